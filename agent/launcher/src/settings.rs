//! The job as requested on the command line.

use std::path::PathBuf;
use std::sync::Arc;

use mainstay_diagnosis::progress_rule::ProgressRule;
use mainstay_recovery::policy;
use mainstay_sys::numa::Binding;

use crate::hang::HangSettings;
use crate::output::prefix::expand;
use crate::ranks::Grace;
use crate::ranks::warm::WarmSettings;

/// The job as requested on the command line.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The ranks.
    pub ranks: RankSettings,
    /// `MASTER_ADDR`.
    pub master_addr: String,
    /// `MASTER_PORT`; none for a free one for each attempt.
    pub master_port: Option<u16>,
    /// Settings for the recovery from failures.
    pub policy: policy::Settings,
    /// The user's own policy; none for the built-in one alone.
    pub policy_file: Option<PathBuf>,
    /// How long stops may take.
    pub grace: Grace,
    /// Where checkpoints go; none for a directory in the run directory.
    pub checkpoint_dir: Option<PathBuf>,
    /// The memory for checkpoints.
    pub checkpoints: CheckpointSettings,
    /// What to do about hangs.
    pub hang: HangSettings,
    /// Whose output is shown on the terminal.
    pub shown: Shown,
    /// The signal that asks ranks to save, in addition to their page; none to send none.
    pub save_signal: Option<i32>,
    /// Whether faults may be injected into the ranks.
    pub allow_inject: bool,
    /// The library by which the host's agent accesses GPUs, if it is not the usual one; set for jobs that allow injected faults.
    pub gpu_library: Option<PathBuf>,
    /// Whether the job ends when the machine is about to be taken away.
    pub leave_on_notice: bool,
    /// Whether what earlier runs of the job learned is used, and kept for the next one.
    pub remember: bool,
    /// How ranks are restarted.
    pub warm: WarmSettings,
    /// The directory with the states of the roles, if this is the launcher of one of several roles.
    pub roles: Option<PathBuf>,
}

/// The ranks as requested.
#[derive(Clone, Debug)]
pub struct RankSettings {
    /// The run id as the user gave it, or made up.
    pub run_id: String,
    /// Program and arguments; `${local_rank}` in them is replaced.
    pub command: Vec<String>,
    /// Ranks on this host.
    pub local_world_size: u32,
    /// `ROLE_NAME`.
    pub role: String,
    /// Whether each rank sees only its own GPU, as the first one, and has local rank 0.
    pub virtual_local_rank: bool,
    /// Which CPUs ranks are bound to; none for all that the launcher may use.
    pub numa: Option<Binding>,
    /// Which lines of their output report a step; none for those of a client alone.
    pub progress: Option<Arc<ProgressRule>>,
}

impl Settings {
    /// The policy of a job. Its random draws are the same for every launcher of the job.
    pub(crate) fn policy_of_job(&self, job: &str) -> policy::Settings {
        policy::Settings { seed: policy::seed([job].into_iter()), ..self.policy.clone() }
    }
}

/// The memory for checkpoints, and the disk behind it.
#[derive(Clone, Debug)]
pub struct CheckpointSettings {
    /// Whether the user named the run, so that others may have the same name.
    pub is_named: bool,
    /// The runs to resume from, as the user names them.
    pub resume_from: Vec<String>,
    /// Directories into which the trainer writes in its own format, each with the format's name.
    pub watch: Vec<(String, PathBuf)>,
    /// Bytes for all ranks; none for half of what is free.
    pub memory: Option<u64>,
    /// Whether there is any; without it ranks write to the disk themselves.
    pub in_memory: bool,
    /// Slots for each rank, if there is room.
    pub slots: usize,
    /// Bytes per second to the disk at most; none for as fast as it is.
    pub bandwidth: Option<u64>,
    /// Whole steps kept on the disk.
    pub keep: usize,
    /// Bytes of steps on the disk beyond the newest whole one; none for as many as the steps need.
    pub quota: Option<u64>,
}

/// Which output is shown on the terminal; all of it is in files.
#[derive(Clone, Debug)]
pub struct Shown {
    /// Local ranks; none for all.
    pub ranks: Option<Vec<u32>>,
    /// By local rank: whether standard output and standard error are shown.
    pub streams: Vec<(bool, bool)>,
    /// The text before each line, with the macros of torchrun; none for `[rank N] `.
    pub prefix: Option<String>,
    /// Lines of standard output that contain one of these texts are also written to `filtered_stdout.log` of the attempt.
    pub duplicate_stdout: Vec<String>,
    /// The same for standard error and `filtered_stderr.log`.
    pub duplicate_stderr: Vec<String>,
}

impl Shown {
    /// Whether a rank's standard output and standard error are shown.
    pub fn streams_of(&self, local_rank: u32) -> (bool, bool) {
        let listed = self.ranks.as_ref().is_none_or(|ranks| ranks.contains(&local_rank));
        let (stdout, stderr) = self.streams.get(local_rank as usize).copied().unwrap_or((true, true));
        (listed && stdout, listed && stderr)
    }

    /// The text before each line of a rank.
    pub fn prefix_of(&self, role: &str, rank: u32, local_rank: u32) -> String {
        let Some(template) = &self.prefix else { return format!("[rank {rank}] ") };
        expand(template, |name| match name {
            "role_name" => Some(role.to_owned()),
            "rank" => Some(rank.to_string()),
            "local_rank" => Some(local_rank.to_string()),
            "hostname" => nix::unistd::gethostname().ok().map(|name| name.to_string_lossy().into_owned()),
            _ => None,
        })
    }
}
