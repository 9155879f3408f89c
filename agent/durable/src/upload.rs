//! Uploads one shard to a bucket, and completes a step whose shards are all there.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mainstay_checkpoint_format::bucket::{
    BEGUN_NAME, STEP_NAME, StepName, StepRecord, run_directory, shard_names,
};
use mainstay_checkpoint_format::{MAX_MANIFEST_BYTES, chunk_sum};
use mainstay_tier::disk::Pace;
use mainstay_tier::peer::SealedShard;
use mainstay_tier::seal::{Bytes, ReadAt};
use object_store::PutPayload;
use tokio::task::JoinSet;

use crate::bucket::{Bucket, DurableError};
use crate::parts::UploadState;

/// Number of parts that are uploaded in parallel.
const AT_ONCE: usize = 4;

/// Bytes of a part, if there are not too many parts: S3 requires at least 5 MiB and allows at most 10,000 parts.
const PART_BYTES: u64 = 16 << 20;

/// Maximum number of parts of one upload.
const MAX_PARTS: u64 = 9000;

/// Options of an upload.
pub struct UploadOptions<'a> {
    /// Directory of the state of uploads; none: an interrupted upload starts again.
    pub notes: Option<&'a Path>,
    /// Rate limit.
    pub pace: &'a Pace,
    /// Minimum number of bytes of a part; none: a size that suits object stores.
    pub part_bytes: Option<u64>,
    /// Whether to stop; uploaded parts stay.
    pub given_up: &'a (dyn Fn() -> bool + Sync),
}

/// The result of an upload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UploadResult {
    /// Bytes sent to the store.
    pub bytes: u64,
    /// Bytes that the store already had.
    pub there: u64,
}

/// The name of a step's object.
pub(crate) fn in_step(step: &StepName, name: &str) -> String {
    format!("{}/{}/{name}", run_directory(step.run_id()), step.directory())
}

/// The name of a shard's step in a bucket.
pub(crate) fn step_name(key: &mainstay_checkpoint::inventory::StepKey) -> StepName {
    StepName {
        job: key.job.to_string(),
        run: key.run.to_string(),
        attempt: key.attempt,
        step: key.step,
        world_size: key.world,
    }
}

/// Records that a host has started to upload a step.
///
/// # Errors
/// The store refuses.
pub async fn begin(bucket: &Bucket, step: &StepName) -> Result<(), DurableError> {
    bucket.put(&in_step(step, BEGUN_NAME), Vec::new()).await
}

/// Completes a step whose shards are all there: writes its record, last of all.
///
/// # Errors
/// The store refuses.
pub async fn commit(bucket: &Bucket, record: &StepRecord) -> Result<(), DurableError> {
    bucket.put(&in_step(&record.name, STEP_NAME), record.encode()).await
}

/// Uploads a shard: its bytes, each verified with its manifest on the way, then its manifest. Uploaded parts are not sent again.
///
/// # Errors
/// The store refuses, or the bytes differ from their seal.
pub async fn shard(
    bucket: &Bucket,
    sealed: &SealedShard,
    from: &Bytes,
    how: &UploadOptions<'_>,
) -> Result<UploadResult, DurableError> {
    let step = step_name(&sealed.shard.key);
    let (data, manifest) = shard_names(sealed.shard.rank, &sealed.shard.root);
    let (data, manifest) = (in_step(&step, &data), in_step(&step, &manifest));
    let mut sent = UploadResult { bytes: 0, there: sealed.shard.bytes };
    if bucket.length(&data).await? != Some(sealed.shard.bytes) {
        sent = bytes(bucket, &data, sealed, from, how).await?;
        let found = bucket.length(&data).await?;
        if found != Some(sealed.shard.bytes) {
            let problem = format!("{} bytes were sent and {found:?} are stored", sealed.shard.bytes);
            return Err(DurableError::Changed { path: data, problem, chunk: None });
        }
    }
    if bucket.get(&manifest, MAX_MANIFEST_BYTES).await?.as_ref() != Some(&sealed.manifest) {
        bucket.put(&manifest, sealed.manifest.clone()).await?;
        if bucket.get(&manifest, MAX_MANIFEST_BYTES).await?.as_ref() != Some(&sealed.manifest) {
            let problem = "the manifest is read back as another".to_owned();
            return Err(DurableError::Changed { path: manifest, problem, chunk: None });
        }
    }
    Ok(sent)
}

async fn bytes(
    bucket: &Bucket,
    name: &str,
    sealed: &SealedShard,
    from: &Bytes,
    how: &UploadOptions<'_>,
) -> Result<UploadResult, DurableError> {
    let size = sealed.shard.bytes;
    let part_bytes = part_bytes(size, u64::from(sealed.chunk_bytes), how.part_bytes);
    if size <= part_bytes {
        how.pace.wait(size);
        bucket.put(name, read(sealed, from, 0, size)?).await?;
        return Ok(UploadResult { bytes: size, there: 0 });
    }
    let notes = how.notes.map(|notes| notes.join(format!("{}.json", sealed.shard.root)));
    let before = notes.as_deref().and_then(UploadState::read);
    if let Some(before) = before.filter(|before| before.name == name && before.part_bytes == part_bytes) {
        let job = PartUpload { bucket, sealed, from, how, notes: notes.as_deref() };
        match job.run(before).await {
            // The store has discarded the upload, for example by a lifecycle rule.
            Err(error) if error.is_gone() => {
                tracing::info!(name, %error, "an upload cannot continue and starts from the beginning");
            }
            done => return done,
        }
    }
    let path = bucket.path(name);
    let id = bucket.again("beginning", &path, || bucket.parts.begin(&path)).await?;
    let under = UploadState { name: name.to_owned(), id, part_bytes, done: Default::default() };
    PartUpload { bucket, sealed, from, how, notes: notes.as_deref() }.run(under).await
}

