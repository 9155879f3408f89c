//! The host's evidence about a failed job: recent kernel lines, unhealthy components, and the classes that they support.

mod found;
mod records;
mod repeated;

use std::collections::{BTreeSet, VecDeque};

use crate::base::id::Pid;
use crate::base::pci::PciAddress;
use crate::base::time::{Mono, Span};
use crate::failure::attribution::Observation;
use crate::failure::attribution::class::Class;
use crate::model::component_id::ComponentId;
use crate::model::entry::Fact;
use crate::model::health::{Component, HealthState};
use crate::model::host_context::HostEvidence;
use crate::model::kernel::KernelClass;

pub use records::Records;

/// How long before a fault a host event may be related to it.
const BEFORE: Span = Span::seconds(600);

/// How long after a fault a host event may be related to it.
pub const AFTER: Span = Span::seconds(60);

/// Maximum number of kernel lines kept; the oldest are dropped.
const LINES: usize = 256;

/// Log-odds of a component that became unhealthy around the fault; less if it was unhealthy before.
const FELL_SICK: f64 = 3.0;
const WAS_SICK: f64 = 1.0;

/// Maximum log-odds of a device that fails more often than its peers, scaled by the probability of that.
const LEMON: f64 = 3.0;

/// Log-odds of a notice that the machine will be taken away: decisive without other evidence, little next to a cause.
const ANNOUNCED: f64 = 2.5;

/// Observations from unhealthy components, records of devices, notices, repetitions and findings. Kernel lines are separate.
pub fn observations(host_evidence: &HostEvidence, fault_at: Mono) -> impl Iterator<Item = Observation> {
    let records = host_evidence.failed_before.iter().map(|before| Observation {
        family: "history".to_owned(),
        text: format!(
            "{} had {} faults in the {:.0} h before this one: {:.0} % probability that it fails more than five times as often as its peers",
            before.component,
            before.incidents,
            before.hours,
            before.suspicion * 100.0
        ),
        class: if before.component == records::HOST { Class::HardwareHost } else { Class::HardwareGpu },
        weight: LEMON * before.suspicion,
        also: Vec::new(),
    });
    let notices = host_evidence.notices.iter().map(|notice| Observation {
        family: "notice".to_owned(),
        text: format!("the cloud announced that it takes the machine away: {notice}"),
        class: Class::Preemption,
        weight: ANNOUNCED,
        also: Vec::new(),
    });
    unhealthy(host_evidence, fault_at)
        .chain(records)
        .chain(notices)
        .chain(host_evidence.seen_before.iter().flat_map(repeated::observations))
        .chain(host_evidence.findings.iter().filter_map(found::observation))
}

fn unhealthy(host_evidence: &HostEvidence, fault_at: Mono) -> impl Iterator<Item = Observation> {
    host_evidence.unhealthy.iter().filter_map(move |component| {
        let (class, family) = speaks_for(&component.name)?;
        let weight = if around(fault_at, component.since) { FELL_SICK } else { WAS_SICK };
        let text = format!("{} is not fit for training: {}", component.name, component.reason);
        Some(Observation { family: family.to_owned(), text, class, weight, also: Vec::new() })
    })
}

/// The failure class that an unhealthy component causes, and the family of evidence for the same fault.
fn speaks_for(component: &str) -> Option<(Class, &'static str)> {
    use ComponentId::{Gpu, Gpus, Host, Interface, NvLink, NvSwitch, Port, Tpu};
    Some(match ComponentId::parse(component) {
        Gpus("driver") => (Class::SoftwarePlatform, "driver"),
        Gpu(_) | Gpus(_) | NvLink(_) | NvSwitch(_) | Tpu(_) => (Class::HardwareGpu, "xid"),
        Port(_) | Interface(_) | Host("network_card") => (Class::Fabric, "fabric"),
        Host("storage" | "mounts") => (Class::Storage, "storage"),
        Host("pcie" | "hardware" | "kernel") => (Class::HardwareHost, "host"),
        // Memory, load and full disks are as often caused by the job itself; logs and exits are better evidence.
        _ => return None,
    })
}

fn around(fault_at: Mono, at: Mono) -> bool {
    at.after(BEFORE) >= fault_at && at <= fault_at.after(AFTER)
}

