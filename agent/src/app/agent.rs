//! The agent: one per host, as root or as a user.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use mainstay_core::attention::ACKNOWLEDGED;
use mainstay_core::device::{DeviceJudge, learned_gpus, reset};
use mainstay_core::entry::{Body, Entry, Fact};
use mainstay_core::host_log::HostLogJudge;
use mainstay_core::id::{BootId, JobId};
use mainstay_core::kernel::{LogCursor, journal_position};
use mainstay_core::observation::Observation;
use mainstay_core::pci::PciAddress;
use mainstay_core::repeats::Repeats;
use mainstay_core::time::{Mono, Span, Stamp};
use mainstay_proto::v1::checkpoint_service_server::CheckpointServiceServer;
use mainstay_proto::v1::launcher_service_server::LauncherServiceServer;
use mainstay_proto::v1::operator_service_server::OperatorServiceServer;
use sd_notify::NotifyState;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::act::hook::{HookPlan, Hooks};
use crate::act::page_files::private_directory;
use crate::act::reset::ResetPlan;
use crate::api::attach::{Allowed, Launchers};
use crate::api::checkpoint::Checkpoints;
use crate::api::operator::Operators;
use crate::api::{self, DeepChecks, Listeners, Mode, UnixSocket};
use crate::app::about;
use crate::app::catalog;
use crate::app::checkpoint;
use crate::app::device::{self, Probing};
use crate::app::kernel_log::{self, Following};
use crate::app::nvrx;
use crate::app::rooms;
use crate::board::{Board, Roster};
use crate::config::Config;
use crate::node::{Before, DEVICES, GpuLook, Hardware, Input, KERNEL_LOG, Node};
use crate::os::clock;
use crate::source::active::{ActivePlan, Deep};
use crate::source::device::ProbePlan;
use crate::source::journald::JOURNALD;
use crate::store::forcing::Forcing;
use crate::store::journal::Journal;
use crate::store::kept::Kept;

/// Inputs that may wait for the node.
pub(super) const QUEUE: usize = 4096;

/// Runs the agent until it is told to stop.
///
/// # Errors
/// It could not begin: a directory, the journal or a socket; or the API ended by itself.
pub async fn run_agent(config: Config) -> anyhow::Result<()> {
    let stop = CancellationToken::new();
    stop_on_signals(&stop).context("catching signals")?;
    let (board, recalled) = open_board(&config)?;
    let mut listeners = listen(&config).await?;
    let (inputs, node_inputs) = mpsc::channel(QUEUE);
    let allowed = Allowed { uids: config.allow_uids.clone(), gids: config.allow_gids.clone() };
    let operators = Operators::new(inputs.clone(), config.allow_uids.clone(), Arc::new(clock::now));
    let keeping = checkpoint::start(&config)?;
    let peers = keeping.peers.clone();
    let launchers = Launchers::new(inputs.clone(), allowed.clone(), keeping.peers.clone());
    listeners.checkpoints.clone_from(&keeping.peers);
    if let Some(files) = &keeping.files {
        tokio::spawn(checkpoint::follow(Arc::clone(files), stop.clone()));
    }
    let checkpoints = Checkpoints::new(
        keeping.peers,
        keeping.durable,
        keeping.files.clone(),
        board.reader(),
        allowed,
        config.allow_uids.clone(),
        &config.state_dir,
    );
    let routes = Routes::new(LauncherServiceServer::new(launchers))
        .add_service(OperatorServiceServer::new(operators))
        .add_service(CheckpointServiceServer::new(checkpoints));
    let reader = board.reader();
    let roster = board.roster().clone();
    nvrx::open(&config, &reader, &stop)?;
    let rooms = rooms::start(&config, &recalled.observed, &inputs, &reader, listeners.checkpoints.clone())?;
    let (hardware, following) = watch_hardware(&config, &recalled, &inputs, &roster)?;
    let probing = start_probing(&config, &recalled, &inputs, &roster)?;
    if following.is_some() {
        board.roster().expect(KERNEL_LOG, clock::mono(), kernel_log::LONGEST_SILENCE);
    }
    if probing.is_some() {
        let every = config.gpu.interval.0.0.saturating_add(config.gpu.deadline.0.0);
        board.roster().expect(DEVICES, clock::mono(), Span(every));
    }

    let look = GpuLook {
        nudge: probing.as_ref().map(Probing::nudge).transpose()?,
        memory_held: config.preflight.gpu_memory_held,
        resets: probing.as_ref().map(Probing::resets),
        reset_mode: config.gpu.reset.mode,
    };
    let hooks = Hooks::start(&hook_plan(&config)).context("starting the threads of the hooks")?;
    let forcing = start_forcing(&config)?;
    let resets = own_resets(&recalled);
    let before = Before { resets, origins: recalled.origins, repeats: recalled.repeats, peers };
    let node = Node::new(board, before, hardware, look, hooks, inputs, forcing);
    let node = tokio::spawn(node.run(node_inputs, watchdog, stop.clone()));
    tracing::info!(socket = %config.socket.display(), state = %config.state_dir.display(), "the agent is ready");
    notify(&[NotifyState::Ready, NotifyState::Status("watching the host")]);
    let served =
        api::serve(listeners, reader, about(Mode::Agent), Arc::new(clock::now), routes, stop.clone()).await;
    notify(&[NotifyState::Stopping]);
    stop.cancel();
    drop((rooms, following, probing));
    node.await.context("the node ended in disorder")?;
    served.context("serving the API")
}

