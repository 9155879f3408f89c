//! The coordination store and its clients, as in `mainstay-coord`: a leader's key under a lease, the record with the
//! epoch of the last elected leader, and the note of the end. A request or its answer may be lost; it is then repeated.

use std::collections::BTreeMap;
use std::sync::Arc;

use mainstay_group::electors::{Electors, Missed};
use mainstay_group::record::Record;
use mainstay_model::time::Span;

use super::network::STORE;
use super::{Happening, LEASE, MS, SECOND, Time, World};

/// The interval between requests of a launcher, and the shorter one while the store does not answer.
const ASKED_EVERY: Time = SECOND;
const PAUSE: Time = 300 * MS;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderKey {
    pub launcher: usize,
    pub epoch: u64,
}

#[derive(Default)]
pub struct Store {
    pub away: bool,
    pub leader: Option<LeaderKey>,
    /// When the leader's lease ends.
    lease_ends: Time,
    /// The epoch of the last elected leader, and the record that leaders wrote.
    pub record: Option<(u64, Option<Arc<Record>>)>,
    pub ended: Option<i32>,
    /// The votes of the members, and when each last renewed its lease.
    pub electors: Electors,
    kept: BTreeMap<String, Time>,
    /// Counts the requests.
    pub revision: u64,
}

/// A launcher's knowledge of the store.
#[derive(Default)]
pub struct Client {
    /// Whether it has a vote on the leader.
    pub has_vote: bool,
    /// The highest epoch that it has seen.
    pub highest_epoch: u64,
    pub leader: Option<LeaderKey>,
    /// The record as last read.
    pub record: Option<Arc<Record>>,
    /// When the newest answered request was sent.
    answered: Time,
    /// When its newest request arrives.
    last_arrives: Time,
    /// The newest revision of the store that it knows.
    revision: u64,
    pub lease_lost: bool,
    pub campaigns: bool,
    /// The epoch in which it leads, if it does.
    pub leads_in: Option<u64>,
    /// The newest record that is not yet stored.
    pub unwritten: Option<(u64, Arc<Record>)>,
    /// The exit status to write at the end of the job.
    pub ends: Option<i32>,
}

#[derive(Clone)]
pub enum Ask {
    Look,
    Elect {
        epoch: u64,
        seen: Option<u64>,
    },
    Write {
        number: u64,
        epoch: u64,
        record: Arc<Record>,
    },
    Resign {
        epoch: u64,
    },
    Remove {
        leader: LeaderKey,
    },
    /// The vote of a member: whether it has a seat, and the leader that it misses.
    Say {
        seated: bool,
        misses: Option<Missed>,
    },
    End {
        epoch: u64,
        exit: i32,
    },
}

#[derive(Clone)]
pub enum Answer {
    Seen {
        leader: Option<LeaderKey>,
        record: Option<(u64, Option<Arc<Record>>)>,
        ended: Option<i32>,
        electors: Electors,
    },
    Elected {
        epoch: u64,
        last: Option<(u64, Option<Arc<Record>>)>,
    },
    Written {
        number: u64,
    },
    Superseded {
        epoch: u64,
    },
    Done,
}

impl World {
    pub fn ask(&mut self, launcher: usize, ask: Ask) {
        // One connection, in order.
        let at = self.after_a_while().max(self.launchers[launcher].client.last_arrives);
        self.launchers[launcher].client.last_arrives = at;
        let asked = self.now;
        self.at(at, Happening::Asked { launcher, asked, ask });
    }

