//! Limits of other processes.

use std::io;

use mainstay_core::base::id::Pid;
use rustix::process::{Resource, Rlimit, prlimit};

/// From now on no file grows by what this process writes: it is told so (`EFBIG`), and SIGXFSZ is sent to it.
///
/// # Errors
/// It is gone, or another user's.
pub fn no_file_may_grow(pid: Pid) -> io::Result<()> {
    let pid = rustix::process::Pid::from_raw(pid.0).ok_or(io::ErrorKind::NotFound)?;
    let nothing = Rlimit { current: Some(0), maximum: Some(0) };
    prlimit(Some(pid), Resource::Fsize, nothing)?;
    Ok(())
}
