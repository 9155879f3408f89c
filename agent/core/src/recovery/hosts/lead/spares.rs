//! What waiting launchers receive so that they are ready for a seat, and who stores copies of checkpoints then.

use super::{Act, Lead};
use crate::recovery::hosts::link::Connection;
use crate::recovery::hosts::merge::COPIES_AMONG;
use crate::recovery::hosts::round::{Member, Seated, vacant};
use crate::recovery::hosts::wire::{Down, Spare};

/// Where launchers store copies of checkpoints for each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Keepers {
    hosts: Vec<String>,
    spares: Vec<String>,
}

impl Lead {
    /// The message for a waiting launcher.
    pub(super) fn waits_as_spare(&self, member: &Member) -> Down {
        let reported = "all hosts are there; waiting as a spare".to_owned();
        let spare = member.prepares.then(|| Box::new(self.spare(member)));
        Down::Waiting { reported, spare }
    }

    fn spare(&self, member: &Member) -> Spare {
        let seats: Vec<Seated> = self.seats().cloned().collect();
        let like = vacant(&seats, member).and_then(|seat| seats.get(seat as usize));
        let seat = like.or(seats.first()).map(|seated| seated.seat.clone()).unwrap_or_default();
        let (job, launch) = self.office.names.clone();
        Spare { seat, job, launch }
    }

    /// Sends all launchers the addresses where copies are stored, if they changed. Before the first spare, hosts know
    /// them anyway. In a large job spares store none: each host has other partners there.
    pub(super) fn report_holders(&mut self) {
        if self.links.len() > COPIES_AMONG {
            return;
        }
        let spares = self.spares.iter().map(|(member, _)| member);
        let spares = spares.filter(|member| member.prepares && !member.replicas.is_empty());
        let spares: Vec<String> = spares.map(|member| member.replicas.clone()).collect();
        let known = self.keepers.as_ref();
        if known.is_none_or(|known| known.spares.is_empty()) && spares.is_empty() {
            return;
        }
        let keepers = Keepers { hosts: self.merge.peers(), spares };
        if known == Some(&keepers) {
            return;
        }
        let Keepers { hosts, spares } = keepers.clone();
        self.acts.push_back(Act::Meet { hosts, spares });
        self.keepers = Some(keepers);
        let seated = self.links.iter().filter(|link| link.seated.member.prepares);
        let waiting = self.spares.iter().filter(|(member, _)| member.prepares);
        let to = seated.filter_map(|link| link.connection).chain(waiting.map(|(_, connection)| *connection));
        let to: Vec<Connection> = to.collect();
        to.into_iter().for_each(|connection| self.report_to_keepers(connection));
    }

    /// Sends a launcher that has connected the addresses where copies are stored.
    pub(super) fn report_to_keepers(&mut self, connection: Connection) {
        if let Some(Keepers { hosts, spares }) = self.keepers.clone() {
            self.acts.push_back(Act::Send(connection, Down::Meet { hosts, spares }));
        }
    }
}
