//! The contracts that launchers rely on, tested with the built-in store and with etcd.
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "in a test, a panic is the report"
)]

mod contract;
mod faults;
mod group;
mod log;
mod managed;
mod model;
mod proxy;
mod secure;
mod stores;

/// Defines one test per store for each contract: the same code runs with both.
#[macro_export]
macro_rules! contract {
    ($($name:ident),* $(,)?) => {
        mod builtin {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name($crate::stores::Store::builtin().await).await;
            })*
        }
        mod etcd {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                if let Some(store) = $crate::stores::Store::etcd().await {
                    super::$name(store).await;
                }
            })*
        }
    };
}
