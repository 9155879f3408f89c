//! `mainstay run`: torchrun's command line in front of the launcher.

pub(super) mod abbreviations;
mod cluster;
mod command;
mod host_options;
mod hosts;
mod values;
mod xpu;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use mainstay_core::base::time::Span;
use mainstay_core::recovery::policy::{Budget, CauseKind, HAND_BACK_EXIT};

use crate::act::devices;
use crate::act::stop::Grace;
use crate::app::{self, JobPlan, default_paths, logging};
use crate::cli::{exit, output, torchrun};
use crate::config::{Config, Environment};
use crate::launch::hang::{HangSettings, Mode};
use crate::launch::hosts::HostsPlan;
use crate::launch::{CheckpointSettings, Settings, Shown, WarmSettings, lineage};

use command::command;
use host_options::HostOptions;
use values::{
    CheckpointMemory, ReadyWithin, bytes, cause_budget, checkpoint_memory, checkpoint_watch, duration,
    hang_limit, hang_mode, interval, limits, ready_within, save_signal, switch,
};

/// The usual status for that, as the command line takes it.
const HAND_BACK: u8 = HAND_BACK_EXIT as u8;

const EXAMPLES: &str = "\
Examples:
  mainstay run --nproc-per-node 8 train.py --config c.yaml
  mainstay run --nproc-per-node gpu -m my.training --lr 3e-4
  mainstay run --nproc-per-node 2 --no-python ./trainer
  mainstay run --nproc-per-node 8 --max-restarts 5 --checkpoint-dir /nvme/ckpt train.py

Arguments after the script belong to the script. Exit status: 0 if all ranks succeed,
else the status of the rank that failed first (128 + N for signal N); 75 to run on another host;
64 for a wrong command line; 70 if the job could not start. See docs/reference/exit-status.md.";

