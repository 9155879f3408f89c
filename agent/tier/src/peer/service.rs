//! The agent's part among its peers: it listens, knows who has what, and sends what has too few copies.

mod ask_pace;
mod counts;
mod decide;
mod divergence;
mod eligibility;
mod failures;
mod known;
mod lag;
mod loops;
mod refusals;
mod repair;
mod seats;
mod settings;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use mainstay_core::checkpoint::decision::Decisions;
use mainstay_core::checkpoint::divergence::ReplicaDivergence;
use mainstay_core::checkpoint::eligibility::PlacementEligibility;
use mainstay_core::checkpoint::inventory::{Copy, Medium, Shard, StepKey};
use mainstay_core::checkpoint::lag::CopyLags;
use mainstay_core::checkpoint::parity::Parity;
use mainstay_core::checkpoint::replication_cost::StepTime;
use mainstay_core::checkpoint::tiers::{Tier, TierState, newest_by_tier};
use mainstay_core::failure::repeats::RemoteFailure;

use self::counts::Counters;
pub use self::counts::Counts;
pub use self::lag::Lag;
use self::refusals::Refusals;
pub use self::settings::Settings;
use super::client::Asking;
use super::durable::{Durable, Figures};
use super::error::PeerError;
use super::local_shards::{LocalShards, Opened, Watched};
use super::message::{Inventory, Withdrawal};
use super::pace::Limit;
use super::pass::Pass;
use super::store::{Store, StoreError};
use super::throttle::{ReplicationOverhead, ReplicationThrottle};

/// How long a shard that was half sent is waited for.
const UPLOAD_PATIENCE: Duration = Duration::from_secs(120);

/// What ranks have sealed in launchers' memory is looked for this often: a few reads for each rank.
const LOOK_INTO_MEMORY: Duration = Duration::from_millis(50);

/// While they have sealed nothing yet.
const LOOK_FOR_THE_FIRST: Duration = Duration::from_millis(200);

/// A peer that failed is left alone for that long, twice as long each time it fails again.
const BACK_OFF: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));

/// How long a copy that was found to be bad is not believed in.
const DISTRUST: Duration = Duration::from_secs(600);

/// How long it is remembered that something was withdrawn: a peer that was away meanwhile has a copy of it still.
const REMEMBERED: Duration = Duration::from_secs(24 * 3600);

/// What is known of a peer.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    /// Whether it answered when it was last asked.
    pub alive: bool,
    /// What went wrong last.
    pub error: Option<String>,
    /// When it last answered.
    pub seen: Option<Instant>,
    /// What it told.
    pub inventory: Inventory,
    /// Bytes a second of the last shard that was sent to it.
    pub rate: Option<u64>,
    /// What it told is not older than that.
    asked: Option<Instant>,
    /// Not before then is it sent anything.
    not_before: Option<Instant>,
    failures: u32,
}

/// What all threads of the service share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) pass: Pass,
    pub(crate) store: Store,
    pub(crate) own: LocalShards,
    durable: OnceLock<Arc<dyn Durable>>,
    peers: Mutex<BTreeMap<String, Peer>>,
    decisions: Mutex<Decisions>,
    distrusted: Mutex<BTreeMap<(String, String), Instant>>,
    /// What was offered and is out of date.
    withdrawn: Mutex<BTreeMap<String, Instant>>,
    refusals: Refusals,
    /// What should have been saved alike and was not.
    unlike: Mutex<divergence::Found>,
    /// Since when steps wait for their copies.
    lags: Mutex<CopyLags>,
    /// How this host stands where others choose who keeps their replicas.
    standing: Mutex<PlacementEligibility>,
    /// How jobs failed here.
    failures: Mutex<Vec<RemoteFailure>>,
    /// Whether it was told that there are too few failure domains for pieces.
    too_few: AtomicBool,
    /// Whether a step was overwritten while it was sent, and not all has been sent since.
    overtaken: AtomicBool,
    /// Whether its peers are the hosts of one job.
    meets: AtomicBool,
    /// Peers that keep copies in addition, and whose copies count for nothing: they wait to replace a host.
    spares: Mutex<BTreeSet<String>>,
    /// Of a launch of that job the attempt and step whose shards its owners here keep.
    keeps_from: Mutex<Option<(String, (u64, u64))>>,
    limit: Limit,
    pub(crate) courtesy: ReplicationThrottle,
    counters: Counters,
    seats: seats::Seats,
    stop: AtomicBool,
    nudged: Mutex<bool>,
    nudge: Condvar,
    /// Counts what may be news here: a step was sealed, a copy came or went, the peers are others.
    changes: AtomicU64,
    /// The sizes of shards that may come here soon.
    expected: Mutex<Vec<u64>>,
    expects: Condvar,
}

