//! Network file systems: one that does not answer blocks every process that touches it, forever.

use std::collections::BTreeMap;

use super::limits::MOUNT_ANSWERS;
use super::sample::{MountState, SystemSample};
use super::{MountLimits, lasting};
use crate::host::os::findings::Findings;
use crate::host::os::latch::{Latch, Level};
use crate::state::Hysteresis;
use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::time::Mono;

#[derive(Clone, Debug, Default)]
pub(super) struct MountWatch {
    latches: BTreeMap<String, Latch>,
}

impl MountWatch {
    pub(super) fn judge(
        &mut self,
        limits: &MountLimits,
        at: Mono,
        sample: &SystemSample,
    ) -> Option<Findings> {
        self.latches.retain(|point, _| sample.mounts.iter().any(|mount| mount.point == *point));
        if sample.mounts.is_empty() {
            return None;
        }
        let mut findings = Findings::default();
        for mount in &sample.mounts {
            let bad = matches!(mount.state, MountState::Fails(_) | MountState::Silent { .. });
            let level = if bad { HealthState::Unhealthy } else { HealthState::Healthy };
            let patience = Hysteresis { worsen_after: 1, recover_after: MOUNT_ANSWERS };
            let latch = self.latches.entry(mount.point.clone()).or_default();
            let state = latch.step(Level { raw: level, eased: level }, patience);
            let name = format!("{} ({} from {})", mount.point, mount.kind, mount.from);
            let state_text = match &mount.state {
                MountState::Asked => {
                    findings.unknown(format!("{name} was asked and has not answered yet"));
                    "asked".to_owned()
                }
                MountState::Answers => "answers".to_owned(),
                MountState::Fails(why) => format!("fails: {why}"),
                MountState::Silent { since } => format!("has not answered for {}", lasting(at.since(*since))),
            };
            let limit = matches!(mount.state, MountState::Silent { .. }).then(|| limits.deadline.to_string());
            findings.evidence(&mount.point, state_text.clone(), limit);
            let again = if bad { "" } else { " again, but not for long enough" };
            findings.problem(state, format!("{name} {state_text}{again}"), RecommendedAction::ContactSupport);
        }
        let count = sample.mounts.len();
        findings.summary(match count {
            1 => "the network file system answers".to_owned(),
            count => format!("{count} network file systems answer"),
        });
        Some(findings)
    }
}
