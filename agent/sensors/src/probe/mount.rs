//! One request to a file system that may never answer.

use std::fs::File;
use std::io;
use std::path::Path;

use nix::sys::statvfs::fstatvfs;

/// Asks a file system for the agent: opens the mount's directory and requests its free space. Blocks until the file system answers.
///
/// # Errors
/// It answered with an error. Denied access counts as an answer.
pub fn ask(point: &Path) -> io::Result<()> {
    match File::open(point).and_then(|directory| Ok(fstatvfs(&directory)?)) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        Err(error) => Err(error),
    }
}