/// The service. It ends when it is dropped.
#[derive(Debug)]
pub struct Service {
    pub(crate) shared: Arc<Shared>,
    address: SocketAddr,
}

/// The service could not begin.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address cannot be listened on.
    #[error("listening for peers on {address}: {source}")]
    Listen {
        /// Which one.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No more threads.
    #[error("starting a thread: {0}")]
    Thread(std::io::Error),
}

impl Service {
    /// Begins to listen, to ask and to send.
    ///
    /// # Errors
    /// The address, the store or a thread cannot be had.
    pub fn start(settings: Settings, pass: impl Into<Pass>) -> Result<Service, StartError> {
        let listen = |source| StartError::Listen { address: settings.listen, source };
        let listener = TcpListener::bind(settings.listen).map_err(listen)?;
        Service::start_at(listener, settings, pass)
    }

    /// The same where the address is listened on already.
    ///
    /// # Errors
    /// The store or a thread cannot be had.
    pub fn start_at(
        listener: TcpListener,
        mut settings: Settings,
        pass: impl Into<Pass>,
    ) -> Result<Service, StartError> {
        let listen = |source| StartError::Listen { address: settings.listen, source };
        let address = listener.local_addr().map_err(listen)?;
        let store = Store::open(&settings.store, settings.quota)?;
        if settings.name.is_empty() {
            settings.name = address.to_string();
        }
        let others = settings.peers.iter().filter(|peer| **peer != settings.name);
        let peers = others.map(|peer| (peer.clone(), Peer::default())).collect();
        let shared = Arc::new(Shared {
            limit: Limit::new(settings.rate),
            courtesy: ReplicationThrottle::new(settings.slowdown),
            settings,
            pass: pass.into(),
            store,
            own: LocalShards::default(),
            durable: OnceLock::new(),
            peers: Mutex::new(peers),
            decisions: Mutex::default(),
            distrusted: Mutex::default(),
            withdrawn: Mutex::default(),
            refusals: Refusals::default(),
            unlike: Mutex::default(),
            lags: Mutex::default(),
            standing: Mutex::default(),
            failures: Mutex::default(),
            too_few: AtomicBool::new(false),
            overtaken: AtomicBool::new(false),
            meets: AtomicBool::new(false),
            spares: Mutex::default(),
            keeps_from: Mutex::default(),
            counters: Counters::default(),
            seats: seats::Seats::default(),
            stop: AtomicBool::new(false),
            nudged: Mutex::new(true),
            nudge: Condvar::new(),
            changes: AtomicU64::new(0),
            expected: Mutex::default(),
            expects: Condvar::new(),
        });
        for (name, work) in [
            ("ckpt-verify", loops::verify as fn(&Shared)),
            ("ckpt-ask", loops::ask),
            ("ckpt-send", loops::send),
            ("ckpt-ready", loops::make_ready),
        ] {
            let shared = Arc::clone(&shared);
            spawn(name, move || work(&shared))?;
        }
        let accepting = Arc::clone(&shared);
        spawn("ckpt-listen", move || loops::accept(&listener, &accepting))?;
        Ok(Service { shared, address })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its name among its peers.
    pub fn name(&self) -> &str {
        &self.shared.settings.name
    }

    /// Watches a checkpoint directory of a job from now on.
    pub fn watch(&self, watched: Watched) {
        self.shared.own.watch(watched);
        self.nudge();
    }

    /// All directories that are watched.
    pub fn watched(&self) -> Vec<Watched> {
        self.shared.own.watched()
    }

    /// There is storage that outlives the hosts: its steps are offered from now on. A second one is not taken.
    pub fn attach(&self, durable: Arc<dyn Durable>) {
        let _ = self.shared.durable.set(durable);
    }

    /// A shard that lies on this host, for one who reads it slowly: rather from the disk than from a launcher's memory.
    pub fn open(&self, root: &str) -> Option<Opened> {
        let shared = &self.shared;
        let on_disk = shared.own.open_file(root).map(Opened::of_file);
        let kept = || shared.store.open_replica(root).map(Opened::of_replica);
        on_disk.or_else(kept).or_else(|| shared.own.open(root))
    }

    /// The bytes of a shard on this host were found not to be those that were sealed: it is offered no more.
    pub fn doubt(&self, root: &str) {
        self.shared.distrust(self.name(), root);
    }

    /// Something was sealed: it is looked at now.
    pub fn nudge(&self) {
        self.shared.changed();
    }

    /// Every copy that is known, here and at peers that answer.
    pub fn copies(&self) -> Vec<Copy> {
        self.shared.own.look();
        self.shared.copies()
    }

    /// How old the newest whole step is in each tier, as far as is known without asking or looking anywhere.
    pub fn tiers(&self) -> Vec<TierState> {
        newest_by_tier(&self.shared.copies())
    }

    /// In how many seconds a step of a job comes from this host to the tiers behind its memory and disk, where that was measured: to the
    /// slowest of its peers at the rate of the last shard, to durable storage as the last step did.
    pub fn arrivals(&self, job: &str) -> Vec<(Tier, f64)> {
        let to_peer = self.shared.seconds_to_peers(job).map(|seconds| (Tier::Peer, seconds));
        let took = self.durable_figures().and_then(|figures| figures.last_step_took);
        let to_durable = took.map(|took| (Tier::Durable, took.as_secs_f64()));
        to_peer.into_iter().chain(to_durable).collect()
    }

    /// These are the peers from now on, this one perhaps among them; spares stay. What is known of those that stay is kept.
    pub fn meet(&self, peers: &[String]) {
        let spares = self.shared.spares().clone();
        self.meet_with_spares(peers, spares.into_iter().collect());
    }

    /// The same with those that wait to replace one of them. A peer that is one of both is no spare any more.
    pub fn meet_with_spares(&self, peers: &[String], mut spares: Vec<String>) {
        spares.retain(|name| !peers.contains(name));
        let mut known = self.shared.peers();
        let before: Vec<String> = known.keys().cloned().collect();
        known.retain(|name, _| peers.contains(name) || spares.contains(name));
        for peer in peers.iter().chain(&spares).filter(|peer| *peer != self.name()) {
            known.entry(peer.clone()).or_default();
        }
        let are_others = !known.keys().eq(&before);
        drop(known);
        *self.shared.spares() = spares.into_iter().collect();
        self.shared.meets.store(true, Ordering::Relaxed);
        if are_others {
            self.nudge();
        } else {
            self.shared.wake();
        }
    }

    /// All peers, by name.
    pub fn peers(&self) -> BTreeMap<String, Peer> {
        self.shared.peers().clone()
    }

    /// What went on since the start.
    pub fn counts(&self) -> Counts {
        self.shared.counters.now()
    }

    /// A rank of a job of this host completed these steps, oldest first: what replicas cost training is known by them.
    pub fn stepped(&self, job: &str, steps: &[StepTime]) {
        self.shared.courtesy.stepped(job, steps);
    }

    /// What training pays for replicas, as far as it tells of its steps.
    pub fn toll(&self) -> ReplicationOverhead {
        self.shared.courtesy.toll()
    }

    /// What ranks saved that said that they save the same, and did not: the newest steps last.
    pub fn unlike(&self) -> Vec<ReplicaDivergence> {
        let found = self.shared.unlike.lock().unwrap_or_else(PoisonError::into_inner);
        found.values().cloned().collect()
    }

    /// What went into durable storage, where there is some.
    pub fn durable_figures(&self) -> Option<Figures> {
        self.shared.durable().map(Durable::figures)
    }

    /// How many replicas each shard should have beside its owner's copy.
    pub fn redundancy(&self) -> usize {
        self.shared.settings.copies
    }

    /// How shards are cut where pieces are kept in place of replicas.
    pub fn parity(&self) -> Option<Parity> {
        self.shared.settings.parity
    }

    /// Bytes of replicas that are kept for others, and how many there may be.
    pub fn usage(&self) -> (u64, u64) {
        self.shared.store.usage()
    }

    /// Bytes of memory that is ready for shards that come: it has its pages already.
    pub fn ready(&self) -> u64 {
        self.shared.store.ready()
    }

    /// Asks all peers what they have, now.
    pub fn refresh(&self) {
        self.shared.refresh();
    }

    /// Looks what lies in durable storage of a run, now.
    pub fn refresh_durable(&self, run: &str) {
        self.shared.refresh_durable(run);
    }

    /// Deletes all copies of a step, here, at peers and in durable storage; how many there were.
    ///
    /// # Errors
    /// A copy is there and cannot be deleted.
    pub fn remove(&self, key: &StepKey) -> Result<usize, PeerError> {
        let shared = &self.shared;
        let copies = shared.copies();
        let of_step = || copies.iter().map(|copy| &copy.shard).filter(|shard| shard.of == *key);
        let is_theirs =
            |copy: &&Copy| copy.own && copy.medium != Medium::Durable && copy.holder != shared.name();
        let elsewhere = copies.iter().filter(|copy| copy.shard.of == *key).find(is_theirs);
        if let Some(copy) = elsewhere.filter(|_| shared.pass.tls().is_none()) {
            return Err(PeerError::Local(format!(
                "ranks on {} wrote step {}, and agents without TLS do not delete what ranks of another host wrote: run \
                 `mainstay ckpt rm` on that host",
                copy.holder, key.step
            )));
        }
        let shards: BTreeMap<&str, &Shard> = of_step().map(|shard| (shard.root.as_str(), shard)).collect();
        // A copy that is made just now, or that lies on a host which is away, goes later.
        shared.are_withdrawn(of_step().map(|shard| shard.whole().to_owned()));
        let mut count = 0;
        for root in shards.keys() {
            let own = shared.own.remove(root).map_err(|error| PeerError::Local(error.to_string()))?;
            count += usize::from(own) + usize::from(shared.store.remove(root));
        }
        if let Some(durable) = shared.durable() {
            count += durable.remove(key)?;
        }
        let what = Withdrawal {
            everything: true,
            ..Withdrawal::of(shards.into_values(), shared.store.withdrawal_key())
        };
        let mut stays = None;
        for peer in shared.alive() {
            let dropped = shared.asking().forget(&peer, &what)?;
            count += dropped.count;
            stays = stays.or((dropped.refused > 0).then_some(peer));
        }
        shared.refresh();
        match stays {
            None => Ok(count),
            Some(peer) => Err(PeerError::Local(format!(
                "{count} copies of step {} were deleted, and those at {peer} stay: another host has put them there, and agents without \
                 TLS delete a replica only for that host. Run `mainstay ckpt rm` on it, or give the agents certificates (`checkpoint.tls_certificate`)",
                key.step
            ))),
        }
    }

    /// Deletes replicas here that no rule keeps; how many.
    pub fn collect(&self) -> usize {
        self.shared.collect()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake();
        // Whoever waits in accept is woken.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), StartError> {
    std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop).map_err(StartError::Thread)
}

impl Shared {
    pub(crate) fn peers(&self) -> MutexGuard<'_, BTreeMap<String, Peer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn spares(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.spares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn keeps_from(&self) -> MutexGuard<'_, Option<(String, (u64, u64))>> {
        self.keeps_from.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn decisions(&self) -> MutexGuard<'_, Decisions> {
        self.decisions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn asking(&self) -> Asking<'_> {
        Asking { pass: &self.pass, patience: self.settings.patience }
    }

