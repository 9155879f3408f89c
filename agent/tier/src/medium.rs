//! Whether a directory is in memory or on a disk.

use mainstay_checkpoint::inventory::Medium;

use crate::beneath::Beneath;

/// The medium of a directory.
pub(crate) fn medium_at(at: &Beneath) -> Medium {
    const TMPFS: i64 = 0x0102_1994;
    match at.file_system() {
        Ok(TMPFS) => Medium::Memory,
        _ => Medium::Disk,
    }
}
