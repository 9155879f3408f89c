//! A parsed record of the kernel log.

use mainstay_model::time::Mono;

/// A parsed record of the kernel log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// 0 (emergency) to 7 (debug).
    pub priority: Option<u8>,
    /// The kernel's sequence number, increasing by one within a boot.
    pub sequence: Option<u64>,
    /// When it was written. The kernel's log clock runs like the monotonic one.
    pub at: Option<Mono>,
    /// The message, without the lines of its dictionary.
    pub message: &'a str,
}
