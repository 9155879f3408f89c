//! Standard output, taken for ourselves.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

/// Standard output under another number, where nobody else finds it: what a library of others writes to its own goes
/// where errors go, and not among our answers.
///
/// # Errors
/// The kernel gives no more descriptors.
pub fn apart() -> io::Result<File> {
    let own = io::stdout().as_fd().try_clone_to_owned()?;
    nix::unistd::dup2_stdout(io::stderr())?;
    Ok(File::from(own))
}