/// What the journal tells of the time before this start.
#[derive(Debug, Default)]
pub(super) struct Recalled {
    /// The newest launcher's entry, by job.
    pub(super) origins: BTreeMap<JobId, u64>,
    /// What this boot's kernel log told.
    pub(super) kernel: Vec<(Mono, Fact)>,
    /// What the kernel logs of earlier boots told, in its order.
    pub(super) earlier: Vec<(Stamp, BootId, Fact)>,
    /// How far that was read, in `/dev/kmsg` or a file.
    pub(super) position: u64,
    /// How far that was read, in systemd's journal.
    pub(super) journal_position: u64,
    /// What the rooms that watch the host saw, in any boot, in its order.
    pub(super) observed: Vec<(Stamp, BootId, Observation)>,
    /// How jobs failed, in any boot.
    pub(super) repeats: Repeats,
}

impl Recalled {
    /// The cursor that was kept, set on by what the journal knows was read after it was.
    fn cursor(&self, kept: Option<LogCursor>) -> Option<LogCursor> {
        let boot = clock::boot_id();
        match kept {
            Some(cursor) if cursor.boot == boot => {
                let in_journal = cursor.log == JOURNALD;
                let known = if in_journal { self.journal_position } else { self.position };
                Some(LogCursor { next: cursor.next.max(known), ..cursor })
            }
            // The first facts of a boot were written, and then the agent was killed.
            _ if self.journal_position > 0 => {
                Some(LogCursor { boot, log: JOURNALD.to_owned(), next: self.journal_position, journal: None })
            }
            kept => kept,
        }
    }

    fn take_in(&mut self, entry: Entry, boot: &BootId) {
        if let (Some(job), Some(seq)) = (&entry.job, entry.origin_seq) {
            self.origins.insert(job.clone(), seq);
        }
        self.repeats.take_in(&entry);
        let Body::Fact(fact) = entry.body else { return };
        if entry.job.is_some() {
            return;
        }
        if let Fact::Observed(observation) = fact {
            let of_faults = observation.event == ACKNOWLEDGED || observation.event == reset::DONE;
            if of_faults && entry.boot == *boot {
                self.kernel.push((entry.at.mono, Fact::Observed(observation.clone())));
            } else if observation.event == reset::DONE {
                // A fault that came again in spite of a reset needs more than one.
                self.earlier.push((entry.at, entry.boot.clone(), Fact::Observed(observation.clone())));
            }
            return self.observed.push((entry.at, entry.boot, observation));
        }
        if entry.boot != *boot {
            if matches!(fact, Fact::Xid(_) | Fact::KernelReport(_)) {
                self.earlier.push((entry.at, entry.boot, fact));
            }
            return;
        }
        let position = match &fact {
            Fact::Xid(xid) => xid.place.position,
            Fact::Sxid(sxid) => sxid.place.position,
            Fact::KernelReport(report) => report.place.position,
            Fact::KernelLinesLeftOut { .. } | Fact::KernelLogGap { .. } => 0,
            _ => return,
        };
        if position == journal_position(entry.at.mono) {
            self.journal_position = self.journal_position.max(position);
        } else {
            self.position = self.position.max(position);
        }
        self.kernel.push((entry.at.mono, fact));
    }
}

