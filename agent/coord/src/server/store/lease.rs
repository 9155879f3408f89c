//! Leases: keys that are removed when no client keeps them alive.

use std::collections::BTreeSet;

use super::{LEASE_EXISTS, NO_LEASE, Refusal, Store, TOO_MANY_LEASES, TTL_TOO_LARGE};
use crate::etcd::etcdserverpb as pb;
use crate::etcd::log::{LeaseGranted, Record, record};
use crate::etcd::mvccpb::KeyValue;
use crate::etcd::mvccpb::event::EventType;

/// The longest lease, in seconds; etcd's limit.
const MAX_TTL_SECONDS: i64 = 9_000_000_000;

#[derive(Clone, Debug)]
pub(super) struct LeaseEntry {
    ttl_seconds: i64,
    /// End of the lease in the caller's milliseconds.
    ends: u64,
    keys: BTreeSet<Vec<u8>>,
}

impl LeaseEntry {
    fn renew(&mut self, now: u64) {
        self.ends = now.saturating_add(self.ttl_seconds.unsigned_abs().saturating_mul(1000));
    }
}

impl Store {
    /// Grants a lease.
    ///
    /// # Errors
    /// Its number is taken, it is too long, or there are too many.
    pub fn grant(
        &mut self,
        question: &pb::LeaseGrantRequest,
        now: u64,
    ) -> Result<pb::LeaseGrantResponse, Refusal> {
        if question.ttl > MAX_TTL_SECONDS {
            return Err(TTL_TOO_LARGE);
        }
        if question.id != 0 && self.leases.contains_key(&question.id) {
            return Err(LEASE_EXISTS);
        }
        if self.leases.len() >= self.limits.leases {
            return Err(TOO_MANY_LEASES);
        }
        let id = if question.id == 0 { self.unused_lease() } else { question.id };
        let granted = LeaseGranted { id, ttl_seconds: question.ttl.max(1) };
        self.add_lease(&granted, now);
        self.records.push(Record { kind: Some(record::Kind::Granted(granted)) });
        let header = Some(self.header());
        Ok(pb::LeaseGrantResponse { header, id, ttl: granted.ttl_seconds, error: String::new() })
    }

    pub(super) fn add_lease(&mut self, granted: &LeaseGranted, now: u64) {
        let mut entry =
            LeaseEntry { ttl_seconds: granted.ttl_seconds.max(1), ends: 0, keys: BTreeSet::new() };
        entry.renew(now);
        self.leases.insert(granted.id, entry);
        // A number is not reused soon: the holder of an old one must find it gone.
        self.next_lease = self.next_lease.max(granted.id.saturating_add(1));
    }

    fn unused_lease(&self) -> i64 {
        let mut id = self.next_lease.max(1);
        while self.leases.contains_key(&id) {
            id = id.checked_add(1).unwrap_or(1);
        }
        id
    }

    /// Ends a lease and removes its keys in one revision.
    ///
    /// # Errors
    /// There is no such lease.
    pub fn revoke(&mut self, question: &pb::LeaseRevokeRequest) -> Result<pb::LeaseRevokeResponse, Refusal> {
        if !self.end_lease(question.id) {
            return Err(NO_LEASE);
        }
        Ok(pb::LeaseRevokeResponse { header: Some(self.header()) })
    }

    fn end_lease(&mut self, id: i64) -> bool {
        let Some(entry) = self.leases.remove(&id) else { return false };
        for key in entry.keys {
            let mod_revision = self.revision + 1;
            self.set(KeyValue { key, mod_revision, ..KeyValue::default() }, EventType::Delete);
        }
        self.commit();
        self.records.push(Record { kind: Some(record::Kind::Ended(id)) });
        true
    }

    /// Renews a lease; the TTL in the answer is 0 if there is none.
    pub fn keep_alive(&mut self, id: i64, now: u64) -> pb::LeaseKeepAliveResponse {
        let header = Some(self.header());
        let ttl = self.leases.get_mut(&id).map_or(0, |entry| {
            entry.renew(now);
            entry.ttl_seconds
        });
        pb::LeaseKeepAliveResponse { header, id, ttl }
    }

    /// The remaining time of a lease, in seconds; -1 if there is none.
    #[must_use]
    pub fn time_to_live(
        &self,
        question: &pb::LeaseTimeToLiveRequest,
        now: u64,
    ) -> pb::LeaseTimeToLiveResponse {
        let header = Some(self.header());
        let id = question.id;
        let Some(entry) = self.leases.get(&id) else {
            return pb::LeaseTimeToLiveResponse { header, id, ttl: -1, ..Default::default() };
        };
        pb::LeaseTimeToLiveResponse {
            header,
            id,
            ttl: i64::try_from(entry.ends.saturating_sub(now) / 1000).unwrap_or(i64::MAX),
            granted_ttl: entry.ttl_seconds,
            keys: if question.keys { entry.keys.iter().cloned().collect() } else { Vec::new() },
        }
    }

    /// Ends the expired leases; returns their number.
    pub fn expire(&mut self, now: u64) -> usize {
        let over: Vec<i64> =
            self.leases.iter().filter(|(_, entry)| entry.ends <= now).map(|(id, _)| *id).collect();
        over.iter().filter(|id| self.end_lease(**id)).count()
    }

    /// The time at which the next lease ends if it is not renewed.
    #[must_use]
    pub fn next_expiry(&self) -> Option<u64> {
        self.leases.values().map(|entry| entry.ends).min()
    }

    /// Extends all leases: the store itself was stalled and could not answer.
    pub fn prolong(&mut self, milliseconds: u64) {
        for entry in self.leases.values_mut() {
            entry.ends = entry.ends.saturating_add(milliseconds);
        }
    }

    pub(super) fn leases_granted(&self) -> Vec<LeaseGranted> {
        let granted =
            |(id, entry): (&i64, &LeaseEntry)| LeaseGranted { id: *id, ttl_seconds: entry.ttl_seconds };
        self.leases.iter().map(granted).collect()
    }

    pub(super) fn attach(&mut self, lease: i64, key: &[u8]) {
        if let Some(entry) = self.leases.get_mut(&lease) {
            entry.keys.insert(key.to_vec());
        }
    }

    pub(super) fn detach(&mut self, lease: i64, key: &[u8]) {
        if let Some(entry) = self.leases.get_mut(&lease) {
            entry.keys.remove(key);
        }
    }
}
