//! A watch on all keys of a job, as typed events.

use std::collections::VecDeque;

use super::values::{JobEndedNote, Leader, Member, Round, StoredRecord};
use super::{Group, GroupState, Key};
use crate::client::{KeyValue, Watch, WatchEvent};
use crate::error::CoordError;

/// An event in a group.
#[allow(clippy::large_enum_variant, reason = "some events a minute, each looked at once")]
#[derive(Clone, Debug, PartialEq)]
pub enum GroupEvent {
    /// The full state: the first event, and again if events were missed. It replaces all earlier state.
    Snapshot(GroupState),
    /// A launcher joined.
    Joined(Member),
    /// A member changed its entry.
    Changed {
        /// The member now.
        now: Member,
        /// The member before.
        before: Member,
    },
    /// A member is gone.
    Left {
        /// Its last state.
        member: Member,
        /// Whether it left on purpose.
        why: Gone,
    },
    /// A launcher was elected leader.
    Elected(Leader),
    /// The leader is gone, and there is no other yet.
    LeaderGone(Leader),
    /// The leader wrote the job's record.
    RecordChanged(StoredRecord),
    /// The leader published a round.
    RoundPublished(Round),
    /// The job has ended.
    Ended(JobEndedNote),
    /// A key has a value that this program cannot read. It counts as missing.
    Unreadable {
        /// The key.
        key: String,
        /// What is wrong with it.
        why: String,
    },
}

/// Why a member is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gone {
    /// It said goodbye, with this reason.
    Goodbye(String),
    /// Its lease ended: its launcher or host failed, or lost the connection to the store.
    LeaseEnded,
}

/// A watch on a job. Dropping it ends it.
#[derive(Debug)]
pub struct GroupWatch {
    group: Group,
    watch: Watch,
    state: GroupState,
    waiting: VecDeque<GroupEvent>,
}

impl Group {
    /// Watches all keys of the job; the first event is a snapshot. Must be called within a runtime.
    #[must_use]
    pub fn watch(&self) -> GroupWatch {
        let watch = self.client.watch_listed(&self.prefix());
        GroupWatch { group: self.clone(), watch, state: GroupState::default(), waiting: VecDeque::new() }
    }
}

impl GroupWatch {
    /// The state after the last returned event and the queued ones.
    #[must_use]
    pub fn state(&self) -> &GroupState {
        &self.state
    }

    /// The next event. May be dropped and called again: no event is lost.
    ///
    /// # Errors
    /// This client is refused. Waits for a store that does not answer.
    pub async fn next(&mut self) -> Result<GroupEvent, CoordError> {
        loop {
            if let Some(event) = self.waiting.pop_front() {
                return Ok(event);
            }
            match self.watch.next().await? {
                WatchEvent::Put { now, .. } => self.put(&now),
                WatchEvent::Deleted { key, revision, .. } => self.deleted(&key, revision),
                WatchEvent::Listed { revision, items, .. } => self.listed(revision, &items),
            }
        }
    }

    fn listed(&mut self, revision: i64, items: &[KeyValue]) {
        self.state = GroupState { revision, ..GroupState::default() };
        for item in items {
            if let Err(why) = self.group.take(&mut self.state, item) {
                self.state.unreadable.insert(item.key.clone(), why);
            }
        }
        self.waiting.push_back(GroupEvent::Snapshot(self.state.clone()));
    }

    fn put(&mut self, item: &KeyValue) {
        self.state.revision = item.mod_revision;
        let member_before = match self.group.kind_of(&item.key) {
            Key::Member(launch) => self.state.members.get(launch).cloned(),
            _ => None,
        };
        self.state.unreadable.remove(&item.key);
        if let Err(why) = self.group.take(&mut self.state, item) {
            self.state.unreadable.insert(item.key.clone(), why.clone());
            self.waiting.push_back(GroupEvent::Unreadable { key: item.key.clone(), why });
            return;
        }
        let state = &self.state;
        let event = match self.group.kind_of(&item.key) {
            Key::Member(launch) => match (state.members.get(launch).cloned(), member_before) {
                (Some(now), Some(before)) if now != before => Some(GroupEvent::Changed { now, before }),
                (Some(now), None) => Some(GroupEvent::Joined(now)),
                _ => None,
            },
            Key::Leader => state.leader.clone().map(GroupEvent::Elected),
            Key::Record => state.record.clone().map(GroupEvent::RecordChanged),
            Key::Round => state.round.clone().map(GroupEvent::RoundPublished),
            Key::Ended => state.ended.clone().map(GroupEvent::Ended),
            Key::Other => None,
        };
        self.waiting.extend(event);
    }

    fn deleted(&mut self, key: &str, revision: i64) {
        self.state.revision = revision;
        self.state.unreadable.remove(key);
        match self.group.kind_of(key) {
            Key::Member(launch) => {
                let Some(member) = self.state.members.remove(launch) else { return };
                let why = member.leaving.clone().map_or(Gone::LeaseEnded, Gone::Goodbye);
                self.waiting.push_back(GroupEvent::Left { member, why });
            }
            Key::Leader => {
                self.waiting.extend(self.state.leader.take().map(GroupEvent::LeaderGone));
            }
            Key::Record => self.state.record = None,
            Key::Round => self.state.round = None,
            Key::Ended => self.state.ended = None,
            Key::Other => {}
        }
    }
}
