//! `mainstay run`: torchrun's command line in front of the launcher.

mod command;
mod values;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use mainstay_core::policy::{Budget, CauseKind, HAND_BACK_EXIT};
use mainstay_core::time::Span;

use crate::act::stop::Grace;
use crate::app::{self, JobPlan, logging, usual};
use crate::cli::{exit, output, torchrun};
use crate::config::{Config, Environment};
use crate::launch::hang::{HangSettings, Mode};
use crate::launch::{CheckpointSettings, Settings, Shown, WarmSettings, places};
use crate::os::clock;

use command::command;
use values::{
    CheckpointMemory, ReadyWithin, bytes, cause_budget, checkpoint_memory, checkpoint_watch, duration,
    hang_limit, hang_mode, limits, ready_within, save_signal,
};

/// The usual status for that, as the command line takes it.
const HAND_BACK: u8 = HAND_BACK_EXIT as u8;

const EXAMPLES: &str = "\
Examples:
  mainstay run --nproc-per-node 8 train.py --config c.yaml
  mainstay run --nproc-per-node gpu -m my.training --lr 3e-4
  mainstay run --nproc-per-node 2 --no-python ./trainer
  mainstay run --nproc-per-node 8 --max-restarts 5 --checkpoint-dir /nvme/ckpt train.py

What follows the script's name belongs to the script. Exit status: 0 when all ranks end with 0; else that of the
rank that failed first, a signal as 128 + its number; 75 when another host may do (--hand-back-exit); 64 for a command line that is not understood, 70 when the job
could not be begun. See docs/reference/cli.md.";

