//! The host's evidence about a failed job: recent kernel lines, unhealthy components, and the classes that they support.

mod finding;
mod records;
mod repeated;

use std::collections::{BTreeSet, VecDeque};

use crate::attribution::Observation;
use crate::attribution::class::Class;
use mainstay_model::component_id::ComponentId;
use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, HealthState};
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::Pid;
use mainstay_model::kernel::KernelClass;
use mainstay_model::pci::PciAddress;
use mainstay_model::time::{Mono, Span};

pub use records::Records;

/// How long before a fault a host event may be related to it.
const MAX_TIME_BEFORE_FAULT: Span = Span::seconds(600);

/// How long after a fault a host event may be related to it.
pub const AFTER: Span = Span::seconds(60);

/// Maximum number of kernel lines kept; the oldest are dropped.
const MAX_KERNEL_LINES: usize = 256;

/// Log-odds of a component that became unhealthy around the fault; less if it was unhealthy before.
const FELL_ILL_LOG_ODDS: f64 = 3.0;
const WAS_ILL_LOG_ODDS: f64 = 1.0;

/// Maximum log-odds of a device that fails more often than its peers, scaled by the probability of that.
const MAX_FAILURE_RATE_LOG_ODDS: f64 = 3.0;

/// Log-odds of a notice that the machine will be taken away: decisive without other evidence, little next to a cause.
const NOTICE_LOG_ODDS: f64 = 2.5;

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
        weight: MAX_FAILURE_RATE_LOG_ODDS * before.suspicion,
        also: Vec::new(),
    });
    let notices = host_evidence.notices.iter().map(|notice| Observation {
        family: "notice".to_owned(),
        text: format!("the cloud announced that it takes the machine away: {notice}"),
        class: Class::Preemption,
        weight: NOTICE_LOG_ODDS,
        also: Vec::new(),
    });
    unhealthy(host_evidence, fault_at)
        .chain(records)
        .chain(notices)
        .chain(host_evidence.seen_before.iter().flat_map(repeated::observations))
        .chain(host_evidence.findings.iter().filter_map(finding::observation))
}

