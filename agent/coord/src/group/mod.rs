//! The group of a job's launchers: who is there, who leads, what the leader published.
//!
//! Members and the leader go with their lease. Every write of a leader compares the revision of its own key, so that a
//! leader that was only slow cannot write over its successor.

mod lead;
mod member;
pub mod values;
mod watch;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub use lead::Leadership;
pub use member::{MemberState, Membership};
pub use watch::{Gone, GroupEvent, GroupWatch};

use crate::client::{Client, KeyValue, LeaseId, Txn};
use crate::error::CoordError;
use values::{Ended, Leader, Member, Round, StoredRecord};

/// Where all keys are. Part of the contract: it changes only with a protocol that older programs cannot join.
pub const ROOT: &str = "/mainstay/v1/jobs/";

/// The name of a job: what its keys start with.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(String);

impl FromStr for JobId {
    type Err = CoordError;

    fn from_str(text: &str) -> Result<JobId, CoordError> {
        check_name("job id", text)?;
        Ok(JobId(text.to_owned()))
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn check_name(what: &str, text: &str) -> Result<(), CoordError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if !text.is_empty() && text.len() <= 128 && text.chars().all(allowed) {
        return Ok(());
    }
    Err(CoordError::Setting {
        what: format!("{what} {text:?}"),
        why: "use 1 to 128 letters, digits, '.', '_' and '-'".to_owned(),
    })
}

/// How long things are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupOptions {
    /// A launcher that is silent for so long is gone. At least two seconds; etcd gives no less.
    pub member_ttl: Duration,
    /// What a job leaves behind that lost all its launchers is removed after this.
    pub retention: Duration,
    /// The end of a job is known for so long.
    pub farewell: Duration,
}

impl Default for GroupOptions {
    fn default() -> GroupOptions {
        GroupOptions {
            member_ttl: Duration::from_secs(10),
            retention: Duration::from_secs(24 * 3600),
            farewell: Duration::from_secs(600),
        }
    }
}

/// The keys of one job. Clones share the highest epoch that was seen.
#[derive(Clone, Debug)]
pub struct Group {
    client: Client,
    job: JobId,
    options: GroupOptions,
    highest_epoch: Arc<AtomicU64>,
}

/// All that the store has of a job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GroupState {
    /// The revision that it was read at, or of the last event.
    pub revision: i64,
    /// Members by launch.
    pub members: BTreeMap<String, Member>,
    /// Who leads.
    pub leader: Option<Leader>,
    /// What the last leader left.
    pub record: Option<StoredRecord>,
    /// The newest round.
    pub round: Option<Round>,
    /// Whether the job has ended.
    pub ended: Option<Ended>,
    /// Keys that this program cannot read, with the reason; they count as not there.
    pub unreadable: BTreeMap<String, String>,
}

/// One of a job's keys.
pub(crate) enum Key<'a> {
    Member(&'a str),
    Leader,
    Record,
    Round,
    Ended,
    /// Not for the state: the secret, and what newer versions write.
    Other,
}

impl Group {
    /// The group of a job; nothing is asked yet.
    #[must_use]
    pub fn new(client: Client, job: JobId, options: GroupOptions) -> Group {
        Group { client, job, options, highest_epoch: Arc::new(AtomicU64::new(0)) }
    }

    /// The client that it asks.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The job.
    #[must_use]
    pub fn job(&self) -> &JobId {
        &self.job
    }

    /// The highest epoch that was ever seen here.
    #[must_use]
    pub fn highest_epoch(&self) -> u64 {
        self.highest_epoch.load(Ordering::Relaxed)
    }

    /// Epochs that are made here are greater than this one: what a journal remembers of a store that was wiped.
    pub fn at_least(&self, epoch: u64) {
        self.highest_epoch.fetch_max(epoch, Ordering::Relaxed);
    }

    /// All that there is now.
    ///
    /// # Errors
    /// No endpoint answered, or this client is refused.
    pub async fn state(&self) -> Result<GroupState, CoordError> {
        let listing = self.client.list(&self.prefix()).await?;
        let mut state = GroupState { revision: listing.revision, ..GroupState::default() };
        for item in &listing.items {
            if let Err(why) = self.take(&mut state, item) {
                state.unreadable.insert(item.key.clone(), why);
            }
        }
        Ok(state)
    }

