//! One question to a file system that may never answer it.

use std::fs::File;
use std::io;
use std::path::Path;

use nix::sys::statvfs::fstatvfs;

/// Asks a file system for the agent: opens the mount's directory and has its room told. Blocks for as long as the file
/// system does.
///
/// # Errors
/// It answered with an error. That it lets us not in is an answer like any other.
pub fn ask(point: &Path) -> io::Result<()> {
    match File::open(point).and_then(|directory| Ok(fstatvfs(&directory)?)) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        Err(error) => Err(error),
    }
}
