//! A job under the launcher, with the brain inside: nothing else is needed on the host.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use mainstay_core::base::id::JobId;
use mainstay_core::host::os::HostLimits;
use mainstay_core::progress::goodput::TimeCategory;
use mainstay_core::recovery::hosts::wire::{Join, PROTOCOL, Seat};
use mainstay_core::recovery::job::Summary;
use mainstay_proto::v1::job_order_service_server::JobOrderServiceServer;
use mainstay_tier::disk::Keep;
use mainstay_tier::pool::{self, PoolOwner};
use nix::unistd::geteuid;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::act::guardian::Guardian;
use crate::act::log_files;
use crate::act::output::{LineStyle, Terminal};
use crate::act::page_files::private_directory;
use crate::act::rank_processes::RankSpec;
use crate::api::orders::Orders;
use crate::api::{self, Listeners, Mode, UnixSocket};
use crate::app::host::sense;
use crate::app::{about, default_paths, resume};
use crate::launch::hosts::HostsPlan;
use crate::launch::order::Ordered;
use crate::launch::paths::{self, LaunchPaths};
use crate::launch::rendezvous::{self, JoinOutcome};
use crate::launch::replicas::{Known, Listening, Replicas};
use crate::launch::sealing::{NotToStart, Sealing};
use crate::launch::{JobResources, Launcher, Outside, Settings, Warm};
use crate::launcher_link;
use crate::os::cgroup::Cgroup;
use crate::os::{clock, limits, spawn};
use crate::source::host::{HostSource, Roots, standard_paths};
use crate::state::StateWriter;
use crate::store::journal::{Journal, Limits};

/// How often the host is looked at beside a job.
const SENSE_EVERY: Duration = Duration::from_secs(5);

/// A terminal that takes nothing of what is left for so long is not read.
const UNREAD_FOR: Duration = Duration::from_secs(5);

/// The status of a job that could not be started, as the core has it (`EX_SOFTWARE`).
const NOT_STARTED: i32 = 70;

/// The closing line is waited for so long where nobody reads.
const CLOSING_WITHIN: Duration = Duration::from_millis(500);

/// Files that a launcher has open apart from connections to other launchers: output, pages, pools, looks at others.
const FILES_APART_FROM_HOSTS: u64 = 512;

/// What the command line asks for.
#[derive(Debug)]
pub struct JobPlan {
    /// The job.
    pub settings: Settings,
    /// Where the hosts of the job meet; none for a job of one host.
    pub hosts: Option<HostsPlan>,
    /// Where run directories are made; the user's state directory if not given.
    pub log_dir: Option<PathBuf>,
    /// Where pages and sockets are made; `/dev/shm/mainstay-<uid>` if not given.
    pub runtime_root: Option<PathBuf>,
    /// The agent's socket; the usual places if not given.
    pub agent_socket: Option<PathBuf>,
    /// Whether to look for an agent at all.
    pub look_for_agent: bool,
    /// Whether to print the summary as JSON on standard output at the end.
    pub print_summary: bool,
    /// Whether the launcher's lines begin with their time.
    pub timestamps: bool,
    /// The signals that end the job.
    pub signals: Vec<i32>,
    /// What was taken from the environment, for people.
    pub from_environment: Option<String>,
}

/// Runs a job to its end and returns the status to exit with.
///
/// # Errors
/// The job could not be begun; nothing of it runs then.
pub async fn run_job(plan: JobPlan) -> anyhow::Result<i32> {
    tokio::task::LocalSet::new().run_until(run(plan)).await
}

