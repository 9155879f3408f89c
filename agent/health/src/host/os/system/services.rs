//! Services that GPUs and their fabric need.

use std::collections::BTreeMap;

use super::ServiceLimits;
use super::limits::FAILED_LOOKS;
use super::sample::{Service, Services, SystemSample};
use crate::host::os::Reading;
use crate::host::os::findings::Findings;
use mainstay_model::counter::Counter;
use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::time::{Mono, Span};

const FABRIC_MANAGER: &str = "nvidia-fabricmanager.service";

#[derive(Clone, Debug, Default)]
pub(super) struct ServiceWatch {
    units: BTreeMap<String, Unit>,
    last: Option<Reading<Services>>,
}

#[derive(Clone, Debug, Default)]
struct Unit {
    /// Samples in a row in which it had failed; the maximum if it had failed in the first sample.
    failed: u32,
    restarts: Counter,
}

impl ServiceWatch {
    /// Services are queried less often than the rest: between queries the last answer counts.
    pub(super) fn judge(
        &mut self,
        limits: &ServiceLimits,
        at: Mono,
        sample: &SystemSample,
    ) -> Option<Findings> {
        if let Some(reading) = &sample.services {
            if let Some(services) = reading.value() {
                self.follow(at, services);
            }
            self.last = Some(reading.clone());
        }
        let services = match self.last.as_ref()? {
            Reading::Value(services) => services,
            Reading::NotAvailable(_) => return None,
            Reading::Failed(why) => {
                let mut findings = Findings::default();
                findings.unreadable(why.clone());
                return Some(findings);
            }
        };
        if services.units.is_empty() {
            return None;
        }
        let mut findings = Findings::default();
        for service in &services.units {
            let Some(unit) = self.units.get_mut(&service.name) else { continue };
            let starts = unit.restarts.within(at, HOUR);
            let state_text = format!(
                "{} ({}), {}",
                service.active,
                service.sub,
                if service.enabled { "enabled" } else { "not enabled" }
            );
            findings.evidence(&service.name, state_text, None);
            let Some(what) = failure(service, services, unit.failed, starts, limits) else { continue };
            // Without the fabric manager, no program can use the GPUs of a host with NVSwitches.
            let vital = service.name == FABRIC_MANAGER && services.switches;
            let state = if vital { HealthState::Unhealthy } else { HealthState::Degraded };
            findings.problem(state, what, RecommendedAction::RestartProcess);
        }
        let running = services.units.iter().filter(|unit| unit.active == "active").count();
        findings.summary(format!("{running} of {} services run, none has failed", services.units.len()));
        Some(findings)
    }

    fn follow(&mut self, at: Mono, services: &Services) {
        self.units.retain(|name, _| services.units.iter().any(|service| service.name == *name));
        for service in &services.units {
            let first = !self.units.contains_key(&service.name);
            let unit = self.units.entry(service.name.clone()).or_default();
            let vital = service.name == FABRIC_MANAGER && services.switches;
            unit.failed = match service.active.as_str() {
                // It failed before this agent started, so the failure is not new.
                "failed" if first => u32::MAX,
                "failed" => unit.failed.saturating_add(1),
                "inactive" if vital && service.enabled => unit.failed.saturating_add(1),
                _ => 0,
            };
            let grown = unit.restarts.step(service.restarts);
            unit.restarts.count(at, grown);
        }
    }
}

const HOUR: Span = Span::seconds(3600);

fn failure(
    service: &Service,
    services: &Services,
    failed: u32,
    starts: u64,
    limits: &ServiceLimits,
) -> Option<String> {
    // The fabric manager exits if it has nothing to manage, which is correct.
    if service.name == FABRIC_MANAGER && (!services.switches || services.gpus < 2) {
        return None;
    }
    if starts >= limits.restarts {
        return Some(format!("{} was started {starts} times within an hour", service.name));
    }
    if failed < FAILED_LOOKS {
        return None;
    }
    Some(match service.active.as_str() {
        "failed" => format!("{} has failed ({})", service.name, service.result),
        other => format!("{} is {other}, though it is to run", service.name),
    })
}
