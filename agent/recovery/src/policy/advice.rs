//! The answer of the user's policy.

use mainstay_model::id::Attempt;
use mainstay_model::policy::Rung;
use mainstay_model::time::Span;
use mainstay_model::verdict::Action;
use serde_json::Value;

/// The number of characters of a reason that are kept.
const MAX_REASON_CHARS: usize = 500;

/// The action that a policy proposes.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// The rung. `None` to wait for the host.
    pub rung: Option<Rung>,
    /// How long the action is delayed.
    pub after: Span,
    /// The reason, as a sentence.
    pub why: String,
}

impl Advice {
    /// Reads a decision with `action`, `after` (seconds) and `why`; null leaves it to the built-in policy.
    ///
    /// # Errors
    /// It is no decision; with the part that is wrong.
    pub fn read(decision: &Value) -> Result<Option<Advice>, String> {
        if decision.is_null() {
            return Ok(None);
        }
        let wrong =
            |part: &str, wanted: &str| format!("{part}: {wanted} is expected, not {}", decision[part]);
        let action = decision["action"].as_str().ok_or_else(|| wrong("action", "a string"))?;
        let after = decision["after"].as_f64().filter(|after| (0.0..1e9).contains(after));
        let after = after.ok_or_else(|| wrong("after", "a number of seconds, from 0 to 3600,"))?;
        let why = decision["why"].as_str().filter(|why| !why.trim().is_empty());
        let why = why.ok_or_else(|| wrong("why", "a sentence for the person on call"))?;
        let printable = |letter: char| if letter.is_control() { ' ' } else { letter };
        Ok(Some(Advice {
            rung: rung_named(action)?,
            after: Span((after * 1e9).round() as u64),
            why: why.chars().map(printable).take(MAX_REASON_CHARS).collect(),
        }))
    }
}

/// The rung of an action by its name in the journal; `None` for `wait`.
///
/// # Errors
/// There is no such action; with those that exist.
pub fn rung_named(action: &str) -> Result<Option<Rung>, String> {
    let wait = Action::Wait.as_str();
    if action == wait {
        return Ok(None);
    }
    let known = Rung::ALL.into_iter().find(|rung| name_of(*rung) == action);
    known.map(Some).ok_or_else(|| {
        let all: Vec<&str> = Rung::ALL.into_iter().map(name_of).chain([wait]).collect();
        format!("action: there is no {action:?}; there are {}", all.join(", "))
    })
}

/// The name of a rung in the journal.
pub(super) fn name_of(rung: Rung) -> &'static str {
    Action::from_rung(rung, Attempt(0), 0).as_str()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_decision_has_an_action_a_delay_and_a_reason() {
        let read = Advice::read(&json!({ "action": "hand_back", "after": 1.5, "why": "so\nit\u{7} is" }));
        let why = "so it  is".to_owned();
        assert_eq!(read, Ok(Some(Advice { rung: Some(Rung::HandBack), after: Span::millis(1500), why })));
        let waits = Advice::read(&json!({ "action": "wait", "after": 0, "why": "so" }));
        assert!(matches!(waits, Ok(Some(Advice { rung: None, .. }))));
        assert_eq!(Advice::read(&Value::Null), Ok(None));
    }

    #[test]
    fn anything_else_is_an_error() {
        for wrong in [
            json!(42),
            json!({}),
            json!({ "action": "reboot", "after": 0, "why": "so" }),
            json!({ "action": "stop", "after": -1, "why": "so" }),
            json!({ "action": "stop", "after": 1e300, "why": "so" }),
            json!({ "action": "stop", "after": 0, "why": " " }),
            json!({ "action": ["stop"], "after": 0, "why": "so" }),
        ] {
            assert!(Advice::read(&wrong).is_err(), "{wrong}");
        }
    }
}
