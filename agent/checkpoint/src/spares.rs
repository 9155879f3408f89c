//! Copies for spare hosts, in addition to the copies that each shard has: a spare that replaces a lost host already has
//! its shards and does not wait for the network.

use std::collections::BTreeSet;

use crate::inventory::{Copy, Medium, Shard};
use crate::placement::score;
use crate::retention::Repair;

/// A host that waits to replace another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpareHost {
    /// Its name.
    pub name: String,
    /// Free space, bytes.
    pub free_bytes: u64,
}

/// The next shard that `me` sends to a spare, once all shards have their copies on other hosts. It is the first shard
/// that the spare lacks of the newest step that ranks of `me` saved in this launch. Each host sends to one spare,
/// chosen by hash. `spares` are those that respond.
pub fn to_spare(me: &str, launch: &str, copies: &[Copy], spares: &[SpareHost]) -> Option<Repair> {
    let spare = spares.iter().max_by_key(|spare| (score(me, &spare.name), &spare.name))?;
    let is_mine = |copy: &&Copy| copy.own && copy.verified && copy.holder == me;
    let own = |copy: &&Copy| is_mine(copy) && copy.medium != Medium::Durable && copy.shard.key.run == launch;
    let newest =
        copies.iter().filter(own).map(|copy| &copy.shard.key).max_by_key(|key| (key.attempt, key.step))?;
    let there: BTreeSet<&str> =
        copies.iter().filter(|copy| copy.holder == spare.name).map(|copy| &*copy.shard.root).collect();
    let mine = copies.iter().filter(own).map(|copy| &copy.shard).filter(|shard| shard.key == *newest);
    let absent: Vec<&Shard> = mine.filter(|shard| !there.contains(&*shard.root)).collect();
    let next = absent.iter().min_by_key(|shard| shard.rank)?;
    let fits = next.bytes <= spare.free_bytes;
    fits.then(|| Repair { shard: (*next).clone(), to: spare.name.clone(), piece: None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::StepKey;

    fn copy(holder: &str, step: u64, rank: u32) -> Copy {
        let key = StepKey { step, job: "job".into(), run: "run@1".into(), attempt: 0, world: 4 };
        let root = format!("{step}/{rank}");
        let shard = Shard { key, rank, root, bytes: 10, created: 1, piece: None };
        Copy { holder: holder.into(), medium: Medium::Memory, own: holder == "a", verified: true, shard }
    }

    fn spare(name: &str, free_bytes: u64) -> SpareHost {
        SpareHost { name: name.to_owned(), free_bytes }
    }

    fn next(copies: &[Copy], spares: &[SpareHost]) -> Option<(u64, u32, String)> {
        to_spare("a", "run@1", copies, spares).map(|next| (next.shard.key.step, next.shard.rank, next.to))
    }

    #[test]
    fn the_newest_step_of_this_host_is_sent_to_a_spare_one_shard_at_a_time() {
        let mut copies = vec![copy("a", 4, 0), copy("a", 5, 1), copy("a", 5, 0), copy("b", 6, 0)];
        let spares = [spare("s", 100)];
        assert_eq!(next(&copies, &spares), Some((5, 0, "s".to_owned())));
        copies.push(copy("s", 5, 0));
        assert_eq!(next(&copies, &spares), Some((5, 1, "s".to_owned())));
        copies.push(copy("s", 5, 1));
        assert_eq!(next(&copies, &spares), None, "a spare does not need older steps");
    }

    #[test]
    fn nothing_is_sent_without_a_spare_or_without_room() {
        let copies = [copy("a", 5, 0)];
        assert_eq!(next(&copies, &[]), None);
        assert_eq!(next(&copies, &[spare("s", 9)]), None);
    }

    #[test]
    fn hosts_are_distributed_among_the_spares() {
        let spares = [spare("s", 100), spare("t", 100)];
        let chosen_by = |me: &str| {
            let copies = [Copy { own: true, ..copy(me, 5, 0) }];
            to_spare(me, "run@1", &copies, &spares).map(|next| next.to)
        };
        let chosen: BTreeSet<_> = (0..20).filter_map(|host| chosen_by(&format!("h{host}"))).collect();
        assert_eq!(chosen.len(), 2);
    }
}
