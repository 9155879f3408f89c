//! Whether a GPU is registered with the NVSwitch fabric, and the state of that registration.

use super::limits::FABRIC_GRACE;
use super::reading::{FabricInfo, GpuReading};
use super::rules::Rules;
use super::rules::{SAMPLED, check_sample};
use super::watch::{CheckResult, Problem};
use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::time::Mono;

use HealthState::{Degraded, Unhealthy};
use RecommendedAction::{RebootNode, ResetDevice};

/// Health of the fabric by the driver's bits: the position of two bits in which 1 is bad, the meaning, the state.
const FABRIC_MASK: [(u32, &str, HealthState); 4] = [
    (0, "its bandwidth is degraded", Degraded),
    (2, "routes are being recovered", Degraded),
    (4, "its routes are not healthy", Unhealthy),
    (6, "access timed out and is being recovered", Degraded),
];

/// Four bits of the mask from this position report a wrong configuration: 1 is none, more is one.
const FABRIC_CONFIGURATION: u32 = 8;

pub(super) fn fabric(at: Mono, reading: &GpuReading, last: &GpuReading, rules: Rules<'_>) -> CheckResult {
    let before = last.fabric.value();
    check_sample(&reading.fabric, |info| match info.state {
        // Registration takes some time after the boot; a single GPU has no fabric.
        1 | 2 if at.0 < FABRIC_GRACE.0 || rules.gpus < 2 => None,
        1 | 2 => {
            let stage = if info.state == 1 { "has not started" } else { "does not finish" };
            let reason = format!("its registration with the fabric {stage} (is the fabric manager running?)");
            let problem = Problem::new(Degraded, reason, RebootNode).by("NVML fabric state", info.state, 3);
            Some(problem.was(before.map(|before| before.state)).sure(SAMPLED))
        }
        3 => fabric_health(info).map(|problem| problem.was(before.map(fabric_words))),
        _ => None,
    })
}

fn fabric_words(info: &FabricInfo) -> String {
    format!("status {}, health {:#x}, summary {}", info.status, info.health_mask, info.health_summary)
}

fn fabric_health(info: &FabricInfo) -> Option<Problem> {
    let mut worst: Option<HealthState> = None;
    let mut reason = Vec::new();
    let mut bad = |state, what: String| {
        worst = worst.max(Some(state));
        reason.push(what);
    };
    if info.status != 0 {
        bad(Unhealthy, format!("its registration with the fabric failed (code {})", info.status));
    }
    match info.health_summary {
        2 => bad(Unhealthy, "the fabric is not healthy".to_owned()),
        3 => bad(Degraded, "the fabric has limited capacity".to_owned()),
        _ => {}
    }
    for (shift, what, state) in FABRIC_MASK {
        if (info.health_mask >> shift) & 0b11 == 1 {
            bad(state, what.to_owned());
        }
    }
    if (info.health_mask >> FABRIC_CONFIGURATION) & 0xf > 1 {
        bad(Unhealthy, "the fabric is configured wrongly".to_owned());
    }
    let action = if worst? == Unhealthy { ResetDevice } else { RecommendedAction::None };
    Some(Problem::new(worst?, reason.join(", "), action).by("NVML fabric", fabric_words(info), ""))
}
