//! The agent: one per host, as root or as a user.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use mainstay_health::hardware::catalog::Catalog;
use mainstay_health::hardware::gpu::{DeviceJudge, learned_gpus};
use mainstay_health::host::kernel_reports::HostLogJudge;
use mainstay_model::entry::Fact;
use mainstay_model::id::BootId;
use mainstay_model::kernel::LogCursor;
use mainstay_model::time::{Span, Stamp};
use mainstay_proto::v1::checkpoint_service_server::CheckpointServiceServer;
use mainstay_proto::v1::launcher_service_server::LauncherServiceServer;
use mainstay_proto::v1::operator_service_server::OperatorServiceServer;
use sd_notify::NotifyState;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::about;
use crate::catalog;
use crate::checkpoint;
use crate::device::{self, Probing};
use crate::earlier_entries::Recalled;
use crate::kernel_log::{self, Following};
use crate::nvrx;
use crate::reset::ResetPlan;
use crate::sensors;
use mainstay_api::attach::Launchers;
use mainstay_api::checkpoint::Checkpoints;
use mainstay_api::handover;
use mainstay_api::operator::Operators;
use mainstay_api::otlp::Exporter;
use mainstay_api::readers::Readers;
use mainstay_api::roles::{Allowed, Roles};
use mainstay_api::{self as api, DeepChecks, Listeners, Mode, UnixSocket};
use mainstay_journal::state::{Roster, StateWriter};
use mainstay_journal::store::journal::Journal;
use mainstay_journal::store::sync_thread::Forcing;
use mainstay_journal::store::value_file::ValueFile;
use mainstay_launcher::agent_link::handover::socket_of;
use mainstay_node::config::{Config, JobTexts};
use mainstay_node::hook::{HookPlan, Hooks};
use mainstay_node::{Before, DEVICES, GpuLook, Hardware, Input, KERNEL_LOG, Node};
use mainstay_sensors::source::active::{ActivePlan, Deep};
use mainstay_sensors::source::device::{DETAILS_INTERVAL, ProbePlan};
use mainstay_sys::clock;
use mainstay_sys::private_directory::private_directory;
use mainstay_tier::peer::Users;

/// Maximum number of attempts of a hook: the second follows after 1 s, the third after 2 s.
const HOOK_TRIES: u32 = 3;

/// Inputs that may queue for the node.
pub(super) const MAX_QUEUED_INPUTS: usize = 4096;

/// Inputs of callers that may queue for the node: a caller that sends more has to wait.
pub(super) const QUEUE_OF_CALLERS: usize = 256;

