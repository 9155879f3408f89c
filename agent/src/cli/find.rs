//! Where servers may be: the agent's usual sockets, and the launchers' beside the pages of their jobs.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Options of commands that ask a server.
#[derive(Debug, clap::Args)]
pub(super) struct Ask {
    /// Ask the server on this socket, and no other
    #[arg(long, value_name = "PATH", env = "MAINSTAY_SOCKET")]
    pub(super) socket: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// A socket that was found. Whether someone answers there is another question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) socket: PathBuf,
    /// The job, for a launcher's socket in its usual place.
    pub(super) job: Option<String>,
}

/// What a search found, and where it looked.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) places: Vec<Place>,
    pub(super) looked_at: Vec<String>,
}

/// Searches the usual places of this user, or takes the one that was named.
pub(super) fn find(ask: &Ask) -> Found {
    if let Some(socket) = &ask.socket {
        return Found {
            places: vec![Place { socket: socket.clone(), job: None }],
            looked_at: vec![socket.display().to_string()],
        };
    }
    let uid = nix::unistd::geteuid().as_raw();
    search(
        &agent_sockets(uid, |name| std::env::var_os(name)),
        &runtime_dir(uid, |n| std::env::var_os(n)),
        uid,
    )
}

/// The agent's sockets in the order in which they are tried.
fn agent_sockets(uid: u32, env: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut sockets = vec![PathBuf::from("/run/mainstay/agent.sock")];
    if let Some(dir) = env("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        sockets.push(Path::new(&dir).join("mainstay/agent.sock"));
    }
    sockets.push(PathBuf::from(format!("/tmp/mainstay-{uid}/agent.sock")));
    sockets
}

/// Where the jobs of this user have their run directories.
fn runtime_dir(uid: u32, env: impl Fn(&str) -> Option<OsString>) -> PathBuf {
    match env("MAINSTAY_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => PathBuf::from(format!("/dev/shm/mainstay-{uid}")),
    }
}

fn search(agents: &[PathBuf], runtime_dir: &Path, uid: u32) -> Found {
    let mut found = Found::default();
    for socket in agents {
        found.looked_at.push(socket.display().to_string());
        if socket.exists() && is_trusted(socket, uid) {
            found.places.push(Place { socket: socket.clone(), job: None });
        }
    }
    found.looked_at.push(runtime_dir.join("*/api.sock").display().to_string());
    let mut launchers: Vec<Place> = std::fs::read_dir(runtime_dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|run| Place {
            socket: run.path().join("api.sock"),
            job: Some(run.file_name().to_string_lossy().into_owned()),
        })
        .filter(|place| place.socket.exists() && is_trusted(&place.socket, uid))
        .collect();
    launchers.sort_by(|a, b| a.socket.cmp(&b.socket));
    found.places.append(&mut launchers);
    found
}

/// In directories that everyone may write to, someone else may have put a socket under our name.
fn is_trusted(socket: &Path, uid: u32) -> bool {
    let shared = ["/tmp", "/dev/shm", "/var/tmp"].iter().any(|dir| socket.starts_with(dir));
    let owner = socket.parent().and_then(|dir| std::fs::metadata(dir).ok()).map(|dir| dir.uid());
    !shared || owner == Some(uid) || owner == Some(0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn the_environment_moves_the_usual_places() {
        let none = |_: &str| None;
        assert_eq!(
            agent_sockets(7, none),
            [PathBuf::from("/run/mainstay/agent.sock"), PathBuf::from("/tmp/mainstay-7/agent.sock")]
        );
        assert_eq!(runtime_dir(7, none), PathBuf::from("/dev/shm/mainstay-7"));
        let set = |_: &str| Some(OsString::from("/x"));
        assert_eq!(agent_sockets(7, set)[1], PathBuf::from("/x/mainstay/agent.sock"));
        assert_eq!(runtime_dir(7, set), PathBuf::from("/x"));
        let empty = |_: &str| Some(OsString::new());
        assert_eq!(agent_sockets(7, empty).len(), 2);
        assert_eq!(runtime_dir(7, empty), PathBuf::from("/dev/shm/mainstay-7"));
    }

    #[test]
    fn a_search_tells_where_it_looked_and_what_it_found() {
        let dir = tempfile::tempdir().unwrap();
        let uid = nix::unistd::geteuid().as_raw();
        let agent = dir.path().join("agent.sock");
        let found = search(std::slice::from_ref(&agent), &dir.path().join("runs"), uid);
        assert!(found.places.is_empty());
        assert_eq!(found.looked_at.len(), 2);

        std::fs::create_dir_all(dir.path().join("runs/demo")).unwrap();
        std::fs::create_dir_all(dir.path().join("runs/without-socket")).unwrap();
        let launcher = dir.path().join("runs/demo/api.sock");
        let _agent = UnixListener::bind(&agent).unwrap();
        let _launcher = UnixListener::bind(&launcher).unwrap();
        let found = search(std::slice::from_ref(&agent), &dir.path().join("runs"), uid);
        assert_eq!(
            found.places,
            [Place { socket: agent, job: None }, Place { socket: launcher, job: Some("demo".to_owned()) }]
        );
    }
}