    /// The job's own secret: 64 hexadecimal digits, made by the first that asks, the same for all.
    ///
    /// # Errors
    /// No endpoint answered, or this client is refused.
    pub async fn secret(&self) -> Result<String, CoordError> {
        let key = self.key("secret");
        if let Some(found) = self.client.get(&key).await? {
            return secret_of(found);
        }
        let mut made = String::new();
        for _ in 0..4 {
            made.push_str(&format!("{:016x}", crate::server::log::random()?));
        }
        // Until a leader takes it under its own; without one it goes by itself.
        let lease = self.client.lease(self.options.retention).await?;
        let txn = Txn::new().if_absent(&key).then_put(&key, made.as_bytes(), Some(lease.id()));
        match self.client.txn(txn).await {
            Ok(reply) if reply.succeeded => return Ok(made),
            Ok(_) => {}
            Err(error) if error.is_unsure() => {}
            Err(error) => return Err(error),
        }
        let found = self.client.get(&key).await?;
        let gone = || CoordError::Unreadable { key, why: "it was removed at once".to_owned() };
        secret_of(found.ok_or_else(gone)?)
    }

    /// Removes the note that the job has ended, so that another one of the same name can start.
    ///
    /// # Errors
    /// No endpoint answered, or this client is refused.
    pub async fn forget_end(&self) -> Result<(), CoordError> {
        self.client.delete(&self.key("ended")).await.map(|_| ())
    }

    /// Removes the key of a leader that is known to be dead, so that another is elected before its lease ends. Whoever
    /// leads by then is left alone; a leader that lives after all learns of it as of the end of its lease.
    ///
    /// # Errors
    /// No endpoint answered, or this client is refused.
    pub async fn depose(&self, leader: &Leader) -> Result<(), CoordError> {
        let key = self.key("leader");
        let txn = Txn::new().if_mod_revision(&key, leader.mod_revision).then_delete(&key);
        self.client.txn(txn).await.map(|_| ())
    }

    pub(crate) fn prefix(&self) -> String {
        format!("{ROOT}{}/", self.job)
    }

    pub(crate) fn key(&self, name: &str) -> String {
        format!("{ROOT}{}/{name}", self.job)
    }

    pub(crate) fn member_key(&self, launch: &str) -> String {
        format!("{ROOT}{}/members/{launch}", self.job)
    }

    pub(crate) fn kind_of<'a>(&self, key: &'a str) -> Key<'a> {
        match key.strip_prefix(self.prefix().as_str()) {
            Some("leader") => Key::Leader,
            Some("record") => Key::Record,
            Some("round") => Key::Round,
            Some("ended") => Key::Ended,
            Some(rest) => rest.strip_prefix("members/").map_or(Key::Other, Key::Member),
            None => Key::Other,
        }
    }

    /// Reads a key into the state.
    pub(crate) fn take(&self, state: &mut GroupState, item: &KeyValue) -> Result<(), String> {
        match self.kind_of(&item.key) {
            Key::Member(launch) => {
                let member: Member = values::read(&item.value)?;
                if member.launch != launch {
                    return Err(format!("it says that it is of launch {:?}", member.launch));
                }
                state.members.insert(launch.to_owned(), member);
            }
            Key::Leader => state.leader = Some(self.leader_of(item)?),
            Key::Record => {
                let record = StoredRecord::of(&item.value)?;
                self.at_least(record.epoch);
                state.record = Some(record);
            }
            Key::Round => {
                let round: Round = values::read(&item.value)?;
                self.at_least(round.epoch);
                state.round = Some(round);
            }
            Key::Ended => state.ended = Some(values::read(&item.value)?),
            Key::Other => {}
        }
        Ok(())
    }

    pub(crate) fn leader_of(&self, item: &KeyValue) -> Result<Leader, String> {
        let mut leader: Leader = values::read(&item.value)?;
        leader.mod_revision = item.mod_revision;
        self.at_least(leader.epoch);
        Ok(leader)
    }

    pub(crate) fn encoded<T: serde::Serialize>(
        &self,
        name: &str,
        value: &T,
        largest: usize,
    ) -> Result<Vec<u8>, CoordError> {
        values::write(value, largest).map_err(|why| CoordError::Setting { what: self.key(name), why })
    }

    /// A lease that no one keeps: what is under it goes after this time.
    pub(crate) async fn expiring(&self, after: Duration) -> Result<LeaseId, CoordError> {
        Ok(self.client.lease(after).await?.id())
    }
}

fn secret_of(found: KeyValue) -> Result<String, CoordError> {
    let text = String::from_utf8(found.value).ok();
    let fits = |text: &String| text.len() == 64 && text.chars().all(|c| c.is_ascii_hexdigit());
    text.filter(fits).ok_or_else(|| CoordError::Unreadable {
        key: found.key,
        why: "it must be 64 hexadecimal digits".to_owned(),
    })
}