/// Run a training job: start its ranks, watch them, restart them when that helps
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Hosts, as N or MIN:MAX; one host for now
    #[arg(long, alias = "nnodes", env = "PET_NNODES", default_value = "1", value_name = "N")]
    nnodes: String,
    /// Ranks on this host: a number, auto, gpu or cpu
    #[arg(long, alias = "nproc_per_node", env = "PET_NPROC_PER_NODE", default_value = "1", value_name = "N")]
    nproc_per_node: String,
    /// Restarts allowed in a window
    #[arg(long, alias = "max_restarts", env = "PET_MAX_RESTARTS", default_value_t = 3, value_name = "N")]
    max_restarts: u32,
    /// The window in which restarts are counted, such as 1h; without it they count for the whole job
    #[arg(long, env = "MAINSTAY_RESTART_WINDOW", value_name = "DURATION", value_parser = duration)]
    restart_window: Option<Span>,
    /// Restarts allowed for one kind of cause, beside --max-restarts: exception, exit_code, signal, out_of_memory or hang,
    /// such as hang=2 or signal=10/1h. May be given more than once
    #[arg(
        long,
        env = "MAINSTAY_RESTART_BUDGET",
        value_name = "CAUSE=N[/WINDOW],…",
        value_delimiter = ',',
        value_parser = cause_budget
    )]
    restart_budget: Vec<(CauseKind, Budget)>,
    /// How long a restart waits for a host that is not ready (GPUs still held, a port taken, a mount that does not answer),
    /// before the job is handed back to the scheduler; off restarts without looking
    #[arg(
        long,
        env = "MAINSTAY_READY_WITHIN",
        default_value = "60s",
        value_name = "DURATION|off",
        value_parser = ready_within
    )]
    ready_within: ReadyWithin,
    /// Exit status that asks the scheduler to start the job again elsewhere
    #[arg(long, env = "MAINSTAY_HAND_BACK_EXIT", default_value_t = HAND_BACK, value_name = "STATUS", value_parser = clap::value_parser!(u8).range(1..))]
    hand_back_exit: u8,
    /// A policy of one's own, in Starlark: what is done about failures (docs/reference/policy-file.md). If none is given,
    /// policy.file of the agent's configuration
    #[arg(long, env = "MAINSTAY_POLICY", value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Name of the run; made up from time and process if not given
    #[arg(long, alias = "rdzv_id", env = "PET_RDZV_ID", value_name = "ID")]
    rdzv_id: Option<String>,
    /// Rendezvous backend; one host needs none
    #[arg(long, alias = "rdzv_backend", env = "PET_RDZV_BACKEND", value_name = "NAME")]
    rdzv_backend: Option<String>,
    /// Rendezvous endpoint HOST:PORT; with the static backend it is MASTER_ADDR and MASTER_PORT
    #[arg(long, alias = "rdzv_endpoint", env = "PET_RDZV_ENDPOINT", value_name = "HOST:PORT")]
    rdzv_endpoint: Option<String>,
    /// Rendezvous settings; one host needs none
    #[arg(long, alias = "rdzv_conf", env = "PET_RDZV_CONF", value_name = "KEY=VALUE,…")]
    rdzv_conf: Option<String>,
    /// One host, any free port: what `mainstay run` does anyway
    #[arg(long, env = "PET_STANDALONE")]
    standalone: bool,
    /// This host's place among the hosts: 0
    #[arg(long, alias = "node_rank", env = "PET_NODE_RANK", default_value_t = 0, value_name = "N")]
    node_rank: u32,
    /// MASTER_ADDR
    #[arg(long, alias = "master_addr", env = "PET_MASTER_ADDR", value_name = "ADDRESS")]
    master_addr: Option<String>,
    /// MASTER_PORT; a free one is chosen for each attempt if not given
    #[arg(long, alias = "master_port", env = "PET_MASTER_PORT", value_name = "PORT")]
    master_port: Option<u16>,
    /// Address of this host; not needed with one host
    #[arg(
        long,
        alias = "local_addr",
        env = "PET_LOCAL_ADDR",
        value_name = "ADDRESS",
        hide_short_help = true
    )]
    local_addr: Option<String>,
    /// ROLE_NAME
    #[arg(long, env = "PET_ROLE", default_value = "default", value_name = "NAME")]
    role: String,
    /// The script is a Python module
    #[arg(short = 'm', long, env = "PET_MODULE", conflicts_with = "no_python")]
    module: bool,
    /// The script is a program, not Python
    #[arg(long, alias = "no_python", env = "PET_NO_PYTHON")]
    no_python: bool,
    /// Where run directories with logs, journal and summary are made
    #[arg(long, alias = "log_dir", env = "PET_LOG_DIR", value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// Streams that are kept off the terminal: 0 none, 1 stdout, 2 stderr, 3 both; or LOCAL_RANK:STREAMS,…
    #[arg(short = 'r', long, env = "PET_REDIRECTS", default_value = "0", value_name = "STREAMS")]
    redirects: String,
    /// Streams that are shown on the terminal in spite of --redirects
    #[arg(short = 't', long, env = "PET_TEE", default_value = "0", value_name = "STREAMS")]
    tee: String,
    /// Local ranks whose output is shown on the terminal, such as 0,1; all if not given
    #[arg(long, alias = "local_ranks_filter", env = "PET_LOCAL_RANKS_FILTER", value_name = "RANKS")]
    local_ranks_filter: Option<String>,
    /// Taken and ignored: deaths are seen at once, not by looking
    #[arg(long, alias = "monitor_interval", env = "PET_MONITOR_INTERVAL", hide_short_help = true)]
    monitor_interval: Option<f64>,
    /// Taken and ignored
    #[arg(long, alias = "start_method", env = "PET_START_METHOD", hide_short_help = true)]
    start_method: Option<String>,
    /// Taken and ignored
    #[arg(long, alias = "event_log_handler", env = "PET_EVENT_LOG_HANDLER", hide_short_help = true)]
    event_log_handler: Option<String>,
    /// How long ranks may take to end after the launcher was asked to stop
    #[arg(
        long,
        alias = "shutdown_timeout",
        env = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        default_value = "30s",
        value_name = "DURATION",
        value_parser = duration
    )]
    shutdown_timeout: Span,
    /// A signal that ranks get when they are to save, beside what `mainstay.save_requested()` tells them: SIGUSR1, SIGUSR2
    #[arg(long, env = "MAINSTAY_SAVE_SIGNAL", value_name = "SIGNAL", value_parser = save_signal)]
    save_signal: Option<i32>,
    /// Let `mainstay inject` do things to the ranks: for drills
    #[arg(long, env = "MAINSTAY_ALLOW_INJECT")]
    allow_inject: bool,
    /// Do not restart: only say what would be done, and end as if nothing could be
    #[arg(long, env = "MAINSTAY_DRY_RUN")]
    dry_run: bool,
    /// Do not end the job when the agent hears that the cloud takes the machine away
    #[arg(long, env = "MAINSTAY_STAY_ON_NOTICE")]
    stay_on_notice: bool,
    /// How long the other ranks may take to end after one has failed
    #[arg(long, env = "MAINSTAY_FAULT_TIMEOUT", default_value = "3s", value_name = "DURATION", value_parser = duration)]
    fault_timeout: Span,
    /// What to do about ranks that live and do not move: auto stops and restarts them, report only tells, off does not look
    #[arg(long, env = "MAINSTAY_HANG", default_value = "auto", value_name = "auto|report|off", value_parser = hang_mode)]
    hang: Mode,
    /// How long a phase may stand still, instead of what was learned: first_step, step, livelock, or a section's name; and
    /// the patience in general: unlearned, long, confirm, passing, spinning, working, idle, cap. May be given more than once
    #[arg(
        long,
        env = "MAINSTAY_HANG_LIMITS",
        value_name = "PHASE=DURATION,…",
        value_delimiter = ',',
        value_parser = hang_limit
    )]
    hang_limit: Vec<(String, Span)>,
    /// Where ranks keep checkpoints, to go on from them in a later run too; a directory of this run if not given
    #[arg(long, env = "MAINSTAY_CHECKPOINT_DIR", value_name = "DIR")]
    checkpoint_dir: Option<PathBuf>,
    /// A directory into which the trainer writes checkpoints in its own way; the agent replicates them, and brings them back before
    /// the ranks start. KIND is auto, megatron, deepspeed, huggingface, torch, dcp, orbax or nemo
    #[arg(long, env = "MAINSTAY_CHECKPOINT_WATCH", value_name = "[KIND:]DIR", value_delimiter = ',', value_parser = checkpoint_watch)]
    checkpoint_watch: Vec<(String, PathBuf)>,
    /// Memory for checkpoints of all ranks together, such as 64G: ranks copy into it and go on, and the launcher writes to the
    /// disk; off has the ranks write to the disk themselves. Half of what is free if not given
    #[arg(long, env = "MAINSTAY_CHECKPOINT_MEMORY", value_name = "BYTES|off", value_parser = checkpoint_memory)]
    checkpoint_memory: Option<CheckpointMemory>,
    /// How fast the launcher writes checkpoints to the disk at most, such as 500M (bytes per second); as fast as it is if not given
    #[arg(long, env = "MAINSTAY_CHECKPOINT_BANDWIDTH", value_name = "BYTES", value_parser = bytes)]
    checkpoint_bandwidth: Option<u64>,
    /// Room on the disk for steps beyond the newest whole one, such as 2T
    #[arg(long, env = "MAINSTAY_CHECKPOINT_QUOTA", value_name = "BYTES", value_parser = bytes)]
    checkpoint_quota: Option<u64>,
    /// Checkpoints of each rank in memory at a time: 2, or 3 so that the disk may be slower than they come
    #[arg(long, env = "MAINSTAY_CHECKPOINT_SLOTS", default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=8))]
    checkpoint_slots: u8,
    /// Whole steps that are kept on the disk
    #[arg(long, env = "MAINSTAY_CHECKPOINT_KEEP", default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    checkpoint_keep: u32,
    /// Where heartbeat pages and the launcher's socket are made: on a tmpfs
    #[arg(long, env = "MAINSTAY_RUNTIME_DIR", value_name = "DIR", hide_short_help = true)]
    runtime_dir: Option<PathBuf>,
    /// The agent's socket; looked for in the usual places if not given
    #[arg(long, env = "MAINSTAY_SOCKET", value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Do not look for an agent
    #[arg(long, env = "MAINSTAY_NO_AGENT")]
    no_agent: bool,
    /// Start ranks anew each time, instead of forking them from a process that holds their imports
    #[arg(long, env = "MAINSTAY_NO_WARM")]
    no_warm: bool,
    /// Neither use what earlier runs of this job learned (how long its steps take, which ranks do the same) nor keep it
    #[arg(long, env = "MAINSTAY_FORGET")]
    forget: bool,
    /// Modules that such a process imports from the job's start on, such as torch,numpy; what the ranks hold is learned
    #[arg(long, env = "MAINSTAY_WARM_IMPORTS", value_name = "MODULES", value_delimiter = ',')]
    warm_imports: Vec<String>,
    /// Print how the job went as one line of JSON on standard output at the end (summary.json's content)
    #[arg(long)]
    json: bool,
    /// The script, and what belongs to it
    #[arg(required = true, trailing_var_arg = true, value_name = "SCRIPT [ARGUMENTS]")]
    command: Vec<String>,
}