fn open_board(config: &Config) -> anyhow::Result<(Board, Recalled)> {
    std::fs::create_dir_all(&config.state_dir)
        .with_context(|| format!("making the state directory {} (state_dir)", config.state_dir.display()))?;
    let boot = clock::boot_id();
    let journal = Journal::open(&config.journal_dir(), config.journal_limits(), boot.clone())?;
    let mut recalled = Recalled::default();
    journal.replay(|entry| recalled.take_in(entry, &boot))?;
    Ok((Board::open(journal)?, recalled))
}

/// Judges what earlier boots of the last week told of devices: a fault that comes again after a reset or a reboot needs
/// more.
fn remember_earlier_boots(devices: &mut DeviceJudge, earlier: &[(Stamp, BootId, Fact)]) {
    const WEEK: i64 = 7 * 86_400 * 1_000_000_000;
    let since = clock::now().wall.0.saturating_sub(WEEK);
    let mut before: Option<&BootId> = None;
    for (at, boot, fact) in earlier.iter().filter(|(at, ..)| at.wall.0 >= since) {
        if before.is_some_and(|before| before != boot) {
            devices.next_boot();
        }
        before = Some(boot);
        devices.take_in(at.mono, fact);
    }
    devices.next_boot();
}

/// The judges of the hardware, and the reading of the kernel log if it is to be read.
pub(super) fn watch_hardware(
    config: &Config,
    recalled: &Recalled,
    inputs: &mpsc::Sender<Input>,
    roster: &Roster,
) -> anyhow::Result<(Hardware, Option<Following>)> {
    let catalog = catalog::load(&config.catalog.files)?;
    let path = &config.kernel_log.path;
    let host_log = HostLogJudge::new(catalog.clone(), &path.display().to_string());
    let mut devices =
        DeviceJudge::new(catalog, config.gpu.limits.clone()).expecting(config.gpu.expected.clone());
    remember_earlier_boots(&mut devices, &recalled.earlier);
    let this_boot = clock::boot_id();
    for (at, boot, observation) in &recalled.observed {
        devices.recall(observation);
        // What an earlier boot found, this one finds again if it is still there.
        if *boot == this_boot {
            devices.recall_finding(at.mono, observation);
        }
    }
    let cursor = recalled.cursor(cursor_file(config).value().cloned());
    let hardware = Hardware::new(devices, host_log, &recalled.kernel);
    if path.as_os_str().is_empty() {
        return Ok((hardware, None));
    }
    let following =
        kernel_log::follow(&config.kernel_log, clock::boot_id(), cursor, inputs.clone(), roster.clone())
            .context("starting the thread that reads the kernel log")?;
    Ok((hardware, Some(following)))
}

fn cursor_file(config: &Config) -> Kept<LogCursor> {
    Kept::open(&config.state_dir.join("kernel-log.cursor"))
}

/// Forces the journal onto the disk, and then keeps how far the kernel log was read.
///
/// # Errors
/// The kernel gives no more threads.
pub(super) fn start_forcing(config: &Config) -> anyhow::Result<Forcing<Option<LogCursor>>> {
    let mut file = cursor_file(config);
    let keep = move |cursor: Option<LogCursor>| {
        if let Some(cursor) = cursor
            && let Err(error) = file.keep(&cursor)
        {
            tracing::debug!(%error, "the cursor of the kernel log cannot be kept");
        }
    };
    Forcing::start(keep).context("starting the thread that forces the journal onto the disk")
}

async fn listen(config: &Config) -> anyhow::Result<Listeners> {
    if let Some(directory) = config.socket.parent().filter(|directory| !directory.exists()) {
        make_socket_directory(directory)
            .with_context(|| format!("making the socket's directory {} (socket)", directory.display()))?;
    }
    let tcp = async |address: Option<SocketAddr>, key: &str| -> anyhow::Result<Option<TcpListener>> {
        match address {
            Some(address) => {
                Ok(Some(api::tcp(&address.to_string()).await.with_context(|| format!("key `{key}`"))?))
            }
            None => Ok(None),
        }
    };
    Ok(Listeners {
        unix: Some(UnixSocket::bind(&config.socket, 0o660)?),
        grpc: tcp(config.listen, "listen").await?,
        http: tcp(config.http, "http").await?,
        deep: Some(active_probes(config)),
        checkpoints: None,
    })
}

