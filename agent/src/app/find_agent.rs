//! Where a launcher looks for the agent of its host.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::unistd::geteuid;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::app::default_paths;

/// How long to wait for a socket that the user named before the job continues.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);

/// The sockets on which the agent may be: the one that the user named, else the default ones. Prints a warning if
/// no agent answers on the named one, because the user relies on it.
pub(super) async fn sockets(named: Option<&Path>, print: &dyn Fn(String)) -> Vec<PathBuf> {
    let Some(socket) = named else {
        return default_paths::agent_sockets(geteuid().as_raw(), &default_paths::environment);
    };
    let answered = timeout(ANSWERS_WITHIN, UnixStream::connect(socket)).await;
    let error = match answered {
        Ok(connected) => connected.err().map(|error| error.to_string()),
        Err(_) => Some("no answer within 1 s".to_owned()),
    };
    if let Some(error) = error {
        let socket = socket.display();
        print(format!("agent: {socket}: {error}; the job runs without an agent until one answers there"));
    }
    vec![socket.to_owned()]
}