async fn run(plan: JobPlan) -> anyhow::Result<i32> {
    let mut signals = signals(&plan.signals).context("catching signals")?;
    let log_dir = plan.log_dir.clone().unwrap_or_else(|| default_paths::log_dir(&default_paths::environment));
    let runtime_root = plan
        .runtime_root
        .clone()
        .unwrap_or_else(|| default_paths::runtime_root(geteuid().as_raw(), &default_paths::environment));
    let (logs, root, run_id) = (log_dir.clone(), runtime_root.clone(), plan.settings.run_id.clone());
    let opening = tokio::task::spawn_blocking(move || open(&logs, &root, &run_id));
    // The log directory may be on a file system that does not answer.
    let (places, board) = tokio::select! {
        biased;
        Some(signal) = signals.recv() => {
            eprintln!("mainstay: ended by signal {signal} before the log directory answered");
            return Ok(128 + signal);
        }
        opened = opening => opened.context("opening the log directory")??,
    };

    spawn::adopt_orphans().context("becoming the reaper of the ranks' orphans")?;
    let warm = Warm::new(plan.settings.warm.clone(), &plan.settings.command, places.run_dir.join("template"));
    let voice = LineStyle { timestamps: plan.timestamps, log: Some(places.run_dir.join("launcher.log")) };
    let terminal = Terminal::start(voice).context("starting the thread that shows the ranks' output")?;
    let sockets = match plan.agent_socket.clone() {
        _ if !plan.look_for_agent => Vec::new(),
        Some(socket) => vec![socket],
        None => default_paths::agent_sockets(geteuid().as_raw(), &default_paths::environment),
    };
    let say = |text: String| terminal.say(text);
    plan.from_environment.iter().for_each(|told| terminal.say(told.clone()));
    let crew = crew(&plan.settings, &places)?;
    let bound = tokio::select! {
        biased;
        Some(signal) = signals.recv() => return Ok(ended_before(signal, &terminal)),
        bound = resume::bind(&plan.settings, &log_dir, &crew.checkpoint_dir, &sockets, &say) => bound?,
    };
    let crew = RankSpec { launch: launch(bound.run()), ..crew };
    // Its port is told to the others before they are known.
    let with_memory = plan.settings.checkpoints.in_memory && crew.page_dir.is_some();
    let listening = plan.hosts.as_ref().filter(|_| with_memory).and_then(|_| Listening::new());
    let replicas_port = listening.as_ref().and_then(Listening::port);
    let (crew, together) = match plan.hosts {
        None => (crew, None),
        Some(hosts) => {
            say_if_files_are_few(limits::open_more_files(), hosts.hosts.1, &say);
            match come_together(hosts, crew, &plan.settings, replicas_port, &mut signals, &terminal).await? {
                (_, JoinOutcome::Over { exit, why }) => {
                    terminal.say(format!("the job ended before this host had a place in it: {why}"));
                    terminal.flush(Duration::from_millis(500));
                    return Ok(exit);
                }
                (_, JoinOutcome::Stopped(signal)) => {
                    terminal.say(format!("signal {signal} before all hosts had joined: nothing was started"));
                    terminal.flush(Duration::from_millis(500));
                    return Ok(128 + signal);
                }
                (crew, together) => (crew, Some(together)),
            }
        }
    };
    let cgroup = Cgroup::make(&format!("mainstay-{}-{}", places.job, std::process::id()))
        .inspect_err(|error| tracing::debug!(%error, "running without a cgroup of the job's own"))
        .ok();
    let crew = RankSpec { cgroup_procs: cgroup.as_ref().map(Cgroup::procs), ..crew };
    // Both may take minutes: a launcher before this one, or a file system, may not let go. Until ranks run, a signal ends it at once.
    let outputs = bound.of_job(crew.checkpoint_run());
    resume::note(&log_dir, &places.run_dir, &outputs).await;
    let starting = start_keeper(&plan.settings, &runtime_root, &crew, &terminal);
    let keeper = tokio::select! {
        biased;
        Some(signal) = signals.recv() => return Ok(ended_before(signal, &terminal)),
        keeper = starting => keeper,
    };
    let known = together.as_ref().and_then(JoinOutcome::known);
    let waits = together.as_ref().is_some_and(JoinOutcome::waits);
    let kept_by_hosts = known.as_ref().map(Known::told);
    let replicas = match (listening, known, &keeper) {
        (Some(listening), Some(known), Some(keeper)) => {
            Replicas::start(listening, known, keeper, &crew, waits)
                .map_err(|error| terminal.say(format!("no copies of checkpoints on other hosts: {error}")))
                .ok()
        }
        _ => None,
    };
    let kept_by_hosts = kept_by_hosts.filter(|_| replicas.is_some());
    let checkpoint_pool = keeper.as_ref().map(|keeper| keeper.directory().to_owned());
    let crew = RankSpec { modules_file: warm.modules_file(), checkpoint_pool, ..crew };
    let guardian = start_guardian(&crew.mark(), cgroup.as_ref(), crew.checkpoint_pool.as_deref());
    let ranks = plan.settings.local_world_size;
    terminal.say(format!(
        "job {}: {}; run id {}; logs in {}",
        places.job,
        if waits {
            format!("no rank(s) yet, {ranks} when it replaces a host")
        } else {
            format!("{ranks} rank(s)")
        },
        crew.checkpoint_run(),
        places.run_dir.display()
    ));
    if let Err(reason) = &places.runtime_dir {
        terminal.say(format!("no heartbeat pages: {reason}; training goes on without heartbeats"));
    }

    let stop = CancellationToken::new();
    let (order_sender, orders) = mpsc::channel(16);
    let served = serve(&places, &board, &terminal, order_sender, stop.clone());
    let (link_sender, link_events) = mpsc::channel(64);
    let agent_expected = sockets.iter().any(|socket| socket.exists());
    let pool = crew.checkpoint_pool.as_deref();
    let sealing = Sealing::of(&outputs, &sockets, (&log_dir, &places.run_dir));
    let kept = kept_by_hosts.as_deref();
    // While a spare waits, other hosts train: it goes back to a step when it has ranks.
    let restoring = async {
        if waits {
            return Ok(String::new());
        }
        resume::restore(&sockets, &outputs, (pool, kept), bound.is_named, sealing.as_ref(), &say).await
    };
    tokio::select! {
        biased;
        Some(signal) = signals.recv() => return Ok(ended_before(signal, &terminal)),
        restored = restoring => match restored {
            Ok(protected) if waits => drop(protected),
            Ok(protected) => terminal.say(protected),
            Err(NotToStart::Refused(words)) => anyhow::bail!(words),
            Err(NotToStart::Lost(words)) => {
                terminal.say(words);
                terminal.flush(Duration::from_millis(500));
                return Ok(NOT_STARTED);
            }
        }
    }
    let directories = resume::directories(&outputs, pool);
    let link =
        tokio::spawn(launcher_link::agent::keep(sockets, JobId(crew.job.clone()), directories, link_sender));
    let paths = standard_paths(&[&places.run_dir, &crew.checkpoint_dir]);
    let (sensing, host) = sense(HostSource::new(Roots::default(), paths), HostLimits::default(), SENSE_EVERY)
        .context("starting the thread that looks at the host")?;
    let outside = Outside { link_events, agent_expected, host, signals, orders };
    let launcher = Launcher::begin(
        plan.settings,
        crew,
        board,
        JobResources { guardian, keeper, cgroup, together, sealing, replicas },
        terminal,
        warm,
    );
    let (exit, summary, terminal) = launcher.run(outside).await;
    drop(sensing);
    // The agent hears of the end before the launcher's process is gone.
    let _ = tokio::time::timeout(launcher_link::agent::LEAVE_WITHIN, link).await;

    write_summary(&places.run_dir, &summary, &terminal);
    if plan.print_summary {
        terminal.print(serde_json::to_string(&summary)?);
    }
    show_the_rest(terminal, last_words(&places.job, &summary), &places.run_dir, &plan.signals).await;
    stop.cancel();
    if let Some(served) = served {
        // Readers get the job's end before the socket goes.
        let _ = served.await;
    }
    Ok(exit)
}

