//! Blocking access to a bucket without an agent: list, verify and restore steps. This is all that a host needs that never
//! had an agent.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

use mainstay_checkpoint::choice::{RestoreRequest, choose};
use mainstay_checkpoint::inventory::{Copy, Medium, StepState, steps as states};
use mainstay_checkpoint::lineage::is_asked;
use mainstay_checkpoint_format::bucket::StepRecord;
use mainstay_tier::disk::Pace;
use mainstay_tier::peer::client::Target;
use mainstay_tier::peer::error::PeerError;
use mainstay_tier::peer::{SealedShard, ShardWriter, look_directory};
use tokio::runtime::Runtime;

use crate::bucket::{Bucket, DurableError};
use crate::fetch::FetchError;
use crate::listing::{self, StepsByName};
use crate::upload::{self, UploadOptions, UploadResult};

/// A bucket with a runtime for blocking calls.
#[derive(Debug)]
pub struct DirectBucket {
    bucket: Bucket,
    runtime: Runtime,
}

/// The result of pulling a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullResult {
    /// The step.
    pub step: u64,
    /// Fetched shards.
    pub shards: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// What a store has of one run or of all.
struct Listing {
    /// Newest first.
    steps: Vec<StepState>,
    /// A line for each damaged step.
    damaged: Vec<String>,
    /// A line for each step whose upload has not finished.
    unfinished: Vec<String>,
}

impl DirectBucket {
    /// Opens a bucket.
    ///
    /// # Errors
    /// The URL is not valid, or threads cannot be started.
    pub fn open(url: &str) -> Result<DirectBucket, DurableError> {
        DirectBucket::over(Bucket::open(url)?)
    }

    /// Wraps an open bucket.
    ///
    /// # Errors
    /// Threads cannot be started.
    pub fn over(bucket: Bucket) -> Result<DirectBucket, DurableError> {
        Ok(DirectBucket { bucket, runtime: crate::tier::runtime()? })
    }

    /// All steps of a run, or of all runs, newest first; and a line for each damaged or incomplete one.
    ///
    /// # Errors
    /// The store does not answer.
    pub fn list(&self, run_id: Option<&str>) -> Result<(Vec<StepState>, Vec<String>), DurableError> {
        let Listing { steps, mut damaged, unfinished } = self.listed(run_id)?;
        damaged.extend(unfinished);
        Ok((steps, damaged))
    }

    fn listed(&self, run_id: Option<&str>) -> Result<Listing, DurableError> {
        let mut copies = Vec::<Copy>::new();
        let (mut damaged, mut unfinished) = (Vec::new(), Vec::new());
        self.runtime.block_on(async {
            let runs = match run_id {
                Some(run_id) => vec![mainstay_checkpoint_format::bucket::run_directory(run_id)],
                None => listing::runs(&self.bucket).await?,
            };
            for run in runs {
                let found = listing::steps(&self.bucket, &run, &StepsByName::default()).await?;
                copies.extend(
                    found.whole.values().flat_map(|record| listing::copies(record, self.bucket.url())),
                );
                damaged
                    .extend(found.damaged.iter().map(|(step, problem)| format!("{run}/{step}: {problem}")));
                unfinished.extend(
                    found.started.iter().map(|step| format!("{run}/{step}: its upload has not finished")),
                );
            }
            Ok(Listing { steps: states(&copies, run_id), damaged, unfinished })
        })
    }

    /// The runs with whole steps, including their owners.
    ///
    /// # Errors
    /// The store does not answer.
    pub fn runs(&self) -> Result<Vec<String>, DurableError> {
        let (states, _) = self.list(None)?;
        let runs: BTreeSet<String> = states
            .iter()
            .filter(|state| state.is_whole())
            .map(|state| state.key.run_id().to_owned())
            .collect();
        Ok(runs.into_iter().collect())
    }

    /// Reads and verifies every byte of the steps of a run (none: of all runs). Calls `reported` for each shard with its bytes or its problem.
    ///
    /// # Errors
    /// The store does not answer.
    pub fn verify(
        &self,
        run_id: Option<&str>,
        mut report: impl FnMut(Result<u64, String>),
    ) -> Result<(), DurableError> {
        // An upload that has not finished is no damage.
        let Listing { steps, damaged, .. } = self.listed(run_id)?;
        for copy in steps.iter().flat_map(|step| step.ranks.values().flatten()) {
            let read = upload::in_step(&upload::step_name(&copy.shard.key), "");
            let done =
                self.runtime.block_on(crate::fetch::shard(&self.bucket, &copy.shard, &mut DiscardTarget));
            report(done.map_err(|error| {
                format!("{read}: rank {}: {}", copy.shard.rank, error.into_peer_error("it"))
            }));
        }
        damaged.into_iter().for_each(|line| report(Err(line)));
        Ok(())
    }

