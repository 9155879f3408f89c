//! `mainstay run`: torchrun's command line in front of the launcher.

pub(super) mod abbreviations;
pub(crate) mod cluster;
mod command;
mod host_options;
mod hosts;
mod plan;
mod roles;
mod values;
mod xpu;

use std::path::PathBuf;
use std::process::ExitCode;

use mainstay_diagnosis::progress_rule::ProgressRule;
use mainstay_model::time::Span;
use mainstay_recovery::policy::{Budget, CauseKind, HAND_BACK_EXIT};

use crate::{exit, output};
use mainstay_app::{self as app, logging};
use mainstay_launcher::agent_link::trust;
use mainstay_launcher::group::plan::Preflight;
use mainstay_launcher::hang::Mode;

use host_options::HostOptions;
use roles::RoleOption;
use values::{
    CheckpointMemory, ReadyWithin, bytes, cause_budget, checkpoint_memory, checkpoint_watch, duration,
    hang_limit, hang_mode, interval, preflight, ready_within, save_signal, switch,
};

/// The default exit status for that, in the type of the option.
const HAND_BACK: u8 = HAND_BACK_EXIT as u8;

const EXAMPLES: &str = "\
Examples:
  mainstay run --nproc-per-node 8 train.py --config c.yaml
  mainstay run --nproc-per-node gpu -m my.training --lr 3e-4
  mainstay run --nproc-per-node 2 --no-python ./trainer
  mainstay run --nproc-per-node 8 --max-restarts 5 --checkpoint-dir /nvme/ckpt train.py
  mainstay run --role trainer=2:train.py --role rollout=6,restart=always:rollout.py

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
    /// Recovery policy, a Python script; default: policy.file of the agent's configuration
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
    /// Settings for several hosts: join_timeout, last_call_timeout, lease, shrink_after, grow_after (seconds), world_multiple (ranks), token, token_file, is_host, encrypt (on or off), domain
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
    /// Measure the links between the hosts before ranks start; report slow ones, or require that there are none
    ///
    /// At most 10 s for 64 hosts. A slow host becomes a spare if enough others have joined.
    #[arg(
        long,
        env = "MAINSTAY_PREFLIGHT",
        value_name = "report|require",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "report",
        value_parser = preflight,
        help_heading = "Launch",
        hide_short_help = true
    )]
    preflight: Option<Preflight>,
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
    /// ROLE_NAME of the ranks, or a role with N ranks and a world and restarts of its own; can be repeated
    ///
    /// KEY: restart (never, on-failure or always), max (restarts), backoff (DURATION), gpus (number), or another option
    /// of `mainstay run`. The job ends with its first role. See docs/howto/roles.md.
    #[arg(
        long,
        env = "PET_ROLE",
        default_value = "default",
        value_name = "NAME[=N[,KEY=VALUE…]:COMMAND]",
        value_parser = roles::role,
        help_heading = "Launch",
        hide_short_help = true
    )]
    role: Vec<RoleOption>,
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
    /// How long ranks may take to exit when the launcher is asked to stop [default: 20s]
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
    /// Lines of the ranks' output that report a completed step, such as 'step (\d+)'
    ///
    /// A regular expression: its first group is the number of the step, a group (?P<loss>…) the loss. For
    /// programs that no client reports. The limits of a step apply to these lines.
    #[arg(long, env = "MAINSTAY_PROGRESS", value_name = "REGEX", value_parser = str::parse::<ProgressRule>, help_heading = "Hangs")]
    progress: Option<ProgressRule>,
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
    /// Serve the page of the job, its JSON and metrics on this TCP address, to a network you trust
    ///
    /// Texts of the program (command, messages, paths) are not served there. Port 0 is any free one.
    #[arg(
        long,
        env = "MAINSTAY_HTTP",
        value_name = "ADDRESS:PORT",
        help_heading = "Output",
        hide_short_help = true
    )]
    http: Option<String>,
    /// Also trust an agent of this user, such as that of another container of the pod: a numeric id
    #[arg(long, env = trust::VARIABLE, value_name = "UID", help_heading = "Agent", hide_short_help = true)]
    trust_agent_uid: Option<u32>,
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
    /// File for the summary of the job, as in summary.json; each host of the job writes the same
    ///
    /// A launcher that the job goes on without does not write it. So its `exit` is the status of the job, also where the
    /// launcher of one host was killed and `srun` returns another status.
    #[arg(
        long,
        env = "MAINSTAY_STATUS_FILE",
        value_name = "FILE",
        help_heading = "Output",
        hide_short_help = true
    )]
    status_file: Option<PathBuf>,
    /// Set by a launcher that the job goes on without, for the one that takes its place
    #[arg(long, hide = true)]
    returning: bool,
    /// The script and its arguments
    #[arg(required_unless_present = "role", trailing_var_arg = true, value_name = "SCRIPT [ARGUMENTS]")]
    command: Vec<String>,
}

/// Runs the job and returns its exit status.
///
/// # Errors
/// An option cannot be satisfied, or the job could not be started.
pub async fn run(args: Args) -> anyhow::Result<ExitCode> {
    trust::trust(args.trust_agent_uid);
    if let Some(uid) = args.trust_agent_uid {
        output::note(&format!("an agent of user {uid} is trusted (--trust-agent-uid)"));
    }
    if args.role.iter().any(|role| matches!(role, RoleOption::Own(_))) {
        return roles::run(args).await;
    }
    let plan = match plan::plan(args) {
        Ok(plan) => plan,
        Err(error) => return Ok(refused(&error)),
    };
    start_logging(plan.progress);
    ended(app::run_job(plan).await)
}

/// The command line cannot be carried out.
fn refused(error: &anyhow::Error) -> ExitCode {
    output::note(&format!("error: {}", output::in_full(error)));
    ExitCode::from(exit::USAGE)
}

fn start_logging(over_progress: bool) {
    let format = if over_progress { logging::Format::OverProgress } else { logging::Format::Text };
    logging::start(tracing::level_filters::LevelFilter::WARN, format);
}

/// The job's end as this process's.
fn ended(status: anyhow::Result<i32>) -> anyhow::Result<ExitCode> {
    logging::flush(logging::FLUSH_TIMEOUT);
    match status {
        Ok(status) => Ok(ExitCode::from(u8::try_from(status).unwrap_or(1))),
        Err(error) => {
            output::note(&format!("error: {}", output::in_full(&error)));
            Ok(ExitCode::from(exit::SOFTWARE))
        }
    }
}