    pub(crate) fn name(&self) -> &str {
        &self.settings.name
    }

    /// Storage that outlives the hosts, where there is one.
    pub(crate) fn durable(&self) -> Option<&dyn Durable> {
        self.durable.get().map(|durable| &**durable)
    }

    /// Looks what lies there of a run. Storage that does not answer holds no job up: what is known of it counts.
    fn refresh_durable(&self, run: &str) {
        if let Some(durable) = self.durable()
            && let Err(error) = durable.refresh(run)
        {
            tracing::warn!(run, %error, "durable storage does not answer");
        }
    }

    fn stops(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Something may be news here: peers are asked soon what they have, and what has too few copies is sent.
    fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
        self.wake();
    }

    fn wake(&self) {
        *self.nudged.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.nudge.notify_all();
        drop(self.expected.lock().unwrap_or_else(PoisonError::into_inner));
        self.expects.notify_all();
    }

    /// Waits until something may have changed, or a launcher's memory is to be looked at; whether somebody said that something has.
    fn wait(&self) -> bool {
        let longest = self.settings.interval;
        let look = if self.own.has_shards() { LOOK_INTO_MEMORY } else { LOOK_FOR_THE_FIRST };
        let longest = if self.own.has_memory() { longest.min(look) } else { longest };
        let nudged = self.nudged.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.nudge.wait_timeout_while(nudged, longest, |nudged| !*nudged);
        let mut nudged = waited.unwrap_or_else(PoisonError::into_inner).0;
        std::mem::take(&mut *nudged)
    }

    /// A shard that lies here: of this host's ranks, or kept for others.
    pub(crate) fn open(&self, root: &str) -> Option<Opened> {
        self.own.open(root).or_else(|| self.store.open_replica(root).map(Opened::of_replica))
    }
}