/// The job's directories, and its journal.
fn open(log_dir: &Path, runtime_root: &Path, run_id: &str) -> anyhow::Result<(LaunchPaths, StateWriter)> {
    let places = paths::make(log_dir, runtime_root, run_id)?;
    let journal = Journal::open(&places.run_dir.join("journal"), Limits::default(), clock::boot_id())?;
    Ok((places, StateWriter::open(journal)?))
}

/// Serves the API for this job beside its pages; without it the job runs all the same.
fn serve(
    places: &LaunchPaths,
    board: &StateWriter,
    terminal: &Terminal,
    orders: mpsc::Sender<Ordered>,
    stop: CancellationToken,
) -> Option<JoinHandle<()>> {
    let socket = places.runtime_dir.as_ref().ok()?.path.join("api.sock");
    let unix = match UnixSocket::bind(&socket, 0o600) {
        Ok(unix) => unix,
        Err(error) => {
            terminal.say(format!("{error}; `mainstay status` will not find this job"));
            return None;
        }
    };
    let listeners = Listeners { unix: Some(unix), ..Listeners::default() };
    let about = about(Mode::Launcher);
    let routes = Routes::new(JobOrderServiceServer::new(Orders::new(orders)));
    let reader = board.reader();
    Some(tokio::spawn(async move {
        let clock = Arc::new(clock::now);
        if let Err(error) = api::serve(listeners, reader, about, clock, routes, stop).await {
            tracing::warn!(%error, "the API of this job ended");
        }
    }))
}

