//! Changes of seats: links follow, the record is stored, and members without a former seat are welcomed.

use std::collections::BTreeMap;

use super::{Act, Lead, by_launcher};
use crate::link::Link;
use crate::resize::Arranged;
use crate::round::Member;
use crate::wire::Down;
use mainstay_model::time::{Mono, Span};

impl Lead {
    /// The merge has assigned other seats.
    pub(super) fn arranged(&mut self, arranged: Arranged) {
        let Arranged { seats, benched } = arranged;
        let before = std::mem::take(&mut self.links).into_iter().filter(|link| !link.lost);
        let mut before: BTreeMap<String, Link> =
            before.map(|link| (link.seated.member.launcher.clone(), link)).collect();
        for seated in seats {
            self.links.push(match before.remove(&seated.member.launcher) {
                Some(link) => Link { seated, ..link },
                // A launcher that waited is welcomed once its seat is stored.
                None => Link::new(seated, self.looked, Span(u64::MAX)),
            });
        }
        self.of_launcher = by_launcher(&self.links);
        let me = |link: &Link| link.seated.member.launcher == self.leader_settings.launcher;
        if let Some(seat) = self.links.iter().position(me) {
            self.leader_settings.seat = u32::try_from(seat).unwrap_or(self.leader_settings.seat);
        }
        let connected = self.links.iter().enumerate();
        self.seats = connected.filter_map(|(seat, link)| Some((link.connection?, seat))).collect();
        for member in benched {
            if let Some(connection) = before.get(&member.launcher).and_then(|link| link.connection) {
                let status = "the job goes on without this host; waiting for a seat".to_owned();
                self.acts.push_back(Act::Send(connection, Down::Waiting { status, spare: None }));
                self.spares.push((member, connection));
            }
        }
        self.report_who_waits();
        self.write_record();
        self.seats_due = Some(self.leader_settings.newest_record);
    }

    /// The changed seats are stored: members that had none are welcomed, and hosts are informed.
    pub(super) fn seats_are_stored(&mut self, now: Mono) {
        self.seats_due = None;
        let (seated, waiting): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.spares).into_iter().partition(|(member, _)| self.has_seat(member));
        self.spares = waiting;
        for (member, connection) in seated {
            if let Some(seat) = self.of_launcher.get(&member.launcher).copied() {
                self.connect(now, seat, connection);
                self.welcome(seat);
            }
        }
        let me = self.leader_settings.seat as usize;
        for (_, link) in self.links.iter_mut().enumerate().filter(|(seat, _)| *seat != me) {
            if link.connection.is_none() && !link.lost && !link.vital.was_connected() {
                // It left before it was welcomed.
                link.given_up = Some("it left before the job went on".to_owned());
            }
        }
        self.merge.arranged(now, &mut self.next);
    }

    /// Whether the saved checkpoints can be loaded only by the same number of ranks. Then that number is kept.
    pub fn keep_world(&mut self, keep: bool) {
        self.merge.keep_world(keep);
    }

    /// Passes the list of waiting launchers to the merge.
    pub(super) fn report_who_waits(&mut self) {
        let waiting = self.spares.iter().map(|(member, _)| member.clone());
        let waiting: Vec<Member> = waiting.filter(|member| !self.has_seat(member)).collect();
        self.merge.set_waiting(waiting);
        self.report_holders();
    }

    /// Whether a launcher has a seat of the present arrangement.
    pub(super) fn has_seat(&self, member: &Member) -> bool {
        let seat = self.of_launcher.get(&member.launcher).copied();
        seat.and_then(|seat| self.links.get(seat)).is_some_and(|link| !link.lost)
    }
}
