//! A summary of the node's health for launchers that ask before their ranks start: fit, or not and why.

use super::{Check, CheckVerdict};
use mainstay_model::health::RecommendedAction;

/// The summary of the node's health.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeHealth {
    /// Checks that exclude the node, each with its reason and action.
    pub failed: Vec<String>,
    /// Problems that do not exclude the node.
    pub warnings: Vec<String>,
    /// Unknown results that do not exclude the node.
    pub unknown: Vec<String>,
}

/// Summarizes the checks. An unknown result excludes the node only with `fail_on_unknown`, or if the check never
/// answered (`silent`): a launcher treats every doubt as healthy, so unknown results are reported explicitly.
pub fn node_health(checks: &[Check], silent: &[String], fail_on_unknown: bool) -> NodeHealth {
    let mut health = NodeHealth::default();
    for check in checks {
        let action_text = match action_name(check.action) {
            Some(action) => format!("{}: {} ({action})", check.name, check.reason),
            None => format!("{}: {}", check.name, check.reason),
        };
        match check.verdict {
            CheckVerdict::Fail => health.failed.push(action_text),
            CheckVerdict::Unknown if fail_on_unknown || silent.contains(&check.name) => {
                health.failed.push(action_text)
            }
            CheckVerdict::Unknown => health.unknown.push(action_text),
            CheckVerdict::Warn => health.warnings.push(action_text),
            CheckVerdict::Pass | CheckVerdict::Skipped => {}
        }
    }
    health
}

/// The action as the API spells it; `None` if there is none.
fn action_name(action: RecommendedAction) -> Option<&'static str> {
    Some(match action {
        RecommendedAction::None => return None,
        RecommendedAction::RestartProcess => "RESTART_PROCESS",
        RecommendedAction::ResetDevice => "RESET_DEVICE",
        RecommendedAction::RebootNode => "REBOOT_NODE",
        RecommendedAction::ReplaceNode => "REPLACE_NODE",
        RecommendedAction::ContactSupport => "CONTACT_SUPPORT",
    })
}

impl NodeHealth {
    /// Whether the node may take part.
    pub fn is_fit(&self) -> bool {
        self.failed.is_empty()
    }
}
