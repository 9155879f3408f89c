//! Refused calls to the API and calls that changed something, as entries of the journal.

use std::collections::BTreeMap;

use mainstay_model::entry::Fact;
use mainstay_model::id::Pid;
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::{Mono, Span};

use super::Node;
use mainstay_sys::clock;

/// The component of these entries.
pub const CALLS: &str = "agent.calls";

/// Entries of one user in one [`TURN`]: more would push entries of others out of the journal.
const MOST: u32 = 20;

/// The period in which a user's entries are counted.
const TURN: Span = Span::seconds(60);

/// Maximum number of users that are counted.
const USERS: usize = 1024;

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

/// How many recent entries each user has, and how many were left out.
#[derive(Debug, Default)]
pub(super) struct Calls(BTreeMap<u32, Turn>);

#[derive(Debug)]
struct Turn {
    began: Mono,
    reported: u32,
    left_out: u32,
}

impl Calls {
    /// Whether this call is recorded, with the number left out before it.
    fn take(&mut self, uid: u32, now: Mono) -> Option<u32> {
        if self.0.len() >= USERS && !self.0.contains_key(&uid) {
            self.0.retain(|_, turn| now.since(turn.began) < TURN);
            if self.0.len() >= USERS {
                return None;
            }
        }
        let turn = self.0.entry(uid).or_insert(Turn { began: now, reported: 0, left_out: 0 });
        if now.since(turn.began) >= TURN {
            *turn = Turn { began: now, reported: 0, left_out: turn.left_out };
        }
        if turn.reported >= MOST {
            turn.left_out = turn.left_out.saturating_add(1);
            return None;
        }
        turn.reported += 1;
        Some(std::mem::take(&mut turn.left_out))
    }
}

impl Node {
    pub(super) fn called(&mut self, of: &Called) {
        let Some(left_out) = self.calls.take(of.uid, clock::mono()) else { return };
        let Called { uid, pid, call, what, refused } = of;
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
        let (component, event) = (CALLS.to_owned(), event.to_owned());
        self.record(None, Fact::Observed(Observation { component, event, weight, detail, values }));
    }
}

#[cfg(test)]
mod tests {
    use super::{Calls, MOST, Mono, TURN, USERS};

    #[test]
    fn one_user_does_not_fill_the_journal_and_what_is_left_out_is_counted() {
        let mut calls = Calls::default();
        let now = Mono(1_000_000_000);
        for _ in 0..MOST {
            assert_eq!(calls.take(7, now), Some(0));
        }
        assert_eq!(calls.take(7, now), None);
        assert_eq!(calls.take(7, now), None);
        assert_eq!(calls.take(8, now), Some(0), "another user's calls are written down");
        assert_eq!(calls.take(7, Mono(now.0 + TURN.0)), Some(2));
    }

    #[test]
    fn users_are_bounded() {
        let mut calls = Calls::default();
        (0..USERS as u32 + 5).for_each(|uid| _ = calls.take(uid, Mono(1)));
        assert!(calls.0.len() <= USERS);
    }
}
