//! The agent as a peer: listens, knows the copies of all peers, and sends shards with too few copies.

mod ask_pace;
mod connection_slots;
mod known_copies;
mod repair;
mod settings;
mod signals;
mod threads;

pub use settings::Settings;
use std::collections::{BTreeMap, BTreeSet};

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use mainstay_checkpoint::decision::Decisions;
use mainstay_checkpoint::divergence::ReplicaDivergence;
use mainstay_checkpoint::eligibility::PlacementEligibility;
use mainstay_checkpoint::inventory::{Copy, Medium, Shard, StepKey};
use mainstay_checkpoint::lag::{CopyLag, CopyLags, LagReason};
use mainstay_checkpoint::parity::Parity;
use mainstay_checkpoint::placement::{Host, Rules};
use mainstay_checkpoint::replication_cost::{DelayReason, StepTime};
use mainstay_checkpoint::spares::SpareHost;
use mainstay_checkpoint::tiers::{Tier, TierState, newest_by_tier};
use mainstay_diagnosis::repeats::{MAX_REPORTED, RemoteFailure, RemoteFailures};
use mainstay_sys::clock::mono;

use crate::lock;
use crate::peer::client::PeerClient;
use crate::peer::credentials::Credentials;
use crate::peer::durable::{Durable, DurableFigures};
use crate::peer::error::PeerError;
use crate::peer::local_shards::{LocalShards, OpenShard, WatchedDirectory};
use crate::peer::message::{Inventory, Withdrawal};
use crate::peer::pace::Limit;
use crate::peer::service::connection_slots::{ConnectionSlots, Refusals};
use crate::peer::service::signals::Signals;
use crate::peer::store::{Store, StoreError};
use crate::peer::throttle::{ReplicationOverhead, ReplicationThrottle};
use crate::peer::user::Users;

/// Interval of checks for sealed shards in launchers' memory: a few reads for each rank.
const MEMORY_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The same while nothing is sealed there yet.
const FIRST_CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// Pause after a failure of a peer, doubled with each further failure: first and longest.
const BACK_OFF_BOUNDS: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));

/// Time for which a copy that was found damaged does not count.
const DISTRUST_TIME: Duration = Duration::from_secs(600);

/// Time for which a withdrawal is remembered: a peer that was unreachable may still have a copy.
const WITHDRAWAL_MAX_AGE: Duration = Duration::from_secs(24 * 3600);

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
    counts: Mutex<Counts>,
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
    divergences: Mutex<known_copies::Divergences>,
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
#[allow(missing_docs, reason = "the message of each says it")]
pub enum StartError {
    #[error("listening for peers on {address}: {source}")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("starting a thread: {0}")]
    Thread(std::io::Error),
}

impl Service {
    /// Starts to listen, to ask peers and to send shards.
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
            counts: Mutex::default(),
            signals: Signals::default(),
            settings,
        });
        threads::start(&shared, listener).map_err(StartError::Thread)?;
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
    pub fn watch(&self, watched: WatchedDirectory) {
        self.shared.own.watch(watched);
        self.nudge();
    }

    /// All watched directories.
    pub fn watched(&self) -> Vec<WatchedDirectory> {
        self.shared.own.watched()
    }

    /// Attaches durable storage, whose steps are offered from now on. A second one is ignored.
    pub fn attach(&self, durable: Arc<dyn Durable>) {
        let _ = self.shared.durable.set(durable);
    }

    /// Opens a shard on this host for a slow reader: from disk rather than from a launcher's memory.
    pub fn open(&self, root: &str) -> Option<OpenShard> {
        let shared = &self.shared;
        let on_disk = shared.own.open_file(root).map(OpenShard::of_file);
        let kept = || shared.store.open_replica(root).map(OpenShard::of_replica);
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
        *lock(&self.shared.counts)
    }

    /// Reports steps that a rank of a job on this host completed, oldest first: they show what replication costs training.
    pub fn record_steps(&self, job: &str, steps: &[StepTime]) {
        self.shared.throttle.stepped(job, steps);
    }

    /// The cost of replication for training, as far as jobs report their steps.
    pub fn overhead(&self) -> ReplicationOverhead {
        self.shared.throttle.overhead()
    }

    /// Steps of which ranks saved different bytes although they declared them equal; the newest steps last.
    pub fn divergences(&self) -> Vec<ReplicaDivergence> {
        let found = lock(&self.shared.reports.divergences);
        found.values().cloned().collect()
    }

    /// Transfers to durable storage, if there is any.
    pub fn durable_figures(&self) -> Option<DurableFigures> {
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

impl Shared {
    pub(crate) fn peers(&self) -> MutexGuard<'_, BTreeMap<String, Peer>> {
        lock(&self.peers)
    }

    pub(crate) fn count(&self, add: impl FnOnce(&mut Counts)) {
        add(&mut lock(&self.counts));
    }

    pub(crate) fn decisions(&self) -> MutexGuard<'_, Decisions> {
        lock(&self.decisions)
    }

    pub(crate) fn client(&self) -> PeerClient<'_> {
        PeerClient { pass: &self.pass, patience: self.settings.patience }
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
        let look = if self.own.has_shards() { MEMORY_CHECK_INTERVAL } else { FIRST_CHECK_INTERVAL };
        let longest = if self.own.has_memory() { longest.min(look) } else { longest };
        self.signals.wait(longest)
    }

    /// Opens a shard on this host: of its ranks, or stored for others.
    pub(crate) fn open(&self, root: &str) -> Option<OpenShard> {
        self.own.open(root).or_else(|| self.store.open_replica(root).map(OpenShard::of_replica))
    }
}

