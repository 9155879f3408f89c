//! Processes that are stuck in the kernel, and zombies.
//!
//! Uninterruptible sleep is normal for a process that reads or writes: only one that has not run at all in between is
//! stuck. Container runtimes leave zombies for a moment: only many of them, in several samples, count.

use std::collections::BTreeMap;

use super::limits::{STUCK_LOOKS, ZOMBIE_PERCENT};
use super::sample::{Blocked, ProcessScan, SystemSample};
use super::{ProcessLimits, TableLimits, judge_table, lasting};
use crate::host::os::findings::Findings;
use crate::host::os::{Checked, Checks, Reading, percent_of};
use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::time::Mono;
use mainstay_wire::wait_channel;

/// Maximum number of stuck processes that are named; more are only counted.
const MAX_NAMED_PROCESSES: usize = 4;

#[derive(Clone, Debug, Default)]
pub(super) struct ProcessWatch {
    /// By process id and start time.
    blocked: BTreeMap<(i32, u64), BlockedProcess>,
    zombies: Option<(Checked, ProcessScan)>,
    unreadable: Option<String>,
}

#[derive(Clone, Debug)]
struct BlockedProcess {
    since: Mono,
    looks: u32,
    last: Blocked,
}

impl ProcessWatch {
    pub(super) fn judge(
        &mut self,
        limits: &ProcessLimits,
        tables: &TableLimits,
        at: Mono,
        sample: &SystemSample,
        checks: &mut Checks<'_>,
    ) -> Findings {
        let mut findings = Findings::default();
        if let Some(tasks) = checks.needed("the number of tasks", &sample.tables.tasks, &mut findings) {
            judge_table(tables, "tasks", "/proc/loadavg", *tasks, checks, &mut findings);
        }
        if let Some(tasks) = sample.tables.group_tasks {
            let what = "tasks of the control group";
            judge_table(tables, what, "pids.current", tasks, checks, &mut findings);
        }
        match &sample.scan {
            Some(Reading::Value(scan)) => {
                self.unreadable = None;
                self.follow(at, &scan.blocked);
                let few = scan.zombies < limits.zombies;
                let share = if few { 0.0 } else { percent_of(scan.zombies, scan.processes) };
                let checked = checks.above("zombies", share, ZOMBIE_PERCENT, f64::INFINITY);
                self.zombies = Some((checked, scan.clone()));
            }
            Some(Reading::NotAvailable(why) | Reading::Failed(why)) => self.unreadable = Some(why.clone()),
            None => {}
        }
        if let Some(why) = &self.unreadable {
            findings.unreadable(format!("processes cannot be looked through: {why}"));
        }
        self.report_zombies(limits, &mut findings);
        self.report_stuck(limits, at, &mut findings);
        findings
    }

    /// Follows processes from sample to sample; a process that ran in between starts again.
    fn follow(&mut self, at: Mono, blocked: &[Blocked]) {
        let before = std::mem::take(&mut self.blocked);
        for process in blocked {
            let key = (process.pid, process.start);
            let same = before.get(&key).filter(|waiting| waiting.last.ran == process.ran);
            let (since, looks) = same.map_or((at, 1), |waiting| (waiting.since, waiting.looks + 1));
            self.blocked.insert(key, BlockedProcess { since, looks, last: process.clone() });
        }
    }

    fn report_zombies(&self, limits: &ProcessLimits, findings: &mut Findings) {
        let Some((checked, scan)) = &self.zombies else { return };
        let ProcessScan { processes, zombies, most, .. } = scan;
        findings.evidence(
            "/proc/*/stat",
            format!("{processes} processes, {zombies} of them ended and not waited for"),
            Some(format!("{} and {} %", limits.zombies, ZOMBIE_PERCENT)),
        );
        let by = most.as_ref().map_or_else(String::new, |(pid, name, count)| {
            format!(": {name} (process {}) does not wait for {count} of them", pid.0)
        });
        findings.problem(
            *checked,
            format!("{zombies} of {processes} processes are zombies{by}"),
            RecommendedAction::RestartProcess,
        );
    }

    fn report_stuck(&self, limits: &ProcessLimits, at: Mono, findings: &mut Findings) {
        let stuck = |waiting: &&BlockedProcess| {
            let long = at.since(waiting.since) >= limits.stuck_after.0 && waiting.looks >= STUCK_LOOKS;
            // Kernel threads may sleep like this forever; the kernel itself reports those that should not.
            long && waiting.last.ran.is_some()
                && (!waiting.last.kernel_thread || in_gpu_driver(&waiting.last))
        };
        for (shown, waiting) in self.blocked.values().filter(stuck).enumerate() {
            let process = &waiting.last;
            let lasted = lasting(at.since(waiting.since));
            let place = match process.waits_in.as_slice() {
                [] => "an unknown place".to_owned(),
                functions => functions.iter().take(3).map(String::as_str).collect::<Vec<_>>().join(" < "),
            };
            let what =
                format!("{} (process {}) is stuck in the kernel for {lasted}", process.name, process.pid);
            if shown < MAX_NAMED_PROCESSES {
                findings.evidence("/proc/PID/wchan", format!("{what}: {place}"), None);
            }
            let (state, action, why) = if in_gpu_driver(process) {
                (HealthState::Unhealthy, RecommendedAction::RebootNode, ", in the GPU's driver")
            } else if in_network_file_system(process) {
                (HealthState::Degraded, RecommendedAction::None, ", in a network file system")
            } else {
                (HealthState::Degraded, RecommendedAction::None, "")
            };
            if shown < MAX_NAMED_PROCESSES {
                findings.problem(state, format!("{what}{why} ({place})"), action);
            } else {
                findings.problem(state, "and more".to_owned(), action);
            }
        }
    }
}

fn in_gpu_driver(process: &Blocked) -> bool {
    let of_driver = |function: &String| {
        let name = function.split('+').next().unwrap_or(function);
        function.contains("[nvidia")
            || ["nvidia", "nv_", "nvUvm", "uvm_", "os_acquire_", "rm_"]
                .iter()
                .any(|start| name.starts_with(start))
    };
    process.waits_in.iter().any(of_driver)
}

fn in_network_file_system(process: &Blocked) -> bool {
    process.waits_in.iter().any(|function| wait_channel::is_of_network_file_system(function))
}
