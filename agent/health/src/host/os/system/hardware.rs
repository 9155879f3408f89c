//! The kernel's counters of memory and CPUs, and the modules that GPUs need to reach network cards.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::SpeedLimits;
use super::sample::{Capped, SystemSample};
use crate::host::os::Reading;
use crate::host::os::findings::Findings;
use mainstay_model::counter::Counter;
use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::time::{Mono, Span};

const HOUR: Span = Span::seconds(3600);
const MINUTE: u64 = 60_000_000_000;

/// Throttling is counted over this many minutes.
const OF_MINUTES: u64 = 10;

#[derive(Clone, Debug, Default)]
pub(super) struct HardwareWatch {
    corrected: BTreeMap<String, Counter>,
    throttled: BTreeMap<String, Counter>,
    /// Minutes since boot in which a package was throttled.
    hot: BTreeMap<String, VecDeque<u64>>,
}

impl HardwareWatch {
    /// Uncorrected errors count until the next boot: the module is bad. Corrected errors count by their rate.
    pub(super) fn judge_memory(&mut self, limit: u64, at: Mono, sample: &SystemSample) -> Option<Findings> {
        if sample.memory.is_empty() {
            return None;
        }
        let mut findings = Findings::default();
        for module in &sample.memory {
            let counter = self.corrected.entry(module.name.clone()).or_default();
            let grown = counter.step(module.corrected);
            counter.count(at, grown);
            let lately = counter.within(at, HOUR);
            if module.corrected > 0 || module.uncorrected > 0 {
                let text = format!(
                    "{} errors corrected ({lately} within an hour), {} not",
                    module.corrected, module.uncorrected
                );
                findings.evidence(&module.name, text, Some(format!("{limit} corrected within an hour")));
            }
            if module.uncorrected > 0 {
                findings.problem(
                    HealthState::Unhealthy,
                    format!("{} had {} errors that could not be corrected", module.name, module.uncorrected),
                    RecommendedAction::ReplaceNode,
                );
            }
            if lately >= limit.max(1) {
                findings.problem(
                    HealthState::Degraded,
                    format!(
                        "{lately} errors of {} were corrected within an hour (limit {limit})",
                        module.name
                    ),
                    RecommendedAction::ContactSupport,
                );
            }
        }
        self.corrected.retain(|name, _| sample.memory.iter().any(|module| module.name == *name));
        findings.summary(format!("{} memory modules without new errors", sample.memory.len()));
        Some(findings)
    }

    /// Judges throttled CPUs by the minutes in which they were throttled.
    pub(super) fn judge_speed(
        &mut self,
        limits: &SpeedLimits,
        at: Mono,
        sample: &SystemSample,
    ) -> Option<Findings> {
        if sample.throttled.is_empty() && sample.governors.is_empty() && sample.capped.is_none() {
            return None;
        }
        let mut findings = Findings::default();
        let now = at.0 / MINUTE;
        for (package, count) in &sample.throttled {
            let grown = self.throttled.entry(package.clone()).or_default().step(*count);
            let hot = self.hot.entry(package.clone()).or_default();
            if grown > 0 && hot.back() != Some(&now) {
                hot.push_back(now);
            }
            while hot.front().is_some_and(|minute| now.saturating_sub(*minute) >= OF_MINUTES) {
                hot.pop_front();
            }
            let minutes = hot.len();
            if minutes > 0 {
                let text = format!("{count} times since boot, in {minutes} of the last 10 min");
                findings.evidence(
                    &format!("{package} throttled"),
                    text,
                    Some(format!("{} min", limits.hot_minutes)),
                );
            }
            if minutes as u64 >= limits.hot_minutes.max(1) {
                findings.problem(
                    HealthState::Degraded,
                    format!("{package} was slowed down for heat in {minutes} of the last 10 min"),
                    RecommendedAction::ContactSupport,
                );
            }
        }
        findings.summary("no CPU was slowed down for heat lately".to_owned());
        judge_capped(limits, sample, &mut findings);
        if !sample.governors.is_empty() {
            let texts: Vec<String> = sample
                .governors
                .iter()
                .map(|(governor, cpus)| format!("{governor} on {cpus} CPUs"))
                .collect();
            findings.note(format!("governor {}", texts.join(", ")));
        }
        Some(findings)
    }
}