// Counters since the start.

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Sent shards.
    pub shards_sent: u64,
    /// Their bytes.
    pub bytes_sent: u64,
    /// Shards received for other hosts.
    pub shards_taken: u64,
    /// Their bytes.
    pub bytes_taken: u64,
    /// Failed tries to send.
    pub failures: u64,
    /// Copies that were found damaged.
    pub damaged: u64,
    /// Steps of which ranks saved different bytes although they declared them equal.
    pub divergences: u64,
}

// The peers and spares of a service, which change with the hosts of a job.

/// A launch of a job, and the attempt and step from which its owners on this host keep their shards.
pub(crate) type KeptFrom = (String, (u64, u64));

/// What a launcher tells its service of the hosts of its job. An agent tells nothing: its peers are those of the
/// configuration, and no one else reports which of them are lost.
#[derive(Debug, Default)]
struct JobHosts {
    /// Hosts that wait to replace another one. They store additional copies, which do not count.
    spares: BTreeSet<String>,
    keeps_from: Option<KeptFrom>,
}

impl Service {
    /// Sets the peers, which may include this host. Spares stay, and so does the state of known peers.
    pub fn meet(&self, peers: &[String]) {
        self.meet_with_spares(peers, self.shared.spares().into_iter().collect());
    }

    /// Same as [`Service::meet`], and sets the spares. A peer in both lists is not a spare.
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
        self.shared.job().get_or_insert_default().spares = spares.into_iter().collect();
        if are_others {
            self.nudge();
        } else {
            self.shared.signals.wake();
        }
    }

    /// Keeps this step of a launch from now on if the files of this host's shards of it are held open. Returns whether they
    /// are.
    pub fn keep_from_files(&self, launch: &str, at: (u64, u64)) -> bool {
        // The files of a step that is not kept are released with this lock held.
        let mut job = self.shared.job();
        let are_held = self.shared.own.holds_all_of(launch, at);
        if are_held {
            job.get_or_insert_default().keeps_from = Some((launch.to_owned(), at));
        }
        are_held
    }

    /// Keeps this step of a launch, in the memory of its owners on this host or in files that are held open: only copies of
    /// older ones may be deleted.
    pub fn keep_from(&self, launch: &str, at: (u64, u64)) {
        self.shared.job().get_or_insert_default().keeps_from = Some((launch.to_owned(), at));
    }
}

impl Shared {
    /// The hosts of the job, if a launcher told them.
    fn job(&self) -> MutexGuard<'_, Option<JobHosts>> {
        lock(&self.job)
    }

    /// Whether a leader reports which peers are lost.
    fn has_leader(&self) -> bool {
        self.job().is_some()
    }

    fn spares(&self) -> BTreeSet<String> {
        self.job().as_ref().map(|job| job.spares.clone()).unwrap_or_default()
    }

    fn keeps_from(&self) -> Option<KeptFrom> {
        self.job().as_ref()?.keeps_from.clone()
    }
}

// Eligibility of this host and its peers as holders of replicas: each agent judges its own host.

impl Service {
    /// Sets this host's eligibility; peers receive it with its inventory.
    pub fn stands(&self, standing: PlacementEligibility) {
        let shared = &self.shared;
        let before = {
            let mut known = lock(&shared.reports.standing);
            if *known == standing {
                return;
            }
            std::mem::replace(&mut *known, standing.clone())
        };
        report_eligibility("this host", before.excluded.as_deref(), standing.excluded.as_deref());
        shared.changed();
    }

