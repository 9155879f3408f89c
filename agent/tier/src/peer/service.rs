//! The agent as a peer: listens, knows the copies of all peers, and sends shards with too few copies.

mod ask_pace;
mod connection_slots;
mod counts;
mod decide;
mod divergence;
mod eligibility;
mod failures;
mod known_copies;
mod lag;
mod loops;
mod members;
mod refusals;
mod removal;
mod repair;
mod settings;
mod signals;

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use mainstay_checkpoint::decision::Decisions;
use mainstay_checkpoint::divergence::ReplicaDivergence;
use mainstay_checkpoint::eligibility::PlacementEligibility;
use mainstay_checkpoint::inventory::Copy;
use mainstay_checkpoint::lag::CopyLags;
use mainstay_checkpoint::parity::Parity;
use mainstay_checkpoint::replication_cost::StepTime;
use mainstay_checkpoint::tiers::{Tier, TierState, newest_by_tier};
use mainstay_diagnosis::repeats::RemoteFailure;

use self::connection_slots::ConnectionSlots;
use self::counts::Counters;
pub use self::counts::Counts;
pub use self::lag::Lag;
use self::members::JobHosts;
use self::refusals::Refusals;
pub use self::settings::Settings;
use self::signals::Signals;
use super::client::Asking;
use super::credentials::Credentials;
use super::durable::{Durable, Figures};
use super::local_shards::{LocalShards, Opened, Watched};
use super::message::Inventory;
use super::pace::Limit;
use super::store::{Store, StoreError};
use super::throttle::{ReplicationOverhead, ReplicationThrottle};
use super::user::Users;

/// Time until an incomplete shard without new chunks is discarded.
const UPLOAD_PATIENCE: Duration = Duration::from_secs(120);

/// Interval of checks for sealed shards in launchers' memory: a few reads for each rank.
const LOOK_INTO_MEMORY: Duration = Duration::from_millis(50);

/// The same while nothing is sealed there yet.
const LOOK_FOR_THE_FIRST: Duration = Duration::from_millis(200);

/// Pause after a failure of a peer, doubled with each further failure: first and longest.
const BACK_OFF: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));

/// Time for which a copy that was found damaged does not count.
const DISTRUST: Duration = Duration::from_secs(600);

/// Time for which a withdrawal is remembered: a peer that was unreachable may still have a copy.
const REMEMBERED: Duration = Duration::from_secs(24 * 3600);

/// The known state of a peer.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    /// Whether it answered the last request.
    pub alive: bool,
    /// The last error.
    pub error: Option<String>,
    /// Time of its last answer.
    pub seen: Option<Instant>,
    /// The inventory that it reported.
    pub inventory: Inventory,
    /// Bytes per second of the last shard that was sent to it.
    pub rate: Option<u64>,
    /// Time of the request for the inventory.
    asked: Option<Instant>,
    /// No shard is sent to it before this time.
    not_before: Option<Instant>,
    failures: u32,
}

/// State that all threads of the service share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) pass: Credentials,
    pub(crate) store: Store,
    pub(crate) own: LocalShards,
    durable: OnceLock<Arc<dyn Durable>>,
    peers: Mutex<BTreeMap<String, Peer>>,
    decisions: Mutex<Decisions>,
    /// Copies that were found damaged, by holder and root, and when: they do not count for a while.
    distrusted: Mutex<BTreeMap<(String, String), Instant>>,
    withdrawals: Withdrawals,
    reports: Reports,
    sender: Sender,
    incoming: Incoming,
    /// The hosts of the one job that it serves, as a launcher told them.
    job: Mutex<Option<JobHosts>>,
    pub(crate) throttle: ReplicationThrottle,
    counters: Counters,
    signals: Signals,
}

/// Shards that were offered and are obsolete.
#[derive(Debug, Default)]
struct Withdrawals {
    /// Their roots, and when they were withdrawn.
    roots: Mutex<BTreeMap<String, Instant>>,
    /// Held while copies of withdrawn shards are deleted at peers: each deletion is counted once.
    deleting: Mutex<()>,
}

/// What is reported of this host, and of what its ranks saved.
#[derive(Debug, Default)]
struct Reports {
    /// Shards that should have been equal and were not.
    divergences: Mutex<divergence::Found>,
    /// The time since which steps wait for their copies.
    lags: Mutex<CopyLags>,
    /// This host's eligibility as a holder of replicas.
    standing: Mutex<PlacementEligibility>,
    /// Failures of jobs on this host.
    failures: Mutex<Vec<RemoteFailure>>,
}

