//! The groups of a process at the other end of a Unix socket.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use nix::libc;

/// Maximum number of groups of one process that are read; Linux allows 65,536.
const MAX_GROUPS: usize = 65_536;

/// The supplementary groups that the process had when it connected, as the kernel reports them (`SO_PEERGROUPS`,
/// Linux 4.13). In `/proc` the process id may belong to another process by now.
///
/// # Errors
/// The kernel does not report them.
pub fn peer_groups(socket: impl AsFd) -> io::Result<Vec<u32>> {
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let room = groups.len() * size_of::<libc::gid_t>();
        let mut length = libc::socklen_t::try_from(room).unwrap_or(libc::socklen_t::MAX);
        let of = socket.as_fd().as_raw_fd();
        // SAFETY: the descriptor lives for the call, and the kernel writes at most `length` bytes into the vector.
        let done = unsafe {
            libc::getsockopt(
                of,
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        let found = length as usize / size_of::<libc::gid_t>();
        if done == 0 {
            groups.truncate(found);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ERANGE) || found <= groups.len() || found > MAX_GROUPS {
            return Err(error);
        }
        groups.resize(found, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_groups_are_those_of_the_process_that_connected() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut found = super::peer_groups(&ours).unwrap();
        let mut own: Vec<u32> =
            nix::unistd::getgroups().unwrap().iter().map(|group| group.as_raw()).collect();
        found.sort_unstable();
        own.sort_unstable();
        assert_eq!(found, own);
    }
}