/// Runs the job and returns its exit status.
///
/// # Errors
/// What the command line asks for cannot be done, or the job could not be begun.
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

fn plan(args: Args) -> anyhow::Result<JobPlan> {
    let wrong = |option: &'static str| move |error: String| anyhow::anyhow!("{option}: {error}");
    torchrun::nodes(&args.nnodes).map_err(wrong("--nnodes"))?;
    if args.node_rank != 0 {
        bail!("--node-rank: {} was given, but a job of one host has only node 0", args.node_rank);
    }
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let ranks = torchrun::ranks_per_node(&args.nproc_per_node, Path::new("/dev"), visible.as_deref())
        .map_err(wrong("--nproc-per-node"))?;
    let redirects = torchrun::streams(&args.redirects, ranks).map_err(wrong("--redirects"))?;
    let tee = torchrun::streams(&args.tee, ranks).map_err(wrong("--tee"))?;
    let streams = redirects.iter().zip(&tee).map(|(off, on)| (!off.0 || on.0, !off.1 || on.1)).collect();
    let listed = args.local_ranks_filter.as_deref().map(torchrun::local_ranks).transpose();
    let (endpoint_addr, endpoint_port) = static_endpoint(&args)?;
    let run_id = args.rdzv_id.clone().unwrap_or_else(|| places::made_up_run_id(clock::now().wall));
    let settings = Settings {
        run_id,
        command: command(&args)?,
        local_world_size: ranks,
        role: args.role,
        master_addr: args.master_addr.or(endpoint_addr).unwrap_or_else(|| "127.0.0.1".to_owned()),
        master_port: args.master_port.or(endpoint_port).filter(|port| *port != 0),
        policy: mainstay_core::policy::Settings {
            by_cause: args.restart_budget.into_iter().collect(),
            ready_within: args.ready_within.0,
            hand_back_exit: i32::from(args.hand_back_exit),
            dry_run: args.dry_run,
            ..Budget { max_restarts: args.max_restarts, window: args.restart_window }.into()
        },
        policy_file: args.policy.or_else(policy_of_the_host),
        grace: Grace { requested: args.shutdown_timeout, fault: args.fault_timeout, done: Span::seconds(5) },
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
            watch: args.checkpoint_watch,
            memory: args.checkpoint_memory.and_then(|memory| memory.0),
            in_memory: args.checkpoint_memory != Some(CheckpointMemory(None)),
            slots: args.checkpoint_slots.into(),
            bandwidth: args.checkpoint_bandwidth,
            keep: usize::try_from(args.checkpoint_keep).unwrap_or(usize::MAX),
            quota: args.checkpoint_quota,
        },
        warm: WarmSettings { enabled: !args.no_warm, imports: args.warm_imports },
        shown: Shown { ranks: listed.map_err(wrong("--local-ranks-filter"))?, streams },
    };
    Ok(JobPlan {
        settings,
        log_dir: args.log_dir,
        runtime_root: args.runtime_dir,
        agent_socket: args.socket,
        look_for_agent: !args.no_agent,
        print_summary: args.json,
    })
}

/// What the agent's configuration names for jobs that name none. A configuration that cannot be read is the agent's trouble.
fn policy_of_the_host() -> Option<PathBuf> {
    Some(configuration_of_the_host()?.policy.file).filter(|file| !file.as_os_str().is_empty())
}

fn configuration_of_the_host() -> Option<Config> {
    let environment = Environment::new(usual::variables(), nix::unistd::geteuid().as_raw());
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
    fn more_than_one_host_is_refused_in_plain_words() {
        let error = plan_of(&["--nnodes", "2", "/bin/sh"]).expect_err("two hosts");
        assert!(error.starts_with("--nnodes: 2 hosts were asked for"), "{error}");
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
    fn durations_in_words_and_in_seconds() {
        assert_eq!(duration("30s"), Ok(Span::seconds(30)));
        assert_eq!(duration("1h 30m"), Ok(Span::seconds(5400)));
        assert_eq!(duration("0.5"), Ok(Span::millis(500)));
        assert!(duration("soon").is_err() && duration("-3s").is_err());
    }
}
