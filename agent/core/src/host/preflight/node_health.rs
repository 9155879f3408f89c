//! The node in one word, for launchers that ask before their ranks join: fit, or not and why.

use super::{Check, CheckVerdict};
use crate::model::health::RecommendedAction;

/// What a launcher is told of the node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeHealth {
    /// What keeps the node out, each with its reason and what to do.
    pub failed: Vec<String>,
    /// What is wrong and does not keep it out.
    pub warnings: Vec<String>,
    /// What cannot be told and does not keep it out.
    pub unknown: Vec<String>,
}

/// The node in one word. What cannot be told keeps it out only if `fail_on_unknown`, or if it never answered at all
/// (`silent`): a launcher takes every doubt for health, so ours must be said.
pub fn node_health(checks: &[Check], silent: &[String], fail_on_unknown: bool) -> NodeHealth {
    let mut health = NodeHealth::default();
    for check in checks {
        let reported = match word(check.action) {
            Some(action) => format!("{}: {} ({action})", check.name, check.reason),
            None => format!("{}: {}", check.name, check.reason),
        };
        match check.verdict {
            CheckVerdict::Fail => health.failed.push(reported),
            CheckVerdict::Unknown if fail_on_unknown || silent.contains(&check.name) => {
                health.failed.push(reported)
            }
            CheckVerdict::Unknown => health.unknown.push(reported),
            CheckVerdict::Warn => health.warnings.push(reported),
            CheckVerdict::Pass | CheckVerdict::Skipped => {}
        }
    }
    health
}

/// The action in the API's words, where there is one.
fn word(action: RecommendedAction) -> Option<&'static str> {
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