/// Run a training job: start its ranks, monitor them, and restart them after a failure
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Number of hosts, as N or MIN:MAX; default: that of the srun or mpirun that started this, else 1
    #[arg(
        long,
        alias = "nnodes",
        env = "PET_NNODES",
        value_name = "N",
        help_heading = "Launch",
        hide_short_help = true
    )]
    nnodes: Option<String>,
    /// Ranks on this host: a number, auto, gpu, cpu or xpu
    #[arg(
        long,
        alias = "nproc_per_node",
        env = "PET_NPROC_PER_NODE",
        default_value = "1",
        value_name = "N",
        help_heading = "Launch"
    )]
    nproc_per_node: String,
    /// Maximum number of restarts
    #[arg(
        long,
        alias = "max_restarts",
        env = "PET_MAX_RESTARTS",
        default_value_t = 3,
        value_name = "N",
        help_heading = "Restarts"
    )]
    max_restarts: u32,
    /// Time window in which restarts count, such as 1h. Default: the whole job
    #[arg(long, env = "MAINSTAY_RESTART_WINDOW", value_name = "DURATION", value_parser = duration, help_heading = "Restarts", hide_short_help = true)]
    restart_window: Option<Span>,
    /// Maximum number of restarts for one cause, in addition to --max-restarts
    ///
    /// Causes: exception, exit_code, signal, out_of_memory, hang, host_lost. Examples: hang=2, signal=10/1h. Can be
    /// repeated.
    #[arg(
        long,
        env = "MAINSTAY_RESTART_BUDGET",
        value_name = "CAUSE=N[/WINDOW],…",
        value_delimiter = ',',
        value_parser = cause_budget, help_heading = "Restarts", hide_short_help = true
    )]
    restart_budget: Vec<(CauseKind, Budget)>,
    /// How long a restart waits for a host that is not ready; off: do not check
    ///
    /// A host is not ready while GPUs are held, a port is taken or a mount does not answer. After this time
    /// the job is handed back to the scheduler.
    #[arg(
        long,
        env = "MAINSTAY_READY_WITHIN",
        default_value = "60s",
        value_name = "DURATION|off",
        value_parser = ready_within, help_heading = "Restarts", hide_short_help = true
    )]
    ready_within: ReadyWithin,
    /// Exit status that asks the scheduler to start the job on another host
    #[arg(long, env = "MAINSTAY_HAND_BACK_EXIT", default_value_t = HAND_BACK, value_name = "STATUS", value_parser = clap::value_parser!(u8).range(1..), help_heading = "Restarts", hide_short_help = true)]
    hand_back_exit: u8,
    /// Recovery policy in Starlark; default: policy.file of the agent's configuration
    ///
    /// See docs/reference/policy-file.md.
    #[arg(long, env = "MAINSTAY_POLICY", value_name = "FILE", help_heading = "Restarts")]
    policy: Option<PathBuf>,
    /// Run id, the name of the job; generated if not set
    #[arg(
        long,
        alias = "rdzv_id",
        env = "PET_RDZV_ID",
        value_name = "ID",
        help_heading = "Launch",
        hide_short_help = true
    )]
    rdzv_id: Option<String>,
    /// How hosts find each other: static (numbered hosts), c10d, or etcd (a cluster of etcd)
    ///
    /// Default: static, or c10d if --rdzv-endpoint is given without --node-rank. Not needed with one host.
    #[arg(
        long,
        alias = "rdzv_backend",
        env = "PET_RDZV_BACKEND",
        value_name = "NAME",
        help_heading = "Launch",
        hide_short_help = true
    )]
    rdzv_backend: Option<String>,
    /// Where all hosts meet: one host, three or five hosts of the job, or etcd
    ///
    /// With one host its launcher coordinates the job, which does not survive the loss of that host. With three or five,
    /// HOST:PORT,HOST:PORT,…, their launchers run etcd between them. https://HOST:PORT needs --rdzv-backend etcd.
    /// With one host and the static backend it sets MASTER_ADDR and MASTER_PORT.
    #[arg(
        long,
        alias = "rdzv_endpoint",
        env = "PET_RDZV_ENDPOINT",
        value_name = "HOST:PORT",
        help_heading = "Launch",
        hide_short_help = true
    )]
    rdzv_endpoint: Option<String>,
    /// Settings for several hosts: join_timeout, last_call_timeout, lease, shrink_after, grow_after (seconds), world_multiple (ranks), token, is_host, encrypt (on or off), domain
    ///
    /// With etcd also user, password, cacert, cert and key.
    #[arg(
        long,
        alias = "rdzv_conf",
        env = "PET_RDZV_CONF",
        value_name = "KEY=VALUE,…",
        help_heading = "Launch",
        hide_short_help = true
    )]
    rdzv_conf: Option<String>,
    /// One host with a free port; this is the default
    #[arg(long, env = "PET_STANDALONE", value_parser = switch("PET_STANDALONE"), help_heading = "Launch", hide_short_help = true)]
    standalone: bool,
    /// Number of this host, from 0; host 0 leads the job
    #[arg(
        long,
        alias = "node_rank",
        env = "PET_NODE_RANK",
        value_name = "N",
        help_heading = "Launch",
        hide_short_help = true
    )]
    node_rank: Option<u32>,
    /// MASTER_ADDR of the ranks; with several numbered hosts, the address of host 0
    #[arg(
        long,
        alias = "master_addr",
        env = "PET_MASTER_ADDR",
        value_name = "ADDRESS",
        help_heading = "Launch",
        hide_short_help = true
    )]
    master_addr: Option<String>,
    /// MASTER_PORT of the ranks; default: a free port for each attempt
    ///
    /// With several numbered hosts, the port at which they meet; MASTER_PORT is then a free port.
    #[arg(
        long,
        alias = "master_port",
        env = "PET_MASTER_PORT",
        value_name = "PORT",
        help_heading = "Launch",
        hide_short_help = true
    )]
    master_port: Option<u16>,
    /// Address by which other hosts reach this one
    #[arg(
        long,
        alias = "local_addr",
        env = "PET_LOCAL_ADDR",
        value_name = "ADDRESS",
        help_heading = "Launch",
        hide_short_help = true
    )]
    local_addr: Option<String>,
    /// ROLE_NAME of the ranks
    #[arg(
        long,
        env = "PET_ROLE",
        default_value = "default",
        value_name = "NAME",
        help_heading = "Launch",
        hide_short_help = true
    )]
    role: String,
    /// Run the script as a Python module
    #[arg(short = 'm', long, env = "PET_MODULE", value_parser = switch("PET_MODULE"), help_heading = "Launch")]
    module: bool,
    /// Run the script as a program, without Python
    #[arg(long, alias = "no_python", env = "PET_NO_PYTHON", value_parser = switch("PET_NO_PYTHON"), help_heading = "Launch")]
    no_python: bool,
    /// Parent directory of run directories with logs, journal and summary
    #[arg(long, alias = "log_dir", env = "PET_LOG_DIR", value_name = "DIR", help_heading = "Output")]
    log_dir: Option<PathBuf>,
    /// Streams not shown on the terminal: 0 none, 1 stdout, 2 stderr, 3 both
    ///
    /// For single ranks: LOCAL_RANK:STREAMS,…
    #[arg(
        short = 'r',
        long,
        env = "PET_REDIRECTS",
        default_value = "0",
        value_name = "STREAMS",
        help_heading = "Output",
        hide_short_help = true
    )]
    redirects: String,
    /// Streams shown on the terminal in spite of --redirects
    #[arg(
        short = 't',
        long,
        env = "PET_TEE",
        default_value = "0",
        value_name = "STREAMS",
        help_heading = "Output",
        hide_short_help = true
    )]
    tee: String,
    /// Local ranks whose output is shown, such as 0,1; default: all
    #[arg(
        long,
        alias = "local_ranks_filter",
        env = "PET_LOCAL_RANKS_FILTER",
        value_name = "RANKS",
        help_heading = "Output",
        hide_short_help = true
    )]
    local_ranks_filter: Option<String>,
    /// Accepted and ignored: exits are detected without polling
    #[arg(
        long,
        alias = "monitor_interval",
        env = "PET_MONITOR_INTERVAL",
        value_name = "SECONDS",
        value_parser = interval,
        help_heading = "Launch",
        hide_short_help = true
    )]
    monitor_interval: Option<f64>,
    /// Accepted and ignored: each rank is a new process
    #[arg(
        long,
        alias = "start_method",
        env = "PET_START_METHOD",
        value_parser = ["spawn", "fork", "forkserver"],
        help_heading = "Launch",
        hide_short_help = true
    )]
    start_method: Option<String>,
    /// Accepted and ignored: `mainstay events` shows the events of a job
    #[arg(
        long,
        alias = "event_log_handler",
        env = "PET_EVENT_LOG_HANDLER",
        value_name = "NAME",
        help_heading = "Launch",
        hide_short_help = true
    )]
    event_log_handler: Option<String>,
    /// How long ranks may take to exit when the launcher is asked to stop [default: 30s]
    ///
    /// TORCH_ELASTIC_SHUTDOWN_TIMEOUT sets it too.
    #[arg(
        long,
        alias = "shutdown_timeout",
        env = "PET_SHUTDOWN_TIMEOUT",
        value_name = "DURATION",
        value_parser = duration, help_heading = "Restarts"
    )]
    shutdown_timeout: Option<Span>,
    /// Signal that asks ranks to save: SIGUSR1 or SIGUSR2
    ///
    /// It is sent in addition to the request that `mainstay.save_requested()` returns.
    #[arg(long, env = "MAINSTAY_SAVE_SIGNAL", value_name = "SIGNAL", value_parser = save_signal, help_heading = "Checkpoints", hide_short_help = true)]
    save_signal: Option<i32>,
    /// Allow fault injection with `mainstay inject`
    #[arg(long, env = "MAINSTAY_ALLOW_INJECT", value_parser = switch("MAINSTAY_ALLOW_INJECT"), help_heading = "Restarts", hide_short_help = true)]
    allow_inject: bool,
    /// Do not restart; report the decision and exit
    #[arg(long, env = "MAINSTAY_DRY_RUN", value_parser = switch("MAINSTAY_DRY_RUN"), help_heading = "Restarts")]
    dry_run: bool,
    /// Do not end the job when the cloud announces an interruption
    #[arg(long, env = "MAINSTAY_STAY_ON_NOTICE", value_parser = switch("MAINSTAY_STAY_ON_NOTICE"), help_heading = "Agent", hide_short_help = true)]
    stay_on_notice: bool,
    /// How long the other ranks may take to exit after one has failed
    #[arg(long, env = "MAINSTAY_FAULT_TIMEOUT", default_value = "3s", value_name = "DURATION", value_parser = duration, help_heading = "Restarts", hide_short_help = true)]
    fault_timeout: Span,
    /// Action for a hang: auto restarts the job, report only reports it, off disables detection
    #[arg(long, env = "MAINSTAY_HANG", default_value = "auto", value_name = "auto|report|off", value_parser = hang_mode, help_heading = "Hangs")]
    hang: Mode,
    /// Time limit of a phase, instead of the learned one; can be repeated
    ///
    /// Phases: first_step, step, livelock, or a section's name. General limits: unlearned, long, confirm,
    /// passing, spinning, working, idle, cap.
    #[arg(
        long,
        env = "MAINSTAY_HANG_LIMITS",
        value_name = "PHASE=DURATION,…",
        value_delimiter = ',',
        value_parser = hang_limit, help_heading = "Hangs", hide_short_help = true
    )]
    hang_limit: Vec<(String, Span)>,
    /// Directory for checkpoints; a later run resumes from it. Default: in the run directory
    #[arg(long, env = "MAINSTAY_CHECKPOINT_DIR", value_name = "DIR", help_heading = "Checkpoints")]
    checkpoint_dir: Option<PathBuf>,
    /// Run whose checkpoints this job resumes from: NAME, NAME~ID or its directory
    ///
    /// A job resumes from its own directory without this option. It is for a directory that has another
    /// path. If no run is called NAME, the job is a new run. Can be repeated.
    #[arg(long, env = "MAINSTAY_RESUME_FROM", value_name = "RUN", help_heading = "Checkpoints")]
    resume_from: Vec<String>,
    /// Directory into which the trainer writes its own checkpoints
    ///
    /// The agent replicates them and restores them before the ranks start. KIND is auto, megatron,
    /// deepspeed, huggingface, torch, dcp, orbax or nemo.
    #[arg(long, env = "MAINSTAY_CHECKPOINT_WATCH", value_name = "[KIND:]DIR", value_delimiter = ',', value_parser = checkpoint_watch, help_heading = "Checkpoints")]
    checkpoint_watch: Vec<(String, PathBuf)>,
    /// Memory for checkpoints of all ranks, such as 64G; off: ranks write to disk
    ///
    /// Default: half of the free memory. Ranks copy into it and continue. The launcher writes to disk.
    #[arg(long, env = "MAINSTAY_CHECKPOINT_MEMORY", value_name = "BYTES|off", value_parser = checkpoint_memory, help_heading = "Checkpoints")]
    checkpoint_memory: Option<CheckpointMemory>,
    /// Maximum bytes per second that the launcher writes to disk, such as 500M
    #[arg(long, env = "MAINSTAY_CHECKPOINT_BANDWIDTH", value_name = "BYTES", value_parser = bytes, help_heading = "Checkpoints", hide_short_help = true)]
    checkpoint_bandwidth: Option<u64>,
    /// Maximum bytes of checkpoints on disk, such as 2T; the newest whole step is always kept
    #[arg(long, env = "MAINSTAY_CHECKPOINT_QUOTA", value_name = "BYTES", value_parser = bytes, help_heading = "Checkpoints", hide_short_help = true)]
    checkpoint_quota: Option<u64>,
    /// Checkpoints of each rank in memory; 3 tolerate a disk that is slower than the saves
    #[arg(long, env = "MAINSTAY_CHECKPOINT_SLOTS", default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=8), help_heading = "Checkpoints", hide_short_help = true)]
    checkpoint_slots: u8,
    /// Number of whole steps kept on disk
    #[arg(long, env = "MAINSTAY_CHECKPOINT_KEEP", default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Checkpoints", hide_short_help = true)]
    checkpoint_keep: u32,
    /// Directory on a tmpfs for heartbeat pages and the launcher's socket
    #[arg(
        long,
        env = "MAINSTAY_RUNTIME_DIR",
        value_name = "DIR",
        help_heading = "Agent",
        hide_short_help = true
    )]
    runtime_dir: Option<PathBuf>,
    /// Socket of the agent; default: the usual paths
    #[arg(
        long,
        env = "MAINSTAY_SOCKET",
        value_name = "PATH",
        help_heading = "Agent",
        hide_short_help = true
    )]
    socket: Option<PathBuf>,
    /// Do not use an agent
    #[arg(long, env = "MAINSTAY_NO_AGENT", value_parser = switch("MAINSTAY_NO_AGENT"), help_heading = "Agent")]
    no_agent: bool,
    /// Do not fork restarted ranks from a process that holds their imports
    #[arg(long, env = "MAINSTAY_NO_WARM", value_parser = switch("MAINSTAY_NO_WARM"), help_heading = "Restarts", hide_short_help = true)]
    no_warm: bool,
    /// Ignore what earlier runs of this job learned, and do not store what this run learns
    #[arg(long, env = "MAINSTAY_FORGET", value_parser = switch("MAINSTAY_FORGET"), help_heading = "Hangs", hide_short_help = true)]
    forget: bool,
    /// Modules that this process imports when the job starts, such as torch,numpy
    #[arg(
        long,
        env = "MAINSTAY_WARM_IMPORTS",
        value_name = "MODULES",
        value_delimiter = ',',
        help_heading = "Restarts",
        hide_short_help = true
    )]
    warm_imports: Vec<String>,
    #[command(flatten)]
    host: HostOptions,
    /// Print summary.json as one line on standard output at the end
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// The script and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "SCRIPT [ARGUMENTS]")]
    command: Vec<String>,
}