/// Runs the agent until it is asked to stop.
///
/// # Errors
/// It could not start: a directory, the journal or a socket failed; or the API ended by itself.
pub async fn run_agent(config: Config) -> anyhow::Result<()> {
    let stop = CancellationToken::new();
    stop_on_signals(&stop).context("catching signals")?;
    let (snapshots, recalled) = open_board(&config)?;
    let catalog = Arc::new(catalog::load(&config.catalog.files)?);
    let users = Arc::<Users>::default();
    let mut listeners = listen(&config, &users).await?;
    listeners.catalog = Some(catalog.clone());
    let (inputs, node_inputs) = mpsc::channel(MAX_QUEUED_INPUTS);
    let (callers, node_callers) = mpsc::channel(QUEUE_OF_CALLERS);
    let allowed = Allowed { uids: config.allow_uids.clone(), gids: config.allow_gids.clone() };
    let operators = Allowed { uids: config.operator_uids.clone(), gids: config.operator_gids.clone() };
    let roles = Roles::new(allowed, operators, callers.clone(), Arc::clone(&users));
    let operators = Operators::new(inputs.clone(), roles.clone(), Arc::new(clock::now));
    let keeping = checkpoint::start(&config, users)?;
    let peers = keeping.peers.clone();
    listeners.inputs = Some(callers.clone());
    let launchers = Launchers::new(inputs.clone(), callers, roles.clone(), keeping.peers.clone());
    listeners.checkpoints.clone_from(&keeping.peers);
    listeners.readers = match config.job_texts {
        JobTexts::Owner => Readers::Owners(roles.clone()),
        JobTexts::Everyone => Readers::Everyone,
    };
    if let Some(files) = &keeping.files {
        checkpoint::follow_aside(Arc::clone(files), stop.clone())
            .context("starting the thread that follows watched directories")?;
    }
    let checkpoints = Checkpoints::new(
        keeping.peers,
        keeping.durable,
        keeping.files.clone(),
        snapshots.reader(),
        roles,
        &config.state_dir,
    );
    let routes = Routes::new(LauncherServiceServer::new(launchers))
        .add_service(OperatorServiceServer::new(operators))
        .add_service(CheckpointServiceServer::new(checkpoints));
    let reader = snapshots.reader();
    let roster = snapshots.roster().clone();
    nvrx::open(&config, &reader, &stop)?;
    let sensors =
        sensors::start(&config, &recalled.observed, &inputs, &reader, listeners.checkpoints.clone())?;
    let (hardware, following) = watch_hardware(&config, &catalog, &recalled, &inputs, &roster)?;
    let probing = start_probing(&config, &recalled, &inputs, &roster)?;
    if following.is_some() {
        snapshots.roster().expect(KERNEL_LOG, clock::mono(), kernel_log::LONGEST_SILENCE);
    }
    if probing.is_some() {
        let every = config.gpu.interval.0.0.saturating_add(config.limits.gpu.deadline.0.0);
        snapshots.roster().expect(DEVICES, clock::mono(), Span(every));
    }

    let look = GpuLook {
        nudge: probing.as_ref().map(Probing::nudge).transpose()?,
        memory_held: config.limits.preflight.gpu_memory_held,
        resets: probing.as_ref().map(Probing::resets),
        reset_mode: config.gpu.reset.mode,
    };
    let hooks = Hooks::start(&hook_plan(&config)).context("starting the threads of the hooks")?;
    let forcing = start_forcing(&config)?;
    let resets = recalled.own_resets();
    let before = Before { resets, origins: recalled.origins, repeats: recalled.repeats, peers };
    // A collector that cannot be used is no reason for a host without an agent.
    match Exporter::from_environment(&|name| std::env::var_os(name)) {
        Ok(Some(exporter)) => {
            let sending =
                exporter.run(reader.clone(), about(Mode::Agent), Arc::new(clock::now), stop.clone());
            tokio::spawn(sending);
        }
        Ok(None) => {}
        Err(error) => tracing::error!(%error, "nothing is sent to a collector of OpenTelemetry"),
    }
    let node = Node::new(snapshots, before, hardware, look, hooks, inputs, forcing);
    let node = tokio::spawn(node.run(node_inputs, node_callers, watchdog, stop.clone()));
    tracing::info!(socket = %config.socket.display(), state = %config.state_dir.display(), "the agent is ready");
    notify(&[NotifyState::Ready, NotifyState::Status("watching the host")]);
    let served =
        api::serve(listeners, reader, about(Mode::Agent), Arc::new(clock::now), routes, stop.clone()).await;
    notify(&[NotifyState::Stopping]);
    stop.cancel();
    drop((sensors, following, probing));
    node.await.context("the node task crashed")?;
    served.context("serving the API")
}

fn open_board(config: &Config) -> anyhow::Result<(StateWriter, Recalled)> {
    std::fs::create_dir_all(&config.state_dir)
        .with_context(|| format!("making the state directory {} (state_dir)", config.state_dir.display()))?;
    let boot = clock::boot_id();
    let journal = Journal::open(&config.journal_dir(), config.journal_limits(), boot.clone())?;
    let mut recalled = Recalled::default();
    journal.replay(|entry| recalled.take_in(entry, &boot))?;
    Ok((StateWriter::open(journal)?, recalled))
}

/// Passes device faults from earlier boots of the last week to the judge: a fault that recurs after a reset or a
/// reboot needs a stronger action.
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

/// The judges of the hardware, and the reader of the kernel log if it is enabled.
pub(super) fn watch_hardware(
    config: &Config,
    catalog: &Catalog,
    recalled: &Recalled,
    inputs: &mpsc::Sender<Input>,
    roster: &Roster,
) -> anyhow::Result<(Hardware, Option<Following>)> {
    let path = &config.kernel_log.path;
    let host_log = HostLogJudge::new(catalog.clone(), &path.display().to_string());
    let mut devices =
        DeviceJudge::new(catalog.clone(), config.limits.gpu.clone()).expecting(config.gpu.expected.clone());
    remember_earlier_boots(&mut devices, &recalled.earlier);
    let this_boot = clock::boot_id();
    for (at, boot, observation) in &recalled.observed {
        devices.recall(observation);
        // Faults of an earlier boot are detected again if they still exist.
        if *boot == this_boot {
            devices.recall_finding(at.mono, observation);
        }
    }
    let kept = cursor_file(config);
    let cursor = recalled.cursor(kept.value().cloned());
    let hardware = Hardware::new(devices, host_log, recalled.records(), &recalled.kernel);
    if path.as_os_str().is_empty() {
        return Ok((hardware, None));
    }
    let following = kernel_log::follow(path, clock::boot_id(), cursor, kept, inputs.clone(), roster.clone())
        .context("starting the thread that reads the kernel log")?;
    Ok((hardware, Some(following)))
}

