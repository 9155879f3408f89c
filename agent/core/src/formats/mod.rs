//! Parsers for external text and bytes: kernel log, `/proc`, pickles, NVRx, Prometheus.

pub mod nvrx;
pub mod parse;
pub mod pickle;
pub mod wait_channel;
