//! The functions of a policy in addition to those of the language, and the check of its decision.

use mainstay_hang::HangKind;
use mainstay_model::id::Attempt;
use mainstay_model::time::Span;
use mainstay_model::verdict::Action;
use mainstay_recovery::policy::{Advice, Rung, jitter};

use crate::language::{Arguments, Heap, Host, Made, Place, Value};

/// The functions of a policy.
pub(crate) struct Words {
    pub(crate) seed: u64,
}

impl Host for Words {
    fn names(&self) -> &'static [&'static str] {
        &["decision", "duration", "jitter"]
    }

    fn call(&self, name: &str, given: &Arguments, _: Place, heap: &mut Heap<'_>) -> Option<Made<Value>> {
        match name {
            "decision" => Some(decision(given, heap)),
            "duration" => Some(duration(given, heap)),
            "jitter" => {
                Some(match &given.plain[..] {
                    [Value::Int(count)] if given.named.is_empty() => {
                        Ok(Value::Float(jitter(u32::try_from(*count).unwrap_or(u32::MAX), self.seed)))
                    }
                    _ => Err("jitter(): it takes one int, the number of restarts in a row without progress"
                        .to_owned()),
                })
            }
            _ => None,
        }
    }
}

fn decision(given: &Arguments, heap: &mut Heap<'_>) -> Made<Value> {
    let mut fields = vec![("action", None), ("after", Some(Value::Float(0.0))), ("why", None)];
    for (at, value) in given.plain.iter().enumerate() {
        let Some(field) = fields.get_mut(at) else {
            return Err("decision(): it takes action, after and why".to_owned());
        };
        field.1 = Some(value.clone());
    }
    for (name, value) in &given.named {
        let Some(field) = fields.iter_mut().find(|(known, _)| **known == **name) else {
            return Err(format!("decision(): there is no parameter {name}; there are action, after and why"));
        };
        field.1 = Some(value.clone());
    }
    let mut made = Vec::new();
    for (name, value) in fields {
        made.push((name.into(), value.ok_or_else(|| format!("decision(): {name} is missing"))?));
    }
    let value = heap.fields(made)?;
    // Report an error where the decision is created, not where it is returned.
    advice(heap, &value)?;
    Ok(value)
}

fn duration(given: &Arguments, heap: &mut Heap<'_>) -> Made<Value> {
    let seconds = match &given.plain[..] {
        [value] if given.named.is_empty() => value.number(),
        _ => None,
    };
    let span = seconds.and_then(span).ok_or("duration(): it takes a number of seconds, 0 or more")?;
    heap.text(&span.to_string())
}

/// A span, to the nearest nanosecond.
fn span(seconds: f64) -> Option<Span> {
    (0.0..1e9).contains(&seconds).then(|| Span((seconds * 1e9).round() as u64))
}

/// Converts the returned value of a policy, if it is a decision.
pub(crate) fn advice(heap: &mut Heap<'_>, value: &Value) -> Made<Option<Advice>> {
    let id = match value {
        Value::None => return Ok(None),
        Value::Struct(id) => *id,
        other => {
            return Err(format!(
                "decide() returned {}; it returns decision(action, after, why), or None to leave it to the built-in policy",
                other.kind()
            ));
        }
    };
    let field = |name: &str| {
        heap.fields_of(id).iter().find(|(known, _)| **known == *name).map(|(_, value)| value.clone())
    };
    let (wanted, after, why) = (field("action"), field("after"), field("why"));
    let rung = match wanted {
        Some(Value::Text(text)) => rung(&text)?,
        other => return Err(format!("action: {}", expected("a string", other.as_ref()))),
    };
    let after = match after {
        Some(value @ (Value::Int(_) | Value::Float(_))) => {
            let number = value.number().unwrap_or(-1.0);
            span(number).ok_or_else(|| {
                format!("after: {number} is not a time to wait; it is in seconds, from 0 to 3600")
            })?
        }
        other => return Err(format!("after: {}", expected("a number of seconds", other.as_ref()))),
    };
    let why = match why {
        Some(Value::Text(text)) if !text.trim().is_empty() => text
            .chars()
            .map(|letter| if letter.is_control() { ' ' } else { letter })
            .take(LONGEST_REASON)
            .collect(),
        other => {
            return Err(format!("why: {}", expected("a sentence for the person on call", other.as_ref())));
        }
    };
    Ok(Some(Advice { rung, after, why }))
}

/// The number of characters of a reason that are kept.
const LONGEST_REASON: usize = 500;

fn expected(what: &str, got: Option<&Value>) -> String {
    match got {
        None => format!("{what} is expected, and it is missing"),
        Some(Value::Text(text)) if text.is_empty() => format!("{what} is expected, and it is empty"),
        Some(other) => format!("{what} is expected, and it is {}", other.kind()),
    }
}

/// All actions, mildest first.
pub(crate) fn actions() -> Vec<&'static str> {
    Rung::ALL.into_iter().map(word).chain(["wait"]).collect()
}

/// The rung of an action; none for `wait`.
pub(crate) fn rung(text: &str) -> Made<Option<Rung>> {
    if text == "wait" {
        return Ok(None);
    }
    let known = Rung::ALL.into_iter().find(|rung| word(*rung) == text);
    known.map(Some).ok_or_else(|| format!("action: there is no {text:?}; there are {}", actions().join(", ")))
}

/// The name of a rung in the journal.
pub(crate) fn word(rung: Rung) -> &'static str {
    Action::of(rung, Attempt(0), 0).word()
}

/// The name of a hang in the journal.
pub(crate) fn hang(kind: HangKind) -> &'static str {
    match kind {
        HangKind::Stopped => "stopped",
        HangKind::NeverRegistered => "never_registered",
        HangKind::FinishedEarly => "finished_early",
        HangKind::DataInput => "data_input",
        HangKind::BlockedIo => "blocked_io",
        HangKind::UserCode => "user_code",
        HangKind::Mismatch => "mismatch",
        HangKind::Network => "network",
        HangKind::SilentHost => "silent_host",
        HangKind::Livelock => "livelock",
        HangKind::AllStill => "all_still",
    }
}
