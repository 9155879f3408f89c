//! What the ranks of a job on this host have in common, and what each of them gets: its number, files, devices and environment.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use mainstay_heartbeat::PageSpec;
use mainstay_model::id::{Attempt, Rank};
use mainstay_recovery::protocol::Seat;
use mainstay_sys::{clock, numa};

use crate::log_files;
use crate::ranks::devices;
use crate::settings::RankSettings;

/// The specification of the ranks, for all attempts of a job.
#[derive(Clone, Debug)]
pub struct RankSpec {
    /// What the user asked for.
    pub settings: RankSettings,
    /// The job's name.
    pub job: String,
    /// This launch: the run that its checkpoints belong to, then an `@` and a part that is unique to the launch. The same
    /// on all hosts of a job.
    pub launch: String,
    /// The id of this launcher alone, if a job has several: its processes are found by it.
    pub launcher: Option<String>,
    /// This host's place in the job.
    pub seat: Seat,
    /// How many ranks the job's last run had, if known.
    pub previous_size: Option<u32>,
    /// How many ranks this run had before, if the number changed.
    pub ran_before: Option<u32>,
    /// `MASTER_ADDR`.
    pub master_addr: String,
    /// `TORCHELASTIC_MAX_RESTARTS`.
    pub max_restarts: u32,
    /// Logs go to `attempt_N/<local rank>/` in here.
    pub run_dir: PathBuf,
    /// Where people find what is in `run_dir`: there, unless that is copied to another directory.
    pub published_dir: PathBuf,
    /// Where logs go instead of `run_dir` while that does not answer.
    pub logs_aside: Option<PathBuf>,
    /// `MAINSTAY_CHECKPOINT_DIR`.
    pub checkpoint_dir: PathBuf,
    /// `MAINSTAY_CHECKPOINT_POOL`: the memory that the launcher keeps for checkpoints; none if ranks write to the disk.
    pub checkpoint_pool: Option<PathBuf>,
    /// `MAINSTAY_CHECKPOINT_RESUME` by rank: the step from which all hosts resume, and the root of the rank's shard.
    pub resume: BTreeMap<u32, String>,
    /// Where heartbeat pages are created; none to run without.
    pub page_dir: Option<PathBuf>,
    /// The boot id as sixteen bytes, for the pages.
    pub boot_id: [u8; 16],
    /// The `cgroup.procs` of the job's cgroup, if there is one.
    pub cgroup_procs: Option<PathBuf>,
    /// `MAINSTAY_MODULES` of the first rank: where its client writes which modules it holds; none to not ask.
    pub modules_file: Option<PathBuf>,
    /// The GPUs that ranks see, if not all that the launcher's own environment names.
    pub devices: Option<Vec<String>>,
}

/// The output files of a rank.
#[derive(Clone, Debug)]
pub struct RankFiles {
    pub stdout: PathBuf,
    pub stderr: PathBuf,
    /// `TORCHELASTIC_ERROR_FILE`.
    pub error: PathBuf,
    /// `MAINSTAY_STACKS`.
    pub stacks: PathBuf,
}

impl RankSpec {
    /// The GPUs that remain for the ranks without that of one of them.
    ///
    /// # Errors
    /// There would be too few of them; as a message.
    pub fn devices_without(&self, local_rank: u32) -> Result<Vec<String>, String> {
        devices::without(&self.visible_devices(), local_rank, self.settings.local_world_size)
    }

    /// The GPUs that the ranks see, by their names in `CUDA_VISIBLE_DEVICES`.
    pub fn visible_devices(&self) -> Vec<String> {
        let given = std::env::var(devices::VARIABLE).ok();
        match &self.devices {
            Some(devices) => devices.clone(),
            None => devices::visible(given.as_deref(), Path::new("/dev")),
        }
    }