/// The state of the thread that sends shards.
#[derive(Debug)]
struct Sender {
    limit: Limit,
    /// Shards that could not be opened to be sent, and when: tried again after a pause.
    unopened: Mutex<BTreeMap<String, Instant>>,
    /// Whether too few failure domains for pieces were already reported.
    too_few: AtomicBool,
    /// Whether a step was overwritten while it was sent, and not everything has been sent since.
    overtaken: AtomicBool,
}

/// Connections of peers.
#[derive(Debug, Default)]
struct Incoming {
    slots: ConnectionSlots,
    refusals: Refusals,
}

/// The service. It stops when it is dropped.
#[derive(Debug)]
pub struct Service {
    pub(crate) shared: Arc<Shared>,
    address: SocketAddr,
}

/// The service could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Listening on the address failed.
    #[error("listening for peers on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The error.
        source: std::io::Error,
    },
    /// The store cannot be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A thread cannot be started.
    #[error("starting a thread: {0}")]
    Thread(std::io::Error),
}

impl Service {
    /// Starts to listen, to ask peers and to send shards.
    ///
    /// # Errors
    /// Listening, opening the store or starting a thread failed.
    pub fn start(settings: Settings, pass: impl Into<Credentials>) -> Result<Service, StartError> {
        let listen = |source| StartError::Listen { address: settings.listen, source };
        let listener = TcpListener::bind(settings.listen).map_err(listen)?;
        Service::start_at(listener, settings, pass)
    }