    /// This host's current eligibility.
    pub fn standing(&self) -> PlacementEligibility {
        self.shared.standing()
    }
}

impl Shared {
    fn standing(&self) -> PlacementEligibility {
        lock(&self.reports.standing).clone()
    }

    /// All agents that count for replicas. Copies on spares are made in addition.
    fn hosts(&self) -> Vec<Host> {
        let now = Instant::now();
        let spares = self.spares();
        let mut hosts = vec![Host {
            name: self.name().to_owned(),
            domain: self.settings.domain.clone(),
            usable: true,
            excluded: self.standing().excluded.is_some(),
        }];
        let peers = self.peers();
        let others = peers.iter().filter(|(name, _)| !spares.contains(*name));
        hosts.extend(others.map(|(name, peer)| Host {
            name: name.clone(),
            domain: peer.inventory.domain.clone(),
            usable: peer.alive && peer.not_before.is_none_or(|until| until <= now),
            excluded: peer.inventory.excluded().is_some(),
        }));
        hosts
    }

    /// The spares that answer, with the room in their last inventory.
    fn spare_hosts(&self) -> Vec<SpareHost> {
        let now = Instant::now();
        let spares = self.spares();
        let peers = self.peers();
        let usable = peers.iter().filter(|(name, peer)| {
            spares.contains(*name) && peer.alive && peer.not_before.is_none_or(|until| until <= now)
        });
        let room = |peer: &Peer| peer.inventory.quota.saturating_sub(peer.inventory.used);
        usable.map(|(name, peer)| SpareHost { name: name.clone(), free_bytes: room(peer) }).collect()
    }

    /// Rules for a placement: avoid the hosts in the configuration, and those whose ranks are next to this host's.
    fn rules(&self) -> Rules {
        let Settings { copies, avoid, parity, .. } = &self.settings;
        let own = self.standing();
        let peers = self.peers();
        let beside = peers.iter().filter(|(_, peer)| own.is_beside(&peer.inventory.standing));
        let avoid: BTreeSet<String> = beside.map(|(name, _)| name).chain(avoid).cloned().collect();
        Rules { copies: *copies, avoid, parity: *parity }
    }
}

/// Logs that a host is excluded as a holder of replicas, or is eligible again.
fn report_eligibility(host: &str, before: Option<&str>, now: Option<&str>) {
    match (before, now) {
        (None, Some(reason)) => {
            tracing::warn!(
                host,
                reason,
                "a host is excluded: replicas go elsewhere, and those it has no longer count"
            );
        }
        (Some(_), None) => tracing::info!(host, "a host is a place for replicas again"),
        _ => {}
    }
}

// Whether replicas keep up with the saves of this host's ranks, and the reason if not.

/// How far the replicas of a run lag, and the reason.
#[derive(Clone, Debug)]
pub struct Lag {
    /// The lag.
    pub copies: CopyLag,
    /// The reason.
    pub reason: LagReason,
    /// The reason as text.
    pub why: String,
}

impl Lag {
    /// The message for users if a step has waited for long.
    pub fn sentence(&self) -> Option<String> {
        self.copies.is_reported().then(|| self.copies.sentence(&self.why))
    }
}

impl Service {
    /// The lag of the replicas of each run of this host, without asking peers. Empty if no replicas are made.
    pub fn lags(&self) -> Vec<Lag> {
        let shared = &self.shared;
        if shared.settings.copies == 0 && shared.settings.parity.is_none() {
            return Vec::new();
        }
        let mut copies = shared.copies();
        let needs_none = shared.own.shared();
        copies.retain(|copy| !needs_none.contains(&copy.shard.root));
        let mut known = lock(&shared.reports.lags);
        let lags = known.look(mono(), shared.name(), &copies);
        drop(known);
        let (reason, why) = self.delay();
        lags.into_iter().map(|copies| Lag { copies, reason, why: why.clone() }).collect()
    }

    /// Why copies do not keep up with saves, as far as known, as a reason and as text.
    pub fn delay(&self) -> (LagReason, String) {
        let shared = &self.shared;
        let peers = shared.peers();
        let fails = peers.iter().find(|(_, peer)| !peer.alive || peer.not_before.is_some());
        if let Some((name, peer)) = fails {
            let error = peer.error.as_deref().unwrap_or("it does not answer");
            return (LagReason::Peer, format!("{name}: {error}"));
        }
        if peers.is_empty() {
            return (LagReason::Peer, "no peer is configured".to_owned());
        }
        drop(peers);
        match shared.throttle.holds() {
            Some(DelayReason::Spent) => {
                let percent = shared.settings.slowdown * 100.0;
                let why = format!(
                    "copies have used their {percent:.0} % of training time; an agent's limit is `checkpoint.slowdown_percent`"
                );
                return (LagReason::Slowdown, why);
            }
            Some(DelayReason::Measurement) => {
                let why = "one is left out, to measure what copies cost training".to_owned();
                return (LagReason::Measurement, why);
            }
            None => {}
        }
        let rate = shared.sender.limit.rate();
        let limit = if rate > 0 { format!(" at {} MiB/s at most", rate >> 20) } else { String::new() };
        (LagReason::Speed, format!("saves come faster than copies{limit}"))
    }
}