/// Runs the job and returns its exit status.
///
/// # Errors
/// What the command line asks for cannot be done, or the job could not be started.
pub async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let plan = match plan(args) {
        Ok(plan) => plan,
        Err(error) => {
            output::note(&format!("error: {}", output::in_full(&error)));
            return Ok(ExitCode::from(exit::USAGE));
        }
    };
    logging::start(tracing::level_filters::LevelFilter::WARN);
    let ended = app::run_job(plan).await;
    logging::flush(logging::PATIENCE);
    match ended {
        Ok(exit) => Ok(ExitCode::from(u8::try_from(exit).unwrap_or(1))),
        Err(error) => {
            output::note(&format!("error: {}", output::in_full(&error)));
            Ok(ExitCode::from(exit::NOT_BEGUN))
        }
    }
}

fn plan(mut args: Args) -> anyhow::Result<JobPlan> {
    let wrong = |option: &'static str| move |error: String| anyhow::anyhow!("{option}: {error}");
    let is_named = args.rdzv_id.is_some();
    let found = cluster::add(&mut args, &cluster::variables(), cluster::full_name().as_deref())?;
    let hosts =
        hosts::hosts(&args)?.map(|hosts| HostsPlan { is_host: hosts.is_host.or(found.is_endpoint), ..hosts });
    if args.module && args.no_python && !args.host.run_path {
        bail!("--module and --no-python exclude each other (PET_MODULE and PET_NO_PYTHON set them too)");
    }
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let ranks = ranks(&args.nproc_per_node, visible.as_deref()).map_err(wrong("--nproc-per-node"))?;
    let gpus = devices::visible(visible.as_deref(), Path::new("/dev"));
    args.host.check(ranks, visible.as_deref(), &gpus).map_err(anyhow::Error::msg)?;
    let redirects = torchrun::streams(&args.redirects, ranks).map_err(wrong("--redirects"))?;
    let tee = torchrun::streams(&args.tee, ranks).map_err(wrong("--tee"))?;
    let streams = redirects.iter().zip(&tee).map(|(off, on)| (!off.0 || on.0, !off.1 || on.1)).collect();
    let listed = args.local_ranks_filter.as_deref().filter(|ranks| !ranks.is_empty());
    let listed = listed.map(torchrun::local_ranks).transpose();
    let (endpoint_addr, endpoint_port) = static_endpoint(&args)?;
    let run_id = match (&args.rdzv_id, &hosts) {
        (Some(id), _) => id.clone(),
        // All hosts have to have the same; it is torchrun's.
        (None, Some(_)) => "none".to_owned(),
        (None, None) => lineage::new_run_id().context("making a run id")?,
    };
    // Where several hosts meet is not where the ranks of a round do.
    let fixed_port = args.master_port.or(endpoint_port).filter(|port| *port != 0 && hosts.is_none());
    let settings = Settings {
        run_id,
        command: command(&args)?,
        local_world_size: ranks,
        role: args.role,
        master_addr: args.master_addr.or(endpoint_addr).unwrap_or_else(|| "127.0.0.1".to_owned()),
        master_port: fixed_port,
        policy: mainstay_core::recovery::policy::Settings {
            by_cause: args.restart_budget.into_iter().collect(),
            ready_within: args.ready_within.0,
            hand_back_exit: i32::from(args.hand_back_exit),
            dry_run: args.dry_run,
            ..Budget { max_restarts: args.max_restarts, window: args.restart_window }.into()
        },
        policy_file: args.policy.or_else(policy_of_the_host),
        grace: Grace {
            requested: shutdown_timeout(args.shutdown_timeout)?,
            fault: args.fault_timeout,
            done: Span::seconds(5),
        },
        save_signal: args.save_signal,
        leave_on_notice: !args.stay_on_notice,
        allow_inject: args.allow_inject,
        gpu_library: configuration_of_the_host()
            .filter(|_| args.allow_inject)
            .map(|config| config.gpu.library),
        hang: HangSettings { mode: args.hang, limits: limits(&args.hang_limit) },
        checkpoint_dir: args.checkpoint_dir,
        remember: !args.forget,
        checkpoints: CheckpointSettings {
            is_named,
            resume_from: args.resume_from,
            watch: args.checkpoint_watch,
            memory: args.checkpoint_memory.and_then(|memory| memory.0),
            in_memory: args.checkpoint_memory != Some(CheckpointMemory(None)),
            slots: args.checkpoint_slots.into(),
            bandwidth: args.checkpoint_bandwidth,
            keep: usize::try_from(args.checkpoint_keep).unwrap_or(usize::MAX),
            quota: args.checkpoint_quota,
        },
        warm: WarmSettings { enabled: !args.no_warm, imports: args.warm_imports },
        shown: Shown {
            ranks: listed.map_err(wrong("--local-ranks-filter"))?,
            streams,
            prefix: args.host.log_line_prefix_template.clone(),
            duplicate_stdout: args.host.duplicate_stdout_filters.clone().unwrap_or_default().0,
            duplicate_stderr: args.host.duplicate_stderr_filters.clone().unwrap_or_default().0,
        },
        virtual_local_rank: args.host.virtual_local_rank,
        numa: args.host.numa_binding,
    };
    Ok(JobPlan {
        settings,
        hosts,
        log_dir: args.log_dir,
        runtime_root: args.runtime_dir,
        agent_socket: args.socket,
        look_for_agent: !args.no_agent,
        print_summary: args.json,
        timestamps: args.host.timestamps(),
        signals: args.host.signals_to_handle,
        from_environment: found.told,
    })
}

