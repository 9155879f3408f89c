//! Streams between launchers, which break; launchers that come back.

use std::collections::VecDeque;

use mainstay_core::recovery::hosts::round::{Member, Seated};
use mainstay_core::recovery::hosts::sequence::Received;

use super::World;
use super::host::{Host, Link};

impl World {
    pub(super) fn deliver_up(&mut self, seat: usize) {
        let (to, now) = (self.hosts[seat].follows.0, self.now);
        if !self.hosts[to].runs() {
            return;
        }
        let Some((number, report)) = self.hosts[seat].up.pop_front() else { return };
        let Some(leader) = &mut self.hosts[to].leads else { return };
        match leader.links[seat].reports_in.receive(number) {
            Received::New => leader.merge.report(now, seat as u32, report, &mut leader.next),
            Received::Again => {}
            Received::Gap => panic!("a connection keeps the order"),
        }
        let have = leader.links[seat].reports_in.have();
        if !self.chance.one_in(3) {
            self.hosts[seat].reports.acknowledged(have);
        }
    }

    pub(super) fn deliver_down(&mut self, seat: usize) {
        if !self.hosts[seat].runs() {
            return;
        }
        let Some((number, epoch, command)) = self.hosts[seat].down.pop_front() else { return };
        if !self.hosts[seat].standing().obeys(epoch) {
            return self.hosts[seat].disconnect();
        }
        match self.hosts[seat].commands_in.receive(number) {
            Received::New => self.obey(seat, (self.hosts[seat].follows.0, epoch), command),
            Received::Again => {}
            Received::Gap => panic!("a connection keeps the order"),
        }
        let (from, have) = (self.hosts[seat].follows.0, self.hosts[seat].commands_in.have());
        if !self.chance.one_in(3)
            && let Some(leader) = &mut self.hosts[from].leads
        {
            leader.links[seat].commands.acknowledged(have);
        }
    }

    /// A follower connects to whom it takes for the leader; one of an older epoch is refused.
    pub(super) fn reconnect(&mut self, seat: usize) {
        let (to, epoch) = self.hosts[seat].follows;
        let host = &self.hosts[seat];
        let (there, leads) = (&self.hosts[to], host.leads.is_some());
        // Another launcher may have the place of the one that led.
        let is_it = there.runs() && there.seated.member.launcher == host.leader;
        if host.connected || !host.runs() || leads || to == seat || !is_it {
            return;
        }
        let (seated, now) = (host.seated.clone(), self.now);
        let have = host.commands_in.have();
        let Some(leader) = self.hosts[to].leads.as_mut().filter(|leader| leader.epoch >= epoch) else {
            return;
        };
        let known = leader.links[seat].launcher == seated.member.launcher;
        if known && leader.merge.lost_seats().iter().any(|lost| lost.seat == seated.seat) {
            // It was taken for lost: it is refused, stops its ranks and ends.
            return self.hosts[seat].crash();
        }
        if leader.links[seat].launcher != seated.member.launcher {
            // The leader before gave it a place that no record has: for this one it waits for a place.
            if leader.merge.lost_seats().iter().any(|lost| lost.seat == seated.seat) {
                leader.links[seat] = Link::new(&seated.member.launcher);
                leader.merge.taken(now, seated, &mut leader.next);
            } else {
                leader.merge.lost(now, seat as u32, "it does not come back", &mut leader.next);
            }
            return;
        }
        let link = &mut leader.links[seat];
        link.commands.acknowledged(have);
        let of = leader.epoch;
        let down = link.commands.unacknowledged().map(|(number, command)| (number, of, command.clone()));
        let down: VecDeque<_> = down.collect();
        let have = link.reports_in.have();
        let host = &mut self.hosts[seat];
        host.connected = true;
        host.reports.acknowledged(have);
        host.up = host.reports.unacknowledged().map(|(number, report)| (number, report.clone())).collect();
        host.down = down;
    }

    /// A leader takes a crashed host for lost; later a new launcher has its place.
    pub(super) fn come_back(&mut self, seat: usize) {
        let now = self.now;
        let leads = self
            .hosts
            .iter()
            .position(|host| host.runs() && host.leads.as_ref().is_some_and(|leader| leader.over.is_none()));
        let Some(me) = leads.filter(|_| self.hosts[seat].crashed) else { return };
        let seated = self.hosts[seat].seated.clone();
        // Only the one whom the store knows gives places away.
        if !self.store.leader.is_some_and(|(of, epoch)| of == me && epoch == self.leader(me).epoch) {
            return;
        }
        let leader = self.leader(me);
        if !leader.merge.lost_seats().iter().any(|lost| lost.seat == seated.seat) {
            return leader.merge.lost(now, seat as u32, "it crashed", &mut leader.next);
        }
        let epoch = leader.epoch;
        let member = Member { launcher: format!("{}+", seated.member.launcher), ..seated.member };
        let seated = Seated { member, ..seated };
        leader.links[seat] = Link::new(&seated.member.launcher);
        leader.merge.taken(now, seated.clone(), &mut leader.next);
        let leader = self.hosts[me].seated.member.launcher.clone();
        self.hosts[seat] = Host::new(seated, (me, epoch), &leader);
    }
}
