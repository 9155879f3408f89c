//! Readings of devices, of the host, of its network and of the kernel log become states of components.
//!
//! `parse` reads what the kernel and others write; `hardware` judges GPUs, TPUs and DCGM, and knows what their error
//! codes mean; `host` judges the operating system, the network, notices of the cloud and kernel reports.
#![forbid(unsafe_code)]

pub mod hardware;
pub mod host;
pub mod parse;
pub mod retest;
mod state;
