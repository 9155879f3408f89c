//! What is known of the current attempt as a whole.

use mainstay_hang::Hang;
use mainstay_model::id::Rank;
use mainstay_model::time::{Mono, Span};

/// How long to wait for a peer's own end. A killed peer is noticed earlier. An interpreter with PyTorch ends within
/// 0.1 to 1 s, or later on a busy host or if it has to release an accelerator.
const PEER_ERROR_WINDOW: Span = Span::seconds(5);

/// The course of an attempt.
#[derive(Clone, Debug)]
pub(super) struct Course {
    pub(super) began: Mono,
    /// The rank whose steps are accounted: the first that completed one.
    pub(super) lead: Option<Rank>,
    /// When the progress of the ranks was last recorded. `None` until all of them step.
    pub(super) recorded_at: Option<Mono>,
    /// A hang, with the evidence from the ranks.
    pub(super) hang: Option<(Box<Hang>, Vec<String>)>,
    pub(super) out_of_memory_kills: u64,
    /// Why the host had no process, thread or file descriptor left.
    pub(super) exhausted: Option<String>,
    /// Set while ranks have lost a peer that is not identified yet.
    pub(super) lost_peer: Option<LostPeer>,
}

impl Course {
    /// An attempt whose ranks are not started yet.
    pub(super) fn new(began: Mono) -> Course {
        Course {
            began,
            lead: None,
            recorded_at: None,
            hang: None,
            out_of_memory_kills: 0,
            exhausted: None,
            lost_peer: None,
        }
    }

    pub(super) fn is_stepping(&self) -> bool {
        self.recorded_at.is_some()
    }
}

/// A lost peer whose end was not seen yet. The job waits for it, so that the cause is judged and
/// not its consequences.
///
/// An interpreter takes a while to end after `sys.exit(3)` or an exception without a note. Its
/// connections close first, and the ranks at their other ends raise at once. A SIGTERM during that
/// time would hide how the peer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LostPeer {
    /// When the first rank lost it.
    pub(super) since: Mono,
    /// When the wait ends.
    pub(super) until: Mono,
}

impl LostPeer {
    pub(super) fn new(at: Mono, since: Mono) -> LostPeer {
        LostPeer { since, until: at.after(PEER_ERROR_WINDOW) }
    }
}
