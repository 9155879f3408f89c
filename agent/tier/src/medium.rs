//! Whether a directory is in memory or on a disk.

use std::path::Path;

use mainstay_checkpoint::inventory::Medium;

use crate::beneath::Beneath;

/// The medium of a directory. One that cannot be opened counts as on a disk.
pub(crate) fn medium_of(path: &Path) -> Medium {
    Beneath::open(path).map_or(Medium::Disk, |at| medium_at(&at))
}

/// Same as [`medium_of`], for an open directory.
pub(crate) fn medium_at(at: &Beneath) -> Medium {
    const TMPFS: i64 = 0x0102_1994;
    match at.file_system() {
        Ok(TMPFS) => Medium::Memory,
        _ => Medium::Disk,
    }
}