    /// The CPUs that a rank is bound to; none if it is not bound, or if its CPUs are unknown.
    pub(crate) fn cpus(&self, local_rank: u32) -> Option<Vec<usize>> {
        let gpus = self.visible_devices();
        let cpus = numa::Topology::of_this_host().cpus(
            self.settings.numa?,
            local_rank,
            self.settings.local_world_size,
            &gpus,
        );
        cpus.inspect_err(|error| tracing::warn!(local_rank, "the rank is bound to no CPUs: {error}")).ok()
    }

    /// The GPU that a rank sees, if each rank sees only its own.
    pub(super) fn own_device(&self, local_rank: u32) -> String {
        let visible = self.visible_devices();
        visible.get(local_rank as usize).cloned().unwrap_or_else(|| local_rank.to_string())
    }

    /// The variable that all processes of this launcher have in their environment, and those of no other launcher.
    pub fn mark(&self) -> String {
        match &self.launcher {
            Some(launcher) => format!("MAINSTAY_LAUNCHER={launcher}"),
            None => format!("MAINSTAY_LAUNCH={}", self.launch),
        }
    }

    /// The run that the job's checkpoints belong to, without the launch.
    pub fn checkpoint_run(&self) -> &str {
        self.launch.split_once('@').map_or(&self.launch, |(run, _)| run)
    }

    /// The number of a rank in the job.
    pub fn rank(&self, local_rank: u32) -> Rank {
        Rank(self.seat.first_rank + local_rank)
    }

    /// The ranks of this host.
    pub fn own_ranks(&self) -> Range<u32> {
        self.seat.first_rank..self.seat.first_rank + self.settings.local_world_size
    }

    /// All ranks of the host, by index.
    pub fn all_ranks(&self) -> Vec<u32> {
        (0..self.settings.local_world_size).collect()
    }

    /// Chooses where the ranks of an attempt write. If the log directory does not answer, is read-only or full, they write
    /// next to their pages, which are in memory; ranks that are not started do no work at all. Returns that place, and why.
    pub fn choose_logs(&mut self, attempt: Attempt) -> Option<(PathBuf, String)> {
        self.logs_aside = None;
        let error = self.make_outputs(attempt).err()?;
        let aside = self.page_dir.as_ref()?.join("logs");
        log_files::write_aside(&aside);
        self.logs_aside = Some(aside.clone());
        if self.make_outputs(attempt).is_err() {
            // The start reports the error of the log directory.
            self.logs_aside = None;
            return None;
        }
        let why = match error.kind() {
            io::ErrorKind::TimedOut => "does not answer".to_owned(),
            _ => format!("cannot be written ({error})"),
        };
        Some((aside, why))
    }

    /// Creates the files for the output of an attempt's ranks.
    fn make_outputs(&self, attempt: Attempt) -> io::Result<()> {
        for local_rank in self.all_ranks() {
            let RankFiles { stdout, stderr, .. } = self.files(attempt, local_rank);
            log_files::append_to(&stdout)?;
            log_files::append_to(&stderr)?;
        }
        Ok(())
    }

    /// The files of a rank in an attempt.
    pub fn files(&self, attempt: Attempt, local_rank: u32) -> RankFiles {
        let logs = self.logs_aside.as_ref().unwrap_or(&self.run_dir);
        let directory = logs.join(format!("attempt_{}", attempt.0)).join(local_rank.to_string());
        RankFiles {
            stdout: directory.join("stdout.log"),
            stderr: directory.join("stderr.log"),
            error: directory.join("error.json"),
            stacks: directory.join("stacks.txt"),
        }
    }

    /// The identity of a rank for its page.
    pub fn page_spec(&self, attempt: Attempt, local_rank: u32) -> PageSpec<'_> {
        PageSpec {
            job: &self.job,
            rank: self.rank(local_rank).0,
            local_rank,
            world_size: self.seat.world_size,
            attempt: attempt.0,
            boot_id: self.boot_id,
            creator_pid: std::process::id(),
            created_mono_ns: clock::mono().0,
        }
    }
}
