//! Managed etcd: the launchers on three or five hosts run etcd, one process each. The job then has a store that
//! survives the loss of a host and needs no operator.
//!
//! It is the real program from PATH. We implement no consensus algorithm.

mod command;
mod rejoin;

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::runtime::Handle;
use tokio::sync::watch;

use self::command::MemberCommand;
use crate::client::Client;
use crate::endpoint::Endpoint;
use crate::error::CoordError;

/// The interval of checks of the process.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The pause before a restart; it doubles up to the second value, and is reset after a run longer than the third.
const RESTART_BACKOFF: (Duration, Duration, Duration) =
    (Duration::from_millis(300), Duration::from_secs(10), Duration::from_secs(60));
/// The time limit of an orderly stop, in which etcd transfers its leadership. Then it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// The size in bytes above which etcd's log is truncated when the process starts.
const LARGEST_LOG: u64 = 8 << 20;

/// The configuration of this host's member.
#[derive(Clone, Debug)]
pub struct ManagedOptions {
    /// All endpoints, three or five, in the same order on every host, with the ports for clients.
    pub endpoints: Vec<Endpoint>,
    /// The index of this host's endpoint; None: the one whose address is here.
    pub me: Option<usize>,
    /// The id that distinguishes this cluster from others: the job's id. Members of another cluster are refused.
    pub cluster: String,
    /// The directory of etcd's data and log. A restart continues with them.
    pub directory: PathBuf,
    /// The port for members is the port for clients plus this.
    pub peer_offset: u16,
    /// Certificates for clients and members; None: plain TCP, and anyone who can reach the port has full access.
    pub tls: Option<ManagedTls>,
    /// The program.
    pub program: PathBuf,
}

impl ManagedOptions {
    /// `etcd` from PATH, plain TCP, and the port for members one above that for clients.
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

    /// The data directory of etcd.
    fn data(&self) -> PathBuf {
        self.directory.join("data")
    }
}

/// Files for TLS in PEM. Each side must present a certificate of the authorities.
#[derive(Clone, Debug)]
pub struct ManagedTls {
    /// This host's certificate, valid for a server and for a client.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authorities.
    pub authorities: PathBuf,
}

/// The state of this host's member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ManagedState {
    /// The process runs. Whether the cluster serves also depends on the other hosts.
    Running {
        /// Its process id.
        pid: u32,
        /// How often it was restarted.
        restarts: u64,
    },
    /// The process ended and is restarted soon.
    Restarting {
        /// How it ended, with the last line of its log.
        why: String,
    },
    /// It was stopped.
    Stopped,
}

/// This host's member of the cluster. It ends with this process, and stops when this is dropped.
#[derive(Debug)]
pub struct Managed {
    endpoints: Vec<Endpoint>,
    state: watch::Receiver<ManagedState>,
    stop: Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl Managed {
    /// Starts this host's member. Returns when the process runs: the cluster serves once a majority of hosts run
    /// theirs.
    ///
    /// # Errors
    /// There are not three or five endpoints, none of them is here, a port is taken, or there is no etcd.
    pub async fn start(options: ManagedOptions) -> Result<Managed, CoordError> {
        let endpoints = options.endpoints.clone();
        let runtime = Handle::current();
        let started = tokio::task::spawn_blocking(move || Supervisor::start(options, runtime)).await;
        let (state, stop, thread) = started.map_err(|error| CoordError::Setting {
            what: "managed etcd".to_owned(),
            why: error.to_string(),
        })??;
        Ok(Managed { endpoints, state, stop, thread: Some(thread) })
    }

    /// The endpoints for clients.
    #[must_use]
    pub fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// The current state of this host's member and its changes.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<ManagedState> {
        self.state.clone()
    }

