//! What a host says when a job on it has failed: what it remembers of its kernel's words, which of its components are
//! sick, and what that speaks for.

use std::collections::VecDeque;

use crate::attribute::Observation;
use crate::attribute::class::Class;
use crate::entry::Fact;
use crate::health::{Component, HealthState};
use crate::id::Pid;
use crate::testimony::Testimony;
use crate::time::{Mono, Span};

/// How long before a fault what happened to the host may have to do with it.
const BEFORE: Span = Span::seconds(600);

/// How long after it.
const AFTER: Span = Span::seconds(60);

/// Kernel lines that are kept for testimonies; the newest count.
const LINES: usize = 256;

/// What a component that fell sick around the fault speaks with, in log-odds; one that was sick before says little.
const FELL_SICK: f64 = 3.0;
const WAS_SICK: f64 = 1.0;

/// What the sick components speak for, beside the kernel's lines.
pub fn observations(testimony: &Testimony, fault_at: Mono) -> impl Iterator<Item = Observation> {
    testimony.sick.iter().filter_map(move |component| {
        let (class, family) = speaks_for(&component.name)?;
        let weight = if around(fault_at, component.since) { FELL_SICK } else { WAS_SICK };
        let text = format!("{} is not fit for training: {}", component.name, component.reason);
        Some(Observation { family: family.to_owned(), text, class, weight })
    })
}

/// The class of failures that a sick component brings about, and the family of evidence that tells of the same.
fn speaks_for(component: &str) -> Option<(Class, &'static str)> {
    let (room, part) = component.split_once('.').unwrap_or((component, ""));
    Some(match (room, part) {
        ("gpu", "driver") => (Class::SoftwarePlatform, "driver"),
        ("gpu" | "nvlink" | "nvswitch" | "tpu", _) => (Class::HardwareGpu, "xid"),
        ("fabric" | "net", _) | ("host", "network_card") => (Class::Fabric, "fabric"),
        ("host", "storage" | "mounts") => (Class::Storage, "storage"),
        ("host", "pcie" | "hardware" | "kernel") => (Class::HardwareHost, "host"),
        // Memory, load and full disks are as often the job's own doing; logs and exits tell.
        _ => return None,
    })
}

fn around(fault_at: Mono, at: Mono) -> bool {
    at.after(BEFORE) >= fault_at && at <= fault_at.after(AFTER)
}

/// The kernel's lines that may be asked for.
#[derive(Clone, Debug, Default)]
pub struct Witness {
    lines: VecDeque<(Mono, Option<Pid>, String)>,
}

impl Witness {
    /// Takes in one fact; those that are no lines of the kernel say nothing here.
    pub fn take_in(&mut self, at: Mono, fact: &Fact) {
        let (pid, line) = match fact {
            Fact::Xid(xid) => (xid.pid, &xid.place.line),
            Fact::Sxid(sxid) => (None, &sxid.place.line),
            Fact::KernelReport(report) => (report.pid, &report.place.line),
            _ => return,
        };
        if self.lines.len() == LINES {
            self.lines.pop_front();
        }
        self.lines.push_back((at, pid, line.clone()));
    }

    /// What is to be said of a fault at `fault_at`. Lines about processes of which `others` says that they are another
    /// job's are left out.
    pub fn testify(
        &self,
        fault_at: Mono,
        others: impl Fn(Pid) -> bool,
        components: &[Component],
    ) -> Testimony {
        let near =
            self.lines.iter().filter(|(at, pid, _)| around(fault_at, *at) && !pid.is_some_and(&others));
        let sick = components.iter().filter(|component| component.state == HealthState::Unhealthy);
        Testimony {
            kernel_lines: near.map(|(_, _, line)| line.clone()).collect(),
            sick: sick.cloned().collect(),
            held: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::RecommendedAction;
    use crate::kernel::{KernelClass, KernelReport, LogPlace};

    fn seconds(n: u64) -> Mono {
        Mono(n * 1_000_000_000)
    }

    fn report(line: &str, pid: Option<i32>) -> Fact {
        let place = LogPlace { line: line.to_owned(), ..LogPlace::default() };
        let pid = pid.map(Pid);
        Fact::KernelReport(KernelReport {
            class: KernelClass::Segfault,
            subject: None,
            pid,
            process: None,
            cgroup: None,
            place,
        })
    }

    fn sick(name: &str, since: Mono) -> Component {
        Component {
            name: name.to_owned(),
            state: HealthState::Unhealthy,
            reason: "lost".to_owned(),
            action: RecommendedAction::RebootNode,
            since,
            ..Component::default()
        }
    }

    #[test]
    fn only_what_was_said_around_the_fault_and_not_of_other_jobs_is_told() {
        let mut witness = Witness::default();
        witness.take_in(seconds(100), &report("long before", None));
        witness.take_in(seconds(950), &report("of another job", Some(7)));
        witness.take_in(seconds(960), &report("of this one", Some(8)));
        witness.take_in(seconds(2000), &report("long after", None));
        let told = witness.testify(seconds(1000), |pid| pid == Pid(7), &[]);
        assert_eq!(told.kernel_lines, ["of this one"]);
    }

    #[test]
    fn a_gpu_that_fell_sick_around_the_fault_weighs_more_than_one_that_was() {
        let weight = |since| {
            let told = Testimony { sick: vec![sick("gpu.0000:3b:00", since)], ..Testimony::default() };
            let observed: Vec<Observation> = observations(&told, seconds(1000)).collect();
            assert_eq!(observed[0].class, Class::HardwareGpu);
            observed[0].weight
        };
        assert!(weight(seconds(990)) > weight(seconds(10)));
    }

    #[test]
    fn a_full_disk_testifies_nothing() {
        let told = Testimony { sick: vec![sick("host.disk", seconds(990))], ..Testimony::default() };
        assert_eq!(observations(&told, seconds(1000)).count(), 0);
    }
}