fn cursor_file(config: &Config) -> ValueFile<LogCursor> {
    ValueFile::open(&config.state_dir.join("kernel-log.cursor"))
}

/// Starts the thread that syncs the journal to disk and then stores the position in the kernel log.
///
/// # Errors
/// The kernel cannot create a thread.
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

async fn listen(config: &Config, users: &Arc<Users>) -> anyhow::Result<Listeners> {
    if let Some(directory) = config.socket.parent().filter(|directory| !directory.exists()) {
        make_socket_directory(directory)
            .with_context(|| format!("making the socket's directory {} (socket)", directory.display()))?;
    }
    // Each call is checked by its user; a site that names a group keeps others from connecting at all.
    let group = u32::try_from(config.socket_gid).ok();
    let mode = if group.is_some() { 0o660 } else { 0o666 };
    let directories = UnixSocket::bind_for(&socket_of(&config.socket), mode, group);
    // Without it, an agent that may not act as its users cannot read their checkpoints; everything else works.
    if let Err(error) = directories
        .map_err(anyhow::Error::from)
        .and_then(|socket| Ok(handover::take(socket, Arc::clone(users))?))
    {
        tracing::error!("no directories are taken from launchers: {error:#}");
    }
    let tcp = async |address: Option<SocketAddr>, key: &str| -> anyhow::Result<Option<TcpListener>> {
        match address {
            Some(address) => {
                Ok(Some(api::tcp(&address.to_string()).await.with_context(|| format!("key `{key}`"))?))
            }
            None => Ok(None),
        }
    };
    let tls = checkpoint::tls("tls", &config.tls)?;
    let unix = UnixSocket::bind_for(&config.socket, mode, group)?;
    Ok(Listeners {
        unix: Some(unix.of_users(users)),
        grpc: tcp(config.listen, "listen").await?,
        http: tcp(config.http, "http").await?,
        hosts: None,
        tls,
        deep: Some(active_probes(config)),
        checkpoints: None,
        readers: Readers::Everyone,
        inputs: None,
        catalog: None,
    })
}

/// The probes that `RunPreflight` runs on request.
fn active_probes(config: &Config) -> DeepChecks {
    DeepChecks::new(Deep {
        plan: ActivePlan {
            program: "/proc/self/exe".into(),
            // For each request.
            deadline: Duration::from_secs(30),
            limits: config.limits.preflight.clone(),
            cuda: None,
        },
        probes: true,
        paths: config.preflight.paths.clone(),
        peers: Vec::new(),
        exclusive: false,
        force: false,
    })
}

/// The directory of root's socket is open to all users, since the socket's mode limits access; a user's own
/// directory is private.
fn make_socket_directory(directory: &Path) -> std::io::Result<()> {
    if nix::unistd::geteuid().is_root() {
        std::fs::create_dir_all(directory)
    } else {
        private_directory(directory)
    }
}

/// Reads the GPUs' driver in a child process that runs this same program.
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
        deadline: Duration::from_nanos(config.limits.gpu.deadline.0.0),
        details_every: DETAILS_INTERVAL,
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

/// The hooks of a configuration.
pub fn hook_plan(config: &Config) -> HookPlan {
    let given = |path: &Path| Some(path.to_owned()).filter(|path| !path.as_os_str().is_empty());
    HookPlan {
        commands: config.hooks.commands.clone(),
        webhooks: config.hooks.webhooks.clone(),
        authorities: given(&config.hooks.authorities),
        on: config.hooks.on.clone(),
        format: config.hooks.format,
        link: link(config),
        deadline: Duration::from_nanos(config.hooks.deadline.0.0),
        tries: HOOK_TRIES,
        directory: config.state_dir.clone(),
    }
}

/// Where people reach this agent's page: none if only this host can.
fn link(config: &Config) -> Option<String> {
    let address = config.http.filter(|address| !address.ip().is_loopback())?;
    let host = match address.ip().is_unspecified() {
        true => nix::unistd::gethostname().ok()?.to_string_lossy().into_owned(),
        false if address.is_ipv6() => format!("[{}]", address.ip()),
        false => address.ip().to_string(),
    };
    Some(format!("http://{host}:{}/", address.port()))
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
    // A daemon does not end when its terminal goes away.
    let mut hangups = signal(SignalKind::hangup())?;
    tokio::spawn(async move { while hangups.recv().await.is_some() {} });
    Ok(())
}

fn watchdog() {
    notify(&[NotifyState::Watchdog]);
}

/// Notifies systemd; does nothing if there is none.
fn notify(states: &[NotifyState<'_>]) {
    let _ = sd_notify::notify(states);
}