    /// Same as [`Service::start`], with an open listener.
    ///
    /// # Errors
    /// Opening the store or starting a thread failed.
    pub fn start_at(
        listener: TcpListener,
        mut settings: Settings,
        pass: impl Into<Credentials>,
    ) -> Result<Service, StartError> {
        let listen = |source| StartError::Listen { address: settings.listen, source };
        let address = listener.local_addr().map_err(listen)?;
        let store = Store::open(&settings.store, settings.quota)?;
        if settings.name.is_empty() {
            settings.name = address.to_string();
        }
        let others = settings.peers.iter().filter(|peer| **peer != settings.name);
        let peers = others.map(|peer| (peer.clone(), Peer::default())).collect();
        let own = LocalShards::new(Arc::clone(&settings.users));
        let shared = Arc::new(Shared {
            throttle: ReplicationThrottle::new(settings.slowdown),
            pass: pass.into(),
            store,
            own,
            durable: OnceLock::new(),
            peers: Mutex::new(peers),
            decisions: Mutex::default(),
            distrusted: Mutex::default(),
            withdrawals: Withdrawals::default(),
            reports: Reports::default(),
            sender: Sender {
                limit: Limit::new(settings.rate),
                unopened: Mutex::default(),
                too_few: AtomicBool::new(false),
                overtaken: AtomicBool::new(false),
            },
            incoming: Incoming::default(),
            job: Mutex::default(),
            counters: Counters::default(),
            signals: Signals::default(),
            settings,
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

    /// The address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its name among its peers.
    pub fn name(&self) -> &str {
        &self.shared.settings.name
    }

    /// The users for whom it acts.
    pub fn users(&self) -> &Arc<Users> {
        &self.shared.settings.users
    }

    /// Starts to watch a checkpoint directory of a job.
    pub fn watch(&self, watched: Watched) {
        self.shared.own.watch(watched);
        self.nudge();
    }

    /// All watched directories.
    pub fn watched(&self) -> Vec<Watched> {
        self.shared.own.watched()
    }

    /// Attaches durable storage, whose steps are offered from now on. A second one is ignored.
    pub fn attach(&self, durable: Arc<dyn Durable>) {
        let _ = self.shared.durable.set(durable);
    }

    /// Opens a shard on this host for a slow reader: from disk rather than from a launcher's memory.
    pub fn open(&self, root: &str) -> Option<Opened> {
        let shared = &self.shared;
        let on_disk = shared.own.open_file(root).map(Opened::of_file);
        let kept = || shared.store.open_replica(root).map(Opened::of_replica);
        on_disk.or_else(kept).or_else(|| shared.own.open(root))
    }

    /// Records that the bytes of a shard on this host differ from its seal: it is no longer offered.
    pub fn doubt(&self, root: &str) {
        self.shared.distrust(self.name(), root);
    }

    /// Reports that something was sealed, so that it is checked now.
    pub fn nudge(&self) {
        self.shared.changed();
    }

    /// All known copies, on this host and on peers that answer.
    pub fn copies(&self) -> Vec<Copy> {
        self.shared.own.look();
        self.shared.copies()
    }

    /// Age of the newest whole step in each tier, as far as known, without requests or checks.
    pub fn tiers(&self) -> Vec<TierState> {
        newest_by_tier(&self.shared.copies())
    }

    /// Seconds until a step of a job reaches the tiers beyond memory and disk, if measured: the slowest of its peers at the rate of the
    /// last shard, and durable storage as the last step took.
    pub fn arrivals(&self, job: &str) -> Vec<(Tier, f64)> {
        let to_peer = self.shared.seconds_to_peers(job).map(|seconds| (Tier::Peer, seconds));
        let took = self.durable_figures().and_then(|figures| figures.last_step_took);
        let to_durable = took.map(|took| (Tier::Durable, took.as_secs_f64()));
        to_peer.into_iter().chain(to_durable).collect()
    }

    /// All peers, by name.
    pub fn peers(&self) -> BTreeMap<String, Peer> {
        self.shared.peers().clone()
    }

    /// Counters since the start.
    pub fn counts(&self) -> Counts {
        self.shared.counters.now()
    }

    /// Reports steps that a rank of a job on this host completed, oldest first: they show what replication costs training.
    pub fn stepped(&self, job: &str, steps: &[StepTime]) {
        self.shared.throttle.stepped(job, steps);
    }

    /// The cost of replication for training, as far as jobs report their steps.
    pub fn overhead(&self) -> ReplicationOverhead {
        self.shared.throttle.overhead()
    }

    /// Steps of which ranks saved different bytes although they declared them equal; the newest steps last.
    pub fn divergences(&self) -> Vec<ReplicaDivergence> {
        let found = self.shared.reports.divergences.lock().unwrap_or_else(PoisonError::into_inner);
        found.values().cloned().collect()
    }

    /// Transfers to durable storage, if there is any.
    pub fn durable_figures(&self) -> Option<Figures> {
        self.shared.durable().map(Durable::figures)
    }

    /// Number of replicas that each shard should have in addition to its owner's copy.
    pub fn redundancy(&self) -> usize {
        self.shared.settings.copies
    }

    /// How shards are cut if pieces are stored instead of replicas.
    pub fn parity(&self) -> Option<Parity> {
        self.shared.settings.parity
    }

    /// Bytes of replicas stored for others, and the quota.
    pub fn usage(&self) -> (u64, u64) {
        self.shared.store.usage()
    }

    /// Bytes of memory with allocated pages for incoming shards.
    pub fn ready(&self) -> u64 {
        self.shared.store.ready()
    }

    /// Asks all peers for their inventories now.
    pub fn refresh(&self) {
        self.shared.refresh();
    }

    /// Lists a run in durable storage now.
    pub fn refresh_durable(&self, run: &str) {
        self.shared.refresh_durable(run);
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.shared.signals.stop();
        // Wakes the thread that waits in accept(2).
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

    pub(crate) fn decisions(&self) -> MutexGuard<'_, Decisions> {
        self.decisions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn asking(&self) -> Asking<'_> {
        Asking { pass: &self.pass, patience: self.settings.patience }
    }

    pub(crate) fn name(&self) -> &str {
        &self.settings.name
    }

    /// Durable storage, if there is any.
    pub(crate) fn durable(&self) -> Option<&dyn Durable> {
        self.durable.get().map(|durable| &**durable)
    }

    /// Lists a run in durable storage. If the storage does not answer, the last known listing counts, so that no job waits for it.
    fn refresh_durable(&self, run: &str) {
        if let Some(durable) = self.durable()
            && let Err(error) = durable.refresh(run)
        {
            tracing::warn!(run, %error, "durable storage does not answer");
        }
    }

    fn stops(&self) -> bool {
        self.signals.stops()
    }

    /// Reports a possible change: peers are asked soon, and shards with too few copies are sent.
    fn changed(&self) {
        self.signals.count_change();
        self.signals.wake();
    }

    /// Waits until something may have changed or it is time to check launchers' memory. Returns whether a change was reported.
    fn wait(&self) -> bool {
        let longest = self.settings.interval;
        let look = if self.own.has_shards() { LOOK_INTO_MEMORY } else { LOOK_FOR_THE_FIRST };
        let longest = if self.own.has_memory() { longest.min(look) } else { longest };
        self.signals.wait(longest)
    }

    /// Opens a shard on this host: of its ranks, or stored for others.
    pub(crate) fn open(&self, root: &str) -> Option<Opened> {
        self.own.open(root).or_else(|| self.store.open_replica(root).map(Opened::of_replica))
    }
}
