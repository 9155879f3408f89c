//! Fetches one shard and verifies each byte with its manifest.

use std::ops::Range;

use mainstay_checkpoint::inventory::Shard;
use mainstay_checkpoint_format::MAX_MANIFEST_BYTES;
use mainstay_checkpoint_format::bucket::shard_names;
use mainstay_tier::peer::SealedShard;
use mainstay_tier::peer::client::Target;
use mainstay_tier::peer::error::PeerError;
use object_store::ObjectStoreExt;
use tokio::task::JoinSet;

use crate::bucket::{Bucket, DurableError};
use crate::upload::{first_bad, in_step, step_name};

/// Number of ranges that are fetched in parallel, and bytes of each.
const AT_ONCE: usize = 4;
const RANGE_BYTES: u64 = 16 << 20;

/// The manifest of a shard in a bucket.
///
/// # Errors
/// It does not exist, or is not of this shard.
pub async fn manifest(bucket: &Bucket, shard: &Shard) -> Result<SealedShard, DurableError> {
    let name = in_step(&step_name(&shard.key), &shard_names(shard.rank, &shard.root).1);
    let changed = |problem: String| DurableError::Changed { path: name.clone(), problem, chunk: None };
    let bytes =
        bucket.get(&name, MAX_MANIFEST_BYTES).await?.ok_or_else(|| changed("it is missing".to_owned()))?;
    let sealed = SealedShard::of(bytes).map_err(|error| changed(error.to_string()))?;
    if sealed.shard.root != shard.root {
        return Err(changed(format!(
            "it is the manifest of {} and not of {}",
            sealed.shard.root, shard.root
        )));
    }
    Ok(sealed)
}

/// Fetches a shard into `target`. Returns the number of bytes, all of which are verified.
///
/// # Errors
/// The store does not return it, it differs from its seal, or `target` refuses it.
pub async fn shard(bucket: &Bucket, shard: &Shard, target: &mut dyn Target) -> Result<u64, FetchError> {
    let sealed = manifest(bucket, shard).await?;
    target.begin(&sealed).map_err(FetchError::Target)?;
    let name = in_step(&step_name(&shard.key), &shard_names(shard.rank, &shard.root).0);
    let size = sealed.shard.bytes;
    let chunk = u64::from(sealed.chunk_bytes).max(1);
    let step = RANGE_BYTES.div_ceil(chunk) * chunk;
    let mut offsets = (0..size.div_ceil(step)).map(|index| index * step);
    let mut coming = JoinSet::new();
    let mut tried_again = 0;
    loop {
        while coming.len() < AT_ONCE
            && let Some(from) = offsets.next()
        {
            ask(&mut coming, bucket, &name, from..(from + step).min(size));
        }
        let Some(came) = coming.join_next().await else { break };
        let (range, bytes) = came.map_err(|error| DurableError::Local(error.to_string()))??;
        let is_short = bytes.len() as u64 != range.end - range.start;
        match first_bad(&sealed, range.start, &bytes) {
            None if !is_short => target.write(range.start, &bytes).map_err(FetchError::Target)?,
            // Try again: the bytes may have been damaged in transit.
            _ if tried_again < AT_ONCE => {
                tried_again += 1;
                ask(&mut coming, bucket, &name, range);
            }
            bad => {
                let chunk = bad.or_else(|| u32::try_from(range.start / chunk).ok());
                let problem = "its bytes are not those of its manifest".to_owned();
                return Err(DurableError::Changed { path: name, problem, chunk }.into());
            }
        }
    }
    Ok(size)
}

type FetchedChunk = Result<(Range<u64>, Vec<u8>), DurableError>;

fn ask(coming: &mut JoinSet<FetchedChunk>, bucket: &Bucket, name: &str, range: Range<u64>) {
    let (bucket, path) = (bucket.clone(), bucket.path(name));
    coming.spawn(async move {
        let get = || bucket.store.get_range(&path, range.clone());
        let bytes = bucket.again("reading", &path, get).await?;
        Ok((range, bytes.to_vec()))
    });
}

/// Why a shard was not fetched.
#[derive(Debug)]
pub enum FetchError {
    /// Error of the storage.
    Durable(DurableError),
    /// Error of the target.
    Target(PeerError),
}

impl From<DurableError> for FetchError {
    fn from(error: DurableError) -> FetchError {
        FetchError::Durable(error)
    }
}

impl FetchError {
    /// Converts it to an error of the tier; `name` is the name of the storage.
    #[must_use]
    pub fn into_peer_error(self, name: &str) -> PeerError {
        match self {
            FetchError::Target(error) => error,
            FetchError::Durable(DurableError::Changed { chunk: Some(chunk), .. }) => {
                PeerError::Corrupt { peer: name.to_owned(), chunk }
            }
            FetchError::Durable(error) => {
                PeerError::Unreadable { peer: name.to_owned(), error: error.to_string() }
            }
        }
    }
}