/// What `RunPreflight` tries when it is asked to.
fn active_probes(config: &Config) -> DeepChecks {
    DeepChecks::new(Deep {
        plan: ActivePlan {
            program: "/proc/self/exe".into(),
            // Each request has its own.
            deadline: Duration::from_secs(30),
            limits: config.preflight.deep.clone(),
            cuda: None,
        },
        probes: true,
        paths: config.preflight.paths.clone(),
        peers: Vec::new(),
        exclusive: false,
        force: false,
        memory_held: config.preflight.gpu_memory_held,
    })
}

/// Root's socket is for everyone whom its mode lets in; a user's own directory is the user's alone.
fn make_socket_directory(directory: &Path) -> std::io::Result<()> {
    if nix::unistd::geteuid().is_root() {
        std::fs::create_dir_all(directory)
    } else {
        private_directory(directory)
    }
}

/// Asks the GPUs' driver by a child process that is this very program.
pub(super) fn start_probing(
    config: &Config,
    recalled: &Recalled,
    inputs: &mpsc::Sender<Input>,
    roster: &Roster,
) -> anyhow::Result<Option<Probing>> {
    if !config.gpu.enabled {
        return Ok(None);
    }
    let named = !config.gpu.library.as_os_str().is_empty();
    let boot = clock::boot_id();
    let of_this_boot =
        recalled.observed.iter().filter(|(_, of, _)| *of == boot).map(|(_, _, observation)| observation);
    let plan = ProbePlan {
        program: "/proc/self/exe".into(),
        library: named.then(|| config.gpu.library.clone()),
        sys: config.host.sys_root.clone(),
        proc: config.host.proc_root.clone(),
        deadline: Duration::from_nanos(config.gpu.deadline.0.0),
        details_every: config.gpu.details_interval.0,
        known: learned_gpus(of_this_boot),
    };
    let program = &config.gpu.reset.program;
    let usual = program.as_os_str().is_empty();
    let reset = ResetPlan {
        program: if usual { "nvidia-smi".into() } else { program.clone() },
        deadline: Duration::from_nanos(config.gpu.reset.deadline.0.0),
        proc: config.host.proc_root.clone(),
        may_stay: config.gpu.reset.may_stay.clone(),
    };
    let interval = Duration::from_nanos(config.gpu.interval.0.0);
    let probing = device::probe(plan, reset, interval, inputs.clone(), roster.clone())
        .context("starting the thread that asks the GPUs' driver")?;
    Ok(Some(probing))
}

/// The GPUs that the agent has reset of its own accord in this boot, and when.
fn own_resets(recalled: &Recalled) -> BTreeMap<PciAddress, Mono> {
    let boot = clock::boot_id();
    let here = recalled.observed.iter().filter(|(_, of, _)| *of == boot);
    here.filter_map(|(at, _, seen)| Some((reset::own_try(seen)?, at.mono))).collect()
}

fn hook_plan(config: &Config) -> HookPlan {
    HookPlan {
        commands: config.hooks.commands.clone(),
        webhooks: config.hooks.webhooks.clone(),
        authorities: Some(config.hooks.authorities.clone()).filter(|path| !path.as_os_str().is_empty()),
        on: config.hooks.on.clone(),
        deadline: Duration::from_nanos(config.hooks.deadline.0.0),
        tries: config.hooks.tries,
        directory: config.state_dir.clone(),
    }
}

fn stop_on_signals(stop: &CancellationToken) -> std::io::Result<()> {
    for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
        let mut arrivals = signal(kind)?;
        let stop = stop.clone();
        tokio::spawn(async move {
            arrivals.recv().await;
            stop.cancel();
        });
    }
    // A terminal that goes away is no reason for a daemon to go.
    let mut hangups = signal(SignalKind::hangup())?;
    tokio::spawn(async move { while hangups.recv().await.is_some() {} });
    Ok(())
}

fn watchdog() {
    notify(&[NotifyState::Watchdog]);
}

/// Tells systemd; without it there is nobody to tell.
fn notify(states: &[NotifyState<'_>]) {
    let _ = sd_notify::notify(states);
}