/// What no other launch is called. Agents on other hosts find the steps by what stands before the `@`. The process id alone would not
/// do: in a container it may be the same in each.
fn launch(run: &str) -> String {
    format!("{run}@{}.{:x}", std::process::id(), clock::now().wall.0)
}

/// What no other launcher is called, with letters that keys of the coordination store may have.
/// Each of the other hosts has a connection to the launcher that leads, and any may come to lead.
fn say_if_files_are_few(limit: Option<u64>, hosts: u32, say: &impl Fn(String)) {
    let needed = u64::from(hosts) + FILES_APART_FROM_HOSTS;
    if let Some(limit) = limit.filter(|limit| *limit < needed) {
        say(format!(
            "{limit} files can be open here, and a launcher that leads {hosts} hosts needs {needed}: raise the hard \
             limit (ulimit -Hn, LimitNOFILE=)"
        ));
    }
}

fn launcher_name(host: &str) -> String {
    let fits = |letter: char| if letter.is_ascii_alphanumeric() || letter == '.' { letter } else { '-' };
    let host: String = host.chars().take(64).map(fits).collect();
    format!("{host}_{}_{:x}", std::process::id(), clock::now().wall.0)
}

fn crew(settings: &Settings, places: &LaunchPaths) -> anyhow::Result<RankSpec> {
    let checkpoint_dir = match &settings.checkpoint_dir {
        Some(directory) => std::path::absolute(directory)
            .with_context(|| format!("--checkpoint-dir {}", directory.display()))?,
        None => places.run_dir.join("checkpoints"),
    };
    Ok(RankSpec {
        job: places.job.clone(),
        run_id: settings.run_id.clone(),
        launch: launch(&settings.run_id),
        launcher: None,
        seat: Seat {
            group_rank: 0,
            group_world_size: 1,
            first_rank: 0,
            world_size: settings.local_world_size,
        },
        command: settings.command.clone(),
        local_world_size: settings.local_world_size,
        previous_size: None,
        ran_before: None,
        role: settings.role.clone(),
        master_addr: settings.master_addr.clone(),
        max_restarts: settings.policy.budget.max_restarts,
        run_dir: places.run_dir.clone(),
        logs_aside: None,
        checkpoint_dir,
        checkpoint_pool: None,
        resume: BTreeMap::new(),
        page_dir: places.runtime_dir.as_ref().ok().map(|runtime| runtime.path.clone()),
        boot_id: clock::boot_id_bytes(),
        cgroup_procs: None,
        modules_file: None,
        devices: None,
        virtual_local_rank: settings.virtual_local_rank,
        numa: settings.numa,
    })
}