/// A kernel line, with the process and the GPU that it is about.
#[derive(Clone, Debug)]
struct Line {
    at: Mono,
    pid: Option<Pid>,
    gpu: Option<PciAddress>,
    /// A program's action, over with that program.
    of_a_program: bool,
    text: String,
}

/// Parts of the host that are unrelated to a job.
#[derive(Clone, Debug, Default)]
pub struct Unrelated {
    /// Ranks of other jobs, and those that this job has started since it failed.
    pub processes: BTreeSet<Pid>,
    /// GPUs that only other jobs use.
    pub gpus: BTreeSet<PciAddress>,
    /// Ignore what programs did before this time: the failed attempt had not started.
    pub programs_before: Mono,
}

impl Unrelated {
    fn has_component(&self, name: &str) -> bool {
        matches!(ComponentId::parse(name), ComponentId::Gpu(gpu) if self.gpus.contains(&gpu))
    }

    fn has_line(&self, line: &Line) -> bool {
        line.pid.is_some_and(|pid| self.processes.contains(&pid))
            || line.gpu.is_some_and(|gpu| self.gpus.contains(&gpu))
            || (line.of_a_program && line.at < self.programs_before)
    }
}

/// The name of a GPU's component.
fn component_of(gpu: PciAddress) -> String {
    ComponentId::Gpu(gpu).to_string()
}

/// The recent kernel lines, and the fault record of each device.
#[derive(Clone, Debug, Default)]
pub struct EvidenceLog {
    lines: VecDeque<Line>,
    records: Records,
}

impl EvidenceLog {
    /// Creates a log with the records of earlier boots.
    pub fn with(records: Records) -> EvidenceLog {
        EvidenceLog { records, ..EvidenceLog::default() }
    }

    /// Processes one fact of this boot.
    pub fn take_in(&mut self, at: Mono, fact: &Fact) {
        self.records.take_in(at, fact);
        let (pid, gpu, line) = match fact {
            Fact::Xid(xid) => (xid.pid, Some(xid.gpu), &xid.place.line),
            // All jobs share a switch.
            Fact::Sxid(sxid) => (None, None, &sxid.place.line),
            Fact::KernelReport(report) => (report.pid, None, &report.place.line),
            _ => return,
        };
        if self.lines.len() == LINES {
            self.lines.pop_front();
        }
        let of_a_program = match fact {
            Fact::Xid(xid) => records::is_of_a_program(xid.code),
            Fact::KernelReport(report) => report.class == KernelClass::Segfault,
            _ => false,
        };
        self.lines.push_back(Line { at, pid, gpu, of_a_program, text: line.clone() });
    }

