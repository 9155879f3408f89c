//! The default paths of sockets and directories.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The environment, as an argument.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The environment of this process.
pub fn environment(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// The variables of this process that are valid text; others are ignored.
pub fn variables() -> Vec<(String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

/// The agent's sockets in the order in which they are tried.
pub fn agent_sockets(uid: u32, environment: Environment<'_>) -> Vec<PathBuf> {
    let mut sockets = vec![PathBuf::from("/run/mainstay/agent.sock")];
    if let Some(directory) = environment("XDG_RUNTIME_DIR").filter(|directory| !directory.is_empty()) {
        sockets.push(Path::new(&directory).join("mainstay/agent.sock"));
    }
    sockets.push(PathBuf::from(format!("/tmp/mainstay-{uid}/agent.sock")));
    sockets
}

/// Where the jobs of a user have their pages and sockets.
pub fn runtime_root(uid: u32, environment: Environment<'_>) -> PathBuf {
    match environment("MAINSTAY_RUNTIME_DIR").filter(|directory| !directory.is_empty()) {
        Some(directory) => PathBuf::from(directory),
        None => PathBuf::from(format!("/dev/shm/mainstay-{uid}")),
    }
}

/// Where run directories are created: below the user's state directory.
pub fn log_dir(environment: Environment<'_>) -> PathBuf {
    let state = environment("XDG_STATE_HOME")
        .map(PathBuf::from)
        .or_else(|| environment("HOME").map(|home| Path::new(&home).join(".local/state")));
    state.unwrap_or_else(std::env::temp_dir).join("mainstay/runs")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_moves_the_usual_places() {
        let none = |_: &str| None;
        assert_eq!(
            agent_sockets(7, &none),
            [PathBuf::from("/run/mainstay/agent.sock"), PathBuf::from("/tmp/mainstay-7/agent.sock")]
        );
        assert_eq!(runtime_root(7, &none), PathBuf::from("/dev/shm/mainstay-7"));
        let set = |_: &str| Some(OsString::from("/x"));
        assert_eq!(agent_sockets(7, &set)[1], PathBuf::from("/x/mainstay/agent.sock"));
        assert_eq!(runtime_root(7, &set), PathBuf::from("/x"));
        assert_eq!(log_dir(&set), PathBuf::from("/x/mainstay/runs"));
        let empty = |_: &str| Some(OsString::new());
        assert_eq!(agent_sockets(7, &empty).len(), 2);
        assert_eq!(runtime_root(7, &empty), PathBuf::from("/dev/shm/mainstay-7"));
    }
}
