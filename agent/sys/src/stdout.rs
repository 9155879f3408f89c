//! Reserves standard output for the program itself.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

/// Standard output under another number that libraries do not know: what a foreign library prints goes to standard
/// error, not between our answers.
///
/// # Errors
/// The kernel provides no more descriptors.
pub fn apart() -> io::Result<File> {
    let own = io::stdout().as_fd().try_clone_to_owned()?;
    nix::unistd::dup2_stdout(io::stderr())?;
    Ok(File::from(own))
}
