//! Which agents are trusted: they can end a job, and read what is handed over to them.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Whether an agent of this user is trusted at this socket.
pub(super) fn is_trusted(socket: &Path, owner: u32) -> bool {
    owner == 0 || owner == nix::unistd::geteuid().as_raw() || is_given_by_root(socket, owner)
}

/// Whether the socket's directory belongs to `owner` and is where only root can create one, such as `/run/mainstay`.
fn is_given_by_root(socket: &Path, owner: u32) -> bool {
    let Some(directory) = socket.parent() else { return false };
    let is_roots = |path: &Path| {
        std::fs::metadata(path).is_ok_and(|above| above.uid() == 0 && above.mode() & 0o022 == 0)
    };
    std::fs::metadata(directory).is_ok_and(|found| found.uid() == owner && found.mode() & 0o022 == 0)
        && directory.ancestors().skip(1).all(is_roots)
}
