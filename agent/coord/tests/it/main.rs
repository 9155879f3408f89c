//! What launchers rely on, held against the built-in store and against etcd itself.
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
mod model;
mod proxy;
mod secure;
mod stores;

/// One test per store for each contract: the same code runs against both.
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
