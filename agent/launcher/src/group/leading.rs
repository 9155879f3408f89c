//! This launcher leads: it decides for the ranks of all hosts. `group::lead` decides; this module connects it with the
//! streams to other launchers and with the store.

use std::collections::BTreeMap;

use mainstay_group::lead::{self, Expected, Lead, LeaderSettings, SteppedDown};
use mainstay_group::link::Connection;
use mainstay_group::merge::Merge;
use mainstay_group::predecessor::Predecessor;
use mainstay_group::record::Record;
use mainstay_group::round::{Member, Seated};
use mainstay_group::succession::Adopted;
use mainstay_group::wire::{Down, Join};
use mainstay_journal::state::StateReader;
use mainstay_model::entry::{Fact, JobSpec};
use mainstay_model::id::Attempt;
use mainstay_model::observation::{HostsEvent, LEADS_HERE};
use mainstay_model::policy::HAND_BACK_EXIT;
use mainstay_model::time::{Mono, Span, Stamp};
use mainstay_recovery::job::Job;
use mainstay_sys::clock;
use tokio::sync::mpsc;

use crate::group::plan::{StoreKind, span};
use crate::group::rendezvous::{FIRST_RECORD, Gathered};
use crate::group::store::{Elected, FromStore, RecordWriter, exit_of};
use crate::group::streams::listen::FromHost;
use crate::group::{Act, Group, Remote, Role};
use crate::ranks::RankSpec;
use crate::run::POLL_INTERVAL;

#[derive(Debug)]
pub(crate) struct Leading {
    pub(crate) lead: Lead,
    /// The channels to followers and spares.
    senders: BTreeMap<Connection, mpsc::Sender<Down>>,
    /// Where it writes; none until the store records that this launcher leads.
    pub(crate) record_writer: Option<RecordWriter>,
    /// What was found of the links between the hosts, until the journal has it.
    pub(crate) links: Vec<Fact>,
}

impl Leading {
    pub(crate) fn alone(job: Job, rank_spec: &RankSpec) -> Leading {
        let host = nix::unistd::gethostname().unwrap_or_default();
        let member = Member {
            host: host.to_string_lossy().into_owned(),
            ranks: rank_spec.settings.local_world_size,
            address: rank_spec.master_addr.clone(),
            leads: true,
            ..Member::default()
        };
        let merge = Merge::new(vec![Seated { member, seat: rank_spec.seat.clone() }], Span(u64::MAX));
        let lead = Lead::new(clock::mono(), job, merge, LeaderSettings::default());
        Leading { lead, senders: BTreeMap::new(), record_writer: None, links: Vec::new() }
    }

    pub(super) fn gathered(
        job: Job,
        gathered: Gathered,
        remote: &Remote,
        names: (String, String),
    ) -> Leading {
        let Gathered { round, me, connections, join, spares, record_writer, links } = gathered;
        let merge = Merge::new(round, remote.plan.join_timeout);
        let mut leading = Leading::new(job, merge, me, join, names, remote, record_writer);
        let mut followers = Vec::new();
        for (launcher, connection, to) in connections {
            leading.senders.insert(connection, to);
            followers.push((launcher, connection));
        }
        let mut waiting = Vec::new();
        for (member, connection, to) in spares {
            leading.senders.insert(connection, to);
            waiting.push((member, connection));
        }
        leading.lead.gathered(&followers, waiting);
        leading.links = links;
        leading
    }

    /// A leader without connected followers.
    fn new(
        job: Job,
        merge: Merge,
        seat: u32,
        leader: Join,
        names: (String, String),
        remote: &Remote,
        record_writer: RecordWriter,
    ) -> Leading {
        let plan = &remote.plan;
        let by = LeaderSettings {
            seat,
            launcher: remote.store_session.launcher.clone(),
            names,
            expected: Expected { leader, mixed: plan.mixed },
            lease: plan.lease(),
            looks_every: span(POLL_INTERVAL),
            epoch: record_writer.epoch,
            newest_record: FIRST_RECORD,
            has_store: true,
        };
        let lead = Lead::new(clock::mono(), job, merge.within(plan.limits(), &by.launcher), by);
        let (senders, links) = (BTreeMap::new(), Vec::new());
        Leading { lead, senders, record_writer: Some(record_writer), links }
    }
}

