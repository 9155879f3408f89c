//! What a follower has seen, for its leader and for the next one.

use super::{Act, Follow};
use crate::wire::Up;
use mainstay_hang::RankSeen;
use mainstay_model::entry::Fact;
use mainstay_model::id::Attempt;
use mainstay_model::time::Mono;
use mainstay_recovery::job::ORDERS;
use mainstay_recovery::protocol::Event;

/// The most reports of an attempt that a host keeps for the next leader.
const LOG: usize = 65_536;

impl Follow {
    /// Something happened on this host that concerns the whole job: it is reported to the leader.
    pub fn step(&mut self, at: Mono, event: Event) {
        if event.is_of_leader() {
            return;
        }
        if let Event::Looked { launcher, sight } = &event
            && *launcher == self.leader.launcher
        {
            return self.saw_leader(*sight);
        }
        self.runs &= !is_end(&event);
        self.keep(at, &event);
        if self.catches_up {
            // An answer to the new leader is sent with the rest, even if the connection has just ended. The new
            // leader does not repeat the order.
            if (self.is_connected() || self.stops) && is_end(&event) {
                self.log.push_back((at, event));
            }
            return;
        }
        let (at, event) = (self.clock.to_leader(at), self.clock.event(event));
        match self.outbox.push((at, event.clone())) {
            Ok(number) => self.send(Up::Event { number, at, event }),
            // Far more than a live leader leaves unread.
            Err(_) => self.gone = Some(Mono(0)),
        }
    }

    /// Keeps what was seen for the next leader. What concerns earlier attempts is already decided.
    fn keep(&mut self, at: Mono, event: &Event) {
        if let Event::Fact(Fact::AttemptStarted { .. } | Fact::StartFailed { .. }) = event {
            self.log.retain(|(_, event)| matches!(event, Event::Fact(Fact::StopRequested { .. })));
        }
        // Step reports are frequent, and each includes the earlier ones. A leader that stops an attempt asks for its
        // end again, and would take an old answer for the new one.
        let again = match event {
            Event::Fact(fact) => !matches!(fact, Fact::AttemptEnded { .. }),
            event => matches!(event, Event::Role { .. }),
        };
        if again && self.log.len() < LOG {
            self.log.push_back((at, event.clone()));
        }
    }

    /// Whether sights of ranks can be sent to the leader now. Before the first round trip no time can be converted.
    pub fn reports_ranks(&self) -> bool {
        self.gone.is_none() && self.clock.uncertainty().is_some()
    }

    /// Sends sights of ranks to the leader, which judges whether they hang.
    pub fn ranks_seen(&mut self, attempt: Attempt, ranks: Vec<RankSeen>) {
        if !ranks.is_empty() {
            let clock = &self.clock;
            let ranks = ranks.into_iter().map(|seen| seen.on_clock(&|at| clock.to_leader(at))).collect();
            self.send(Up::Seen { attempt, ranks });
        }
    }

    pub(super) fn send_again(&mut self) {
        if self.open {
            let again = self.outbox.unacknowledged();
            let again =
                again.map(|(number, (at, event))| Up::Event { number, at: *at, event: event.clone() });
            self.acts.extend(again.map(Act::Send));
        }
    }

    /// Reports to a new leader what was seen of the current attempt.
    pub(super) fn catch_up(&mut self) {
        self.catches_up = false;
        for (at, event) in self.log.clone() {
            // No more than a live leader leaves unread.
            let _ = self.outbox.push((self.clock.to_leader(at), self.clock.event(event)));
        }
        self.log.retain(|(_, event)| !is_end(event));
        self.send_again();
    }
}

/// Whether the event is the end of an attempt on this host.
fn is_end(event: &Event) -> bool {
    matches!(event, Event::Fact(Fact::AttemptEnded { .. }))
}

/// Whether a fact concerns the whole job, and not only the host that saw it.
pub fn concerns_all(fact: &Fact) -> bool {
    match fact {
        Fact::AttemptStarted { .. }
        | Fact::StartFailed { .. }
        | Fact::RankConnected { .. }
        | Fact::RankRefused { .. }
        | Fact::PagesUnavailable { .. }
        | Fact::RankRaised { .. }
        | Fact::RankEnding { .. }
        | Fact::RankExited { .. }
        | Fact::RanksHung { .. }
        | Fact::HangPassed { .. }
        | Fact::EvidenceTaken { .. }
        | Fact::AttemptEnded { .. }
        | Fact::StopRequested { .. }
        | Fact::OutOfMemoryKills { .. } => true,
        Fact::Observed(seen) => {
            seen.component == ORDERS || matches!(seen.component.as_str(), "job" | "template")
        }
        _ => false,
    }
}
