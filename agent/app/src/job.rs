//! A job under the launcher, which also decides: nothing else is needed on the host.

mod closing;
mod prepare;
pub(crate) mod signals;

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use mainstay_health::host::os::HostLimits;
use mainstay_model::id::JobId;
use mainstay_proto::v1::job_order_service_server::JobOrderServiceServer;
use nix::unistd::geteuid;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use self::closing::{Closing, ended_before, show_the_rest, versioned_summary, write_status, write_summary};
use self::prepare::{
    come_together, launch, rank_spec, start_guardian, start_pool_owner, warn_if_files_are_few,
};
use self::signals::caught;
use crate::host::sense;
use crate::{about, default_paths, resume};
use mainstay_api::orders::Orders;
use mainstay_api::readers::Readers;
use mainstay_api::{self as api, Listeners, Mode, UnixSocket};
use mainstay_journal::state::StateWriter;
use mainstay_journal::store::journal::{Journal, Limits};
use mainstay_launcher::agent_link;
use mainstay_launcher::agent_link::checkpoint::NotToStart;
use mainstay_launcher::checkpoints::replicas::{Listening, ReplicaPlan, Replicas};
use mainstay_launcher::checkpoints::sealing::Sealing;
use mainstay_launcher::group::meeting::{self, Attendance, MeetingResult};
use mainstay_launcher::group::plan::HostsPlan;
use mainstay_launcher::group::rendezvous::JoinOutcome;
use mainstay_launcher::group::streams::{self, api::OtherHosts};
use mainstay_launcher::order::Ordered;
use mainstay_launcher::output::{LineStyle, Terminal};
use mainstay_launcher::paths::{self, LaunchPaths};
use mainstay_launcher::ranks::RankSpec;
use mainstay_launcher::ranks::warm::Warm;
use mainstay_launcher::{JobEnd, JobResources, Launcher, Outside, Settings};
use mainstay_sensors::source::host::{HostSource, Roots, standard_paths};
use mainstay_sys::cgroup::Cgroup;
use mainstay_sys::{clock, limits, spawn};

/// How often the host is read during a job.
const SENSE_EVERY: Duration = Duration::from_secs(5);

/// A log directory that does not answer for this long is reported.
const REPORT_AFTER: Duration = Duration::from_secs(5);

/// The exit status of a job that could not be started, as defined in the core (`EX_SOFTWARE`).
pub(crate) const NOT_STARTED: i32 = 70;

/// The options of the command line.
#[derive(Debug)]
pub struct JobPlan {
    /// The job.
    pub settings: Settings,
    /// Where the hosts of the job meet; none for a job of one host.
    pub hosts: Option<HostsPlan>,
    /// Where run directories are created; the user's state directory if not given.
    pub log_dir: Option<PathBuf>,
    /// Where pages and sockets are created; `/dev/shm/mainstay-<uid>` if not given.
    pub runtime_root: Option<PathBuf>,
    /// The agent's socket; the usual places if not given.
    pub agent_socket: Option<PathBuf>,
    /// Whether to look for an agent at all.
    pub look_for_agent: bool,
    /// The address where the page of the job, its JSON and metrics are served over HTTP; none: only on its socket.
    pub http: Option<String>,
    /// Whether to print the summary as JSON on standard output at the end.
    pub print_summary: bool,
    /// Where to write the summary of the job in addition, for scripts.
    pub status_file: Option<PathBuf>,
    /// Whether the launcher's lines start with their time.
    pub timestamps: bool,
    /// Whether people read the launcher's lines on a terminal.
    pub is_terminal: bool,
    /// Whether the last line of that terminal shows the progress of the job.
    pub progress: bool,
    /// The signals that end the job.
    pub signals: Vec<i32>,
    /// What was set by environment variables, and what these show of the job, for people.
    pub from_environment: Vec<String>,
}

