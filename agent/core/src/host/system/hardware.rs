//! What the kernel counts of memory and CPUs, and the modules that GPUs need to reach network cards.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::sample::SystemSample;
use crate::counter::Counter;
use crate::health::{HealthState, RecommendedAction};
use crate::host::Reading;
use crate::host::findings::Findings;
use crate::time::{Mono, Span};

const HOUR: Span = Span::seconds(3600);
const MINUTE: u64 = 60_000_000_000;

/// Minutes of the last ten in which CPUs were throttled before they are degraded.
const HOT_MINUTES: usize = 6;

#[derive(Clone, Debug, Default)]
pub(super) struct HardwareWatch {
    corrected: BTreeMap<String, Counter>,
    throttled: BTreeMap<String, Counter>,
    /// Minutes since boot in which a package was throttled.
    hot: BTreeMap<String, VecDeque<u64>>,
}

impl HardwareWatch {
    /// Errors that could not be corrected stand until the next boot: the module is bad. Corrected ones by rate.
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
                let told = format!(
                    "{} errors corrected ({lately} within an hour), {} not",
                    module.corrected, module.uncorrected
                );
                findings.evidence(&module.name, told, Some(format!("{limit} corrected within an hour")));
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

    /// CPUs that are too hot, by the minutes in which they were.
    pub(super) fn judge_speed(&mut self, at: Mono, sample: &SystemSample) -> Option<Findings> {
        if sample.throttled.is_empty() && sample.governors.is_empty() {
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
            while hot.front().is_some_and(|minute| now.saturating_sub(*minute) >= 10) {
                hot.pop_front();
            }
            let minutes = hot.len();
            if minutes > 0 {
                let told = format!("{count} times since boot, in {minutes} of the last 10 min");
                findings.evidence(&format!("{package} throttled"), told, Some(format!("{HOT_MINUTES} min")));
            }
            if minutes >= HOT_MINUTES {
                findings.problem(
                    HealthState::Degraded,
                    format!("{package} was slowed down for heat in {minutes} of the last 10 min"),
                    RecommendedAction::ContactSupport,
                );
            }
        }
        findings.summary("no CPU was slowed down for heat lately".to_owned());
        if !sample.governors.is_empty() {
            let told: Vec<String> = sample
                .governors
                .iter()
                .map(|(governor, cpus)| format!("{governor} on {cpus} CPUs"))
                .collect();
            findings.note(format!("governor {}", told.join(", ")));
        }
        Some(findings)
    }
}

/// Modules by which GPUs and network cards reach each other's memory.
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
    if !needed && modules.lacking.is_empty() {
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
