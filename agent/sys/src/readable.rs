//! File descriptors that the runtime waits on.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a descriptor to wait until it is readable. Must be called within a tokio runtime.
///
/// # Errors
/// The kernel cannot poll it.
pub fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is an open descriptor, always the same one, and stays open for as long as the AsyncFd
    // that owns it.
    let registered = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
    registered.map_err(|error| error.into_parts().1)
}