/// Waits for the other hosts, and gives the crew its place among them.
async fn come_together(
    hosts: HostsPlan,
    mut crew: RankSpec,
    settings: &Settings,
    replicas_port: Option<u16>,
    signals: &mut mpsc::Receiver<i32>,
    terminal: &Terminal,
) -> anyhow::Result<(RankSpec, JoinOutcome)> {
    let host = nix::unistd::gethostname().context("reading the host's name")?;
    let join = Join {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        run_id: settings.run_id.clone(),
        launcher: launcher_name(&host.to_string_lossy()),
        host: host.to_string_lossy().into_owned(),
        address: rendezvous::local_address(&hosts),
        node_rank: hosts.node_rank,
        ranks: settings.local_world_size,
        hosts: hosts.hosts,
        program: paths::hash_of_program(&settings.command),
        // The address is known when it is known where the hosts meet.
        replicas: replicas_port.map_or_else(String::new, |port| format!(":{port}")),
        domain: hosts.fails_together(),
        moves: true,
        // Without memory it is of no use to be there early.
        prepares: replicas_port.is_some(),
        listens: String::new(),
        have: (0, 0),
        have_of: String::new(),
    };
    crew.launcher = Some(crew.launch.clone());
    if settings.checkpoint_dir.is_none() && replicas_port.is_none() {
        terminal.say(
            "without memory for checkpoints, mainstay.checkpoint needs a directory that all hosts share: name one with \
             --checkpoint-dir. Without it, no step is whole on any host, and ranks start from their own checkpoints or from step 0"
                .to_owned(),
        );
    }
    let say = |text: String| terminal.say(text);
    let names = (crew.job.clone(), crew.launch.clone());
    let together = rendezvous::gather(hosts, join, names, &crew.run_dir, signals, &say).await?;
    if let Some(seat) = together.seat() {
        crew.seat = seat.clone();
    }
    if let Some(seat) = together.seat().filter(|_| !together.waits()) {
        let last = seat.first_rank + settings.local_world_size.saturating_sub(1);
        terminal.say(format!(
            "all hosts are there: this is node rank {} of {}, with ranks {} to {last} of {}",
            seat.group_rank, seat.group_world_size, seat.first_rank, seat.world_size
        ));
    }
    if let JoinOutcome::Following(followed) = &together {
        (crew.job, crew.launch) = (followed.job.clone(), followed.launch.clone());
    }
    Ok((crew, together))
}

/// Memory for checkpoints; without it the ranks write to the disk themselves.
async fn start_keeper(
    settings: &Settings,
    runtime_root: &Path,
    crew: &RankSpec,
    terminal: &Terminal,
) -> Option<PoolOwner> {
    let wanted = &settings.checkpoints;
    if !wanted.in_memory {
        return None;
    }
    // Where no page could be put, perhaps because others may write there, nothing is put that a job resumes from.
    if crew.page_dir.is_none() {
        terminal
            .say("no memory for checkpoints without it; ranks write them to the disk themselves".to_owned());
        return None;
    }
    let root = runtime_root.join("pools");
    let settings = pool::Settings {
        root: root.clone(),
        directory: crew.checkpoint_dir.clone(),
        job: crew.job.clone(),
        run: crew.launch.clone(),
        world_size: crew.seat.world_size,
        ranks: crew.seat.first_rank..crew.seat.first_rank + crew.local_world_size,
        keep: Keep { steps: wanted.keep, bytes: wanted.quota },
        // On several hosts one more: a step stays until each of its shards has a copy elsewhere.
        slots: wanted.slots + usize::from(crew.seat.group_world_size > 1),
        memory: wanted.memory,
        rate: wanted.bandwidth,
    };
    let place = root.clone();
    let start = move || {
        private_directory(&place)
            .map_err(|error| format!("{}: {error}", place.display()))
            .and_then(|()| PoolOwner::start(settings).map_err(|error| error.to_string()))
    };
    let started = tokio::task::spawn_blocking(start).await.unwrap_or_else(|error| Err(error.to_string()));
    // What others left who were killed is memory that nobody uses. It may be much: not in the way of this job.
    let _ = std::thread::Builder::new().name("ckpt-left".to_owned()).spawn(move || {
        for line in pool::recover_all(&root).iter().flat_map(pool::Recovered::told) {
            tracing::warn!("{line}");
        }
    });
    match started {
        Ok(keeper) => Some(keeper),
        Err(error) => {
            terminal
                .say(format!("no memory for checkpoints: {error}; ranks write them to the disk themselves"));
            None
        }
    }
}

/// A signal came before there were ranks: nothing of the job runs, and there is nothing to wait for.
fn ended_before(signal: i32, terminal: &Terminal) -> i32 {
    terminal.say(format!("ended by signal {signal} before the ranks were started"));
    terminal.flush(Duration::from_millis(500));
    128 + signal
}