fn unhealthy(host_evidence: &HostEvidence, fault_at: Mono) -> impl Iterator<Item = Observation> {
    host_evidence.unhealthy.iter().filter_map(move |component| {
        let (class, family) = speaks_for(&component.name)?;
        let weight = if around(fault_at, component.since) { FELL_ILL_LOG_ODDS } else { WAS_ILL_LOG_ODDS };
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
    at.after(MAX_TIME_BEFORE_FAULT) >= fault_at && at <= fault_at.after(AFTER)
}

/// A kernel line, with the process and the GPU that it is about.
#[derive(Clone, Debug)]
struct Line {
    at: Mono,
    pid: Option<Pid>,
    cgroup: Option<String>,
    gpu: Option<PciAddress>,
    about: About,
    text: String,
}

/// What a kernel line is about, which decides for whose failures it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum About {
    /// A device or the host: a fault that outlives programs.
    Machine,
    /// What a program did to a device or waits for. It is over with that program.
    Program,
    /// The end of one process, which concerns only the job that the process belongs to.
    Process,
}

impl About {
    fn of(fact: &Fact) -> About {
        match fact {
            Fact::Xid(xid) if records::is_of_a_program(xid.code) => About::Program,
            Fact::KernelReport(report) => match report.class {
                KernelClass::OutOfMemory | KernelClass::Segfault => About::Process,
                KernelClass::HungTask => About::Program,
                _ => About::Machine,
            },
            _ => About::Machine,
        }
    }
}

/// The parts of the host that a failed attempt used.
#[derive(Clone, Debug, Default)]
pub struct AttemptScope {
    /// When the attempt started. What programs did before is not of this attempt.
    pub began: Mono,
    /// Its ranks.
    pub processes: BTreeSet<Pid>,
    /// The control group of the job, as `/proc/PID/cgroup` shows it; none if unknown.
    pub control_group: Option<String>,
    /// Ranks of other jobs, and those that this job has started since it failed.
    pub other_processes: BTreeSet<Pid>,
    /// Its GPUs; none if those of a rank are unknown, and then every GPU of the host counts.
    pub gpus: Option<BTreeSet<PciAddress>>,
}

impl AttemptScope {
    fn excludes_component(&self, name: &str) -> bool {
        matches!(ComponentId::parse(name), ComponentId::Gpu(gpu) if !self.may_use(gpu))
    }

    /// Whether a rank uses this GPU, as far as is known.
    fn may_use(&self, gpu: PciAddress) -> bool {
        self.gpus.as_ref().is_none_or(|own| own.contains(&gpu))
    }

    /// Whether the line may be evidence about the attempt.
    fn includes(&self, line: &Line) -> bool {
        let of_others = line.pid.is_some_and(|pid| self.other_processes.contains(&pid))
            || line.gpu.is_some_and(|gpu| !self.may_use(gpu));
        let in_time = line.about == About::Machine || line.at >= self.began;
        let is_own = || line.about != About::Process || self.owns_process(line);
        !of_others && in_time && is_own()
    }

    /// Whether the process is a rank, or in the job's control group.
    fn owns_process(&self, line: &Line) -> bool {
        let of_group = |group: &str| self.control_group.as_deref().is_some_and(|own| is_within(group, own));
        line.pid.is_some_and(|pid| self.processes.contains(&pid))
            || line.cgroup.as_deref().is_some_and(of_group)
    }
}

/// Whether a control group is this one or below it. All processes are below the root, which identifies none. A reader in a control group
/// namespace sees groups outside it as `/../other`; the kernel's log has their full path.
fn is_within(group: &str, own: &str) -> bool {
    let mut relative = own;
    while let Some(rest) = relative.strip_prefix("/..") {
        relative = rest;
    }
    let inside = |place: usize| matches!(group.as_bytes().get(place + relative.len()), None | Some(b'/'));
    match relative.trim_end_matches('/') {
        "" => false,
        _ if relative.len() == own.len() => group.starts_with(own) && inside(0),
        _ => group.match_indices(relative).any(|(place, _)| inside(place)),
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
        let (pid, cgroup, gpu, place) = match fact {
            Fact::Xid(xid) => (xid.pid, None, Some(xid.gpu), &xid.place),
            // All jobs share a switch.
            Fact::Sxid(sxid) => (None, None, None, &sxid.place),
            Fact::KernelReport(report) => {
                let gpu = report.subject.as_deref().and_then(PciAddress::parse);
                (report.pid, report.cgroup.clone(), gpu, &report.place)
            }
            _ => return,
        };
        if self.lines.len() == MAX_KERNEL_LINES {
            self.lines.pop_front();
        }
        let (about, text) = (About::of(fact), place.line.clone());
        self.lines.push_back(Line { at, pid, cgroup, gpu, about, text });
    }

    /// The evidence about a fault at `fault_at` of an attempt with this scope.
    pub fn report_evidence(
        &self,
        fault_at: Mono,
        scope: &AttemptScope,
        components: &[Component],
    ) -> HostEvidence {
        let near = self.lines.iter().filter(|line| around(fault_at, line.at) && scope.includes(line));
        let unhealthy = components.iter().filter(|component| {
            component.state == HealthState::Unhealthy && !scope.excludes_component(&component.name)
        });
        let mut failed_before = self.records.before(fault_at);
        failed_before.retain(|record| !scope.excludes_component(&record.component));
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
    use mainstay_model::health::RecommendedAction;
    use mainstay_model::kernel::{KernelReport, LogPlace};

    fn seconds(n: u64) -> Mono {
        Mono(n * 1_000_000_000)
    }

    fn report(class: KernelClass, line: &str) -> KernelReport {
        let place = LogPlace { line: line.to_owned(), ..LogPlace::default() };
        KernelReport { class, subject: None, pid: None, process: None, cgroup: None, place }
    }

    /// The end of a process by this class of event.
    fn of_process(class: KernelClass, line: &str, pid: i32, cgroup: Option<&str>) -> Fact {
        let (pid, cgroup) = (Some(Pid(pid)), cgroup.map(str::to_owned));
        Fact::KernelReport(KernelReport { pid, cgroup, ..report(class, line) })
    }

    /// An attempt that started after 900 s, with the process 8 as its rank, in a control group. The process 7 is another job's.
    fn attempt(control_group: &str) -> AttemptScope {
        AttemptScope {
            began: seconds(900),
            processes: [Pid(8)].into(),
            control_group: Some(control_group.to_owned()),
            other_processes: [Pid(7)].into(),
            ..AttemptScope::default()
        }
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
        use KernelClass::{DiskError, HungTask};
        let mut log = EvidenceLog::default();
        let machine = |line: &str| Fact::KernelReport(report(DiskError, line));
        log.take_in(seconds(100), &machine("long before"));
        log.take_in(seconds(850), &machine("shortly before"));
        log.take_in(seconds(860), &of_process(HungTask, "waited before the attempt", 9, None));
        log.take_in(seconds(950), &of_process(HungTask, "of another job", 7, None));
        log.take_in(seconds(960), &of_process(HungTask, "machine", 9, None));
        log.take_in(seconds(2000), &machine("long after"));
        let evidence = log.report_evidence(seconds(1000), &attempt("/job"), &[]);
        assert_eq!(evidence.kernel_lines, ["shortly before", "machine"]);
    }

    #[test]
    fn the_end_of_a_process_counts_only_for_its_own_job_after_the_start_of_the_attempt() {
        use KernelClass::{OutOfMemory, Segfault};
        let mut log = EvidenceLog::default();
        log.take_in(seconds(850), &of_process(OutOfMemory, "earlier", 8, Some("/job")));
        log.take_in(seconds(950), &of_process(OutOfMemory, "in another group", 9, Some("/foreign")));
        log.take_in(seconds(951), &of_process(OutOfMemory, "of an unknown process", 9, None));
        log.take_in(seconds(952), &of_process(Segfault, "crash of an unknown process", 9, None));
        log.take_in(seconds(953), &of_process(OutOfMemory, "rank elsewhere", 8, Some("/own")));
        log.take_in(seconds(954), &of_process(OutOfMemory, "worker", 10, Some("/job/step")));
        log.take_in(seconds(955), &of_process(Segfault, "rank crash", 8, None));
        let lines = |scope: &AttemptScope| log.report_evidence(seconds(960), scope, &[]).kernel_lines;
        assert_eq!(lines(&attempt("/job")), ["rank elsewhere", "worker", "rank crash"]);
        // All processes are in the root.
        assert_eq!(lines(&attempt("/")), ["rank elsewhere", "rank crash"]);
    }

    #[test]
    fn a_control_group_is_recognised_at_the_borders_of_its_name() {
        assert!(is_within("/jobs/a", "/jobs/a") && is_within("/jobs/a/rank0", "/jobs/a"));
        assert!(!is_within("/jobs/ab", "/jobs/a") && !is_within("/jobs", "/jobs/a"));
        assert!(!is_within("/pods/jobs/a", "/jobs/a"));
        // Seen from a namespace of control groups.
        assert!(
            is_within("/pods/one/cri-a", "/../../one/cri-a") && !is_within("/pods/one/cri-ab", "/../cri-a")
        );
        assert!(!is_within("/pods/one", "/..") && !is_within("/pods/one", "/"));
    }

    #[test]
    fn program_faults_before_the_attempt_are_ignored_and_device_faults_are_not() {
        let mut log = EvidenceLog::default();
        log.take_in(seconds(850), &xid(31));
        log.take_in(seconds(851), &xid(79));
        log.take_in(seconds(950), &xid(31));
        let evidence = log.report_evidence(seconds(960), &attempt("/job"), &[]).kernel_lines;
        assert_eq!(evidence, ["XID 79", "XID 31"]);
    }

    #[test]
    fn a_gpu_that_no_rank_uses_is_ignored_and_a_switch_is_shared_by_all_jobs() {
        let mut log = EvidenceLog::default();
        (1..4).for_each(|n| log.take_in(seconds(n * 36_000), &xid(79)));
        let at = seconds(3 * 36_000 + 5);
        let off =
            KernelReport { subject: Some("0000:3b:00".to_owned()), ..report(KernelClass::GpuOffBus, "off") };
        log.take_in(at, &Fact::KernelReport(off));
        let components = [unhealthy("gpu.0000:3b:00", at), unhealthy("nvswitch.3", at)];
        let on = |gpu| {
            let gpu = PciAddress::parse(gpu).expect("an address");
            AttemptScope { gpus: Some([gpu].into()), ..AttemptScope::default() }
        };
        assert_eq!(log.report_evidence(at, &on("0000:3b:00"), &components).kernel_lines.len(), 2);
        let elsewhere = on("0000:4c:00");
        let all = log.report_evidence(at, &AttemptScope::default(), &components);
        assert_eq!((all.kernel_lines.len(), all.unhealthy.len(), all.failed_before.len()), (2, 2, 1));
        let evidence = log.report_evidence(at, &elsewhere, &components);
        assert_eq!(
            (evidence.kernel_lines.len(), evidence.unhealthy.len(), evidence.failed_before.len()),
            (0, 1, 0)
        );
        assert_eq!(evidence.unhealthy[0].name, "nvswitch.3");
    }

    #[test]
    fn a_gpu_that_became_unhealthy_around_the_fault_weighs_more_than_an_older_one() {
        let weight = |since| {
            let evidence = HostEvidence {
                unhealthy: vec![unhealthy("gpu.0000:3b:00", since)],
                ..HostEvidence::default()
            };
            let observed: Vec<Observation> = observations(&evidence, seconds(1000)).collect();
            assert_eq!(observed[0].class, Class::HardwareGpu);
            observed[0].weight
        };
        assert!(weight(seconds(990)) > weight(seconds(10)));
    }

    #[test]
    fn a_notice_supports_preemption() {
        let evidence =
            HostEvidence { notices: vec!["AWS: spot interruption".to_owned()], ..HostEvidence::default() };
        let received: Vec<Observation> = observations(&evidence, seconds(1)).collect();
        let [notice] = &received[..] else { panic!("one observation: {received:?}") };
        assert_eq!(notice.class, Class::Preemption);
        assert!(notice.text.contains("spot interruption"), "{}", notice.text);
        assert_eq!(observations(&HostEvidence::default(), seconds(1)).count(), 0);
    }

    fn xid(code: u32) -> Fact {
        let gpu = mainstay_model::pci::PciAddress::parse("0000:3b:00").expect("an address");
        let place = LogPlace { line: format!("XID {code}"), ..LogPlace::default() };
        Fact::Xid(mainstay_model::kernel::Xid { gpu, code, place, ..mainstay_model::kernel::Xid::default() })
    }

    #[test]
    fn repeated_gpu_faults_count_and_program_faults_do_not() {
        let weight = |code: u32, times: u64| {
            let mut log = EvidenceLog::default();
            (1..=times).for_each(|n| log.take_in(seconds(n * 36_000), &xid(code)));
            let evidence = log.report_evidence(seconds(times * 36_000 + 5), &AttemptScope::default(), &[]);
            observations(&evidence, seconds(times * 36_000 + 5))
                .map(|observation| observation.weight)
                .fold(0.0, f64::max)
        };
        assert!(weight(79, 8) > 2.5, "{}", weight(79, 8));
        assert!(weight(79, 2) < weight(79, 8));
        assert!(weight(79, 1).abs() < f64::EPSILON, "the first fault has no record before it");
        assert!(weight(31, 8).abs() < f64::EPSILON, "a program's own fault is not the device's");
    }

    #[test]
    fn a_full_disk_is_no_evidence() {
        let evidence =
            HostEvidence { unhealthy: vec![unhealthy("host.disk", seconds(990))], ..HostEvidence::default() };
        assert_eq!(observations(&evidence, seconds(1000)).count(), 0);
    }
}
