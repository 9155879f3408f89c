//! Refused calls to the API and calls that changed something, as entries of the journal.

use std::collections::BTreeMap;

use mainstay_model::entry::Fact;
use mainstay_model::id::Pid;
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::Span;

use super::Node;
use super::allowance::Allowance;
use mainstay_sys::clock;

/// The component of these entries.
pub const CALLS_COMPONENT: &str = "agent.calls";

/// Entries of one user in one period.
const MAX_ENTRIES_PER_PERIOD: (u64, Span) = (20, Span::seconds(60));

pub(super) fn allowance() -> Allowance {
    Allowance::new(MAX_ENTRIES_PER_PERIOD.0, MAX_ENTRIES_PER_PERIOD.1)
}

/// A call that was refused, or that changes something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Called {
    /// The user, as reported by the kernel.
    pub uid: u32,
    /// The calling process; 0 in another PID namespace.
    pub pid: Pid,
    /// Which call.
    pub call: &'static str,
    /// Its subject, or why it was refused.
    pub what: String,
    /// Whether it was refused.
    pub refused: bool,
}

impl Node {
    pub(super) fn called(&mut self, call_made: &Called) {
        let Ok(left_out) = self.calls.take(call_made.uid, 1, clock::mono()) else { return };
        let Called { uid, pid, call, what, refused } = call_made;
        let (event, word) = if *refused { ("refused", "was refused") } else { ("called", "called") };
        let mut values = BTreeMap::from([
            ("uid".to_owned(), uid.to_string()),
            ("pid".to_owned(), pid.0.to_string()),
            ("call".to_owned(), (*call).to_owned()),
        ]);
        if left_out > 0 {
            values.insert("left_out".to_owned(), left_out.to_string());
        }
        let detail = format!("user {uid} (process {}) {word} {call}: {what}", pid.0);
        let weight = if *refused { Weight::Warning } else { Weight::Info };
        let (component, event) = (CALLS_COMPONENT.to_owned(), event.to_owned());
        self.record(None, Fact::Observed(Observation { component, event, weight, detail, values }));
    }
}
