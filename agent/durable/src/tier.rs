//! The durable tier in the background of an agent: uploads steps that are due, deletes old ones, and reports the content of the bucket
//! to the service among peers, so that a host without any history finds it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mainstay_checkpoint::durable::{Candidate, expired, next};
use mainstay_checkpoint::inventory::{Copy, Medium, Shard, StepKey, StepState, steps};
use mainstay_checkpoint::placement::score;
use mainstay_checkpoint_format::bucket::{StepRecord, run_directory, step_of_directory};
use mainstay_tier::disk::Pace;
use mainstay_tier::peer::client::Target;
use mainstay_tier::peer::error::PeerError;
use mainstay_tier::peer::{Durable, DurableFigures, Service};
use tokio::runtime::Runtime;

use crate::bucket::{Bucket, DurableError};
use crate::fetch::FetchError;
use crate::listing::{self, StepsByName};
use crate::upload::{self, UploadOptions, step_name};

/// Time limit for an answer of the bucket before a decision is made without it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Time for which a listing counts as current: while an upload runs, and otherwise.
const LISTING_MAX_AGES: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(300));

/// Wait after a failure, doubled each time: first and longest.
const BACK_OFF_BOUNDS: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(300));

/// Settings of the durable tier.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The first step in each interval of this many training steps is uploaded.
    pub every: u64,
    /// Whole steps of a run that are kept in the bucket.
    pub keep: usize,
    /// Bytes per second; none: no limit.
    pub bandwidth: Option<u64>,
    /// Minimum number of bytes of a part; none: a size that suits object stores.
    pub part_bytes: Option<u64>,
    /// Directory of the state of uploads.
    pub notes: PathBuf,
    /// Time between two checks.
    pub interval: Duration,
}

/// State of the durable tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The step that is being uploaded.
    pub uploading: Option<u64>,
    /// The last error, until the next success.
    pub error: Option<String>,
    /// Bytes uploaded since the start.
    pub bytes_sent: u64,
    /// Steps that this agent completed there since the start.
    pub steps: u64,
    /// Failed tries since the start.
    pub failures: u64,
    /// Time that the upload of this host's shards of the last step took.
    pub last_step_took: Option<Duration>,
}

#[derive(Debug, Default)]
struct State {
    /// By run id.
    runs: BTreeMap<String, (Instant, StepsByName)>,
    status: Status,
}

/// The durable tier of an agent. It stops when it is dropped.
#[derive(Debug)]
pub struct Tier {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    bucket: Bucket,
    settings: Settings,
    runtime: Runtime,
    state: Mutex<State>,
    stop: AtomicBool,
    bell: (Mutex<bool>, Condvar),
}

pub(crate) fn runtime() -> Result<Runtime, DurableError> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let built = builder.worker_threads(2).thread_name("ckpt-durable").enable_all().build();
    built.map_err(|error| DurableError::Local(format!("starting threads: {error}")))
}

impl Tier {
    /// Starts to watch `service` and reports the content of the bucket to it.
    ///
    /// # Errors
    /// Threads cannot be started, or the directory for notes cannot be created.
    pub fn start(bucket: Bucket, settings: Settings, service: &Arc<Service>) -> Result<Tier, DurableError> {
        let made = fs::create_dir_all(&settings.notes);
        made.map_err(|error| DurableError::Local(format!("{}: {error}", settings.notes.display())))?;
        let inner = Arc::new(Inner {
            bucket,
            settings,
            runtime: runtime()?,
            state: Mutex::default(),
            stop: AtomicBool::new(false),
            bell: (Mutex::new(false), Condvar::new()),
        });
        service.attach(Arc::clone(&inner) as Arc<dyn Durable>);
        let (worker, service) = (Arc::clone(&inner), Arc::clone(service));
        let work = move || worker.work(&service);
        let spawned = std::thread::Builder::new().name("ckpt-durable".to_owned()).spawn(work);
        spawned.map_err(|error| DurableError::Local(format!("starting a thread: {error}")))?;
        Ok(Tier { inner })
    }

    /// The current state.
    #[must_use]
    pub fn status(&self) -> Status {
        self.inner.state().status.clone()
    }

    /// The URL of the bucket.
    #[must_use]
    pub fn url(&self) -> &str {
        self.inner.bucket.url()
    }
}