/// How many ranks were asked for.
fn ranks(text: &str, visible: Option<&str>) -> Result<u32, String> {
    let (dev, drm) = (Path::new("/dev"), Path::new("/sys/class/drm"));
    let mask = std::env::var("ZE_AFFINITY_MASK").ok();
    let has_gpus = !devices::visible(visible, dev).is_empty();
    let number = xpu::in_numbers(text, xpu::count(&dev.join("dri"), drm, mask.as_deref()), has_gpus)?;
    torchrun::ranks_per_node(&number, dev, visible)
}

/// How long ranks may take to exit: what was given, else what PyTorch's own variable has.
fn shutdown_timeout(given: Option<Span>) -> anyhow::Result<Span> {
    const VARIABLE: &str = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT";
    match (given, std::env::var(VARIABLE)) {
        (Some(given), _) => Ok(given),
        (None, Ok(text)) => duration(&text).map_err(|error| anyhow::anyhow!("{VARIABLE}: {error}")),
        (None, Err(_)) => Ok(Span::seconds(30)),
    }
}

/// What the agent's configuration names for jobs that name none. A configuration that cannot be read is the agent's trouble.
fn policy_of_the_host() -> Option<PathBuf> {
    Some(configuration_of_the_host()?.policy.file).filter(|file| !file.as_os_str().is_empty())
}