/// Runs a job to its end and returns the exit status.
///
/// # Errors
/// The job could not be started; none of it runs then.
pub async fn run_job(plan: JobPlan) -> anyhow::Result<i32> {
    match tokio::task::LocalSet::new().run_until(run(plan)).await? {
        LauncherEnd::With(exit) => Ok(exit),
        LauncherEnd::Again(exit) => {
            let error = start_again();
            eprintln!("mainstay: this launcher could not be started again: {error}");
            Ok(exit)
        }
    }
}

/// How this launcher ends.
enum LauncherEnd {
    /// With this exit status.
    With(i32),
    /// A new launcher takes its place, or, if that fails, with this exit status.
    Again(i32),
}

async fn run(plan: JobPlan) -> anyhow::Result<LauncherEnd> {
    let mut signals = caught(&plan.signals).context("catching signals")?;
    // A user may have named them among the signals that end the job.
    let to_save = [nix::libc::SIGUSR1, nix::libc::SIGUSR2].into_iter();
    let to_save: Vec<i32> = to_save.filter(|signal| !plan.signals.contains(signal)).collect();
    let save_signals = caught(&to_save).context("catching signals")?;
    let log_dir = plan.log_dir.clone().unwrap_or_else(|| default_paths::log_dir(&default_paths::environment));
    let runtime_root = plan
        .runtime_root
        .clone()
        .unwrap_or_else(|| default_paths::runtime_root(geteuid().as_raw(), &default_paths::environment));
    let (logs, root, run_id) = (log_dir.clone(), runtime_root.clone(), plan.settings.ranks.run_id.clone());
    let opening = tokio::task::spawn_blocking(move || open(&logs, &root, &run_id));
    // The log directory may be on a file system that does not answer.
    tokio::pin!(opening);
    let mut waited = false;
    let (mut launch_paths, snapshots) = loop {
        tokio::select! {
            biased;
            Some(signal) = signals.recv() => {
                eprintln!("mainstay: ended by signal {signal} before the log directory answered");
                return Ok(LauncherEnd::With(128 + signal));
            }
            opened = &mut opening => break opened.context("opening the log directory")??,
            () = tokio::time::sleep(REPORT_AFTER), if !waited => {
                waited = true;
                eprintln!("mainstay: waiting for the log directory {}: it does not answer", log_dir.display());
            }
        }
    };
    let mirror = launch_paths.mirror.take();

    spawn::adopt_orphans().context("becoming the reaper of the ranks' orphans")?;
    let warm = Warm::new(
        plan.settings.warm.clone(),
        &plan.settings.ranks.command,
        launch_paths.run_dir.join("template"),
    );
    let log = Some(launch_paths.run_dir.join("launcher.log"));
    let role = plan.settings.roles.as_ref().map(|_| plan.settings.ranks.role.clone());
    let voice = LineStyle { timestamps: plan.timestamps, log, progress: plan.progress, role };
    let terminal = Terminal::start(voice).context("starting the thread that shows the ranks' output")?;
    let print = |text: String| terminal.print(text);
    let sockets = match plan.agent_socket.clone() {
        _ if !plan.look_for_agent => {
            let by_variable = default_paths::environment("MAINSTAY_NO_AGENT").is_some();
            let by = if by_variable { "MAINSTAY_NO_AGENT is set" } else { "--no-agent" };
            terminal.print(format!("agent: none: {by}"));
            Vec::new()
        }
        Some(named) => vec![named],
        None => default_paths::agent_sockets(geteuid().as_raw(), &default_paths::environment),
    };
    plan.from_environment.iter().for_each(|reported| terminal.print(reported.clone()));
    let rank_spec = rank_spec(&plan.settings, &launch_paths)?;
    let bound = tokio::select! {
        biased;
        Some(signal) = signals.recv() => return Ok(LauncherEnd::With(ended_before(signal, &terminal))),
        bound = resume::bind(&plan.settings, &log_dir, &rank_spec.checkpoint_dir, &sockets, &print) => bound?,
    };
    let rank_spec = RankSpec { launch: launch(bound.run()), ..rank_spec };
    // Its port is sent to the other hosts before their addresses are known.
    let with_memory = plan.settings.checkpoints.in_memory && rank_spec.page_dir.is_some();
    let listening = plan.hosts.as_ref().filter(|_| with_memory).and_then(|_| Listening::new());
    let replicas_port = listening.as_ref().and_then(Listening::port);
    let (mut place, hand_back): (Option<Attendance>, _) = (None, plan.settings.policy.hand_back_exit);
    let mut other_hosts = None;
    let (rank_spec, together) = match plan.hosts {
        None => (rank_spec, None),
        Some(hosts) => {
            let found = tokio::select! {
                biased;
                Some(signal) = signals.recv() => {
                    return Ok(LauncherEnd::With(ended_before(signal, &terminal)));
                }
                found = meeting::find(hosts, &print) => found?,
            };
            let hosts = match found {
                MeetingResult::At(hosts, at) => {
                    place = at;
                    *hosts
                }
                MeetingResult::Ended(exit) => {
                    terminal.print(format!("the job has ended with status {exit} before this host came"));
                    terminal.flush(Duration::from_millis(500));
                    return Ok(LauncherEnd::With(exit));
                }
            };
            warn_if_files_are_few(limits::open_more_files(), hosts.hosts.1, &print);
            let returns = hosts.returning;
            let (api_links, others) = streams::api::links();
            other_hosts = Some(others);
            let of_host = (replicas_port, api_links, &sockets[..]);
            let joining = come_together(hosts, rank_spec, &plan.settings, of_host, &mut signals, &terminal);
            let given_up = async {
                match &place {
                    Some(place) => place.is_given_up().await,
                    None => std::future::pending().await,
                }
            };
            let joined = tokio::select! {
                joined = joining => joined,
                () = given_up => {
                    let words = "the hosts that keep the store of this job are gone, or it has ended meanwhile";
                    terminal.print(format!("{words}: start this launcher again"));
                    terminal.flush(Duration::from_millis(500));
                    return Ok(LauncherEnd::With(hand_back));
                }
            };
            if returns && let Err(error) = &joined {
                terminal.print(format!("this launcher does not find its job again: {error:#}"));
                terminal.flush(Duration::from_millis(500));
                return Ok(LauncherEnd::With(plan.settings.policy.hand_back_exit));
            }
            match joined? {
                (_, JoinOutcome::Over { exit, why }) => {
                    terminal.print(format!("the job ended before this host had a place in it: {why}"));
                    terminal.flush(Duration::from_millis(500));
                    return Ok(LauncherEnd::With(exit));
                }
                (_, JoinOutcome::Stopped(signal)) => {
                    terminal
                        .print(format!("signal {signal} before all hosts had joined: nothing was started"));
                    terminal.flush(Duration::from_millis(500));
                    return Ok(LauncherEnd::With(128 + signal));
                }
                (rank_spec, together) => (rank_spec, Some(together)),
            }
        }
    };
    // Both may take minutes if an earlier launcher or a file system blocks. Until ranks run, a signal ends the job
    // at once.
    let outputs = bound.of_job(rank_spec.checkpoint_run());
    resume::note(&log_dir, &launch_paths.published_dir, &outputs).await;
    let starting = start_pool_owner(&plan.settings, &runtime_root, &rank_spec, &terminal);
    let pool_owner = tokio::select! {
        biased;
        Some(signal) = signals.recv() => return Ok(LauncherEnd::With(ended_before(signal, &terminal))),
        pool_owner = starting => pool_owner,
    };
    let known = together.as_ref().and_then(JoinOutcome::known);
    let waits = together.as_ref().is_some_and(JoinOutcome::waits);
    let kept_by_hosts = known.as_ref().map(ReplicaPlan::describe);
    let replicas = match (listening, known, &pool_owner) {
        (Some(listening), Some(known), Some(pool_owner)) => {
            Replicas::start(listening, known, pool_owner, &rank_spec, waits)
                .map_err(|error| terminal.print(format!("no copies of checkpoints on other hosts: {error}")))
                .ok()
        }
        _ => None,
    };
    let kept_by_hosts = kept_by_hosts.filter(|_| replicas.is_some());
    let checkpoint_pool = pool_owner.as_ref().map(|pool_owner| pool_owner.directory().to_owned());
    let rank_spec = RankSpec { modules_file: warm.modules_file(), checkpoint_pool, ..rank_spec };
    // Just before the guardian, which removes it when this launcher is killed.
    let cgroup = Cgroup::make(&format!("mainstay-{}-{}", launch_paths.job, std::process::id()))
        .inspect_err(|error| tracing::debug!(%error, "running without a cgroup of the job's own"))
        .ok();
    let rank_spec = RankSpec { cgroup_procs: cgroup.as_ref().map(Cgroup::procs), ..rank_spec };
    let guardian = start_guardian(&rank_spec.mark(), cgroup.as_ref(), rank_spec.checkpoint_pool.as_deref());
    let ranks = plan.settings.ranks.local_world_size;
    terminal.print(format!(
        "job {}: {}; run id {}; logs in {}",
        launch_paths.job,
        if waits {
            format!("no rank(s) yet, {ranks} when it replaces a host")
        } else {
            format!("{ranks} rank(s)")
        },
        rank_spec.checkpoint_run(),
        launch_paths.published_dir.display()
    ));
    if let Err(reason) = &launch_paths.runtime_dir {
        terminal.print(format!("no heartbeat pages: {reason}; training goes on without heartbeats"));
    }

    let stop = CancellationToken::new();
    let (order_sender, orders) = mpsc::channel(16);
    let http = http_listener(plan.http.as_deref(), &terminal).await;
    let to_api = (order_sender, http, other_hosts);
    let served = serve(&launch_paths, &snapshots, &terminal, to_api, stop.clone());
    let (link_sender, link_events) = mpsc::channel(64);
    let agent_expected = sockets.iter().any(|socket| socket.exists());
    let pool = rank_spec.checkpoint_pool.as_deref();
    let sealing = Sealing::new(&outputs, &sockets, (&log_dir, &launch_paths.published_dir));
    let kept = kept_by_hosts.as_deref();
    // While a spare waits, other hosts train: it resumes from a step when it has ranks.
    let restoring = async {
        if waits {
            return Ok(String::new());
        }
        resume::restore(&sockets, &outputs, (pool, kept), bound.is_named, sealing.as_ref(), &print).await
    };
    tokio::select! {
        biased;
        Some(signal) = signals.recv() => return Ok(LauncherEnd::With(ended_before(signal, &terminal))),
        restored = restoring => match restored {
            Ok(protected) if waits => drop(protected),
            Ok(protected) => terminal.print(protected),
            Err(NotToStart::Refused(words)) => anyhow::bail!(words),
            Err(NotToStart::Lost(words)) => {
                terminal.print(words);
                terminal.flush(Duration::from_millis(500));
                return Ok(LauncherEnd::With(NOT_STARTED));
            }
        }
    }
    let directories = resume::directories(&outputs, pool);
    let link = agent_link::stream::keep(sockets, JobId(rank_spec.job.clone()), directories, link_sender);
    let link = tokio::spawn(link);
    let paths = standard_paths(&[&launch_paths.run_dir, &rank_spec.checkpoint_dir]);
    let (sensing, host) = sense(HostSource::new(Roots::default(), paths), HostLimits::default(), SENSE_EVERY)
        .context("starting the thread that looks at the host")?;
    let outside = Outside { link_events, agent_expected, host, signals, save_signals, orders };
    let launcher = Launcher::begin(
        plan.settings,
        rank_spec,
        snapshots,
        JobResources { guardian, pool_owner, cgroup, together, sealing, replicas, mirror },
        terminal,
        warm,
    );
    let JobEnd { exit, summary, terminal, may_return, is_of_job, mirror } = launcher.run(outside).await;
    drop(sensing);
    // The agent receives the end before the launcher's process is gone.
    let _ = tokio::time::timeout(agent_link::stream::LEAVE_WITHIN, link).await;

    write_summary(&launch_paths.run_dir, &summary, &terminal);
    if is_of_job {
        if let Some(file) = &plan.status_file {
            write_status(file, &summary, &terminal);
        }
        if let Some(place) = place
            && let Err(error) = place.ended(exit)
        {
            terminal.print(format!("the end of the job is not noted for hosts that come later: {error}"));
        }
    }
    if plan.print_summary && !may_return {
        terminal.print_plain(versioned_summary(&summary)?.to_string());
    }
    let closing = match may_return {
        true => {
            Closing::line("the job goes on without this launcher: starting it again, as a spare".to_owned())
        }
        false => Closing::of(&launch_paths.job, &summary, plan.is_terminal),
    };
    show_the_rest(terminal, closing, &launch_paths.published_dir, mirror, &plan.signals).await;
    stop.cancel();
    if let Some(served) = served {
        // Readers receive the job's end before the socket is removed.
        let _ = served.await;
    }
    Ok(if may_return { LauncherEnd::Again(exit) } else { LauncherEnd::With(exit) })
}

