//! What waiting launchers receive so that they are ready for a seat, and who stores copies of checkpoints then.

use super::{Act, Lead};
use crate::link::Connection;
use crate::merge::COPIES_AMONG;
use crate::round::{Member, Seated, vacant};
use crate::wire::{Down, Join, Spare};

/// Where launchers store copies of checkpoints for each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ReplicaAddresses {
    hosts: Vec<String>,
    spares: Vec<String>,
}

impl Lead {
    /// The message for a waiting launcher.
    pub(super) fn waits_as_spare(&self, member: &Member) -> Down {
        let Join { host, run_id, .. } = &self.leader_settings.expected.leader;
        let status = format!(
            "all hosts are there; waiting as a spare of job {run_id}, which host {host} leads. For another job give \
             another --rdzv-id"
        );
        let spare = member.prepares.then(|| Box::new(self.spare(member)));
        Down::Waiting { status, spare }
    }

    fn spare(&self, member: &Member) -> Spare {
        let seats: Vec<Seated> = self.seats().cloned().collect();
        let like = vacant(&seats, member).and_then(|seat| seats.get(seat as usize));
        let seat = like.or(seats.first()).map(|seated| seated.seat.clone()).unwrap_or_default();
        let (job, launch) = self.leader_settings.names.clone();
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
        let known = self.replica_addresses.as_ref();
        if known.is_none_or(|known| known.spares.is_empty()) && spares.is_empty() {
            return;
        }
        let replica_addresses = ReplicaAddresses { hosts: self.merge.peers(), spares };
        if known == Some(&replica_addresses) {
            return;
        }
        let ReplicaAddresses { hosts, spares } = replica_addresses.clone();
        self.acts.push_back(Act::Meet { hosts, spares });
        self.replica_addresses = Some(replica_addresses);
        let seated = self.links.iter().filter(|link| link.seated.member.prepares);
        let waiting = self.spares.iter().filter(|(member, _)| member.prepares);
        let to = seated.filter_map(|link| link.connection).chain(waiting.map(|(_, connection)| *connection));
        let to: Vec<Connection> = to.collect();
        to.into_iter().for_each(|connection| self.send_replica_addresses(connection));
    }

    /// Sends a launcher that has connected the addresses where copies are stored.
    pub(super) fn send_replica_addresses(&mut self, connection: Connection) {
        if let Some(ReplicaAddresses { hosts, spares }) = self.replica_addresses.clone() {
            self.acts.push_back(Act::Send(connection, Down::Meet { hosts, spares }));
        }
    }
}