/// Judges CPUs whose frequency is capped, or whose governor is not the configured one.
fn judge_capped(limits: &SpeedLimits, sample: &SystemSample, findings: &mut Findings) {
    if let Some(Capped { cpus, least, at_least }) = sample.capped {
        let limit = limits.least_share.0;
        findings.evidence(
            "cpufreq",
            format!("{at_least} of {cpus} CPUs may run at {least:.0} % of their best"),
            Some(format!("{limit} %")),
        );
        if least < limit {
            findings.problem(
                HealthState::Degraded,
                format!("{at_least} of {cpus} CPUs may run at {least:.0} % of their highest frequency only (limit {limit} %)"),
                RecommendedAction::ContactSupport,
            );
        }
    }
    if sample.held_low > 0 {
        findings.problem(
            HealthState::Degraded,
            format!("{} CPUs are held at their lowest frequency by the governor powersave", sample.held_low),
            RecommendedAction::None,
        );
    }
    let others: Vec<&str> =
        sample.governors.keys().map(String::as_str).filter(|governor| *governor != limits.governor).collect();
    if !limits.governor.is_empty() && !others.is_empty() {
        findings.problem(
            HealthState::Degraded,
            format!("CPUs run by the governor {}, not by {}", others.join(", "), limits.governor),
            RecommendedAction::None,
        );
    }
}

/// Judges switches that send the traffic between their devices up to the CPU and back.
pub(super) fn judge_switches(wanted: bool, sample: &SystemSample) -> Option<Findings> {
    let ports = sample.switch_ports.as_ref()?;
    let mut findings = Findings::default();
    let first: Vec<&str> = ports.redirecting.iter().take(4).map(String::as_str).collect();
    if let [_, ..] = first.as_slice() {
        let text =
            format!("{} of {} ports redirect: {}", ports.redirecting.len(), ports.read, first.join(", "));
        findings.evidence("access control services of PCIe switches", text, None);
        let reason = format!(
            "{} of {} ports of PCIe switches above GPUs redirect (ACS): GPUs and network cards of one switch reach each \
             other by way of the CPU",
            ports.redirecting.len(),
            ports.read
        );
        if wanted {
            findings.problem(HealthState::Degraded, reason, RecommendedAction::None);
        } else {
            findings.note(reason);
        }
    }
    findings.summary(format!("{} ports of PCIe switches lead to GPUs", ports.read));
    Some(findings)
}

/// Judges the modules with which GPUs and network cards reach each other's memory.
pub(super) fn judge_modules(sample: &SystemSample) -> Option<Findings> {
    let mut findings = Findings::default();
    let modules = match sample.modules.as_ref()? {
        Reading::Value(modules) => modules,
        Reading::NotAvailable(_) => return None,
        Reading::Failed(why) => {
            findings.unreadable(why.clone());
            return Some(findings);
        }
    };
    let loaded: BTreeSet<&str> = modules.loaded.iter().map(String::as_str).collect();
    let needed = modules.gpus > 0 && modules.rdma && loaded.contains("nvidia");
    if !needed && modules.lacking.is_empty() && modules.without_verbs.is_empty() {
        return None;
    }
    findings.evidence("/proc/modules", modules.loaded.join(", "), None);
    for name in &modules.lacking {
        findings.problem(
            HealthState::Degraded,
            format!("the kernel module {name} is not loaded, though host.system.modules names it"),
            RecommendedAction::RebootNode,
        );
    }
    if let Some(first) = modules.without_verbs.first() {
        findings.problem(
            HealthState::Degraded,
            format!(
                "{} RDMA devices have no verbs device, {first} for one: no program can use them (ib_uverbs)",
                modules.without_verbs.len()
            ),
            RecommendedAction::RebootNode,
        );
    }
    if needed {
        let peermem = loaded.contains("nvidia_peermem") || loaded.contains("nv_peer_mem");
        if !peermem && !modules.dma_buf {
            findings.problem(
                HealthState::Degraded,
                "neither nvidia_peermem is loaded nor does the driver share memory by DMA-BUF: data of GPUs goes \
                 to the network by way of the host's memory"
                    .to_owned(),
                RecommendedAction::ContactSupport,
            );
        }
        if !loaded.contains("gdrdrv") {
            findings.note("gdrdrv is not loaded: small messages take longer".to_owned());
        }
        let way = if peermem { "nvidia_peermem" } else { "DMA-BUF" };
        findings.summary(format!("GPUs and network cards reach each other by {way}"));
    }
    Some(findings)
}