// Deletes the copies of a step everywhere, and replicas that no rule keeps.

impl Service {
    /// Deletes all copies of a step, on this host, on peers and in durable storage. Returns their number.
    ///
    /// # Errors
    /// A copy exists and cannot be deleted.
    pub fn remove(&self, key: &StepKey) -> Result<usize, PeerError> {
        let shared = &self.shared;
        let copies = shared.copies();
        let of_step = || copies.iter().map(|copy| &copy.shard).filter(|shard| shard.key == *key);
        let is_theirs =
            |copy: &&Copy| copy.own && copy.medium != Medium::Durable && copy.holder != shared.name();
        let elsewhere = copies.iter().filter(|copy| copy.shard.key == *key).find(is_theirs);
        if let Some(copy) = elsewhere.filter(|_| shared.pass.tls().is_none()) {
            return Err(PeerError::Local(format!(
                "ranks on {} wrote step {}, and agents without TLS do not delete what ranks of another host wrote: run \
                 `mainstay ckpt rm` on that host",
                copy.holder, key.step
            )));
        }
        let shards: BTreeMap<&str, &Shard> = of_step().map(|shard| (shard.root.as_str(), shard)).collect();
        let _deleting = lock(&shared.withdrawals.deleting);
        // Copies that are being made, or that are on an unreachable host, are deleted later.
        shared.record_withdrawals(of_step().map(|shard| shard.whole().to_owned()));
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
            ..Withdrawal::new(shards.into_values(), shared.store.withdrawal_key())
        };
        let mut stays = None;
        for peer in shared.alive() {
            let dropped = shared.client().forget(&peer, &what)?;
            count += dropped.count;
            stays = stays.or((dropped.refused > 0).then_some(peer));
        }
        shared.refresh();
        match stays {
            None => Ok(count),
            Some(peer) => Err(PeerError::Local(format!(
                "{count} copies of step {} were deleted, and those at {peer} stay: another host has put them there, and agents without \
                 TLS delete a replica only for that host. Run `mainstay ckpt rm` on it, or give the agents certificates (`checkpoint.tls`)",
                key.step
            ))),
        }
    }

    /// Deletes replicas on this host that no rule keeps. Returns their number.
    pub fn collect(&self) -> usize {
        self.shared.collect()
    }
}

// Failures of jobs on this host and on its peers: passed on unchanged to the code that diagnoses failures.

/// Maximum length of a program name or fingerprint from a peer, bytes: they are numbers of 16 digits.
const MAX_NAME_BYTES: usize = 64;

impl Service {
    /// Sets the failures of jobs on this host; peers receive them with its inventory.
    pub fn set_failures(&self, failures: Vec<RemoteFailure>) {
        *lock(&self.shared.reports.failures) = failures;
    }

    /// The failures that peers reported last, including peers that no longer answer, and the number of peers that answer.
    pub fn peers_failures(&self) -> RemoteFailures {
        let peers = self.shared.peers();
        let answered_by = peers.values().filter(|peer| peer.alive).count();
        let known = |(name, peer): (&String, &Peer)| {
            let sound = peer.inventory.failures.iter().filter(|known| is_sound(known));
            let failures: Vec<RemoteFailure> = sound.take(MAX_REPORTED).cloned().collect();
            (!failures.is_empty()).then(|| (name.clone(), failures))
        };
        let failures: BTreeMap<String, Vec<RemoteFailure>> = peers.iter().filter_map(known).collect();
        RemoteFailures { answered_by: u32::try_from(answered_by).unwrap_or(u32::MAX), failures }
    }
}

impl Shared {
    fn failures(&self) -> Vec<RemoteFailure> {
        lock(&self.reports.failures).clone()
    }
}

fn is_sound(failure: &RemoteFailure) -> bool {
    let names = [Some(&failure.program), Some(&failure.fingerprint), failure.content.as_ref()];
    names.into_iter().flatten().all(|name| name.len() <= MAX_NAME_BYTES)
}