/// Without a guardian the ranks still die with the launcher; only what they started may outlive it.
fn start_guardian(mark: &str, cgroup: Option<&Cgroup>, pool: Option<&Path>) -> Option<Guardian> {
    let program = Path::new("/proc/self/exe");
    // By the launch, which is unique, and not by the job: another launcher may run under the same id.
    Guardian::start(program, mark, cgroup.map(Cgroup::path), pool)
        .inspect_err(|error| tracing::warn!(%error, "running without a guardian"))
        .ok()
}

/// Shows what is left of the ranks' output for as long as it is read, and says the closing line in any case. A further signal
/// ends the wait.
async fn show_the_rest(terminal: Terminal, closing: String, run_dir: &Path, of_signals: &[i32]) {
    let enough = Arc::new(AtomicBool::new(false));
    let (stop, run_dir) = (enough.clone(), run_dir.to_owned());
    let showing = tokio::task::spawn_blocking(move || {
        let left = terminal.finish(UNREAD_FOR, &stop);
        if let Some(notice) = left.notice(&run_dir) {
            terminal.say(notice);
        }
        terminal.say(closing);
        terminal.finish(CLOSING_WITHIN, &AtomicBool::new(false));
    });
    tokio::pin!(showing);
    let mut again = signals(of_signals).ok();
    let asked = async {
        match &mut again {
            Some(signals) => signals.recv().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = &mut showing => return,
        _ = asked => enough.store(true, Ordering::Relaxed),
    }
    let _ = showing.await;
}

/// The signals that ask the launcher to stop.
fn signals(which: &[i32]) -> std::io::Result<mpsc::Receiver<i32>> {
    let (sender, receiver) = mpsc::channel(8);
    for kind in which.iter().map(|signal| SignalKind::from_raw(*signal)) {
        let mut arrivals = signal(kind)?;
        let sender = sender.clone();
        tokio::spawn(async move {
            while arrivals.recv().await.is_some() {
                if sender.send(kind.as_raw_value()).await.is_err() {
                    return;
                }
            }
        });
    }
    Ok(receiver)
}

fn write_summary(run_dir: &Path, summary: &Summary, terminal: &Terminal) {
    let path = run_dir.join("summary.json");
    let written = serde_json::to_vec_pretty(summary).map_err(std::io::Error::from).and_then(|text| {
        let path = path.clone();
        let written = log_files::ask(move || std::fs::write(path, text));
        written.unwrap_or_else(|| Err(std::io::Error::other("its file system does not answer")))
    });
    if let Err(error) = written {
        terminal.say(format!("writing {}: {error}", path.display()));
    }
}

fn last_words(job: &str, summary: &Summary) -> String {
    let books = &summary.books;
    let mut parts: Vec<(&TimeCategory, f64)> =
        books.parts.iter().map(|(state, span)| (state, span.as_seconds())).collect();
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    // Without heartbeats the start has no known end: what it is counted as is training, for the most part.
    let name = |state: &TimeCategory| match (state, books.goodput) {
        (TimeCategory::Starting, None) => "starting and training, without heartbeats".to_owned(),
        (state, _) => state.to_string(),
    };
    let parts: Vec<String> =
        parts.iter().map(|(state, seconds)| format!("{} {seconds:.1} s", name(state))).collect();
    let saving = summary.saving.map_or(String::new(), |advised| format!(". {}", advised.told()));
    let goodput =
        books.goodput.map_or_else(String::new, |share| format!("goodput {:.1} % of ", share * 100.0));
    let steps = match (books.goodput, books.steps_lost) {
        // Without heartbeats nobody knows of steps.
        (None, _) => String::new(),
        (Some(_), 0) => format!(", {} step(s)", books.steps),
        (Some(_), again) => format!(", {} step(s), {again} of them done twice", books.steps),
    };
    let restarts = match summary.attempts.saturating_sub(1) {
        0 => "no restart".to_owned(),
        1 => "1 restart".to_owned(),
        many => format!("{many} restarts"),
    };
    let ended = format!("job {job} ended with status {}: {}", summary.exit, summary.reason);
    if summary.attempts == 0 {
        // Of a job that others decided for, or that never began, no more is known here.
        return ended;
    }
    format!("{ended}; {restarts}{steps}, {goodput}{} ({}){saving}", books.wall, parts.join(", "))
}
