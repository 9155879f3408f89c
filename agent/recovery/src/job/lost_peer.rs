//! Ranks that lost a peer. The job waits for the peer's own end, so that the cause is judged and not its
//! consequences.
//!
//! An interpreter takes a while to end after `sys.exit(3)` or an exception without a note. Its connections close
//! first, and the ranks at their other ends raise at once. A SIGTERM during that time would hide how the peer ended.

use mainstay_model::id::Rank;
use mainstay_model::time::{Mono, Span};

use super::{Command, Job, Output, Phase, RankState};

/// How long to wait for a peer's own end. A killed peer is noticed earlier. An interpreter with PyTorch ends within
/// 0.1 to 1 s, or later on a busy host or if it has to release an accelerator.
const PEER_ERROR_WINDOW: Span = Span::seconds(5);

/// A lost peer whose end was not seen yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LostPeer {
    /// When the first rank lost it.
    pub(super) since: Mono,
    /// When the wait ends.
    until: Mono,
}

impl Job {
    /// A rank raised or failed: the others are stopped, unless a lost peer may still be ending.
    pub(super) fn raised(&mut self, at: Mono, rank: Rank, fault_at: Mono, out: &mut Vec<Output>) {
        let lost = self.ranks.get(&rank).is_some_and(|state| state.end.speaks_of_a_lost_peer());
        let may_end = |_: Rank, state: &RankState| {
            state.end.exit.is_none() && state.ending_at.is_none() && !state.end.speaks_of_a_lost_peer()
        };
        if self.phase != Phase::Running || !lost || !self.asked.may_end.any(&self.ranks, may_end) {
            return self.failure(at, fault_at, out);
        }
        if self.lost_peer.is_none() {
            let until = at.after(PEER_ERROR_WINDOW);
            self.lost_peer = Some(LostPeer { since: fault_at, until });
            out.push(Output::Command(Command::Wake { at: until }));
        }
    }

    /// Whether the job waits for a lost peer. When the time is over, the ranks are stopped without its end.
    pub(super) fn waits_for_lost_peer(&mut self, at: Mono, out: &mut Vec<Output>) -> bool {
        let Some(LostPeer { since, until }) = self.lost_peer else { return false };
        if at < until {
            out.push(Output::Command(Command::Wake { at: until }));
        } else {
            self.failure(at, since, out);
        }
        true
    }

    /// Everything about the lost peer has been seen.
    pub(super) fn lost_peer_is_known(&mut self, at: Mono, out: &mut Vec<Output>) {
        if let Some(LostPeer { since, .. }) = self.lost_peer {
            self.failure(at, since, out);
        }
    }
}
