//! Managed etcd: the launchers on three or five hosts run etcd between them, one process each, so that the job has a
//! store that survives the loss of a host and no one has to operate one.
//!
//! It is the real program, found on PATH. We write no consensus of our own.

use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::sync::watch;

use crate::client::Client;
use crate::endpoint::Endpoint;
use crate::error::CoordError;

/// The process is looked at this often.
const LOOK: Duration = Duration::from_millis(100);
/// The pause before it is started again; it doubles up to the second value, and starts over after the third.
const PAUSE: (Duration, Duration, Duration) =
    (Duration::from_millis(300), Duration::from_secs(10), Duration::from_secs(60));
/// An orderly end hands etcd's leadership on; then it is killed.
const FAREWELL: Duration = Duration::from_secs(5);
/// A log of etcd that is larger is started over with the process.
const LARGEST_LOG: u64 = 8 << 20;
/// Hosts of training jobs are busy: etcd's own 100 ms and 1 s would change leaders under load. Leases are then at least 3 s.
const TIMING: [&str; 2] = ["--heartbeat-interval=200", "--election-timeout=2000"];

/// What this host runs.
#[derive(Clone, Debug)]
pub struct ManagedOptions {
    /// All endpoints, three or five, in the same order on every host. The ports are those for clients.
    pub endpoints: Vec<Endpoint>,
    /// Which of them is this host's; None: the one whose address is here.
    pub me: Option<usize>,
    /// What tells this cluster from others: the job's id. Members of another one are refused.
    pub cluster: String,
    /// Where etcd's data and log are. A restart continues with what is there.
    pub directory: PathBuf,
    /// Members reach each other at the port for clients plus this.
    pub peer_offset: u16,
    /// Certificates for clients and members; None: plain TCP, and anyone who reaches the port may do anything.
    pub tls: Option<ManagedTls>,
    /// The program.
    pub program: PathBuf,
}

impl ManagedOptions {
    /// `etcd` from PATH, plain TCP, members one port above clients.
    #[must_use]
    pub fn new(
        endpoints: Vec<Endpoint>,
        cluster: impl Into<String>,
        directory: impl Into<PathBuf>,
    ) -> ManagedOptions {
        ManagedOptions {
            endpoints,
            me: None,
            cluster: cluster.into(),
            directory: directory.into(),
            peer_offset: 1,
            tls: None,
            program: PathBuf::from("etcd"),
        }
    }
}

/// Files for TLS, all in PEM; each side must show a certificate of the authorities.
#[derive(Clone, Debug)]
pub struct ManagedTls {
    /// This host's certificate, good for a server and for a client.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authorities.
    pub authorities: PathBuf,
}

/// How this host's member is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ManagedState {
    /// The process runs. Whether the cluster serves depends on the other hosts too.
    Running {
        /// Its process id.
        pid: u32,
        /// How often it was started again.
        restarts: u64,
    },
    /// The process ended, and is started again soon.
    Restarting {
        /// How it ended, with the last line of its log.
        why: String,
    },
    /// It was stopped.
    Stopped,
}

/// This host's member of the cluster. It ends with this process, and is stopped when this is dropped.
#[derive(Debug)]
pub struct Managed {
    endpoints: Vec<Endpoint>,
    state: watch::Receiver<ManagedState>,
    stop: Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl Managed {
    /// Starts this host's member. Returns when the process runs: the cluster serves when most hosts have theirs.
    ///
    /// # Errors
    /// There are not three or five endpoints, none of them is here, a port is taken, or there is no etcd.
    pub async fn start(options: ManagedOptions) -> Result<Managed, CoordError> {
        let endpoints = options.endpoints.clone();
        let started = tokio::task::spawn_blocking(move || Supervisor::start(options)).await;
        let (state, stop, thread) = started.map_err(|error| CoordError::Setting {
            what: "managed etcd".to_owned(),
            why: error.to_string(),
        })??;
        Ok(Managed { endpoints, state, stop, thread: Some(thread) })
    }

    /// Where clients ask.
    #[must_use]
    pub fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// How this host's member is, and every change.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<ManagedState> {
        self.state.clone()
    }