/// The size of a part: whole chunks, and few enough parts.
fn part_bytes(size: u64, chunk: u64, wanted: Option<u64>) -> u64 {
    let least = wanted.unwrap_or(PART_BYTES).max(size.div_ceil(MAX_PARTS)).max(1);
    least.div_ceil(chunk.max(1)).saturating_mul(chunk.max(1))
}

/// One upload in parts.
struct PartUpload<'a> {
    bucket: &'a Bucket,
    sealed: &'a SealedShard,
    from: &'a Bytes,
    how: &'a UploadOptions<'a>,
    notes: Option<&'a Path>,
}

impl PartUpload<'_> {
    async fn run(&self, mut under: UploadState) -> Result<UploadResult, DurableError> {
        let size = self.sealed.shard.bytes;
        let parts = usize::try_from(size.div_ceil(under.part_bytes)).unwrap_or(usize::MAX);
        under.done.retain(|index, _| *index < parts);
        let part_bytes = under.part_bytes;
        let path = self.bucket.path(&under.name);
        let noting = Arc::new(UploadNote::begin(under, self.notes)?);
        let mut sent = UploadResult::default();
        let mut coming = JoinSet::new();
        for index in 0..parts {
            let offset = index as u64 * part_bytes;
            let length = part_bytes.min(size - offset);
            if noting.under().done.contains_key(&index) {
                sent.there += length;
                continue;
            }
            if (self.how.given_up)() {
                return Err(DurableError::GivenUp);
            }
            if coming.len() >= AT_ONCE {
                take(&mut coming).await?;
            }
            self.how.pace.wait(length);
            // Read and verify on this thread; the runtime's threads send what was read before.
            let payload = PutPayload::from(read(self.sealed, self.from, offset, length)?);
            let (bucket, path, noting) = (self.bucket.clone(), path.clone(), Arc::clone(&noting));
            coming.spawn(async move {
                let id = noting.under().id.clone();
                let put = || bucket.parts.put(&path, &id, index, offset, payload.clone());
                let part = bucket.again("sending a part of", &path, put).await?;
                // Record it immediately, so that after a kill it need not be sent again.
                noting.done(index, part)
            });
            sent.bytes += length;
        }
        while !coming.is_empty() {
            take(&mut coming).await?;
        }
        let (id, all) = {
            let under = noting.under();
            (under.id.clone(), under.done.values().cloned().collect::<Vec<String>>())
        };
        let complete = || self.bucket.parts.complete(&path, &id, all.clone());
        let completed = self.bucket.again("completing", &path, complete).await;
        // Also on refusal: parts that the store has lost would make it fail forever.
        if let Some(notes) = self.notes {
            let _ = fs::remove_file(notes);
        }
        completed.map(|()| sent)
    }
}

/// Waits for one part.
async fn take(coming: &mut JoinSet<Result<(), DurableError>>) -> Result<(), DurableError> {
    match coming.join_next().await {
        None => Ok(()),
        Some(Ok(done)) => done,
        Some(Err(error)) => Err(DurableError::Local(format!("sending a part: {error}"))),
    }
}

/// Progress of an upload, and its file.
struct UploadNote {
    under: Mutex<UploadState>,
    notes: Option<PathBuf>,
}

impl UploadNote {
    fn begin(under: UploadState, notes: Option<&Path>) -> Result<UploadNote, DurableError> {
        let noting = UploadNote { under: Mutex::new(under), notes: notes.map(Path::to_owned) };
        noting.write(&noting.under())?;
        Ok(noting)
    }

    fn under(&self) -> MutexGuard<'_, UploadState> {
        self.under.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn done(&self, index: usize, part: String) -> Result<(), DurableError> {
        let mut under = self.under();
        under.done.insert(index, part);
        self.write(&under)
    }

    fn write(&self, under: &UploadState) -> Result<(), DurableError> {
        let Some(notes) = &self.notes else { return Ok(()) };
        under.write(notes).map_err(|error| DurableError::Local(format!("{}: {error}", notes.display())))
    }
}

/// Reads whole chunks of a shard and verifies them.
fn read(sealed: &SealedShard, from: &Bytes, offset: u64, length: u64) -> Result<Vec<u8>, DurableError> {
    let changed = |problem: String, chunk| DurableError::Changed {
        path: format!("the shard of rank {} of step {}", sealed.shard.rank, sealed.shard.key.step),
        problem,
        chunk,
    };
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
    from.read_exact_at(&mut bytes, offset).map_err(|error| changed(format!("reading it: {error}"), None))?;
    first_bad(sealed, offset, &bytes).map_or(Ok(bytes), |chunk| {
        Err(changed(format!("its bytes have changed since (chunk {chunk})"), Some(chunk)))
    })
}

/// The first chunk from `offset` on that does not match the manifest.
pub(crate) fn first_bad(sealed: &SealedShard, offset: u64, bytes: &[u8]) -> Option<u32> {
    let chunk = u64::from(sealed.chunk_bytes).max(1);
    let first = offset / chunk;
    let size = usize::try_from(chunk).unwrap_or(usize::MAX);
    bytes.chunks(size).zip(first..).find_map(|(piece, index)| {
        let index = u32::try_from(index).ok()?;
        let is_good = sealed.sums.get(index as usize) == Some(&chunk_sum(piece));
        (!is_good).then_some(index)
    })
}
