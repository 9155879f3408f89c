//! Whether a job's GPUs are free for its next ranks: from a reading that was made after the last ones were gone.
//!
//! A healthy host pays next to nothing: the driver is asked at the moment in which no process of the attempt is left, while
//! the launcher judges, and a job that was on no GPU is not asked for. Whoever waits for the driver is told so in time.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{PipeWriter, Write};
use std::sync::mpsc::Sender;
use std::time::Duration;

use mainstay_core::base::id::{JobId, Pid};
use mainstay_core::base::pci::PciAddress;
use mainstay_core::base::time::Mono;
use mainstay_core::base::units::Bytes;
use mainstay_core::hardware::gpu::reset::{ResetError, ResetMode, ResetOrder};
use mainstay_core::hardware::gpu::{DeviceReport, GpuReading, ProbeAnswer};
use mainstay_core::host::preflight::{GpuUse, Owners};
use mainstay_core::view::node::{JobPhase, JobView};

use super::owners;

/// The driver is waited for so long; the launcher waits a quarter of a second for the ruling.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_millis(150);

/// How the node has the GPUs read at once, and what counts as free.
#[derive(Debug)]
pub struct GpuLook {
    /// A byte into it has them read now.
    pub nudge: Option<PipeWriter>,
    /// What the driver itself may hold of a GPU's memory.
    pub memory_held: Bytes,
    /// Takes orders to reset a GPU; none where GPUs are not watched.
    pub resets: Option<Sender<ResetOrder>>,
    /// Who may have one reset.
    pub reset_mode: ResetMode,
}

/// What is known of the GPUs for the sake of restarts.
#[derive(Debug)]
pub(super) struct Gpus {
    look: GpuLook,
    /// Whether a look was asked for and has not come yet.
    nudged: bool,
    used: GpuUse,
    /// When the newest reading was begun.
    read_at: Mono,
    newest: Vec<GpuReading>,
    /// Whose its processes are.
    owners: Owners,
    /// Since when the job's attempt is over, and the processes of it that stay.
    left: BTreeMap<JobId, (Mono, BTreeSet<Pid>)>,
}

impl Gpus {
    pub(super) fn new(look: GpuLook) -> Gpus {
        Gpus {
            look,
            nudged: false,
            used: GpuUse::default(),
            read_at: Mono::default(),
            newest: Vec::new(),
            owners: Owners::new(),
            left: BTreeMap::new(),
        }
    }

    /// Takes in a reading that was begun at `began`.
    pub(super) fn read<'a>(
        &mut self,
        began: Mono,
        report: &DeviceReport,
        jobs: impl Iterator<Item = &'a JobView>,
    ) {
        self.nudged = false;
        let DeviceReport::Answered(ProbeAnswer::Gpus { gpus, .. }) = report else { return };
        self.read_at = began;
        self.newest.clone_from(gpus);
        let open = |job: &&JobView| !matches!(job.phase, JobPhase::Ended(_) | JobPhase::Lost);
        let jobs: Vec<&JobView> = jobs.filter(open).collect();
        self.owners = owners::of(gpus, &jobs);
        // What is held after a fault is not what the job worked on.
        let at_work = jobs.iter().filter(|job| matches!(job.phase, JobPhase::Starting | JobPhase::Running));
        for job in at_work.filter(|job| !self.left.contains_key(&job.id)) {
            let members = owners::members(job);
            let of_job = self.owners.iter().filter(|(_, owner)| members.contains(owner));
            let of_job: Owners = of_job.map(|(pid, owner)| (*pid, *owner)).collect();
            self.used.see(&job.id, &of_job, gpus);
        }
    }

    /// The job's next attempt has begun.
    pub(super) fn started(&mut self, job: &JobId) {
        self.left.remove(job);
    }

    /// No process of the job's attempt is left, but for those that are to go on. What these hold they keep.
    pub(super) fn emptied(&mut self, job: &JobId, now: Mono, staying: BTreeSet<Pid>) {
        if self.used.is_left(job, &staying) {
            self.left.insert(job.clone(), (now, staying));
            self.nudge();
        }
    }

    /// The job is not to use the GPU of this rank any more.
    pub(super) fn excluded(&mut self, job: &JobId, rank: Pid) {
        self.used.exclude(job, rank);
    }

    /// Whether that component is a GPU that the job is not to use any more.
    pub(super) fn is_excluded(&self, job: &JobId, component: &str) -> bool {
        self.used.is_excluded(job, component)
    }

    /// GPUs on which only other jobs are, where it is known on which these ranks are.
    pub(super) fn of_others(&self, job: &JobId, ranks: &BTreeSet<Pid>) -> BTreeSet<PciAddress> {
        self.used.of_others(job, ranks)
    }

    /// The job is over.
    pub(super) fn over(&mut self, job: &JobId) {
        self.used.forget(job);
        self.left.remove(job);
    }

    /// What is held of the job's GPUs; none while that is not read yet, and is about to be.
    pub(super) fn held(&mut self, job: &JobId) -> Option<Vec<String>> {
        let Some((since, staying)) = self.left.get(job) else { return Some(Vec::new()) };
        if self.look.nudge.is_none() {
            return Some(Vec::new());
        }
        if self.read_at < *since {
            self.nudge();
            return None;
        }
        let held = self.used.held(job, &self.newest, &self.owners, self.look.memory_held, staying);
        if !held.is_empty() {
            // It will be asked for again soon.
            self.nudge();
        }
        Some(held)
    }

    /// Whose the processes on them were then.
    pub(super) fn owners(&self) -> &Owners {
        &self.owners
    }

    /// The GPUs as they were read last.
    pub(super) fn newest(&self) -> &[GpuReading] {
        &self.newest
    }

    /// Who may have a GPU reset.
    pub(super) fn reset_mode(&self) -> ResetMode {
        self.look.reset_mode
    }

    /// Has a GPU reset: after the next reading, which is made at once.
    pub(super) fn reset(&mut self, order: ResetOrder) -> Result<(), ResetError> {
        let resets = self.look.resets.as_ref().ok_or(ResetError::NotWatched)?;
        resets.send(order).map_err(|_| ResetError::NotWatched)?;
        self.nudged = false;
        self.nudge();
        Ok(())
    }

    /// Has the GPUs read now. One nudge at a time: a driver that hangs must not fill the pipe.
    fn nudge(&mut self) {
        if let Some(nudge) = self.look.nudge.as_mut().filter(|_| !self.nudged) {
            // Without a reader nobody reads GPUs any more, and nothing is held.
            self.nudged = nudge.write_all(b"!").is_ok();
        }
    }
}