/// The option by which a launcher knows that it takes the place of another one.
const RETURNING: &str = "--returning";

/// Replaces this process by a new launcher with the same options and the same process id: under `srun`, a launcher that
/// exits with another status than 0 makes Slurm start the whole job again, although it goes on elsewhere.
fn start_again() -> std::io::Error {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let Some(run) = arguments.iter().position(|argument| argument == "run") else {
        return ErrorKind::InvalidInput.into();
    };
    let (before, after) = arguments.split_at(run + 1);
    let already = usize::from(after.first().is_some_and(|first| first == RETURNING));
    let mut command = Command::new("/proc/self/exe");
    before.first().map(|name| command.arg0(name));
    command.args(before.iter().skip(1)).arg(RETURNING).args(after.iter().skip(already)).exec()
}

/// Creates the job's directories and its journal.
fn open(log_dir: &Path, runtime_root: &Path, run_id: &str) -> anyhow::Result<(LaunchPaths, StateWriter)> {
    let launch_paths = paths::make(log_dir, runtime_root, run_id)?;
    let journal = Journal::open(&launch_paths.run_dir.join("journal"), Limits::default(), clock::boot_id())?;
    Ok((launch_paths, StateWriter::open(journal)?))
}

/// The listener for `--http`. A job does not depend on its page.
async fn http_listener(address: Option<&str>, terminal: &Terminal) -> Option<TcpListener> {
    let address = address?;
    let bound = api::tcp(address).await;
    let listener =
        bound.map_err(|error| terminal.print(format!("--http: {error}; no page is served"))).ok()?;
    let at = listener.local_addr().map_or_else(|_| address.to_owned(), |at| at.to_string());
    terminal.print(format!("page: http://{at}/"));
    Some(listener)
}

/// Serves the API for this job next to its pages. The job also runs without it.
fn serve(
    launch_paths: &LaunchPaths,
    snapshots: &StateWriter,
    terminal: &Terminal,
    (orders, http, hosts): (mpsc::Sender<Ordered>, Option<TcpListener>, Option<OtherHosts>),
    stop: CancellationToken,
) -> Option<JoinHandle<()>> {
    let unix = launch_paths.runtime_dir.as_ref().ok().and_then(|directory| {
        UnixSocket::bind(&directory.path.join("api.sock"), 0o600)
            .map_err(|error| terminal.print(format!("{error}; `mainstay status` will not find this job")))
            .ok()
    });
    if unix.is_none() && http.is_none() && hosts.is_none() {
        return None;
    }
    let listeners = Listeners { unix, http, hosts, readers: Readers::OfSocket, ..Listeners::default() };
    let about = about(Mode::Launcher);
    let routes = Routes::new(JobOrderServiceServer::new(Orders::new(orders)));
    let reader = snapshots.reader();
    Some(tokio::spawn(async move {
        let clock = Arc::new(clock::now);
        if let Err(error) = api::serve(listeners, reader, about, clock, routes, stop).await {
            tracing::warn!(%error, "the API of this job ended");
        }
    }))
}
