//! A leader that is not heard: this host looks at it, and tells the others if it does not live.

use super::{Act, Follow};
use crate::base::time::{Mono, Span};
use crate::recovery::hosts::lost::{Judgement, Sight};
use crate::recovery::hosts::wire::Down;

/// Who looks at the leader: this host alone.
const ME: u32 = 0;

impl Follow {
    /// The leader lives.
    pub(super) fn hears_leader(&mut self, at: Mono, down: &Down) {
        match down {
            // What waits in a connection that is given up says nothing.
            _ if !self.open => return,
            Down::Welcome { .. } => self.vital.connects(at),
            Down::Beat { .. } => self.vital.beat(at),
            _ => self.vital.received(at),
        }
        self.miss_leader(false);
    }

    pub(super) fn miss_leader(&mut self, misses: bool) {
        if std::mem::replace(&mut self.misses, misses) != misses {
            self.acts.push_back(Act::MissLeader(misses));
        }
    }

    /// Looks at a leader that is not heard. If no one answers where it listens, the others learn that this host misses it.
    pub(super) fn look_at_leader(&mut self, now: Mono) {
        match self.vital.judge(now, Span(u64::MAX)) {
            Judgement::Look => {
                self.vital.asks(now, vec![ME]);
                self.acts.push_back(Act::LookAtLeader);
            }
            Judgement::Lost if self.vital.is_unreached() && !self.misses => {
                self.miss_leader(true);
                self.close();
                if self.gone.is_none() {
                    self.gone = Some(now);
                    let (host, silence) = (&self.leader.host, self.vital.silence(now));
                    let said = format!(
                        "nothing from the leader on host {host} for {silence}, and this host cannot reach it; the ranks go on"
                    );
                    self.acts.push_back(Act::Say(said));
                }
                self.campaign();
            }
            Judgement::Wait | Judgement::Lost => {}
        }
    }

    /// What was found where the leader listens.
    pub(super) fn saw_leader(&mut self, sight: Sight) {
        self.vital.looked(ME, sight);
    }

    /// Most of those who have a say miss the leader.
    pub fn leader_is_missed(&mut self) {
        if self.misses && !self.cut_off {
            self.acts.push_back(Act::RemoveLeader);
        }
    }
}