fn configuration_of_the_host() -> Option<Config> {
    let environment = Environment::new(default_paths::variables(), nix::unistd::geteuid().as_raw());
    Config::load(None, &environment, &[]).ok()
}

/// With torchrun's static backend the rendezvous endpoint is the address of the ranks' store.
fn static_endpoint(args: &Args) -> anyhow::Result<(Option<String>, Option<u16>)> {
    let (Some("static"), Some(endpoint)) = (args.rdzv_backend.as_deref(), args.rdzv_endpoint.as_deref())
    else {
        return Ok((None, None));
    };
    let (host, port) = match endpoint.rsplit_once(':') {
        Some((host, port)) => {
            let port = port.parse().with_context(|| format!("--rdzv-endpoint: {port:?} is no port"))?;
            (host, Some(port))
        }
        None => (endpoint, None),
    };
    Ok((Some(host.to_owned()), port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &[&str]) -> Result<Args, String> {
        let line = std::iter::once("run").chain(line.iter().copied());
        Line::try_parse_from(line).map(|line| line.args).map_err(|error| error.to_string())
    }

    fn plan_of(line: &[&str]) -> Result<JobPlan, String> {
        plan(parse(line)?).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn what_follows_the_script_belongs_to_the_script() {
        let plan = plan_of(&["--nproc_per_node=2", "/bin/sh", "--n", "5", "--help", "-m"]).expect("a plan");
        assert_eq!(plan.settings.command, ["/bin/sh", "--n", "5", "--help", "-m"]);
        assert_eq!(plan.settings.local_world_size, 2);
    }

    #[test]
    fn an_unknown_option_before_the_script_is_an_error() {
        let error = plan_of(&["--nproc-pr-node", "2", "/bin/sh"]).expect_err("a typing error");
        assert!(error.contains("--nproc-pr-node"), "{error}");
    }

    #[test]
    fn modules_run_under_python() {
        let plan = plan_of(&["-m", "json.tool", "-h"]).expect("a plan");
        assert_eq!(plan.settings.command[1..], ["-m", "json.tool", "-h"]);
    }

    #[test]
    fn a_missing_script_is_named() {
        let error = plan_of(&["./no-such-script.py"]).expect_err("no script");
        assert_eq!(error, "./no-such-script.py: no such script or program");
    }

    #[test]
    fn redirected_streams_are_off_the_terminal_unless_teed() {
        let shown = plan_of(&["--nproc-per-node=2", "-r", "3", "-t", "0:1", "/bin/sh"])
            .expect("a plan")
            .settings
            .shown;
        assert_eq!((shown.of(0), shown.of(1)), ((true, false), (false, false)));
    }

    #[test]
    fn limits_of_phases_and_of_patience() {
        let line = ["--hang-limit", "step=30s,checkpoint=1h", "--hang-limit", "spinning=5s", "/bin/sh"];
        let hang = plan_of(&line).expect("a plan").settings.hang;
        assert_eq!(hang.limits.given["checkpoint"], Span::seconds(3600));
        assert_eq!((hang.limits.given["step"], hang.limits.spinning), (Span::seconds(30), Span::seconds(5)));
        assert_eq!(hang.mode, Mode::Auto);
        assert!(plan_of(&["--hang-limit", "step", "/bin/sh"]).is_err());
        assert!(plan_of(&["--hang", "maybe", "/bin/sh"]).is_err());
    }

    #[test]
    fn budgets_of_causes_and_patience_with_the_host() {
        let line = ["--restart-budget", "hang=2,signal=10/1h", "--ready-within", "off", "/bin/sh"];
        let policy = plan_of(&line).expect("a plan").settings.policy;
        let signal = Budget { max_restarts: 10, window: Some(Span::seconds(3600)) };
        assert_eq!(policy.by_cause[&CauseKind::Signal], signal);
        assert_eq!(policy.by_cause[&CauseKind::Hang], Budget { max_restarts: 2, window: None });
        assert_eq!((policy.ready_within, policy.hand_back_exit), (None, 75));
        assert!(plan_of(&["--restart-budget", "tuesday=2", "/bin/sh"]).is_err());
        assert!(plan_of(&["--hand-back-exit", "0", "/bin/sh"]).is_err());
    }

    #[test]
    fn a_module_is_not_run_without_python() {
        let error = plan_of(&["-m", "--no-python", "json.tool"]).expect_err("both");
        assert!(error.contains("--module and --no-python exclude each other"), "{error}");
    }

    #[test]
    fn durations_in_words_and_in_seconds() {
        assert_eq!(duration("30s"), Ok(Span::seconds(30)));
        assert_eq!(duration("1h 30m"), Ok(Span::seconds(5400)));
        assert_eq!(duration("0.5"), Ok(Span::millis(500)));
        assert!(duration("soon").is_err() && duration("-3s").is_err());
    }
}
