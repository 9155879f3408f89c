//! Whether a job's GPUs are free for its next ranks, from a reading made after the previous ranks were gone.
//!
//! On a healthy host this costs almost nothing: the driver is read at the moment when no process of the attempt is
//! left, while the launcher judges, and not at all for a job without GPUs. A launcher that waits for the driver
//! receives an answer in time.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{PipeWriter, Write};
use std::sync::mpsc::Sender;
use std::time::Duration;

use mainstay_health::hardware::gpu::reset::{ResetError, ResetMode, ResetOrder};
use mainstay_health::hardware::gpu::{DeviceReport, GpuReading, ProbeAnswer};
use mainstay_health::host::preflight::{GpuUse, Owners};
use mainstay_model::id::{JobId, Pid};
use mainstay_model::pci::PciAddress;
use mainstay_model::time::Mono;
use mainstay_model::units::Bytes;
use mainstay_view::node::{JobPhase, JobView};

use super::owners;

/// How long to wait for the driver; the launcher waits a quarter of a second for the evidence.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_millis(150);

/// How the node requests a reading of the GPUs, and what counts as free.
#[derive(Debug)]
pub struct GpuLook {
    /// A byte written to it starts a reading.
    pub nudge: Option<PipeWriter>,
    /// How much of a GPU's memory the driver itself may hold.
    pub memory_held: Bytes,
    /// Receives orders to reset a GPU; none if GPUs are not monitored.
    pub resets: Option<Sender<ResetOrder>>,
    /// Who may reset a GPU.
    pub reset_mode: ResetMode,
}

/// The state of the GPUs that matters for restarts.
#[derive(Debug)]
pub(super) struct Gpus {
    look: GpuLook,
    /// Whether a look was requested and is not complete yet.
    nudged: bool,
    used: GpuUse,
    /// When the newest reading started.
    read_at: Mono,
    newest: Vec<GpuReading>,
    /// The owners of its processes.
    owners: Owners,
    /// When the job's attempt ended, and its processes that stay.
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

    /// Stores a reading that started at `began`.
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
        self.owners = owners::find_owners(gpus, &jobs);
        // Memory held after a fault is not the job's work.
        let at_work = jobs.iter().filter(|job| matches!(job.phase, JobPhase::Starting | JobPhase::Running));
        for job in at_work.filter(|job| !self.left.contains_key(&job.id)) {
            let members = owners::members(job);
            let of_job = self.owners.iter().filter(|(_, owner)| members.contains(owner));
            let of_job: Owners = of_job.map(|(pid, owner)| (*pid, *owner)).collect();
            self.used.see(&job.id, &of_job, gpus);
        }
    }

    /// The job's next attempt has started.
    pub(super) fn started(&mut self, job: &JobId) {
        self.left.remove(job);
    }

    /// No process of the job's attempt is left, except those that continue. They keep what they hold.
    pub(super) fn emptied(&mut self, job: &JobId, now: Mono, staying: BTreeSet<Pid>) {
        if self.used.is_left(job, &staying) {
            self.left.insert(job.clone(), (now, staying));
            self.nudge();
        }
    }

    /// The job must no longer use the GPU of this rank.
    pub(super) fn excluded(&mut self, job: &JobId, rank: Pid) {
        self.used.exclude(job, rank);
    }

    /// Whether that component is a GPU that the job must no longer use.
    pub(super) fn is_excluded(&self, job: &JobId, component: &str) -> bool {
        self.used.is_excluded(job, component)
    }

    /// The GPUs of the job, if those of all these ranks are known.
    pub(super) fn of_job(&self, job: &JobId, ranks: &BTreeSet<Pid>) -> Option<BTreeSet<PciAddress>> {
        self.used.of_job(job, ranks)
    }

    /// The job has ended.
    pub(super) fn over(&mut self, job: &JobId) {
        self.used.forget(job);
        self.left.remove(job);
    }

    /// What is held on the job's GPUs; none until a new reading is complete.
    pub(super) fn held(&mut self, job: &JobId) -> Option<Vec<String>> {
        let Some((since, staying)) = self.left.get(job) else { return Some(Vec::new()) };
        if self.look.nudge.is_none() {
            return Some(Vec::new());
        }
        if self.read_at < *since {
            self.nudge();
            return None;
        }
        let held = self.used.not_free(job, &self.newest, &self.owners, self.look.memory_held, staying);
        if !held.is_empty() {
            // The launcher will ask again soon.
            self.nudge();
        }
        Some(held)
    }

    /// The owners of the processes on them at that time.
    pub(super) fn owners(&self) -> &Owners {
        &self.owners
    }

    /// The GPUs in their last reading.
    pub(super) fn newest(&self) -> &[GpuReading] {
        &self.newest
    }

    /// Who may reset a GPU.
    pub(super) fn reset_mode(&self) -> ResetMode {
        self.look.reset_mode
    }

    /// Orders a reset of a GPU: it follows the next reading, which starts at once.
    pub(super) fn reset(&mut self, order: ResetOrder) -> Result<(), ResetError> {
        let resets = self.look.resets.as_ref().ok_or(ResetError::NotWatched)?;
        resets.send(order).map_err(|_| ResetError::NotWatched)?;
        self.nudged = false;
        self.nudge();
        Ok(())
    }

    /// Requests a reading of the GPUs. One nudge at a time: a driver that hangs must not fill the pipe.
    fn nudge(&mut self) {
        if let Some(nudge) = self.look.nudge.as_mut().filter(|_| !self.nudged) {
            // Without a reader GPUs are no longer read, and nothing counts as held.
            self.nudged = nudge.write_all(b"!").is_ok();
        }
    }
}
