//! A store from its records, and the record that holds all of a store. Records come from a file: none may panic.

use super::history::revision_of;
use super::{Limits, Store};
use crate::etcd::log::{Change, Record, Snapshot, record};
use crate::etcd::mvccpb::event::EventType;

/// A record does not fit to those before it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unfit(pub String);

impl Store {
    /// All of the store in one record.
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

    /// A store from its snapshot. Leases have their whole time again from `now` on.
    ///
    /// # Errors
    /// The record is none, or contradicts itself.
    pub fn restore(record: Record, limits: Limits, now: u64) -> Result<Store, Unfit> {
        let Some(record::Kind::Snapshot(snapshot)) = record.kind else {
            return Err(Unfit("the first record is no snapshot".to_owned()));
        };
        let mut store = Store::new(snapshot.cluster, limits);
        if snapshot.revision < 1 || snapshot.compacted > snapshot.revision || snapshot.compacted < 0 {
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

    /// Does again what a record says.
    ///
    /// # Errors
    /// It does not follow what is there.
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
            // What a newer version wrote, and this one does not know.
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
