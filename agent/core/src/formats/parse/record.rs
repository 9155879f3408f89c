//! A record of the kernel log, taken apart.

use crate::base::time::Mono;

/// A record, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// 0 (emergency) to 7 (debug).
    pub priority: Option<u8>,
    /// The kernel's number of it; goes up by one within a boot.
    pub sequence: Option<u64>,
    /// When it was written. The kernel's clock for this counts like the monotonic one.
    pub at: Option<Mono>,
    /// What it says, without the lines that name the device for machines.
    pub message: &'a str,
}