    /// A request arrives at the store.
    pub fn asked(&mut self, launcher: usize, asked: Time, ask: Ask) {
        let machine = self.launchers[launcher].machine;
        if self.store.away || !self.passes(machine, STORE) || !self.machines[machine].up {
            return;
        }
        self.store.expire(self.now);
        let seated = self.launchers[launcher].seat.is_some();
        if self.store.kept.insert(self.launchers[launcher].name.clone(), self.now).is_none() {
            self.store.electors.set(&self.launchers[launcher].name, seated, None);
        }
        let mut keeps_lease = false;
        self.store.revision += 1;
        let revision = self.store.revision;
        let answer = match ask {
            Ask::Look => {
                keeps_lease = true;
                let Store { leader, record, ended, electors, .. } = &self.store;
                Answer::Seen {
                    leader: leader.clone(),
                    record: record.clone(),
                    ended: *ended,
                    electors: electors.clone(),
                }
            }
            Ask::Elect { epoch, seen } => {
                let last = self.store.record.clone();
                if self.store.leader.is_some()
                    || self.store.ended.is_some()
                    || last.as_ref().map(|last| last.0) != seen
                {
                    Answer::Done
                } else {
                    self.check_epoch(launcher, epoch);
                    self.store.leader = Some(LeaderKey { launcher, epoch });
                    self.store.record = Some((epoch, last.as_ref().and_then(|last| last.1.clone())));
                    keeps_lease = true;
                    Answer::Elected { epoch, last }
                }
            }
            Ask::Write { number, epoch, record } => {
                if self.store.leader == Some(LeaderKey { launcher, epoch }) {
                    if let Some(exit) = record.ended {
                        self.check_end(launcher, exit);
                    }
                    self.store.record = Some((epoch, Some(record)));
                    Answer::Written { number }
                } else {
                    Answer::Superseded { epoch }
                }
            }
            Ask::Resign { epoch } => {
                if self.store.leader == Some(LeaderKey { launcher, epoch }) {
                    self.store.leader = None;
                }
                Answer::Done
            }
            Ask::Remove { leader } => {
                if self.store.leader.as_ref() == Some(&leader) {
                    self.store.leader = None;
                }
                Answer::Done
            }
            Ask::Say { seated, misses } => {
                self.store.electors.set(&self.launchers[launcher].name, seated, misses);
                Answer::Done
            }
            Ask::End { epoch, exit } => {
                if self.store.leader == Some(LeaderKey { launcher, epoch }) {
                    self.check_end(launcher, exit);
                    (self.store.leader, self.store.ended) = (None, Some(exit));
                }
                Answer::Done
            }
        };
        if keeps_lease && self.store.leader.as_ref().is_some_and(|leader| leader.launcher == launcher) {
            self.store.lease_ends = self.now + LEASE;
        }
        if self.passes(STORE, machine) {
            let at = self.after_a_while();
            self.at(at, Happening::Answered { launcher, asked, revision, answer });
        }
    }

    pub fn answered(&mut self, launcher: usize, asked: Time, revision: u64, answer: Answer) {
        let client = &mut self.launchers[launcher].client;
        if client.lease_lost {
            client.lease_lost = false;
        }
        client.answered = client.answered.max(asked);
        let older = revision < client.revision;
        client.revision = client.revision.max(revision);
        match answer {
            Answer::Seen { .. } if older => {}
            Answer::Seen { leader, record, ended, electors } => {
                let epochs = record.iter().map(|record| record.0);
                let highest = epochs.chain(leader.iter().map(|leader| leader.epoch)).max();
                client.highest_epoch = client.highest_epoch.max(highest.unwrap_or_default());
                if let Some((_, Some(record))) = &record {
                    client.record = Some(record.clone());
                }
                let mine = leader.as_ref().is_some_and(|leader| leader.launcher == launcher);
                if let (true, Some(leader)) = (mine && client.leads_in.is_none(), &leader) {
                    // Won in an election whose answer was lost or no longer awaited: resign.
                    let epoch = leader.epoch;
                    return self.ask(launcher, Ask::Resign { epoch });
                }
                if leader.is_none() && client.campaigns && client.leads_in.is_none() && ended.is_none() {
                    let seen = record.as_ref().map(|record| record.0);
                    let epoch = client.highest_epoch.max(seen.unwrap_or_default()) + 1;
                    self.ask(launcher, Ask::Elect { epoch, seen });
                }
                if let Some(epoch) = self.launchers[launcher].client.leads_in
                    && leader != Some(LeaderKey { launcher, epoch })
                {
                    self.forgotten(launcher, epoch);
                }
                if let Some(key) = &leader {
                    let leads = self.launchers[key.launcher].name.clone();
                    let client = &mut self.launchers[launcher];
                    client.client.has_vote = electors.has_vote(&client.name, &leads);
                    if client.client.has_vote && electors.miss(&Missed { launcher: leads, epoch: key.epoch })
                    {
                        self.leader_is_missed(launcher);
                    }
                }
                self.told_of_leader(launcher, leader);
                if let Some(exit) = ended {
                    self.told_of_the_end(launcher, exit);
                }
            }
            Answer::Elected { epoch, last } => {
                client.highest_epoch = client.highest_epoch.max(epoch);
                if !client.campaigns {
                    return self.ask(launcher, Ask::Resign { epoch });
                }
                client.campaigns = false;
                client.leads_in = Some(epoch);
                let record = last.as_ref().and_then(|last| last.1.clone()).or_else(|| client.record.clone());
                self.elected(launcher, epoch, last.map(|last| last.0), record);
            }
            Answer::Written { number } => {
                if client.unwritten.as_ref().is_some_and(|(of, _)| *of == number) {
                    client.unwritten = None;
                }
                self.stored(launcher, number);
            }
            Answer::Superseded { epoch } => {
                if client.leads_in == Some(epoch) {
                    self.forgotten(launcher, epoch);
                }
            }
            Answer::Done => {}
        }
    }

