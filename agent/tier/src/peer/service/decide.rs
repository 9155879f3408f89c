//! Decides which step a job goes back to where no launcher leads: the first agent by name chooses it, for all agents that ask,
//! and announces it to all peers that answer.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use mainstay_checkpoint::choice::{Wanted, choose};
use mainstay_checkpoint::decision::{Decision, Word};
use mainstay_checkpoint::inventory::{Copy, StepKey, StepState, restorable, steps};

use super::Shared;
use crate::peer::error::PeerError;

impl Shared {
    /// The decision of the leader: the first by name of the hosts that answer.
    pub(crate) fn decide(&self, run: &str) -> Result<Decision, PeerError> {
        self.refresh();
        let mut leaders = self.alive();
        leaders.push(self.name().to_owned());
        leaders.sort();
        let mut last = None;
        for leader in leaders {
            let asked = if leader == self.name() {
                self.lead(run, self.name(), &[])
            } else {
                self.asking().decide(&leader, run, self.name(), self.distrusted())
            };
            match asked {
                Ok(decision) => {
                    let reported = self.decisions().report(&decision);
                    if let Word::Refused(newer) = reported {
                        return Ok(newer);
                    }
                    return Ok(decision);
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| PeerError::Local("no host decides".to_owned())))
    }

    /// Makes the decision for `asker` and announces it to all peers that answer.
    pub(crate) fn lead(
        &self,
        run: &str,
        asker: &str,
        distrusted: &[(String, String)],
    ) -> Result<Decision, PeerError> {
        for (holder, root) in distrusted {
            let mut known = self.distrusted.lock().unwrap_or_else(PoisonError::into_inner);
            known.entry((holder.clone(), root.clone())).or_insert_with(Instant::now);
        }
        self.own.look();
        self.refresh();
        self.refresh_durable(run);
        let newest = self.newest_after_second_request(run);
        // A peer that knows a newer decision raises the number; after this many tries something is wrong.
        for _ in 0..8 {
            let decision = self.decisions().decide(self.name(), run, asker, newest.as_ref());
            let Some(newer) = self.announce(&decision) else { return Ok(decision) };
            let mut decisions = self.decisions();
            let newer = Decision {
                fence: newer.fence.max(decision.fence).saturating_add(1),
                step: newest.clone(),
                by: self.name().to_owned(),
                ..newer
            };
            let _ = decisions.report(&newer);
        }
        Err(PeerError::Local(format!("peers do not agree on a step of {run}")))
    }

    /// The newest whole step. Peers that did not answer are asked once more if the job would otherwise start from scratch or
    /// lose a step that is whole with what they reported last: on a busy host one request may time out. A lost host whose
    /// shards have copies elsewhere delays nothing.
    fn newest_after_second_request(&self, run: &str) -> Option<StepKey> {
        let wanted = Wanted { run: Some(run), ..Wanted::default() };
        let newest = |copies: Vec<Copy>| choose(&restorable(copies), wanted).key();
        let answered = newest(self.copies());
        let silent = self.silent();
        if silent.is_empty() || (answered.is_some() && answered == newest(self.copies_as_last_reported())) {
            return answered;
        }
        tracing::info!(
            run,
            peers = silent.join(", "),
            "peers that may have the newest step do not answer: asking once more"
        );
        self.ask_peers(&silent, Duration::ZERO);
        newest(self.copies())
    }

    /// Announces a decision to all peers that answer. Returns the newest decision with which one of them rejects it.
    pub(super) fn announce(&self, decision: &Decision) -> Option<Decision> {
        let alive = self.alive();
        let words = std::thread::scope(|scope| {
            let reported: Vec<_> =
                alive.iter().map(|peer| scope.spawn(|| self.asking().report(peer, decision))).collect();
            reported.into_iter().map(|word| word.join()).collect::<Vec<_>>()
        });
        let refused = words.into_iter().filter_map(|word| match word {
            Ok(Ok(Word::Refused(newer))) => Some(newer),
            _ => None,
        });
        refused.max_by_key(|newer| newer.fence)
    }

    /// The known state of a step, with all copies that a restore can use.
    pub(crate) fn step(&self, key: &StepKey) -> Option<StepState> {
        self.refresh_durable(key.run_id());
        steps(&restorable(self.copies()), Some(key.run_id())).into_iter().find(|step| step.key == *key)
    }
}
