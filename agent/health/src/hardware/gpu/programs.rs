//! Programs that failed on a GPU. The programs are the culprit unless many different ones fail on one GPU only.

use std::collections::{BTreeSet, VecDeque};

use super::line;
use mainstay_model::fault_code::FaultCode;
use mainstay_model::health::Evidence;
use mainstay_model::kernel::Xid;
use mainstay_model::time::{Mono, Span};

/// Maximum number of remembered failures.
const MAX_REMEMBERED_FAILURES: usize = 64;
/// Maximum number of lines shown as evidence.
const MAX_SHOWN_LINES: usize = 3;
/// The XID with which the driver removes the work of a program, also of one that was stopped by hand.
const REMOVED: u32 = 45;

#[derive(Clone, Debug, Default)]
pub(super) struct Programs {
    failures: VecDeque<Failure>,
}

#[derive(Clone, Debug)]
struct Failure {
    at: Mono,
    code: u32,
    meaning: String,
    name: Option<String>,
    line: String,
}

impl Programs {
    pub(super) fn is_empty(&self) -> bool {
        self.failures.is_empty()
    }

    pub(super) fn faulted(&mut self, at: Mono, xid: &Xid, meaning: &str) {
        if self.failures.len() == MAX_REMEMBERED_FAILURES {
            self.failures.pop_front();
        }
        let (name, line) = (xid.process.clone(), xid.place.line.clone());
        self.failures.push_back(Failure { at, code: xid.code, meaning: meaning.to_owned(), name, line });
    }

    /// Withdraws the last failure with this code: it is reported again in more detail.
    pub(super) fn retract(&mut self, code: u32) {
        if let Some(place) = self.failures.iter().rposition(|failure| failure.code == code) {
            self.failures.remove(place);
        }
    }

    /// Whether any failed within the last `span`; drops older failures.
    pub(super) fn any_since(&mut self, now: Mono, span: Span) -> bool {
        self.failures.retain(|failure| now.since(failure.at) <= span);
        !self.failures.is_empty()
    }

    /// The names of the programs that failed, without duplicates and without those that were only removed.
    pub(super) fn names(&self) -> Vec<String> {
        let failed = self.failures.iter().filter(|failure| failure.code != REMOVED);
        let names: BTreeSet<&String> = failed.filter_map(|failure| failure.name.as_ref()).collect();
        names.into_iter().cloned().collect()
    }

    pub(super) fn summary(&self) -> Option<String> {
        let last = self.failures.back()?;
        let who = last.name.as_deref().unwrap_or("a program");
        Some(match self.failures.len() {
            1 => format!("{who} failed on it (XID {})", last.code),
            count => format!("programs failed on it {count} times, last {who} (XID {})", last.code),
        })
    }

    pub(super) fn evidence(&self) -> Vec<Evidence> {
        let shown = self.failures.iter().rev().take(MAX_SHOWN_LINES);
        shown.map(|program| line(&program.line, FaultCode::Xid(program.code), &program.meaning)).collect()
    }
}
