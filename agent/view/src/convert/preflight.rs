//! Converts checks before a start, in both directions: the command line shows the agent's checks next to its own.

use mainstay_health::host::preflight::{Check, CheckVerdict, Group, Requirement};
use mainstay_proto::v1;

use super::health::{action, action_in, evidence, evidence_in};
use super::{duration, span};

/// A check as an API message.
pub fn check(check: &Check) -> v1::PreflightCheck {
    v1::PreflightCheck {
        name: check.name.clone(),
        group: group(check.group).into(),
        verdict: verdict(check.verdict).into(),
        reason: check.reason.clone(),
        recommended_action: action(check.action).into(),
        evidence: check.evidence.iter().map(evidence).collect(),
        took: check.took.map(duration),
        deadline: check.deadline.map(duration),
    }
}

/// A check from an API message. Values of a newer server that this version does not know are unknown.
pub fn check_of(check: v1::PreflightCheck) -> Check {
    let verdict = match check.verdict() {
        v1::CheckVerdict::Pass => CheckVerdict::Pass,
        v1::CheckVerdict::Warn => CheckVerdict::Warn,
        v1::CheckVerdict::Fail => CheckVerdict::Fail,
        v1::CheckVerdict::Skipped => CheckVerdict::Skipped,
        v1::CheckVerdict::Unknown | v1::CheckVerdict::Unspecified => CheckVerdict::Unknown,
    };
    Check {
        group: group_of(check.group()).unwrap_or_else(|| Group::from_name(&check.name)),
        verdict,
        action: action_in(check.recommended_action()),
        took: check.took.map(|took| span(&took)),
        deadline: check.deadline.map(|deadline| span(&deadline)),
        evidence: check.evidence.into_iter().map(evidence_in).collect(),
        name: check.name,
        reason: check.reason,
    }
}

/// A requirement as an API message.
pub fn requirement(required: Requirement) -> v1::CheckRequirement {
    v1::CheckRequirement { group: group(required.group).into(), count: required.count }
}

/// A verdict as an API message.
pub fn verdict(verdict: CheckVerdict) -> v1::CheckVerdict {
    match verdict {
        CheckVerdict::Pass => v1::CheckVerdict::Pass,
        CheckVerdict::Warn => v1::CheckVerdict::Warn,
        CheckVerdict::Fail => v1::CheckVerdict::Fail,
        CheckVerdict::Unknown => v1::CheckVerdict::Unknown,
        CheckVerdict::Skipped => v1::CheckVerdict::Skipped,
    }
}

/// A group as an API message.
pub fn group(group: Group) -> v1::CheckGroup {
    match group {
        Group::Gpu => v1::CheckGroup::Gpu,
        Group::Fabric => v1::CheckGroup::Fabric,
        Group::Storage => v1::CheckGroup::Storage,
        Group::Host => v1::CheckGroup::Host,
        Group::Tpu => v1::CheckGroup::Tpu,
        Group::Network => v1::CheckGroup::Network,
    }
}

/// A group from an API message; none if it is unset or unknown.
pub fn group_of(group: v1::CheckGroup) -> Option<Group> {
    Some(match group {
        v1::CheckGroup::Unspecified => return None,
        v1::CheckGroup::Gpu => Group::Gpu,
        v1::CheckGroup::Fabric => Group::Fabric,
        v1::CheckGroup::Storage => Group::Storage,
        v1::CheckGroup::Host => Group::Host,
        v1::CheckGroup::Tpu => Group::Tpu,
        v1::CheckGroup::Network => Group::Network,
    })
}

#[cfg(test)]
mod tests {
    use mainstay_model::health::{Evidence, RecommendedAction};
    use mainstay_model::time::Span;

    use super::*;

    #[test]
    fn a_check_comes_back_as_it_was() {
        for verdict in [
            CheckVerdict::Pass,
            CheckVerdict::Warn,
            CheckVerdict::Fail,
            CheckVerdict::Unknown,
            CheckVerdict::Skipped,
        ] {
            for group in Group::ALL {
                let mut before = Check::new("gpu.0000:3b:00", group, verdict, "why");
                before.action = RecommendedAction::ResetDevice;
                before.took = Some(Span::millis(1500));
                before.deadline = Some(Span::seconds(10));
                before.evidence.push(Evidence::new("NVML", "1").limit("0"));
                assert_eq!(check_of(check(&before)), before);
            }
        }
    }
}
