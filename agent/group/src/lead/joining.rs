//! Launchers that join, return, wait for a seat, and are lost.

use super::Act;
use super::Lead;
use crate::link::{BACK_WITHIN, Connection, Link};
use crate::predecessor::Predecessor;
use crate::recent::Recent;
use crate::round::{self, Member, Seated};
use crate::wire::{Down, Join};
use mainstay_model::entry::HostLoss;
use mainstay_model::time::Mono;

impl Lead {
    /// The hosts of a complete round: followers by launcher with their connections, and launchers beyond the round.
    pub fn gathered(&mut self, connections: &[(String, Connection)], spares: Vec<(Member, Connection)>) {
        self.links.iter_mut().for_each(|link| link.vital.is_expected_within(BACK_WITHIN));
        for (launcher, connection) in connections {
            if let Some(seat) = self.of_launcher.get(launcher).copied() {
                self.connect(self.looked, seat, *connection);
                self.welcome(seat);
            }
        }
        for (member, connection) in spares {
            let waits = self.waits_as_spare(&member);
            self.acts.push_back(Act::Send(connection, waits));
            if member.is_avoided() {
                self.fact(self.looked, member.avoided(None));
            }
            self.spares.push((member, connection));
        }
        self.report_who_waits();
    }

    pub(super) fn connect(&mut self, at: Mono, seat: usize, connection: Connection) {
        let before = self.links.get_mut(seat).and_then(|link| link.connected(at, connection));
        self.close(before);
        self.seats.insert(connection, seat);
    }

    /// A launcher has connected and wants to take part.
    pub fn joined(&mut self, at: Mono, connection: Connection, join: &Join) {
        if let Some(why) = self.leader_settings.expected.refusal(join) {
            return self.refuse_and_print(connection, &join.host, why);
        }
        if self.lost.contains(&join.launcher) {
            // Its place may have been given to another launcher, and its ranks may still run.
            let why = "it was lost, and the job continued without it".to_owned();
            return self.refuse(connection, why, true);
        }
        if let Some(seat) = self.of_launcher.get(&join.launcher).copied() {
            return self.came_back(at, seat, connection, join);
        }
        if let Some(why) = self.leader_settings.expected.difference(join) {
            return self.refuse_and_print(connection, &join.host, why);
        }
        let message = format!("host {} has joined and waits for a seat", join.host);
        let member = Member::from_join(join);
        let waits = self.waits_as_spare(&member);
        self.acts.push_back(Act::Send(connection, waits));
        let (before, others) = std::mem::take(&mut self.spares)
            .into_iter()
            .partition(|(other, _)| other.launcher == join.launcher);
        self.spares = others;
        before.into_iter().for_each(|(_, connection)| self.close(Some(connection)));
        if member.prepares {
            self.send_replica_addresses(connection);
        }
        self.spares.push((member, connection));
        self.seat_spares(at);
        self.acts.push_back(Act::Print(message));
    }

    fn refuse_and_print(&mut self, connection: Connection, host: &str, why: String) {
        self.acts.push_back(Act::Print(format!("host {host} cannot take part: {why}")));
        self.refuse(connection, why, false);
    }

    fn refuse(&mut self, connection: Connection, why: String, may_return: bool) {
        self.acts.push_back(Act::Send(connection, Down::Refused { why, may_return }));
        self.close(Some(connection));
    }

    fn came_back(&mut self, at: Mono, seat: usize, connection: Connection, join: &Join) {
        let Some(link) = self.links.get_mut(seat) else { return };
        if self.leader_settings.launcher == join.have_of {
            link.outbox.acknowledged(join.have.0);
            link.entries = join.have.1;
        } else if let Some(predecessor) = &self.predecessor {
            link.entries = link.entries.max(predecessor.position(join));
        }
        self.connect(at, seat, connection);
        self.welcome(seat);
        if join.prepares {
            self.send_replica_addresses(connection);
        }
    }

    pub(super) fn welcome(&mut self, seat: usize) {
        let (job, launch) = self.leader_settings.names.clone();
        let epoch = self.leader_settings.epoch;
        let Some(link) = self.links.get(seat) else { return };
        let Some(connection) = link.connection else { return };
        let (have, seat) = (link.inbox.have(), link.seated.seat.clone());
        let newest = self.recent.as_ref().map_or(0, Recent::newest);
        self.acts.push_back(Act::Send(connection, Down::Welcome { seat, job, launch, have, epoch, newest }));
        self.acts.extend(link.outbox.unacknowledged().map(|(number, command)| {
            Act::Send(connection, Down::Command { number, epoch, command: command.clone() })
        }));
    }

    /// Gives seats of lost hosts to waiting launchers.
    fn seat_spares(&mut self, at: Mono) {
        let mut waiting = std::mem::take(&mut self.spares);
        waiting.sort_by_key(|(member, _)| member.is_avoided());
        for (member, connection) in waiting {
            let seat = round::vacant(&self.merge.lost_seats(), &member);
            // A launcher that got a seat is welcomed once that is stored.
            let seat = seat.filter(|_| !self.has_seat(&member));
            match seat.and_then(|seat| self.links.get_mut(seat as usize)) {
                Some(link) => {
                    let seated = Seated { member, seat: link.seated.seat.clone() };
                    self.of_launcher.remove(&link.seated.member.launcher);
                    self.of_launcher.insert(seated.member.launcher.clone(), seated.seat.group_rank as usize);
                    *link = Link::new(seated.clone(), at, BACK_WITHIN);
                    self.record_due = true;
                    let seat = seated.seat.group_rank as usize;
                    self.connect(at, seat, connection);
                    self.welcome(seat);
                    self.merge.taken(at, seated, &mut self.next);
                }
                None => self.spares.push((member, connection)),
            }
        }
        self.report_who_waits();
    }

    /// The host at this seat is lost.
    pub(super) fn lose(&mut self, at: Mono, seat: usize, how: (HostLoss, &str)) {
        let Some(link) = self.links.get_mut(seat) else { return };
        link.lost = true;
        self.lost.insert(link.seated.member.launcher.clone());
        let (open, seat) = (link.connection.take(), link.seated.seat.group_rank);
        self.close(open);
        self.merge.lost(at, seat, how, &mut self.next);
        self.seat_spares(at);
    }

    /// This launcher replaced another leader.
    pub fn replaces(&mut self, predecessor: Predecessor) {
        self.predecessor = Some(predecessor);
    }
}
