//! Text and bytes that others write, read into typed values: kernel log, `/proc`, pickles, NVRx, Prometheus.

pub mod nvrx;
pub mod parse;
pub mod pickle;
pub mod wait_channel;
