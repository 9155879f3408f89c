//! Sealed shards in the memory of a launcher on this host, as the agent sees them: by reading files, never through mapped
//! memory, because a page that its user truncates must not end the agent.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use mainstay_checkpoint_format::control::{CONTROL_BYTES, CONTROL_NAME, Control, ControlWords, Slot, State};

use crate::beneath::Beneath;
use crate::os::monotonic_ms;
use crate::peer::user::Access;
use crate::seal::SealedShard;

/// Time for which each request reserves a slot, ms.
const PIN_MS: u64 = 10_000;

/// A sealed slot.
#[derive(Clone, Debug)]
pub(crate) struct PooledShard {
    pub(crate) sealed: Arc<SealedShard>,
    pool: PathBuf,
    /// The directory of the rank in the pool.
    home: PathBuf,
    access: Access,
    slot: Slot,
}

impl PooledShard {
    /// Opens the slot's file, which starts with the shard. None if the slot now holds another shard.
    pub(crate) fn open(&self) -> Option<File> {
        self.pin();
        let file = self.open_slot()?;
        self.is_still().then_some(file)
    }

    /// The slot's file, which later steps use again.
    pub(crate) fn path(&self) -> PathBuf {
        self.pool.join(self.file())
    }

    fn file(&self) -> PathBuf {
        self.home.join(format!("slot-{}.{}", self.slot.index, self.slot.file))
    }

    fn open_slot(&self) -> Option<File> {
        let as_user = self.access.act().ok()?;
        let file = as_user.open(&self.pool).ok()?.read(&self.file()).ok()?;
        let found = file.metadata().ok()?;
        (found.uid() == self.access.user().uid && found.len() >= self.sealed.shard.bytes).then_some(file)
    }

    /// Whether the slot still holds the shard.
    pub(crate) fn is_still(&self) -> bool {
        let Ok(as_user) = self.access.act() else { return false };
        let Ok(pool) = as_user.open(&self.pool) else { return false };
        with_page(&pool, &self.home, |page| page.is_still(&self.slot)) == Some(true)
    }

    /// Asks the pool owner not to use the slot for a while. The pool owner may ignore this: a save does not wait for a copy to a peer.
    pub(crate) fn pin(&self) {
        let Ok(as_user) = self.access.act() else { return };
        let opened = as_user.open(&self.pool).and_then(|pool| pool.write_over(&self.home.join(CONTROL_NAME)));
        let Ok(file) = opened else { return };
        let (at, word) = Control::pin(&self.slot, monotonic_ms().saturating_add(PIN_MS));
        // Overwrite existing bytes only: a pool that is being removed must not grow.
        if file.metadata().is_ok_and(|found| found.len() >= CONTROL_BYTES as u64) {
            let _ = file.write_all_at(&word, at);
        }
    }
}

/// The sealed shards in a pool, from files of this user only. `known` are manifests that were read before, by slot.
pub(super) fn look_into_pool(
    pool: &Path,
    access: &Access,
    run: &str,
    known: &[PooledShard],
) -> Vec<PooledShard> {
    let Ok(as_user) = access.act() else { return Vec::new() };
    let Ok(at) = as_user.open(pool) else { return Vec::new() };
    let mut found = Vec::new();
    for home in ranks(&at) {
        let slots = with_page(&at, &home, |page| page.all().collect::<Vec<Slot>>()).unwrap_or_default();
        for slot in slots.into_iter().filter(|slot| slot.state == State::Sealed) {
            if let Some(known) = known.iter().find(|known| {
                known.slot == slot
                    && known.pool == pool
                    && known.home == home
                    && known.access.user() == access.user()
            }) {
                found.push(known.clone());
                continue;
            }
            let sealed = SealedShard::read_in(&at, &home.join(format!("slot-{}.json", slot.index)));
            let Ok(sealed) = sealed.and_then(|sealed| sealed.owned_as(run)) else { continue };
            let key = &sealed.shard.key;
            let is_it = (key.attempt, key.step, u64::from(key.world), sealed.shard.bytes)
                == (slot.epoch, slot.step, slot.world_size, slot.used);
            // The manifest and the slot belong together only if nothing changed in between.
            if is_it && with_page(&at, &home, |page| page.is_still(&slot)) == Some(true) {
                let (pool, home) = (pool.to_owned(), home.clone());
                let (access, sealed) = (access.clone(), Arc::new(sealed));
                found.push(PooledShard { sealed, pool, home, access, slot });
            }
        }
    }
    found
}

/// For each rank, the memory reserved for its shard: the size of its largest slot.
pub(super) fn reserved_in_pool(pool: &Path, access: &Access) -> Vec<u64> {
    let Ok(as_user) = access.act() else { return Vec::new() };
    let room = |page: &Control<'_>| page.all().map(|slot| slot.capacity).max().filter(|room| *room > 0);
    let Ok(at) = as_user.open(pool) else { return Vec::new() };
    ranks(&at).iter().filter_map(|home| with_page(&at, home, room).flatten()).collect()
}

/// A number over all sealed slots: it changes when a slot is sealed or released.
pub(super) fn stamp_of_pool(pool: &Path, access: &Access) -> u64 {
    let Ok(as_user) = access.act() else { return 0 };
    let Ok(at) = as_user.open(pool) else { return 0 };
    let sealed = ranks(&at).into_iter().enumerate().flat_map(|(index_of_rank, home)| {
        let sealed_slots = |page: &Control<'_>| {
            let sealed = page.all().filter(|slot| slot.state == State::Sealed);
            sealed.map(|slot| (slot.index as u64, slot.generation)).collect::<Vec<_>>()
        };
        with_page(&at, &home, sealed_slots)
            .unwrap_or_default()
            .into_iter()
            .map(move |at| (index_of_rank as u64, at))
    });
    sealed.fold(0xcbf2_9ce4_8422_2325, |sum, (index_of_rank, (index, generation))| {
        [index_of_rank, index, generation]
            .into_iter()
            .fold(sum, |sum: u64, word| (sum ^ word).wrapping_mul(0x0100_0000_01b3))
    })
}

fn ranks(pool: &Beneath) -> Vec<PathBuf> {
    let names = pool.list(Path::new("")).unwrap_or_default().into_iter();
    let is_rank = |name: &str| name.starts_with("rank-");
    let named = names.filter(|(name, _)| name.to_str().is_some_and(is_rank));
    let mut ranks: Vec<PathBuf> = named.map(|(name, _)| name.into()).collect();
    ranks.sort_unstable();
    ranks
}

/// Reads the current page; each word is consistent.
fn with_page<T>(pool: &Beneath, home: &Path, read: impl FnOnce(&Control<'_>) -> T) -> Option<T> {
    let file = pool.read(&home.join(CONTROL_NAME)).ok()?;
    let mut bytes = [0; CONTROL_BYTES];
    file.read_exact_at(&mut bytes, 0).ok()?;
    let mut words = bytes.chunks_exact(8).map(|word| {
        // The words of the page have native byte order.
        AtomicU64::new(u64::from_ne_bytes(word.try_into().unwrap_or_default()))
    });
    let words: Box<ControlWords> =
        Box::new(std::array::from_fn(|_| words.next().unwrap_or_else(|| AtomicU64::new(0))));
    Control::new(&words).ok().map(|page| read(&page))
}