impl Group {
    /// Carries out an action of the leader, or leaves it to this launcher.
    pub(crate) fn act_as_leader(&mut self, now: Mono, act: lead::Act) {
        let Role::Leads(leading) = &mut self.role else { return };
        match act {
            lead::Act::Send(connection, down) => {
                // A full channel is dropped; the follower connects again.
                if leading.senders.get(&connection).is_some_and(|to| to.try_send(down).is_err()) {
                    leading.senders.remove(&connection);
                    leading.lead.gone(now, connection, "it does not read its messages".to_owned());
                }
            }
            lead::Act::Close(connection) => drop(leading.senders.remove(&connection)),
            lead::Act::Store(number, mut record) => {
                record.at = clock::now();
                if let Some(record_writer) = &leading.record_writer {
                    record_writer.write(number, &record);
                }
            }
            lead::Act::Campaign => {
                leading.record_writer = None;
                if let Some(remote) = &mut self.remote {
                    remote.store_session.campaign();
                }
            }
            lead::Act::StepDown(why) => self.step_down(why),
            lead::Act::Record(at, body) => self.acts.push_back(Act::Record(at, body)),
            lead::Act::Obey(command) => self.acts.push_back(Act::Obey(command)),
            lead::Act::Print(line) => self.print(line),
            lead::Act::Finished(attempt, rank) => self.acts.push_back(Act::Finished(attempt, rank)),
            lead::Act::Seen(attempt, ranks) => self.acts.push_back(Act::Seen(attempt, ranks)),
            lead::Act::Meet { hosts, spares } => self.acts.push_back(Act::Meet { hosts, spares }),
        }
    }

    /// Processes a message of a follower.
    pub(crate) fn follower_sent(&mut self, now: Mono, event: FromHost) {
        let Role::Leads(leading) = &mut self.role else { return };
        match event {
            FromHost::Joined { connection, join, to, .. } => {
                leading.senders.insert(connection, to);
                leading.lead.joined(now, connection, &join);
            }
            FromHost::Gone { connection, why } => {
                leading.senders.remove(&connection);
                leading.lead.gone(now, connection, why);
            }
            FromHost::Received { connection, at, up } => leading.lead.receive(at, connection, up),
        }
    }

    /// Processes news from the store for a leader.
    pub(crate) fn store_sent_to_leader(&mut self, now: Mono, update: FromStore) {
        let (Role::Leads(leading), Some(remote)) = (&mut self.role, &self.remote) else { return };
        let look_who_leads = |leading: &mut Leading| {
            if let Some(leader) = &remote.store_session.leader {
                leading.lead.led_by(&leader.launch, &leader.host, leader.epoch);
            }
        };
        match update {
            FromStore::Written(number) => leading.lead.stored(now, number),
            FromStore::Deposed(epoch) => {
                leading.lead.forgotten(epoch);
                look_who_leads(leading);
            }
            // Dropping a leadership that arrives too late returns it to the store.
            FromStore::Elected(_) if leading.lead.is_deposed() => {}
            FromStore::Elected(elected) => {
                let Elected { record_writer, last, .. } = *elected;
                let epoch = record_writer.epoch;
                leading.record_writer = Some(record_writer);
                leading.lead.elected(epoch, last);
            }
            FromStore::Leader(_) => look_who_leads(leading),
            // Its key is removed next, and then the store reports it.
            FromStore::LeaderMissed => {}
            FromStore::Notice(why) | FromStore::Problem(why) => self.print(why),
            FromStore::Ended(ended) => {
                // Without a token, the proof shows only that its writer has read the store.
                let is_open = matches!(remote.plan.store, StoreKind::Builtin) && remote.plan.token.is_none();
                let exit = exit_of(&ended);
                leading.lead.ended(if is_open && exit == 0 { HAND_BACK_EXIT } else { exit });
            }
        }
    }

