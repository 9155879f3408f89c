//! A silent leader: this host checks it, and publishes if it is not alive.

use super::{Act, Follow};
use crate::lost::Judgement;
use crate::wire::Down;
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::protocol::ProbeResult;

/// Only this host checks the leader.
const ME: u32 = 0;

impl Follow {
    /// A message proves that the leader is alive.
    pub(super) fn leader_reported(&mut self, at: Mono, down: &Down) {
        match down {
            // Messages buffered in a closed connection prove nothing.
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

    /// Checks a silent leader. If nothing answers at its address, this host publishes that it misses the leader.
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
                    let message = format!(
                        "nothing from the leader on host {host} for {silence}, and this host cannot reach it; the ranks go on"
                    );
                    self.acts.push_back(Act::Print(message));
                }
                self.campaign();
            }
            Judgement::Wait | Judgement::Lost => {}
        }
    }

    /// The result of a check at the leader's address.
    pub(super) fn saw_leader(&mut self, sight: ProbeResult) {
        self.vital.looked(ME, sight);
    }

    /// The majority of the electors misses the leader.
    pub fn leader_is_missed(&mut self) {
        if self.misses && !self.cut_off {
            self.acts.push_back(Act::RemoveLeader);
        }
    }
}
