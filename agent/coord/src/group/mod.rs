//! The group of a job's launchers: members, leader, and the leader's record and rounds.
//!
//! The keys of members and leader are attached to their lease. Every write of a leader compares the revision of its
//! own key, so that a slow leader cannot overwrite the values of its successor.

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
use values::{JobEndedNote, Leader, Member, Round, StoredRecord};

/// The prefix of all keys. Part of the contract: it changes only with a protocol that older programs cannot join.
pub const ROOT: &str = "/mainstay/v1/jobs/";

/// The name of a job, part of the prefix of its keys.
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

/// Times for which keys are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupOptions {
    /// A launcher that is silent for this time is considered gone. At least two seconds, the minimum of etcd.
    pub member_ttl: Duration,
    /// The keys of a job that lost all its launchers are removed after this time.
    pub retention: Duration,
    /// The note of the end of a job is kept for this time.
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

/// The keys of one job. Clones share the highest epoch seen.
#[derive(Clone, Debug)]
pub struct Group {
    client: Client,
    job: JobId,
    options: GroupOptions,
    highest_epoch: Arc<AtomicU64>,
}

/// The state of a job in the store.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GroupState {
    /// The revision at which it was read, or that of the last event.
    pub revision: i64,
    /// Members by launch.
    pub members: BTreeMap<String, Member>,
    /// The leader.
    pub leader: Option<Leader>,
    /// The record of the last leader.
    pub record: Option<StoredRecord>,
    /// The newest round.
    pub round: Option<Round>,
    /// The note that the job has ended, if it has.
    pub ended: Option<JobEndedNote>,
    /// Keys that this program cannot read, with the reason. They count as missing.
    pub unreadable: BTreeMap<String, String>,
}

/// A key of a job.
pub(crate) enum Key<'a> {
    Member(&'a str),
    Leader,
    Record,
    Round,
    Ended,
    /// Not part of the state: the secret, and keys of newer versions.
    Other,
}

impl Group {
    /// The group of a job. Sends no request.
    #[must_use]
    pub fn new(client: Client, job: JobId, options: GroupOptions) -> Group {
        Group { client, job, options, highest_epoch: Arc::new(AtomicU64::new(0)) }
    }

    /// The client of the store.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The job.
    #[must_use]
    pub fn job(&self) -> &JobId {
        &self.job
    }

    /// The highest epoch seen here.
    #[must_use]
    pub fn highest_epoch(&self) -> u64 {
        self.highest_epoch.load(Ordering::Relaxed)
    }

    /// Makes later epochs greater than this one, such as one that a journal has of a store that was wiped.
    pub fn at_least(&self, epoch: u64) {
        self.highest_epoch.fetch_max(epoch, Ordering::Relaxed);
    }

    /// Reads the current state.
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

    /// The job's secret: 64 hexadecimal digits, generated by the first caller, the same for all.
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
        // A leader moves it to its own lease; without a leader it expires.
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

    /// Removes the note that the job has ended, unless `is_kept` accepts it: the one of an earlier job of the same name,
    /// or one that no launcher of the job wrote. Members and leaders are refused while there is one.
    ///
    /// # Errors
    /// No endpoint answered, or this client is refused.
    pub async fn forget_end(&self, is_kept: impl Fn(&JobEndedNote) -> bool) -> Result<(), CoordError> {
        let key = self.key("ended");
        let Some(found) = self.client.get(&key).await? else { return Ok(()) };
        if values::read(&found.value).is_ok_and(|ended| is_kept(&ended)) {
            return Ok(());
        }
        let txn = Txn::new().if_mod_revision(&key, found.mod_revision).then_delete(&key);
        self.client.txn(txn).await.map(|_| ())
    }

    /// Removes the key of a leader that is known to be dead, so that another is elected before its lease ends. A
    /// newer leader is not affected. A leader that is still alive reads it like the end of its lease.
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

    /// Whether this is the key of the note that the job has ended.
    #[must_use]
    pub fn is_end(&self, key: &str) -> bool {
        matches!(self.kind_of(key), Key::Ended)
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
                let record = StoredRecord::parse_header(&item.value)?;
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

    /// A lease that no one keeps alive: its keys expire after this time.
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