    /// Another launcher leads, or this one is cut off: its ranks are stopped, and nothing more is decided here.
    fn step_down(&mut self, why: SteppedDown) {
        let (Role::Leads(leading), Some(remote)) = (&mut self.role, &mut self.remote) else { return };
        leading.record_writer = None;
        remote.store_session.stand_down();
        let why = match why {
            SteppedDown::Ended { exit } => {
                self.print("another launcher has led the job to its end".to_owned());
                return self.acts.push_back(Act::End(exit));
            }
            SteppedDown::Replaced { host, epoch } => format!("host {host} leads the job now (epoch {epoch})"),
            SteppedDown::LedMeanwhile => "another launcher has led the job meanwhile".to_owned(),
            SteppedDown::CutOff => {
                let (endpoint, lease) = (remote.plan.endpoint(), remote.plan.lease);
                format!("neither {endpoint} nor any other host has answered for {lease:?}")
            }
        };
        self.print(why);
        self.print("the ranks of this host are stopped: this launcher no longer leads the job".to_owned());
        self.acts.push_back(Act::StopRanks);
    }

    /// What a follower that takes over goes on with: the state by the record of the lost leader, the job as this host's
    /// journal records it, and how long a start waits for a lost host.
    pub(crate) fn adopt(
        &self,
        record: &Record,
        seat: u32,
        attempt: Attempt,
        now: Stamp,
    ) -> Option<(Adopted, JobSpec, Span)> {
        let (following, remote) = (self.follower()?, self.remote.as_ref()?);
        let adopted =
            Adopted::from_record(record, seat, Member::from_join(&following.join.borrow()), attempt, now);
        Some((adopted, following.spec.clone(), remote.plan.join_timeout))
    }

    /// Leads the job from now on, in place of the lost leader: by its record, and by what hosts report again.
    pub(crate) fn take_over(
        &mut self,
        now: Mono,
        adopted: &Adopted,
        (job, merge): (Job, Merge),
        (record, record_writer): (&Record, RecordWriter),
        reader: &StateReader,
    ) {
        let Some(remote) = &self.remote else { return };
        let Role::Follows(following) = std::mem::replace(&mut self.role, Role::Gone) else { return };
        let (epoch, me, join, follow) =
            (record_writer.epoch, adopted.me, following.join.borrow().clone(), following.follow);
        let names = (record.job.clone(), record.launch.clone());
        let mut leading = Leading::new(job, merge, me, join, names, remote, record_writer);
        let entries = reader.entries_after(follow.since(), usize::MAX);
        let entries = entries.map(|read| read.entries).unwrap_or_default();
        let predecessor = Predecessor::new(follow.leader().launcher.clone(), &entries, reader.newest());
        leading.lead.replaces(predecessor);
        let host = adopted.lost.as_ref().map(|seated| seated.member.host.clone()).unwrap_or_default();
        leading.lead.begin_with(now, Vec::new());
        leading.lead.fact(now, leader_replaced(&host, me, epoch));
        leading.lead.continue_from(now, adopted, record.ended, follow.into_log());
        self.role = Role::Leads(Box::new(leading));
        self.print(format!("host {host}, which led the job, is lost: this host leads now (epoch {epoch})"));
    }
}

fn leader_replaced(host: &str, seat: u32, epoch: u64) -> Fact {
    let detail = format!("host {host} is lost; node rank {seat} leads the job now (epoch {epoch})");
    let values = [(LEADS_HERE, true.to_string()), ("epoch", epoch.to_string())];
    Fact::Observed(HostsEvent::LeaderReplaced.observed(detail, &values))
}