    /// The evidence about a fault at `fault_at`, without what is unrelated (`elsewhere`).
    pub fn report_evidence(
        &self,
        fault_at: Mono,
        elsewhere: &Unrelated,
        components: &[Component],
    ) -> HostEvidence {
        let near = self.lines.iter().filter(|line| around(fault_at, line.at) && !elsewhere.has_line(line));
        let unhealthy = components.iter().filter(|component| {
            component.state == HealthState::Unhealthy && !elsewhere.has_component(&component.name)
        });
        let mut failed_before = self.records.before(fault_at);
        failed_before.retain(|record| !elsewhere.has_component(&record.component));
        HostEvidence {
            kernel_lines: near.map(|line| line.text.clone()).collect(),
            unhealthy: unhealthy.cloned().collect(),
            held: Vec::new(),
            failed_before,
            gpus: Vec::new(),
            notices: Vec::new(),
            seen_before: None,
            findings: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::health::RecommendedAction;
    use crate::model::kernel::{KernelReport, LogPlace};

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

    fn unhealthy(name: &str, since: Mono) -> Component {
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
    fn only_lines_around_the_fault_and_not_of_other_jobs_are_reported() {
        let mut log = EvidenceLog::default();
        log.take_in(seconds(100), &report("long before", None));
        log.take_in(seconds(950), &report("of another job", Some(7)));
        log.take_in(seconds(960), &report("of this one", Some(8)));
        log.take_in(seconds(2000), &report("long after", None));
        let elsewhere = Unrelated { processes: [Pid(7)].into(), ..Unrelated::default() };
        let reported = log.report_evidence(seconds(1000), &elsewhere, &[]);
        assert_eq!(reported.kernel_lines, ["of this one"]);
    }

    #[test]
    fn program_faults_before_the_attempt_are_ignored_and_device_faults_are_not() {
        let mut log = EvidenceLog::default();
        log.take_in(seconds(900), &xid(31));
        log.take_in(seconds(901), &report("segfault of another program", Some(9)));
        log.take_in(seconds(902), &xid(79));
        log.take_in(seconds(950), &xid(31));
        let elsewhere = Unrelated { programs_before: seconds(940), ..Unrelated::default() };
        let reported = log.report_evidence(seconds(960), &elsewhere, &[]).kernel_lines;
        assert_eq!(reported, ["XID 79", "XID 31"]);
    }

    #[test]
    fn a_gpu_of_other_jobs_is_ignored_and_a_switch_is_shared_by_all_jobs() {
        let mut log = EvidenceLog::default();
        (1..4).for_each(|n| log.take_in(seconds(n * 36_000), &xid(79)));
        let at = seconds(3 * 36_000 + 5);
        let components = [unhealthy("gpu.0000:3b:00", at), unhealthy("nvswitch.3", at)];
        let gpu = PciAddress::parse("0000:3b:00").expect("an address");
        let elsewhere = Unrelated { gpus: [gpu].into(), ..Unrelated::default() };
        let all = log.report_evidence(at, &Unrelated::default(), &components);
        assert_eq!((all.kernel_lines.len(), all.unhealthy.len(), all.failed_before.len()), (1, 2, 1));
        let reported = log.report_evidence(at, &elsewhere, &components);
        assert_eq!(
            (reported.kernel_lines.len(), reported.unhealthy.len(), reported.failed_before.len()),
            (0, 1, 0)
        );
        assert_eq!(reported.unhealthy[0].name, "nvswitch.3");
    }

    #[test]
    fn a_gpu_that_became_unhealthy_around_the_fault_weighs_more_than_an_older_one() {
        let weight = |since| {
            let reported = HostEvidence {
                unhealthy: vec![unhealthy("gpu.0000:3b:00", since)],
                ..HostEvidence::default()
            };
            let observed: Vec<Observation> = observations(&reported, seconds(1000)).collect();
            assert_eq!(observed[0].class, Class::HardwareGpu);
            observed[0].weight
        };
        assert!(weight(seconds(990)) > weight(seconds(10)));
    }

    #[test]
    fn a_notice_supports_preemption() {
        let reported =
            HostEvidence { notices: vec!["AWS: spot interruption".to_owned()], ..HostEvidence::default() };
        let received: Vec<Observation> = observations(&reported, seconds(1)).collect();
        let [notice] = &received[..] else { panic!("one observation: {received:?}") };
        assert_eq!(notice.class, Class::Preemption);
        assert!(notice.text.contains("spot interruption"), "{}", notice.text);
        assert_eq!(observations(&HostEvidence::default(), seconds(1)).count(), 0);
    }

    fn xid(code: u32) -> Fact {
        let gpu = crate::base::pci::PciAddress::parse("0000:3b:00").expect("an address");
        let place = LogPlace { line: format!("XID {code}"), ..LogPlace::default() };
        Fact::Xid(crate::model::kernel::Xid { gpu, code, place, ..crate::model::kernel::Xid::default() })
    }

    #[test]
    fn repeated_gpu_faults_count_and_program_faults_do_not() {
        let reported = |code: u32, times: u64| {
            let mut log = EvidenceLog::default();
            (1..=times).for_each(|n| log.take_in(seconds(n * 36_000), &xid(code)));
            let reported = log.report_evidence(seconds(times * 36_000 + 5), &Unrelated::default(), &[]);
            observations(&reported, seconds(times * 36_000 + 5)).map(|of| of.weight).fold(0.0, f64::max)
        };
        assert!(reported(79, 8) > 2.5, "{}", reported(79, 8));
        assert!(reported(79, 2) < reported(79, 8));
        assert!(reported(79, 1).abs() < f64::EPSILON, "the first fault has no record before it");
        assert!(reported(31, 8).abs() < f64::EPSILON, "a program's own fault is not the device's");
    }

    #[test]
    fn a_full_disk_is_no_evidence() {
        let reported =
            HostEvidence { unhealthy: vec![unhealthy("host.disk", seconds(990))], ..HostEvidence::default() };
        assert_eq!(observations(&reported, seconds(1000)).count(), 0);
    }
}
