//! Which agents are trusted: they can end a job, and read what is handed over to them.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::OnceLock;

/// Names the user whose agent is trusted, for all programs of a container: in a pod the agent of another container has a
/// user of its own, and nothing on the shared volume belongs to root.
pub const VARIABLE: &str = "MAINSTAY_AGENT_UID";

/// The user whom the one who started this process trusts.
static TRUSTED_UID: OnceLock<Option<u32>> = OnceLock::new();

/// Trusts agents of this user too. Must be called before the first connection.
pub fn trust(uid: Option<u32>) {
    // A second call would be an error of ours; the first remains valid.
    let _ = TRUSTED_UID.set(uid);
}

/// Whether an agent of this user is trusted at this socket.
pub(crate) fn is_trusted(socket: &Path, owner: u32) -> bool {
    let variable = || std::env::var(VARIABLE).ok()?.parse().ok();
    owner == 0
        || owner == nix::unistd::geteuid().as_raw()
        || *TRUSTED_UID.get_or_init(variable) == Some(owner)
        || is_given_by_root(socket, owner)
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
