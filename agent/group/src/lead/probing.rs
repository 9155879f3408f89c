//! Checks whether the hosts of the job are alive. Others check silent followers, which are lost if no one reaches
//! them.

use super::Lead;
use crate::lost::{Judgement, PROBERS};
use mainstay_model::entry::HostLoss;
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::protocol::{Command, ProbeResult};

/// A leader that misses this many of its looks was stalled: messages that followers sent meanwhile may not have been
/// read yet.
const MISSED_LOOKS: u64 = 4;

/// How often a job with this many hosts stores its progress. A new leader counts time and steps from there. All
/// launchers read what is written, and its size grows with the hosts, so a large job writes less often.
fn remembered_every(hosts: usize) -> Span {
    const UP_TO: u64 = 256;
    let times = (hosts as u64).div_ceil(UP_TO).max(1);
    Span::seconds(30 * times)
}

impl Lead {
    /// To be called as time passes: followers that no one reaches are lost. `silent`: how long the store has not
    /// answered.
    pub fn look(&mut self, now: Mono, silent: Option<Span>) {
        if self.deposed {
            return;
        }
        let since = now.since(std::mem::replace(&mut self.looked, now));
        self.end_without_record(now, silent);
        if since >= Span(MISSED_LOOKS * self.leader_settings.looks_every.0) || !self.is_registered {
            // Silent followers may have sent something, and nothing is decided without the store.
            self.links.iter_mut().for_each(|link| link.vital.exclude(now, since));
        }
        if !self.is_registered {
            return self.look_at_store(silent);
        }
        for seat in 0..self.links.len() {
            self.look_at(now, seat);
        }
        self.merge.look(now, &mut self.next);
        if now.since(self.remembered) >= remembered_every(self.links.len()) {
            self.remembered = now;
            self.record_due = true;
        }
    }

    fn look_at(&mut self, now: Mono, seat: usize) {
        let (patience, me) = (self.leader_settings.lease, self.leader_settings.seat as usize);
        let Some(link) = self.links.get_mut(seat).filter(|link| seat != me && !link.lost) else { return };
        if let Some(why) = link.given_up.take() {
            return self.lose(now, seat, (HostLoss::Left, &why));
        }
        match link.vital.judge(now, patience) {
            Judgement::Wait => {}
            Judgement::Look => self.have_looked_at(now, seat),
            Judgement::Lost => {
                let loss = link.vital.loss();
                let how = self.links.get(seat).map(|link| link.vital.describe(now, |seat| self.host(seat)));
                self.lose(now, seat, (loss, &how.unwrap_or_default()));
            }
        }
    }

    fn host(&self, seat: u32) -> String {
        let host = self.links.get(seat as usize).map(|link| link.seated.member.host.clone());
        host.unwrap_or_default()
    }

    /// Asks others to check a host: the leader, and the next hosts that can.
    fn have_looked_at(&mut self, now: Mono, seat: usize) {
        let Some(member) = self.links.get(seat).map(|link| &link.seated.member) else { return };
        let (launcher, address) = (member.launcher.clone(), member.listens.clone());
        let mut probers = Vec::new();
        if !address.is_empty() {
            let count = self.links.len();
            let others = (1..count).map(|after| (seat + after) % count);
            let able = |other: &usize| {
                *other != self.leader_settings.seat as usize
                    && self.links.get(*other).is_some_and(|link| !link.lost && link.can_look(now))
            };
            let others = others.filter(able).take(PROBERS).map(|other| other as u32);
            probers = std::iter::once(self.leader_settings.seat).chain(others).collect();
        }
        for looker in &probers {
            let (launcher, address) = (launcher.clone(), address.clone());
            self.command(*looker, Command::Look { launcher, address });
        }
        if let Some(link) = self.links.get_mut(seat) {
            link.vital.asks(now, probers);
        }
    }

    /// What the host at seat `by` found when it checked another.
    pub(super) fn looked_at(&mut self, by: u32, launcher: &str, sight: ProbeResult) {
        let seat = self.of_launcher.get(launcher).copied();
        if let Some(link) = seat.and_then(|seat| self.links.get_mut(seat)) {
            link.vital.looked(by, sight);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_job_is_stored_less_often() {
        assert_eq!(remembered_every(1), Span::seconds(30));
        assert_eq!(remembered_every(256), Span::seconds(30));
        assert_eq!(remembered_every(12_500), Span::seconds(49 * 30));
    }
}