    /// Waits until the cluster serves: most of the hosts are there. The other hosts may come minutes later.
    ///
    /// # Errors
    /// This client is refused.
    pub async fn serves(&self, client: &Client) -> Result<(), CoordError> {
        loop {
            // A read that the whole cluster has to agree on.
            match client.get("/mainstay/v1").await {
                Err(error) if error.is_unreachable() => tracing::debug!(%error, "etcd does not serve yet"),
                Err(error) => return Err(error),
                Ok(_) => return Ok(()),
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Stops this host's member, and returns when its process is gone. Its data stays.
    pub async fn stop(mut self) {
        let _ = self.stop.send(());
        if let Some(thread) = self.thread.take() {
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        let _ = self.stop.send(());
    }
}

/// The thread that starts the process and waits for its end. The kernel ends the process with the thread that
/// started it: so it must be one that lives as long as this program.
struct Supervisor {
    command: Vec<String>,
    program: PathBuf,
    log: PathBuf,
    state: watch::Sender<ManagedState>,
    restarts: u64,
}

type Started = (watch::Receiver<ManagedState>, Sender<()>, JoinHandle<()>);

impl Supervisor {
    fn start(options: ManagedOptions) -> Result<Started, CoordError> {
        let command = arguments(&options)?;
        fs::create_dir_all(&options.directory)
            .map_err(|error| CoordError::file(&options.directory, error))?;
        let (state, seen) = watch::channel(ManagedState::Stopped);
        let supervisor = Supervisor {
            command,
            program: options.program.clone(),
            log: options.directory.join("etcd.log"),
            state,
            restarts: 0,
        };
        let (stop, stopped) = channel();
        let (told, first) = channel();
        let run = move || supervisor.run(&stopped, &told);
        let thread = std::thread::Builder::new().name("mainstay-etcd".to_owned()).spawn(run);
        let thread = thread.map_err(|error| CoordError::io("the thread of managed etcd", error))?;
        match first.recv() {
            Ok(Ok(())) => Ok((seen, stop, thread)),
            Ok(Err(error)) => Err(not_started(&options, error)),
            Err(_) => Err(CoordError::io("managed etcd", io::Error::other("its thread ended"))),
        }
    }

    fn run(mut self, stopped: &Receiver<()>, told: &Sender<io::Result<()>>) {
        let mut child = match self.spawn() {
            Ok(child) => child,
            Err(error) => {
                let _ = told.send(Err(error));
                return;
            }
        };
        let _ = told.send(Ok(()));
        let mut pause = PAUSE.0;
        loop {
            let since = Instant::now();
            match watch_over(&mut child, stopped) {
                Some(status) => {
                    let why = format!("etcd ended ({status}): {}", last_line(&self.log));
                    tracing::warn!(why, "this host's member of the coordination store is started again");
                    self.state.send_replace(ManagedState::Restarting { why });
                }
                None => break end(&mut child),
            }
            if since.elapsed() > PAUSE.2 {
                pause = PAUSE.0;
            }
            child = loop {
                if !matches!(stopped.recv_timeout(pause), Err(RecvTimeoutError::Timeout)) {
                    self.state.send_replace(ManagedState::Stopped);
                    return;
                }
                pause = (pause * 2).min(PAUSE.1);
                self.restarts += 1;
                match self.spawn() {
                    Ok(child) => break child,
                    Err(error) => {
                        let why = format!("{} cannot be started: {error}", self.program.display());
                        self.state.send_replace(ManagedState::Restarting { why });
                    }
                }
            };
        }
        self.state.send_replace(ManagedState::Stopped);
    }

    fn spawn(&self) -> io::Result<Child> {
        if fs::metadata(&self.log).is_ok_and(|log| log.len() > LARGEST_LOG) {
            File::create(&self.log)?;
        }
        let log = File::options().create(true).append(true).open(&self.log)?;
        let mut command = Command::new(&self.program);
        command.args(&self.command).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // What a person's shell has set for etcd must not change this one, nor make etcd refuse to start.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("ETCD_") {
                command.env_remove(name);
            }
        }
        // SAFETY: between fork and exec only prctl is called, which allocates nothing and takes no lock.
        unsafe {
            command.pre_exec(|| Ok(nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?));
        }
        let child = command.spawn()?;
        self.state.send_replace(ManagedState::Running { pid: child.id(), restarts: self.restarts });
        Ok(child)
    }
}

/// How the process ended; None: it is to be stopped.
fn watch_over(child: &mut Child, stopped: &Receiver<()>) -> Option<ExitStatus> {
    loop {
        if !matches!(stopped.recv_timeout(LOOK), Err(RecvTimeoutError::Timeout)) {
            return None;
        }
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
    }
}

/// Ends the process: first asked, then killed.
fn end(child: &mut Child) {
    let deadline = Instant::now() + FAREWELL;
    if let Ok(pid) = i32::try_from(child.id()) {
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    }
    while Instant::now() < deadline {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(LOOK / 5);
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// etcd's command line on this host.
fn arguments(options: &ManagedOptions) -> Result<Vec<String>, CoordError> {
    let wrong = |why: String| CoordError::Setting { what: "managed etcd".to_owned(), why };
    let endpoints = &options.endpoints;
    if !matches!(endpoints.len(), 3 | 5) {
        let why = format!(
            "{} endpoints are given, 3 or 5 are needed; one endpoint has the built-in store",
            endpoints.len()
        );
        return Err(wrong(why));
    }
    let me = options.me.or_else(|| endpoints.iter().position(Endpoint::is_here));
    let (index, me) = me.and_then(|index| Some((index, endpoints.get(index)?))).ok_or_else(|| {
        let all: Vec<String> = endpoints.iter().map(Endpoint::authority).collect();
        wrong(format!("none of {} is this host", all.join(", ")))
    })?;
    let address =
        local_address(me).ok_or_else(|| wrong(format!("{} has no address on this host", me.host)))?;
    let peer_port = |endpoint: &Endpoint| {
        let port = endpoint.port.checked_add(options.peer_offset);
        port.ok_or_else(|| wrong(format!("no port is left above {} for members", endpoint.port)))
    };
    for port in [me.port, peer_port(me)?] {
        // etcd itself would only say so in its log, and try again and again.
        TcpListener::bind(SocketAddr::new(address, port)).map_err(|error| {
            CoordError::io(format!("managed etcd on {}", SocketAddr::new(address, port)), error)
        })?;
    }
    let scheme = if options.tls.is_some() { "https" } else { "http" };
    let url = |host: &str, port: u16| {
        let host = Endpoint { tls: options.tls.is_some(), host: host.to_owned(), port };
        format!("{scheme}://{}", host.authority())
    };
    let mut cluster = Vec::new();
    for (number, endpoint) in endpoints.iter().enumerate() {
        cluster.push(format!("mainstay-{number}={}", url(&endpoint.host, peer_port(endpoint)?)));
    }
    let here = address.to_string();
    let mut arguments = vec![
        format!("--name=mainstay-{index}"),
        format!("--data-dir={}", options.directory.join("data").display()),
        format!("--listen-client-urls={}", url(&here, me.port)),
        format!("--advertise-client-urls={}", url(&me.host, me.port)),
        format!("--listen-peer-urls={}", url(&here, peer_port(me)?)),
        format!("--initial-advertise-peer-urls={}", url(&me.host, peer_port(me)?)),
        format!("--initial-cluster={}", cluster.join(",")),
        format!("--initial-cluster-token=mainstay-{}", options.cluster),
        "--initial-cluster-state=new".to_owned(),
        "--auto-compaction-mode=revision".to_owned(),
        "--auto-compaction-retention=10000".to_owned(),
        "--logger=zap".to_owned(),
        "--log-level=warn".to_owned(),
    ];
    arguments.extend(TIMING.map(str::to_owned));
    if let Some(tls) = &options.tls {
        for (option, path) in
            [("cert-file", &tls.certificate), ("key-file", &tls.key), ("trusted-ca-file", &tls.authorities)]
        {
            arguments.push(format!("--{option}={}", path.display()));
            arguments.push(format!("--peer-{option}={}", path.display()));
        }
        arguments.extend(["--client-cert-auth", "--peer-client-cert-auth"].map(str::to_owned));
    }
    Ok(arguments)
}

/// The address of the endpoint that this host has: etcd listens on addresses, not on names.
fn local_address(endpoint: &Endpoint) -> Option<IpAddr> {
    let mut addresses = endpoint.addresses().into_iter();
    addresses.find(|address| TcpListener::bind(SocketAddr::new(*address, 0)).is_ok())
}

fn not_started(options: &ManagedOptions, error: io::Error) -> CoordError {
    if error.kind() != io::ErrorKind::NotFound {
        return CoordError::io(format!("managed etcd ({})", options.program.display()), error);
    }
    let hosts: Vec<&str> = options.endpoints.iter().map(|endpoint| endpoint.host.as_str()).collect();
    CoordError::Setting {
        what: "managed etcd".to_owned(),
        why: format!(
            "there is no program {:?} on this host; install etcd (Debian: etcd-server) on {}, or give one endpoint for the built-in store",
            options.program,
            hosts.join(", ")
        ),
    }
}

/// The last line of etcd's log, shortened: what it died of.
fn last_line(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let tail = String::from_utf8_lossy(&text[text.len().saturating_sub(4096)..]).into_owned();
    let line = tail.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("its log is empty");
    line.chars().take(400).collect()
}
