//! Refused calls to the API and calls that changed something, as entries of the journal.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

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

/// All callers over TCP together are counted under this number: no user has it, and addresses are many.
const REMOTE: u32 = u32::MAX;

/// Who made a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CalledBy {
    /// A process of this host, as reported by the kernel.
    Process {
        /// The user.
        uid: u32,
        /// The process; 0 in another PID namespace.
        pid: Pid,
    },
    /// A caller over TCP.
    Remote {
        /// Its address.
        address: IpAddr,
        /// The name in its certificate.
        certificate: Option<String>,
    },
}

impl fmt::Display for CalledBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CalledBy::Process { uid, pid } => write!(f, "user {uid} (process {})", pid.0),
            CalledBy::Remote { address, certificate: Some(name) } => {
                write!(f, "the owner of certificate {name:?} at {address}")
            }
            CalledBy::Remote { address, certificate: None } => {
                write!(f, "a caller without a certificate at {address}")
            }
        }
    }
}

impl CalledBy {
    fn values(&self) -> BTreeMap<String, String> {
        let values = match self {
            CalledBy::Process { uid, pid } => {
                vec![("uid", uid.to_string()), ("pid", pid.0.to_string())]
            }
            CalledBy::Remote { address, certificate } => {
                let certificate = certificate.iter().map(|name| ("certificate", name.clone()));
                certificate.chain([("address", address.to_string())]).collect()
            }
        };
        values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    fn counted_as(&self) -> u32 {
        match self {
            CalledBy::Process { uid, .. } => *uid,
            CalledBy::Remote { .. } => REMOTE,
        }
    }
}

/// A call that was refused, or that changes something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Called {
    /// Who called.
    pub by: CalledBy,
    /// Which call.
    pub call: String,
    /// Its subject, or why it was refused.
    pub what: String,
    /// Whether it was refused.
    pub refused: bool,
}

impl Node {
    pub(super) fn called(&mut self, call_made: &Called) {
        let Ok(left_out) = self.calls.take(call_made.by.counted_as(), 1, clock::mono()) else { return };
        let Called { by, call, what, refused } = call_made;
        let (event, word) = if *refused { ("refused", "was refused") } else { ("called", "called") };
        let mut values = by.values();
        values.insert("call".to_owned(), call.clone());
        if left_out > 0 {
            values.insert("left_out".to_owned(), left_out.to_string());
        }
        let detail = format!("{by} {word} {call}: {what}");
        let weight = if *refused { Weight::Warning } else { Weight::Info };
        let (component, event) = (CALLS_COMPONENT.to_owned(), event.to_owned());
        self.record(None, Fact::Observed(Observation { component, event, weight, detail, values }));
    }
}