    /// Waits until the cluster serves: a majority of hosts is up. The other hosts may start minutes later.
    ///
    /// # Errors
    /// This client is refused.
    pub async fn serves(&self, client: &Client) -> Result<(), CoordError> {
        loop {
            // A read that needs a majority of the cluster.
            match client.get("/mainstay/v1").await {
                Err(error) if error.is_unreachable() => tracing::debug!(%error, "etcd does not serve yet"),
                Err(error) => return Err(error),
                Ok(_) => return Ok(()),
            }
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    }

    /// Stops this host's member, and returns after its process has ended. Its data stays.
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

/// The thread that starts the process and waits for its end. The kernel ends the process together with the thread
/// that started it, so this thread must live as long as the program.
struct Supervisor {
    options: ManagedOptions,
    line: MemberCommand,
    log: PathBuf,
    /// Bytes of the log that earlier processes wrote.
    log_before: u64,
    /// The runtime for requests to the other members.
    runtime: Handle,
    state: watch::Sender<ManagedState>,
    restarts: u64,
}

type Started = (watch::Receiver<ManagedState>, Sender<()>, JoinHandle<()>);

impl Supervisor {
    fn start(options: ManagedOptions, runtime: Handle) -> Result<Started, CoordError> {
        let line = command::line(&options)?;
        fs::create_dir_all(&options.directory)
            .map_err(|error| CoordError::file(&options.directory, error))?;
        let (state, seen) = watch::channel(ManagedState::Stopped);
        let supervisor = Supervisor {
            line,
            log: options.directory.join("etcd.log"),
            log_before: 0,
            options: options.clone(),
            runtime,
            state,
            restarts: 0,
        };
        let (stop, stopped) = channel();
        let (started, first) = channel();
        let run = move || supervisor.run(&stopped, &started);
        let thread = std::thread::Builder::new().name("mainstay-etcd".to_owned()).spawn(run);
        let thread = thread.map_err(|error| CoordError::io("the thread of managed etcd", error))?;
        match first.recv() {
            Ok(Ok(())) => Ok((seen, stop, thread)),
            Ok(Err(error)) => Err(not_started(&options, error)),
            Err(_) => Err(CoordError::io("managed etcd", io::Error::other("its thread ended"))),
        }
    }

    fn run(mut self, stopped: &Receiver<()>, started: &Sender<io::Result<()>>) {
        let mut child = match self.spawn() {
            Ok(child) => child,
            Err(error) => {
                let _ = started.send(Err(error));
                return;
            }
        };
        let _ = started.send(Ok(()));
        let mut pause = RESTART_BACKOFF.0;
        loop {
            let started = Instant::now();
            match watch_over(&mut child, stopped) {
                Some(status) => {
                    let why = format!("etcd ended ({status}): {}", last_line(&self.log));
                    if rejoin::is_needed(&self.options, &since(&self.log, self.log_before)) {
                        // A returning host: it gets a new member, which is then reported.
                        tracing::debug!(
                            why,
                            "this host's member of the coordination store is not taken back"
                        );
                    } else {
                        tracing::warn!(why, "this host's member of the coordination store is started again");
                    }
                    self.state.send_replace(ManagedState::Restarting { why });
                }
                None => break end(&mut child),
            }
            if started.elapsed() > RESTART_BACKOFF.2 {
                pause = RESTART_BACKOFF.0;
            }
            child = loop {
                if !matches!(stopped.recv_timeout(pause), Err(RecvTimeoutError::Timeout)) {
                    self.state.send_replace(ManagedState::Stopped);
                    return;
                }
                pause = (pause * 2).min(RESTART_BACKOFF.1);
                self.restarts += 1;
                match self.find_a_place() {
                    // The cluster does not serve: it may be waiting for this member.
                    Err(error) if error.is_unreachable() => {}
                    Err(error) => {
                        let why = format!("this host's member has no place in the cluster yet: {error}");
                        self.state.send_replace(ManagedState::Restarting { why });
                        continue;
                    }
                    Ok(()) => {}
                }
                match self.spawn() {
                    Ok(child) => break child,
                    Err(error) => {
                        let why = format!("{} cannot be started: {error}", self.options.program.display());
                        self.state.send_replace(ManagedState::Restarting { why });
                    }
                }
            };
        }
        self.state.send_replace(ManagedState::Stopped);
    }

    /// Replaces this host's member if its data is gone.
    fn find_a_place(&mut self) -> Result<(), CoordError> {
        if !rejoin::is_needed(&self.options, &since(&self.log, self.log_before)) {
            return Ok(());
        }
        let placed = self.runtime.block_on(rejoin::place(&self.options, &self.line))?;
        if let Some(line) = placed {
            tracing::info!(
                "this host's member of the coordination store has lost its data and gets a new place"
            );
            let data = self.options.data();
            match fs::remove_dir_all(&data) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(CoordError::file(&data, error));
                }
                _ => self.line = line,
            }
        }
        Ok(())
    }

    fn spawn(&mut self) -> io::Result<Child> {
        if fs::metadata(&self.log).is_ok_and(|log| log.len() > LARGEST_LOG) {
            File::create(&self.log)?;
        }
        let log = File::options().create(true).append(true).open(&self.log)?;
        self.log_before = log.metadata().map_or(0, |log| log.len());
        let mut command = Command::new(&self.options.program);
        command.args(&self.line.arguments).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // Variables for etcd in the user's shell must not change this one or prevent its start.
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

/// The exit status of the process; None: stop was requested.
fn watch_over(child: &mut Child, stopped: &Receiver<()>) -> Option<ExitStatus> {
    loop {
        if !matches!(stopped.recv_timeout(CHECK_INTERVAL), Err(RecvTimeoutError::Timeout)) {
            return None;
        }
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
    }
}

/// Ends the process: first with SIGTERM, then with SIGKILL.
fn end(child: &mut Child) {
    let deadline = Instant::now() + STOP_TIMEOUT;
    if let Ok(pid) = i32::try_from(child.id()) {
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    }
    while Instant::now() < deadline {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(CHECK_INTERVAL / 5);
    }
    let _ = child.kill();
    let _ = child.wait();
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

/// The content of the log from this byte on.
fn since(log: &Path, begin: u64) -> String {
    let mut text = Vec::new();
    let read = File::open(log).and_then(|mut file| {
        file.seek(SeekFrom::Start(begin))?;
        file.take(LARGEST_LOG).read_to_end(&mut text)
    });
    // A log that cannot be read counts as empty.
    read.map_or_else(|_| String::new(), |_| String::from_utf8_lossy(&text).into_owned())
}

/// The last line of etcd's log, shortened: the reason of its end.
fn last_line(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let tail = String::from_utf8_lossy(&text[text.len().saturating_sub(4096)..]).into_owned();
    let line = tail.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("its log is empty");
    words_of(line).chars().take(400).collect()
}

/// The message of a line of etcd's log, which is a JSON object with a stack trace and more.
fn words_of(line: &str) -> String {
    let object: Option<serde_json::Value> = serde_json::from_str(line).ok();
    let field =
        |name| object.as_ref().and_then(|object| object.get(name)).and_then(serde_json::Value::as_str);
    match (field("msg"), field("error")) {
        (Some(message), Some(error)) => format!("{message}: {error}"),
        (Some(message), None) => message.to_owned(),
        (None, _) => line.to_owned(),
    }
}
