//! Ranks that lost a peer: the peer's own end is waited for, so that it is judged and not what it led to.
//!
//! An interpreter takes a while to end after `sys.exit(3)` or an exception without a note. Its connections close first, and
//! the ranks at their other ends raise at once. A SIGTERM in that while would hide how the peer ended.

use crate::base::id::Rank;
use crate::base::time::{Mono, Span};

use super::{Job, Order, Output, Phase, RankState};

/// How long a peer's own end is waited for. A killed one is seen before; an interpreter that holds PyTorch ends within 0.1 to
/// 1 s, later on a host that is busy or where an accelerator has to be let go.
const WITHIN: Span = Span::seconds(5);

/// A peer that was lost, and whose end was not seen yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LostPeer {
    /// When the first rank lost it.
    pub(super) since: Mono,
    /// When it is waited for no more.
    until: Mono,
}

impl Job {
    /// A rank raised or ended badly: the others are stopped, but for a peer that may be ending by itself.
    pub(super) fn raised(&mut self, at: Mono, rank: Rank, fault_at: Mono, out: &mut Vec<Output>) {
        let lost = self.ranks.get(&rank).is_some_and(|state| state.end.speaks_of_a_lost_peer());
        let may_end = |_: Rank, state: &RankState| {
            state.end.exit.is_none() && state.ending_at.is_none() && !state.end.speaks_of_a_lost_peer()
        };
        if self.phase != Phase::Running || !lost || !self.asked.may_end.any(&self.ranks, may_end) {
            return self.failure(at, fault_at, out);
        }
        if self.lost_peer.is_none() {
            let until = at.after(WITHIN);
            self.lost_peer = Some(LostPeer { since: fault_at, until });
            out.push(Output::Order(Order::LookAgain { at: until }));
        }
    }

    /// Whether a lost peer is waited for; once the time is over, the ranks are stopped without its end.
    pub(super) fn waits_for_lost_peer(&mut self, at: Mono, out: &mut Vec<Output>) -> bool {
        let Some(LostPeer { since, until }) = self.lost_peer else { return false };
        if at < until {
            out.push(Output::Order(Order::LookAgain { at: until }));
        } else {
            self.failure(at, since, out);
        }
        true
    }

    /// What there is to see of a lost peer has been seen.
    pub(super) fn lost_peer_is_known(&mut self, at: Mono, out: &mut Vec<Output>) {
        if let Some(LostPeer { since, .. }) = self.lost_peer {
            self.failure(at, since, out);
        }
    }
}
