//! Where servers may be: the agent's default sockets, and the launchers' next to the pages of their jobs.

use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap_complete::ArgValueCandidates;
use mainstay_app::default_paths;
use tonic::codegen::http::uri::Authority;

use super::client::TLS;
use super::completions;
use super::output::Form;

/// The port of an agent that is asked over TCP, if none is given: that of the example of `listen`.
const DEFAULT_PORT: u16 = 7130;

/// Options of commands that ask a server of this host.
#[derive(Debug, clap::Args)]
pub(super) struct Ask {
    /// Ask the server on this socket, and no other
    #[arg(long, value_name = "PATH", env = "MAINSTAY_SOCKET")]
    pub(super) socket: Option<PathBuf>,
    #[command(flatten)]
    pub(super) form: Form,
}

/// Options of commands that also ask the agent of another host.
#[derive(Debug, clap::Args)]
pub(super) struct AskAny {
    #[command(flatten)]
    pub(super) server: Server,
    #[command(flatten)]
    pub(super) form: Form,
}

/// The server to ask, where it is not found by itself.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Server {
    /// Ask the server on this socket, and no other
    #[arg(long, value_name = "PATH", env = "MAINSTAY_SOCKET", conflicts_with = "host")]
    socket: Option<PathBuf>,
    /// Ask the agent of this host over TCP, and no other; port 7130 if none is given
    #[arg(long, value_name = "HOST[:PORT]", env = "MAINSTAY_HOST", value_parser = agent_over_tcp)]
    host: Option<PathBuf>,
}

impl Server {
    /// Its socket, or `http://HOST:PORT` or `https://HOST:PORT`.
    pub(super) fn named(&self) -> Option<&Path> {
        self.host.as_deref().or(self.socket.as_deref())
    }
}

/// `HOST` or `HOST:PORT` as `https://HOST:PORT`. For loopback it is `http://` unless a certificate is set: only there an
/// agent listens without TLS by default.
pub(super) fn agent_over_tcp(text: &str) -> Result<PathBuf, String> {
    let wrong = || "write HOST or HOST:PORT".to_owned();
    let address: Authority = text.parse().map_err(|_| wrong())?;
    let host = address.host();
    let port = match address.as_str().strip_prefix(host) {
        Some("") => Some(DEFAULT_PORT),
        Some(_) => address.port_u16(),
        // USER@HOST
        None => None,
    };
    match port {
        Some(port) if !host.is_empty() => {
            let is_named = std::env::var_os(TLS).is_some_and(|path| !path.is_empty());
            let scheme = if is_loopback(host) && !is_named { "http" } else { "https" };
            Ok(format!("{scheme}://{host}:{port}").into())
        }
        _ => Err(wrong()),
    }
}

fn is_loopback(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// The job that a command is about, in either of two forms.
#[derive(Debug, clap::Args)]
pub(super) struct JobName {
    /// The job; not needed where only one runs, and all of them are shown otherwise
    #[arg(value_name = "JOB", add = ArgValueCandidates::new(completions::jobs))]
    job_named: Option<String>,
    /// The job, as an option
    #[arg(long = "job", value_name = "JOB", conflicts_with = "job_named", add = ArgValueCandidates::new(completions::jobs))]
    job_option: Option<String>,
}

impl JobName {
    /// Its name, if one is given.
    pub(super) fn get(&self) -> Option<&String> {
        self.job_named.as_ref().or(self.job_option.as_ref())
    }
}

/// The run that a command is about, in either of two forms.
#[derive(Debug, clap::Args)]
pub(super) struct RunName {
    /// A run directory, or the name of a run in the usual place; the newest run if not given
    #[arg(value_name = "RUN")]
    run_named: Option<PathBuf>,
    /// The run, as an option
    #[arg(long = "job", value_name = "RUN", conflicts_with = "run_named")]
    run_option: Option<PathBuf>,
}

impl RunName {
    /// Its name or directory, if one is given.
    pub(super) fn get(&self) -> Option<&Path> {
        self.run_named.as_deref().or(self.run_option.as_deref())
    }
}

/// A socket that was found. It may have no server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SocketAt {
    pub(super) socket: PathBuf,
    /// The job, for a launcher's socket in its default place.
    pub(super) job: Option<String>,
}

/// The result of a search, and where it looked.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct SocketSearch {
    pub(super) places: Vec<SocketAt>,
    pub(super) looked_at: Vec<String>,
}

/// Searches the default places of this user, or uses the named server.
pub(super) fn find(named: Option<&Path>) -> SocketSearch {
    if let Some(socket) = named {
        return SocketSearch {
            places: vec![SocketAt { socket: socket.to_owned(), job: None }],
            looked_at: vec![socket.display().to_string()],
        };
    }
    let uid = nix::unistd::geteuid().as_raw();
    let environment = &default_paths::environment;
    search(
        &default_paths::agent_sockets(uid, environment),
        &default_paths::runtime_root(uid, environment),
        uid,
    )
}

fn search(agents: &[PathBuf], runtime_dir: &Path, uid: u32) -> SocketSearch {
    let mut found = SocketSearch::default();
    for socket in agents {
        found.looked_at.push(socket.display().to_string());
        if socket.exists() && is_trusted(socket, uid) {
            found.places.push(SocketAt { socket: socket.clone(), job: None });
        }
    }
    found.looked_at.push(runtime_dir.join("*/api.sock").display().to_string());
    let mut launchers: Vec<SocketAt> = std::fs::read_dir(runtime_dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|run| SocketAt {
            socket: run.path().join("api.sock"),
            job: Some(run.file_name().to_string_lossy().into_owned()),
        })
        .filter(|place| place.socket.exists() && is_trusted(&place.socket, uid))
        .collect();
    launchers.sort_by(|a, b| a.socket.cmp(&b.socket));
    found.places.append(&mut launchers);
    found
}

/// In directories that everyone may write to, another user may have put a socket under this name.
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
    fn the_agent_of_another_host_has_a_default_port() {
        let address = |text: &str| agent_over_tcp(text).ok().map(|path| path.display().to_string());
        for (text, expected) in [
            ("node-7", "https://node-7:7130"),
            ("node-7:9400", "https://node-7:9400"),
            ("10.0.0.7", "https://10.0.0.7:7130"),
            ("[fe80::1]", "https://[fe80::1]:7130"),
            ("[fe80::1]:9400", "https://[fe80::1]:9400"),
            ("localhost", "http://localhost:7130"),
            ("127.0.0.1:9400", "http://127.0.0.1:9400"),
            ("[::1]", "http://[::1]:7130"),
        ] {
            assert_eq!(address(text).as_deref(), Some(expected), "{text}");
        }
        for wrong in
            ["", ":7130", "node-7:", "node-7:x", "node-7:70000", "fe80::1", "a/b", "http://node-7", "a b"]
        {
            assert_eq!(address(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_search_reports_where_it_looked_and_what_it_found() {
        let dir = testing::tempdir().unwrap();
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
            [
                SocketAt { socket: agent, job: None },
                SocketAt { socket: launcher, job: Some("demo".to_owned()) }
            ]
        );
    }
}
