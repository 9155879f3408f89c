//! Shares of users in a store.
//!
//! One user may fill it. As soon as another user needs room, each has an equal part: the oldest replicas of the user with more are
//! deleted first. Runs of the agents themselves count as one more user.

use std::collections::{BTreeMap, BTreeSet};

use mainstay_checkpoint::inventory::{Shard, StepKey};
use mainstay_checkpoint::owner::owner;

use super::{Inner, Replica, Store, StoreError};

/// A user of a store by uid; none for the agents' own runs.
type Owner = Option<u32>;

impl Store {
    /// Makes room for a shard: deletes `deletable` steps first, then what other users have beyond their part. Also deletes spare files
    /// that are in the way.
    pub(super) fn make_room(
        &self,
        inner: &mut Inner,
        shard: &Shard,
        deletable: &[StepKey],
    ) -> Result<(), StoreError> {
        let (wanted, quota) = (shard.bytes, self.quota);
        let fits = |inner: &Inner| inner.used().saturating_add(wanted) <= quota;
        if fits(inner) {
            return Ok(());
        }
        for step in deletable {
            let of_step = inner.replicas.values().filter(|replica| replica.sealed.shard.of == *step);
            let roots: Vec<String> = of_step.map(|replica| replica.sealed.shard.root.clone()).collect();
            roots.iter().for_each(|root| self.drop_replica(inner, root));
        }
        let user = owner_of(shard);
        let has = inner.used_by_users();
        let users = has.keys().chain([&user]).collect::<BTreeSet<_>>().len() as u64;
        let part = quota / users.max(1);
        let of_user = has.get(&user).copied().unwrap_or(0);
        if of_user.saturating_add(wanted) <= part {
            while !fits(inner) {
                let Some(root) = inner.oldest_beyond(part) else { break };
                self.drop_replica(inner, &root);
            }
        }
        // A spare of the right size is used; all others are deleted if necessary.
        while inner.used().saturating_add(inner.spares.bytes()).saturating_add(wanted) > quota {
            if !inner.spares.give_up_one() {
                break;
            }
        }
        let free = quota.saturating_sub(inner.used());
        match fits(inner) {
            true => Ok(()),
            false if users > 1 => Err(StoreError::Part { wanted, free, quota, of_user, part, users }),
            false => Err(StoreError::Full { wanted, free, quota }),
        }
    }
}

impl Inner {
    /// Bytes of replicas and uploads. Spares do not count: they are deleted when room is needed.
    pub(super) fn used(&self) -> u64 {
        self.shards().map(|shard| shard.bytes).fold(self.lent, u64::saturating_add)
    }

    fn shards(&self) -> impl Iterator<Item = &Shard> {
        let held = self.replicas.values().map(|replica| &replica.sealed.shard);
        held.chain(self.uploads.values().map(|upload| &upload.sealed.shard))
    }

    /// Same as [`Inner::used`], by user and without lent memory.
    fn used_by_users(&self) -> BTreeMap<Owner, u64> {
        let mut has: BTreeMap<Owner, u64> = BTreeMap::new();
        for shard in self.shards() {
            let bytes = has.entry(owner_of(shard)).or_default();
            *bytes = bytes.saturating_add(shard.bytes);
        }
        has
    }

    /// The oldest replica of the user with the most bytes, if that is more than a part.
    fn oldest_beyond(&self, part: u64) -> Option<String> {
        let has = self.used_by_users();
        let (most, bytes) = has.into_iter().max_by_key(|(_, bytes)| *bytes)?;
        if bytes <= part {
            return None;
        }
        let of_user = self.replicas.values().filter(|replica| owner_of(&replica.sealed.shard) == most);
        // All replicas that were found at a start count as equally old.
        let age = |replica: &&Replica| (replica.since, replica.sealed.shard.of.step);
        of_user.min_by_key(age).map(|replica| replica.sealed.shard.root.clone())
    }
}

fn owner_of(shard: &Shard) -> Owner {
    owner(shard.of.run_id())
}
