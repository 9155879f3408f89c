//! Parsers of small foreign formats: pickles, messages of NVRx, wait channels of the kernel.
#![forbid(unsafe_code)]

pub mod nvrx;
pub mod pickle;
pub mod wait_channel;
