//! The owners of the processes on GPUs. A rank is not always the process on its GPU: a child of it may be (a
//! wrapper's program, a helper), and may outlive it.

use std::collections::BTreeSet;
use std::iter;

use mainstay_health::hardware::gpu::GpuReading;
use mainstay_health::host::preflight::Owners;
use mainstay_model::id::Pid;
use mainstay_view::node::JobView;

use mainstay_sys::processes;

/// Maximum distance of a process from its rank.
const GENERATIONS: usize = 64;

/// The processes that others can belong to: a job's ranks, and its launcher, which adopts orphans of its ranks.
pub(super) fn members(job: &JobView) -> BTreeSet<Pid> {
    job.ranks.values().map(|rank| rank.pid).chain([job.spec.launcher]).filter(|pid| pid.0 > 0).collect()
}

/// The job that owns each process on these GPUs: by ancestry, else by the job's mark in its environment.
pub(super) fn find_owners(gpus: &[GpuReading], jobs: &[&JobView]) -> Owners {
    let members: BTreeSet<Pid> = jobs.iter().flat_map(|job| members(job)).collect();
    let there = gpus.iter().filter_map(|gpu| gpu.processes.value()).flatten().map(|process| process.pid);
    let there: BTreeSet<Pid> = there.collect();
    let owner = |pid: Pid| by_descent(pid, &members).or_else(|| by_mark(pid, jobs));
    there.into_iter().filter_map(|pid| Some((pid, owner(pid)?))).collect()
}

fn by_descent(pid: Pid, members: &BTreeSet<Pid>) -> Option<Pid> {
    let mut line = iter::successors(Some(pid), |pid| processes::parent(*pid)).take(GENERATIONS);
    line.find(|pid| members.contains(pid))
}

fn by_mark(pid: Pid, jobs: &[&JobView]) -> Option<Pid> {
    let mark = processes::variable(pid, "MAINSTAY_JOB_ID")?;
    jobs.iter().find(|job| job.id.0 == mark).map(|job| job.spec.launcher)
}