    /// A client checks its lease, and repeats requests without an answer.
    pub fn look_at_store(&mut self, launcher: usize) {
        let now = self.now;
        let client = &mut self.launchers[launcher].client;
        if !client.lease_lost && now.saturating_sub(client.answered) >= LEASE {
            client.lease_lost = true;
            if let Some(epoch) = client.leads_in {
                self.forgotten(launcher, epoch);
            }
        }
        let client = &mut self.launchers[launcher].client;
        if let Some(epoch) = client.leads_in {
            if let Some(exit) = client.ends {
                self.ask(launcher, Ask::End { epoch, exit });
            } else if let Some((number, record)) = client.unwritten.clone() {
                self.ask(launcher, Ask::Write { number, epoch, record });
            }
        }
    }

    pub fn write(&mut self, launcher: usize, number: u64, record: Record) {
        let record = Arc::new(record);
        let client = &mut self.launchers[launcher].client;
        client.unwritten = Some((number, record.clone()));
        if let Some(epoch) = client.leads_in {
            self.ask(launcher, Ask::Write { number, epoch, record });
        }
    }

    pub fn resign(&mut self, launcher: usize) {
        if let Some(epoch) = self.launchers[launcher].client.leads_in.take() {
            self.ask(launcher, Ask::Resign { epoch });
        }
    }

    /// The time for which the store has not answered this launcher; `None` if below 2 s.
    pub fn silent_for(&self, launcher: usize) -> Option<Span> {
        let silent = self.now.saturating_sub(self.launchers[launcher].client.answered);
        (silent >= ASKED_EVERY + SECOND).then_some(Span(silent))
    }

    /// When the launcher sends the next request.
    pub fn next_question(&self) -> Time {
        self.now + if self.store.away { PAUSE } else { ASKED_EVERY }
    }
}

impl Client {
    /// The client has its lease from now on.
    pub fn answered_at(&mut self, now: Time) {
        self.answered = now;
    }
}

impl Store {
    pub fn begun_by(launcher: usize, record: Record) -> Store {
        Store {
            leader: Some(LeaderKey { launcher, epoch: 1 }),
            lease_ends: LEASE,
            record: Some((1, Some(Arc::new(record)))),
            ..Store::default()
        }
    }

    fn expire(&mut self, now: Time) {
        if now >= self.lease_ends {
            self.leader = None;
        }
        let Store { kept, electors, .. } = self;
        kept.retain(|name, at| {
            let keeps = now < *at + LEASE;
            if !keeps {
                electors.remove(name);
            }
            keeps
        });
    }

    /// The store loses all data and keeps running.
    pub fn wipe(&mut self) {
        (self.leader, self.record, self.ended) = (None, None, None);
        (self.electors, self.kept) = (Electors::default(), BTreeMap::new());
    }
}