    /// Fetches the newest whole step of a run into a directory with the disk's layout. A step with damaged bytes is skipped for
    /// the next older one, which is reported to `say`. None if there is no step.
    ///
    /// # Errors
    /// The store does not answer, no step is intact, or the directory cannot be written.
    pub fn pull(
        &self,
        run_id: &str,
        ranks: &[u32],
        directory: &Path,
        report_line: &dyn Fn(String),
    ) -> Result<Option<PullResult>, PeerError> {
        let name = self.bucket.url();
        let listed =
            self.list(Some(run_id)).map_err(|error| FetchError::Durable(error).into_peer_error(name))?;
        let mut last = None;
        let copies: Vec<Copy> =
            listed.0.into_iter().flat_map(|state| state.ranks.into_values().flatten()).collect();
        let mut failed = BTreeSet::new();
        while let Some(state) =
            choose(&copies, RestoreRequest { failed: Some(&failed), ..RestoreRequest::default() }).step
        {
            match self.pull_step(&state, ranks, directory) {
                Ok(pulled) => return Ok(Some(pulled)),
                Err(error @ PeerError::Local(_)) => return Err(error),
                Err(error) => {
                    report_line(format!(
                        "step {} cannot be read: {error}; trying an older one",
                        state.key.step
                    ));
                    last = Some(error);
                    failed.insert(state.key);
                }
            }
        }
        last.map_or(Ok(None), Err)
    }

    fn pull_step(
        &self,
        state: &StepState<&Copy>,
        ranks: &[u32],
        directory: &Path,
    ) -> Result<PullResult, PeerError> {
        let mut pulled = PullResult { step: state.key.step, shards: 0, bytes: 0 };
        let wanted = |rank: &u32| ranks.is_empty() || ranks.contains(rank);
        for (_, copies) in state.ranks.iter().filter(|(rank, _)| wanted(rank)) {
            let Some(copy) = copies.first() else { continue };
            let mut landing = ShardWriter::new(directory);
            let fetched = self.runtime.block_on(crate::fetch::shard(&self.bucket, &copy.shard, &mut landing));
            pulled.bytes += fetched.map_err(|error| error.into_peer_error(self.bucket.url()))?;
            pulled.shards += 1;
            landing.finish()?;
        }
        Ok(pulled)
    }

    /// Uploads the newest whole step of a directory to the bucket; none if no step of the run is whole there.
    ///
    /// # Errors
    /// The store refuses, or the bytes differ from their seal.
    pub fn push(&self, run_id: &str, directory: &Path) -> Result<Option<(u64, UploadResult)>, DurableError> {
        let mut found: Vec<(SealedShard, PathBuf)> = Vec::new();
        look_directory(directory, |path, sealed| {
            found.extend(sealed.ok().map(|sealed| (sealed, path.to_owned())))
        });
        let copy = |sealed: &SealedShard| Copy {
            holder: "".into(),
            medium: Medium::Disk,
            own: true,
            verified: true,
            shard: sealed.shard.clone(),
        };
        let copies: Vec<Copy> = found.iter().map(|(sealed, _)| copy(sealed)).collect();
        let copies: Vec<Copy> =
            copies.into_iter().filter(|copy| is_asked(copy.shard.key.run_id(), run_id)).collect();
        let newest = choose(&copies, RestoreRequest::default()).step.map(StepState::owned);
        let Some((state, record)) = newest.and_then(|state| Some((state.clone(), listing::record(&state)?)))
        else {
            return Ok(None);
        };
        let pace = Pace::default();
        let how = UploadOptions { notes: None, pace: &pace, part_bytes: None, given_up: &|| false };
        let mut sent = UploadResult::default();
        self.runtime.block_on(async {
            upload::begin(&self.bucket, &record.name).await?;
            for (sealed, path) in found.iter().filter(|(sealed, _)| is_in(&record, sealed)) {
                let path = path.join(&sealed.file);
                let open = File::open(&path);
                let file =
                    open.map_err(|error| DurableError::Local(format!("{}: {error}", path.display())))?;
                let one = upload::shard(&self.bucket, sealed, &file.into(), &how).await?;
                (sent.bytes, sent.there) = (sent.bytes + one.bytes, sent.there + one.there);
            }
            upload::commit(&self.bucket, &record).await
        })?;
        Ok(Some((state.key.step, sent)))
    }
}

fn is_in(record: &StepRecord, sealed: &SealedShard) -> bool {
    let shard = record.shards.get(sealed.shard.rank as usize);
    shard.is_some_and(|shard| shard.root == sealed.shard.root)
}

/// Target for bytes that are only verified.
struct DiscardTarget;

impl Target for DiscardTarget {
    fn begin(&mut self, _sealed: &SealedShard) -> Result<(), PeerError> {
        Ok(())
    }

    fn write(&self, _offset: u64, _bytes: &[u8]) -> Result<(), PeerError> {
        Ok(())
    }
}