impl Drop for Tier {
    fn drop(&mut self) {
        self.inner.stop.store(true, Ordering::SeqCst);
        *self.inner.bell.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.inner.bell.1.notify_all();
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stops(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    fn work(&self, service: &Service) {
        let pace = Pace::new(self.settings.bandwidth);
        let mut failures: u32 = 0;
        while !self.stops() {
            let looked = self.look(service, &pace);
            let wait = match &looked {
                Ok(()) => self.settings.interval,
                Err(_) => {
                    failures += 1;
                    (BACK_OFF_BOUNDS.0 * (1 << failures.min(8))).min(BACK_OFF_BOUNDS.1)
                }
            };
            let mut state = self.state();
            state.status.uploading = None;
            match looked {
                Ok(()) => (failures, state.status.error) = (0, None),
                Err(DurableError::GivenUp) => {}
                Err(error) => {
                    let message = error.to_string();
                    if state.status.error.as_ref() != Some(&message) {
                        tracing::warn!(url = self.bucket.url(), error = message, "durable storage");
                    }
                    state.status.failures += 1;
                    state.status.error = Some(message);
                }
            }
            drop(state);
            let rung = self.bell.0.lock().unwrap_or_else(PoisonError::into_inner);
            drop(self.bell.1.wait_timeout_while(rung, wait, |rung| !*rung));
        }
    }

    /// One check: uploads steps that are due.
    fn look(&self, service: &Service, pace: &Pace) -> Result<(), DurableError> {
        let copies: Vec<Copy> =
            service.copies().into_iter().filter(|copy| copy.medium != Medium::Durable).collect();
        let runs: BTreeSet<&str> = copies.iter().map(|copy| copy.shard.key.run_id()).collect();
        for run in runs {
            let states = steps(&copies, Some(run));
            self.list(run, LISTING_MAX_AGES.1)?;
            if next(&self.candidates(run, &states), self.settings.every).is_none() {
                continue;
            }
            // Another host may have started with another step.
            self.list(run, LISTING_MAX_AGES.0)?;
            let candidates = self.candidates(run, &states);
            let Some(due) = next(&candidates, self.settings.every) else { continue };
            if let Some(state) = states.iter().find(|state| state.key == due.key) {
                self.upload_next(service, run, state, &copies, pace)?;
            }
        }
        Ok(())
    }

    /// Uploads this agent's shards of a step, and completes the step if all others are there.
    fn upload_next(
        &self,
        service: &Service,
        run: &str,
        state: &StepState,
        copies: &[Copy],
        pace: &Pace,
    ) -> Result<(), DurableError> {
        let Some(record) = listing::record(state) else { return Ok(()) };
        self.state().status.uploading = Some(state.key.step);
        let how = UploadOptions {
            notes: Some(&self.settings.notes),
            pace,
            part_bytes: self.settings.part_bytes,
            given_up: &|| self.stops(),
        };
        let mut notes = BTreeSet::new();
        let began = Instant::now();
        self.runtime.block_on(async {
            upload::begin(&self.bucket, &record.name).await?;
            for shard in ours(service.name(), state, copies) {
                let Some(opened) = service.open(&shard.root) else { continue };
                notes.insert(format!("{}.json", shard.root));
                opened.pin();
                let sent = upload::shard(&self.bucket, &opened.sealed, &opened.bytes, &how).await;
                // A shard in memory may have been overwritten by another step: that is no damage.
                if let (Err(DurableError::Changed { chunk: Some(_), .. }), true) = (&sent, opened.is_still())
                {
                    service.doubt(&shard.root);
                }
                self.state().status.bytes_sent += sent?.bytes;
            }
            self.state().status.last_step_took = Some(began.elapsed());
            if listing::missing(&self.bucket, &record).await?.is_empty() {
                upload::commit(&self.bucket, &record).await?;
                tracing::info!(
                    run,
                    step = state.key.step,
                    url = self.bucket.url(),
                    "a step is in durable storage"
                );
                self.state().status.steps += 1;
            }
            Ok(())
        })?;
        self.forget_notes(&notes);
        self.list(run, Duration::ZERO)?;
        self.tidy(run)
    }

    /// Aborts uploads of other steps, so that the store need not keep their parts.
    fn forget_notes(&self, of_now: &BTreeSet<String>) {
        for entry in fs::read_dir(&self.settings.notes).into_iter().flatten().flatten() {
            if entry.file_name().to_str().is_some_and(|name| of_now.contains(name)) {
                continue;
            }
            if let Some(under) = crate::parts::UploadState::read(&entry.path()) {
                let path = self.bucket.path(&under.name);
                let _ = self.runtime.block_on(self.bucket.parts.abort(&path, &under.id));
            }
            let _ = fs::remove_file(entry.path());
        }
    }

    /// Deletes steps beyond `keep`.
    fn tidy(&self, run: &str) -> Result<(), DurableError> {
        let candidates = self.candidates(run, &[]);
        for gone in expired(&candidates, self.settings.keep) {
            let name = if gone.durable { step_name(&gone.key).directory() } else { gone.key.job.to_string() };
            self.runtime.block_on(listing::delete(&self.bucket, &run_directory(run), &name))?;
            if let Some((_, steps)) = self.state().runs.get_mut(run) {
                steps.whole.remove(&name);
                steps.started.remove(&name);
            }
        }
        Ok(())
    }

    /// Lists a run, unless it was listed within `within`.
    fn list(&self, run: &str, within: Duration) -> Result<(), DurableError> {
        let known = self.state().runs.get(run).cloned();
        if known.as_ref().is_some_and(|(at, _)| at.elapsed() < within) {
            return Ok(());
        }
        let known = known.map(|(_, steps)| steps).unwrap_or_default();
        let asked = listing::list_run(&self.bucket, run, &known);
        let late = |_| {
            DurableError::Local(format!("{} did not answer within {ANSWER_TIMEOUT:?}", self.bucket.url()))
        };
        let found = self
            .runtime
            .block_on(async { tokio::time::timeout(ANSWER_TIMEOUT, asked).await })
            .map_err(late)??;
        for (step, problem) in found.damaged.iter().filter(|(step, _)| !known.damaged.contains_key(*step)) {
            tracing::warn!(run, step, problem, "a step in durable storage is damaged and not offered");
        }
        self.state().runs.insert(run.to_owned(), (Instant::now(), found));
        Ok(())
    }

    /// The steps of a run: those on hosts and those in the bucket. A step of which only its directory is known has the directory's name
    /// in place of its job.
    fn candidates(&self, run: &str, states: &[StepState]) -> Vec<Candidate> {
        let state = self.state();
        let Some((_, there)) = state.runs.get(run) else { return Vec::new() };
        let named: BTreeSet<String> = states.iter().map(|state| step_name(&state.key).directory()).collect();
        let here = states.iter().map(|state| {
            let name = step_name(&state.key).directory();
            Candidate {
                key: state.key.clone(),
                created: state.created,
                here: state.is_whole(),
                started: there.started.contains(&name),
                durable: there.whole.contains_key(&name),
            }
        });
        let whole =
            there.whole.iter().filter(|(name, _)| !named.contains(*name)).map(|(_, record)| Candidate {
                key: listing::key(record),
                created: i64::try_from(record.created_unix_s()).unwrap_or(i64::MAX),
                here: false,
                started: true,
                durable: true,
            });
        let half = there.started.iter().filter(|name| !named.contains(*name)).filter_map(|name| {
            let (step, attempt) = step_of_directory(name)?;
            let key = StepKey { step, attempt, job: name.into(), run: run.into(), world: 0 };
            Some(Candidate { key, created: 0, here: false, started: true, durable: false })
        });
        here.chain(whole).chain(half).collect()
    }

    fn record_for(&self, key: &StepKey) -> Option<StepRecord> {
        let name = step_name(key).directory();
        self.state().runs.get(key.run_id()).and_then(|(_, steps)| steps.whole.get(&name).cloned())
    }
}

/// The shards that this agent must upload: its own, and those of lost owners that rendezvous hashing assigns to it.
fn ours(me: &str, state: &StepState, copies: &[Copy]) -> Vec<Shard> {
    let mut ours = Vec::new();
    for shards in state.ranks.values() {
        let Some(shard) = shards.first().map(|copy| &copy.shard) else { continue };
        let of_it = copies.iter().filter(|copy| copy.shard.root == shard.root);
        let owner = of_it.clone().find(|copy| copy.own).map(|copy| copy.holder.as_str());
        let by_score = of_it.max_by_key(|copy| score(&shard.root, &copy.holder));
        if owner.or_else(|| by_score.map(|copy| copy.holder.as_str())) == Some(me) {
            ours.push(shard.clone());
        }
    }
    ours
}

impl Durable for Inner {
    fn name(&self) -> String {
        self.bucket.url().to_owned()
    }

    fn shards(&self) -> Vec<Shard> {
        let state = self.state();
        state.runs.values().flat_map(|(_, steps)| steps.whole.values()).flat_map(listing::shards).collect()
    }

    fn figures(&self) -> DurableFigures {
        let Status { bytes_sent, failures, last_step_took, .. } = self.state().status;
        DurableFigures { bytes_sent, failures, last_step_took }
    }

    fn refresh(&self, run_id: &str) -> Result<(), PeerError> {
        self.list(run_id, Duration::from_secs(1))
            .map_err(|error| FetchError::Durable(error).into_peer_error(self.bucket.url()))
    }

    fn get(&self, shard: &Shard, target: &mut dyn Target) -> Result<u64, PeerError> {
        let got = self.runtime.block_on(crate::fetch::shard(&self.bucket, shard, target));
        got.map_err(|error| error.into_peer_error(self.bucket.url()))
    }

    fn remove(&self, key: &StepKey) -> Result<usize, PeerError> {
        let Some(record) = self.record_for(key) else { return Ok(0) };
        let (run, name) = (run_directory(key.run_id()), step_name(key).directory());
        let deleted = self.runtime.block_on(listing::delete(&self.bucket, &run, &name));
        deleted.map_err(|error| FetchError::Durable(error).into_peer_error(self.bucket.url()))?;
        if let Some((_, steps)) = self.state().runs.get_mut(key.run_id()) {
            steps.whole.remove(&name);
        }
        Ok(record.shards.len())
    }
}
