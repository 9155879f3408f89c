//! Restores a store from its records, and creates the snapshot record. Records come from a file: no record may cause
//! a panic.

use super::history::revision_of;
use super::{Limits, Store};
use crate::etcd::log::{Change, Record, Snapshot, record};
use crate::etcd::mvccpb::event::EventType;

/// A record does not match the ones before it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unfit(pub String);

impl Store {
    /// The whole store in one record.
    #[must_use]
    pub fn snapshot(&self) -> Record {
        let snapshot = Snapshot {
            cluster: self.cluster,
            revision: self.revision,
            compacted: self.compacted,
            keys: self.keys.values().cloned().collect(),
            leases: self.leases_granted(),
            history: self.history.iter().cloned().collect(),
        };
        Record { kind: Some(record::Kind::Snapshot(snapshot)) }
    }

    /// Restores a store from its snapshot. Leases have their full time again from `now` on.
    ///
    /// # Errors
    /// The record is no snapshot, or contradicts itself.
    pub fn restore(record: Record, limits: Limits, now: u64) -> Result<Store, Unfit> {
        let Some(record::Kind::Snapshot(snapshot)) = record.kind else {
            return Err(Unfit("the first record is not a snapshot".to_owned()));
        };
        let mut store = Store::new(snapshot.cluster, limits);
        // No store gets near the largest revision; a record with such a number was not written by one.
        let revisions = 1..i64::MAX / 2;
        if !revisions.contains(&snapshot.revision) || !(0..=snapshot.revision).contains(&snapshot.compacted) {
            return Err(Unfit("the snapshot's revisions contradict each other".to_owned()));
        }
        (store.revision, store.compacted) = (snapshot.revision, snapshot.compacted);
        for granted in &snapshot.leases {
            store.add_lease(granted, now);
        }
        for item in snapshot.keys {
            if item.mod_revision > store.revision || item.key.is_empty() {
                return Err(Unfit("a key of the snapshot is newer than the snapshot".to_owned()));
            }
            store.set(item, EventType::Put);
        }
        store.open.clear();
        let mut last = store.compacted;
        for event in &snapshot.history {
            let revision = revision_of(event);
            if revision < last || revision > store.revision {
                return Err(Unfit("the snapshot's history is out of order".to_owned()));
            }
            last = revision;
        }
        store.remember(snapshot.history);
        Ok(store)
    }

    /// Applies a record.
    ///
    /// # Errors
    /// It does not follow the current state.
    pub fn replay(&mut self, record: Record, now: u64) -> Result<(), Unfit> {
        match record.kind {
            Some(record::Kind::Change(change)) => self.replay_change(change)?,
            Some(record::Kind::Granted(granted)) => self.add_lease(&granted, now),
            Some(record::Kind::Ended(id)) => {
                self.leases.remove(&id);
            }
            Some(record::Kind::Compacted(revision)) if revision <= self.revision => {
                self.forget_before(revision);
            }
            Some(record::Kind::Compacted(_)) => {
                return Err(Unfit("a compaction of a revision that does not exist".to_owned()));
            }
            Some(record::Kind::Snapshot(_)) => return Err(Unfit("a second snapshot".to_owned())),
            // A record of a newer version, unknown to this one.
            None => return Err(Unfit("a record of an unknown kind: written by a newer version".to_owned())),
        }
        Ok(())
    }

    fn replay_change(&mut self, change: Change) -> Result<(), Unfit> {
        if change.revision != self.revision + 1 || change.events.is_empty() {
            let wanted = self.revision + 1;
            return Err(Unfit(format!("revision {} where {wanted} was expected", change.revision)));
        }
        let events = change.events.into_iter().map(|event| {
            let kind = EventType::try_from(event.r#type).ok()?;
            let now = event.kv.filter(|now| now.mod_revision == change.revision && !now.key.is_empty())?;
            Some((now, kind))
        });
        let events: Option<Vec<_>> = events.collect();
        let events = events.ok_or_else(|| Unfit("an event of another revision".to_owned()))?;
        for (now, kind) in events {
            self.set(now, kind);
        }
        let events = std::mem::take(&mut self.open);
        self.revision = change.revision;
        self.remember(events);
        Ok(())
    }
}
