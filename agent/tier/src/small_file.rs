//! Small files of the agent that are written atomically, also if the host crashes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Writes a file that only its owner may read.
pub(crate) fn write_at_once(directory: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let aside = directory.join(format!(".{name}.tmp"));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&aside, directory.join(name))?;
    sync_directory(directory)
}

/// Syncs the names in a directory to disk.
pub(crate) fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}
