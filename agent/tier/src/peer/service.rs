//! The agent's part among its peers: it listens, knows who has what, and sends what has too few copies.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use mainstay_core::checkpoint::decision::{Decision, Decisions, Word};
use mainstay_core::checkpoint::inventory::{Copy, StepKey, StepState, newest_whole, steps};
use mainstay_core::checkpoint::placement::{Host, Rules};
use mainstay_core::checkpoint::retention::{Repair, Retention, deletable, repairs};
use mainstay_core::checkpoint::tiers::{TierState, newest_by_tier};

use super::client::{Asking, Sending};
use super::durable::{self, Durable};
use super::error::{PeerError, Reason};
use super::message::{Held, Inventory};
use super::own::{Opened, Own, Watched};
use super::pace::Limit;
use super::server;
use super::store::{Store, StoreError};
use super::token::Token;
use super::wire::{Patience, Wire};

/// Connections that are served at once; further ones are closed.
const CONNECTIONS: usize = 256;

/// How long a shard that was half sent is waited for.
const UPLOAD_PATIENCE: Duration = Duration::from_secs(120);

/// What ranks have sealed in launchers' memory is looked for this often: a few reads for each rank.
const LOOK_INTO_MEMORY: Duration = Duration::from_millis(50);

/// A peer that failed is left alone for that long, twice as long each time it fails again.
const BACK_OFF: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));

/// How long a copy that was found to be bad is not believed in.
const DISTRUST: Duration = Duration::from_secs(600);

/// What the service is to do.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where to listen.
    pub listen: SocketAddr,
    /// Under which of `peers`' words the others know this agent: its name among them.
    pub name: String,
    /// All agents, as `host:port`; this one may be among them.
    pub peers: Vec<String>,
    /// What fails together with this host.
    pub domain: String,
    /// Where replicas are kept.
    pub store: PathBuf,
    /// Bytes of replicas at most.
    pub quota: u64,
    /// Replicas of each shard beside the owner's.
    pub copies: usize,
    /// Whole steps that are kept at least.
    pub keep: usize,
    /// Peers that are taken only if nobody else is there.
    pub avoid: BTreeSet<String>,
    /// Bytes a second for all replication; 0 for no limit.
    pub rate: u64,
    /// Connections for one shard.
    pub streams: usize,
    /// Time from one look at own directories and peers to the next.
    pub interval: Duration,
    /// How long others are waited for.
    pub patience: Patience,
    /// This version of Mainstay.
    pub software: String,
}

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
    /// Not before then is it sent anything.
    not_before: Option<Instant>,
    failures: u32,
}

/// What went on since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Shards that were sent.
    pub shards_sent: u64,
    /// Their bytes.
    pub bytes_sent: u64,
    /// Shards that were taken for others.
    pub shards_taken: u64,
    /// Their bytes.
    pub bytes_taken: u64,
    /// Tries to send that failed.
    pub failures: u64,
    /// Copies that were found damaged.
    pub damaged: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    shards_sent: AtomicU64,
    bytes_sent: AtomicU64,
    shards_taken: AtomicU64,
    bytes_taken: AtomicU64,
    failures: AtomicU64,
    damaged: AtomicU64,
}

/// What all threads of the service share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) token: Token,
    pub(crate) store: Store,
    pub(crate) own: Own,
    durable: OnceLock<Arc<dyn Durable>>,
    peers: Mutex<BTreeMap<String, Peer>>,
    decisions: Mutex<Decisions>,
    distrusted: Mutex<BTreeMap<(String, String), Instant>>,
    limit: Limit,
    counters: Counters,
    connections: AtomicUsize,
    stop: AtomicBool,
    nudged: Mutex<bool>,
    nudge: Condvar,
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
    pub fn start(mut settings: Settings, token: Token) -> Result<Service, StartError> {
        let listen = |source| StartError::Listen { address: settings.listen, source };
        let listener = TcpListener::bind(settings.listen).map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let store = Store::open(&settings.store, settings.quota)?;
        if settings.name.is_empty() {
            settings.name = address.to_string();
        }
        let others = settings.peers.iter().filter(|peer| **peer != settings.name);
        let peers = others.map(|peer| (peer.clone(), Peer::default())).collect();
        let shared = Arc::new(Shared {
            limit: Limit::new(settings.rate),
            settings,
            token,
            store,
            own: Own::default(),
            durable: OnceLock::new(),
            peers: Mutex::new(peers),
            decisions: Mutex::default(),
            distrusted: Mutex::default(),
            counters: Counters::default(),
            connections: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            nudged: Mutex::new(true),
            nudge: Condvar::new(),
        });
        for (name, work) in [("ckpt-verify", verify as fn(&Shared)), ("ckpt-ask", ask), ("ckpt-send", send)] {
            let shared = Arc::clone(&shared);
            spawn(name, move || work(&shared))?;
        }
        let accepting = Arc::clone(&shared);
        spawn("ckpt-listen", move || accept(&listener, &accepting))?;
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
        let on_disk = shared.own.open_file(root).or_else(|| shared.store.open_replica(root));
        on_disk.map(Opened::of_file).or_else(|| shared.own.open(root))
    }

    /// The bytes of a shard on this host were found not to be those that were sealed: it is offered no more.
    pub fn doubt(&self, root: &str) {
        self.shared.distrust(self.name(), root);
    }

    /// Something was sealed: it is looked at now.
    pub fn nudge(&self) {
        self.shared.wake();
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

    /// All peers, by name.
    pub fn peers(&self) -> BTreeMap<String, Peer> {
        self.shared.peers().clone()
    }

    /// What went on since the start.
    pub fn counts(&self) -> Counts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { shards_sent, bytes_sent, shards_taken, bytes_taken, failures, damaged } =
            &self.shared.counters;
        Counts {
            shards_sent: of(shards_sent),
            bytes_sent: of(bytes_sent),
            shards_taken: of(shards_taken),
            bytes_taken: of(bytes_taken),
            failures: of(failures),
            damaged: of(damaged),
        }
    }

    /// How many replicas each shard should have beside its owner's copy.
    pub fn redundancy(&self) -> usize {
        self.shared.settings.copies
    }

    /// Bytes of replicas that are kept for others, and how many there may be.
    pub fn usage(&self) -> (u64, u64) {
        self.shared.store.usage()
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
        let roots: BTreeSet<String> = shared
            .copies()
            .into_iter()
            .filter(|copy| copy.shard.of == *key)
            .map(|copy| copy.shard.root)
            .collect();
        let mut count = 0;
        for root in &roots {
            let own = shared.own.remove(root).map_err(|error| PeerError::Local(error.to_string()))?;
            count += usize::from(own) + usize::from(shared.store.remove(root));
        }
        if let Some(durable) = shared.durable() {
            count += durable.remove(key)?;
        }
        let roots: Vec<String> = roots.into_iter().collect();
        for peer in shared.alive() {
            count += shared.asking().forget(&peer, roots.clone())?;
        }
        shared.refresh();
        Ok(count)
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

/// Whether the bytes were not as they were sealed before they went out.
fn is_ours(error: &PeerError) -> bool {
    matches!(error, PeerError::Corrupt { peer, .. } if peer == "this host")
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), StartError> {
    std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop).map_err(StartError::Thread)
}

fn verify(shared: &Shared) {
    shared.store.verify_all(|shard| {
        shared.counters.damaged.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(
            run = shard.of.run,
            step = shard.of.step,
            rank = shard.rank,
            "a replica was damaged and is deleted"
        );
    });
}

/// Asks peers in turn, for as long as the service lives.
fn ask(shared: &Shared) {
    while !shared.stops() {
        shared.refresh();
        shared.store.sweep(UPLOAD_PATIENCE);
        shared.collect();
        shared.wake();
        let until = Instant::now() + shared.settings.interval;
        while !shared.stops() && Instant::now() < until {
            std::thread::sleep(shared.settings.interval.min(Duration::from_millis(50)));
        }
    }
}

/// Sends what has too few copies, whenever something may have changed.
fn send(shared: &Shared) {
    let (mut last, mut seen) = (Instant::now(), 0);
    loop {
        let nudged = shared.wait();
        if shared.stops() {
            return;
        }
        let stamp = shared.own.stamp_of_memory();
        if !nudged && last.elapsed() < shared.settings.interval && stamp == seen {
            continue;
        }
        (last, seen) = (Instant::now(), stamp);
        shared.own.look();
        // One at a time: after each the world may be another.
        while !shared.stops() {
            let Some(repair) = shared.next_repair() else { break };
            shared.repair(&repair);
            shared.own.look();
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for stream in listener.incoming() {
        if shared.stops() {
            return;
        }
        let Ok(stream) = stream else {
            // Too many open files: it passes, or not; the loop must not spin.
            std::thread::sleep(Duration::from_millis(50));
            continue;
        };
        if shared.connections.fetch_add(1, Ordering::SeqCst) >= CONNECTIONS {
            shared.connections.fetch_sub(1, Ordering::SeqCst);
            continue;
        }
        let serving = Arc::clone(shared);
        let served = std::thread::Builder::new().name("ckpt-peer".to_owned()).spawn(move || {
            let patience = serving.settings.patience;
            let talked = Wire::accept(stream, &serving.token, patience)
                .and_then(|mut wire| server::converse(&mut wire, &serving));
            if let Err(error) = talked {
                tracing::debug!(%error, "a peer's connection ended");
                if matches!(error, PeerError::WrongToken { .. }) {
                    tracing::warn!(%error, "a connection was refused");
                }
            }
            serving.connections.fetch_sub(1, Ordering::SeqCst);
            // What was stored may be news for what is sent.
            serving.wake();
        });
        if served.is_err() {
            shared.connections.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Shared {
    pub(crate) fn peers(&self) -> MutexGuard<'_, BTreeMap<String, Peer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn decisions(&self) -> MutexGuard<'_, Decisions> {
        self.decisions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn asking(&self) -> Asking<'_> {
        Asking { token: &self.token, patience: self.settings.patience }
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

    fn wake(&self) {
        *self.nudged.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.nudge.notify_all();
    }

    /// Waits until something may have changed, or a launcher's memory is to be looked at; whether somebody said that something has.
    fn wait(&self) -> bool {
        let longest = self.settings.interval;
        let longest = if self.own.has_memory() { longest.min(LOOK_INTO_MEMORY) } else { longest };
        let nudged = self.nudged.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.nudge.wait_timeout_while(nudged, longest, |nudged| !*nudged);
        let mut nudged = waited.unwrap_or_else(PoisonError::into_inner).0;
        std::mem::take(&mut *nudged)
    }

    /// A shard that lies here: of this host's ranks, or kept for others.
    pub(crate) fn open(&self, root: &str) -> Option<Opened> {
        self.own.open(root).or_else(|| self.store.open_replica(root).map(Opened::of_file))
    }

    /// What this agent tells others.
    pub(crate) fn inventory(&self) -> Inventory {
        let (used, quota) = self.store.usage();
        self.own.look();
        let own = self.own.list().into_iter().map(|of| (of, true));
        let kept = self.store.list().into_iter().map(|of| (of, false));
        let held = |((shard, medium, verified), own)| Held { shard, medium, own, verified };
        Inventory {
            software: self.settings.software.clone(),
            domain: self.settings.domain.clone(),
            used,
            quota,
            copies: own.chain(kept).map(held).collect(),
        }
    }

    /// Every copy that is known, but those that were found to be bad.
    pub(crate) fn copies(&self) -> Vec<Copy> {
        let mut copies = Vec::new();
        let named = |holder: &str, held: Held| Copy {
            // A peer can speak for itself only.
            holder: holder.to_owned(),
            medium: held.medium,
            own: held.own,
            verified: held.verified,
            shard: held.shard,
        };
        copies.extend(self.inventory_unlooked().into_iter().map(|held| named(self.name(), held)));
        for (name, peer) in self.peers().iter().filter(|(_, peer)| peer.alive) {
            copies.extend(peer.inventory.copies.iter().cloned().map(|held| named(name, held)));
        }
        copies.extend(self.durable().into_iter().flat_map(durable::copies));
        let mut distrusted = self.distrusted.lock().unwrap_or_else(PoisonError::into_inner);
        distrusted.retain(|_, since| since.elapsed() < DISTRUST);
        copies.retain(|copy| !distrusted.contains_key(&(copy.holder.clone(), copy.shard.root.clone())));
        copies
    }

    fn inventory_unlooked(&self) -> Vec<Held> {
        let own = self.own.list().into_iter().map(|of| (of, true));
        let kept = self.store.list().into_iter().map(|of| (of, false));
        own.chain(kept)
            .map(|((shard, medium, verified), own)| Held { shard, medium, own, verified })
            .collect()
    }

    /// A copy was found to be bad: for a while it counts for nothing.
    pub(crate) fn distrust(&self, holder: &str, root: &str) {
        self.counters.damaged.fetch_add(1, Ordering::Relaxed);
        if holder == self.name() {
            self.own.is_bad(root);
            self.store.remove(root);
        }
        let mut distrusted = self.distrusted.lock().unwrap_or_else(PoisonError::into_inner);
        distrusted.insert((holder.to_owned(), root.to_owned()), Instant::now());
    }

    pub(crate) fn distrusted(&self) -> Vec<(String, String)> {
        self.distrusted.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }

    pub(crate) fn alive(&self) -> Vec<String> {
        self.peers().iter().filter(|(_, peer)| peer.alive).map(|(name, _)| name.clone()).collect()
    }

    pub(crate) fn count_taken(&self, bytes: u64) {
        self.counters.shards_taken.fetch_add(1, Ordering::Relaxed);
        self.counters.bytes_taken.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Asks all peers at once what they have.
    pub(crate) fn refresh(&self) {
        let names: Vec<String> = self.peers().keys().cloned().collect();
        std::thread::scope(|scope| {
            for name in &names {
                scope.spawn(move || {
                    let answer = self.asking().list(name);
                    self.heard(name, answer);
                });
            }
        });
    }

    fn heard(&self, name: &str, answer: Result<Inventory, PeerError>) {
        let mut peers = self.peers();
        let Some(peer) = peers.get_mut(name) else { return };
        match answer {
            Ok(inventory) => {
                if !peer.alive {
                    tracing::info!(peer = name, software = inventory.software, "a peer answers");
                }
                (peer.alive, peer.seen, peer.inventory) = (true, Some(Instant::now()), inventory);
                if peer.not_before.is_none() {
                    peer.error = None;
                }
            }
            Err(error) => {
                let text = error.to_string();
                if peer.alive || peer.error.as_ref() != Some(&text) {
                    tracing::warn!(peer = name, error = text, "a peer does not answer");
                }
                (peer.alive, peer.error) = (false, Some(text));
            }
        }
    }

    /// All agents, as far as replicas go.
    fn hosts(&self) -> Vec<Host> {
        let now = Instant::now();
        let mut hosts =
            vec![Host { name: self.name().to_owned(), domain: self.settings.domain.clone(), usable: true }];
        hosts.extend(self.peers().iter().map(|(name, peer)| Host {
            name: name.clone(),
            domain: peer.inventory.domain.clone(),
            usable: peer.alive && peer.not_before.is_none_or(|until| until <= now),
        }));
        hosts
    }

    fn next_repair(&self) -> Option<Repair> {
        let rules = Rules { copies: self.settings.copies, avoid: self.settings.avoid.clone() };
        repairs(self.name(), &self.copies(), &self.hosts(), &rules).into_iter().next()
    }

    fn repair(&self, repair: &Repair) {
        let Repair { shard, to } = repair;
        let Some(opened) = self.open(&shard.root) else {
            // It was deleted meanwhile, or cannot be read: the next look tells.
            self.distrust(self.name(), &shard.root);
            return;
        };
        let going = || opened.pin();
        let sending = Sending { limit: &self.limit, streams: self.settings.streams, going: &going };
        match self.asking().put(to, &opened.sealed, &opened.file, &sending) {
            Ok(sent) => {
                self.counters.shards_sent.fetch_add(1, Ordering::Relaxed);
                self.counters.bytes_sent.fetch_add(sent.bytes, Ordering::Relaxed);
                let mut peers = self.peers();
                let Some(peer) = peers.get_mut(to) else { return };
                (peer.failures, peer.not_before) = (0, None);
                if sent.bytes > 0 {
                    peer.rate = Some((sent.bytes as f64 / sent.took.as_secs_f64().max(1e-9)) as u64);
                }
                // It told so itself; the next inventory will have it too.
                let medium = mainstay_core::checkpoint::inventory::Medium::Disk;
                let held = Held { shard: shard.clone(), medium, own: false, verified: true };
                peer.inventory.copies.retain(|other| other.shard.root != shard.root);
                peer.inventory.copies.push(held);
            }
            Err(error) if is_ours(&error) && !opened.is_still() => {
                // A save needed its memory; nothing is wrong with it. What replaced it, or its copy on the disk, is next.
                tracing::debug!(
                    step = shard.of.step,
                    rank = shard.rank,
                    "a step was passed over in memory while it was sent"
                );
                let _ = self.asking().forget(to, vec![shard.root.clone()]);
            }
            Err(error) => self.failed(shard, to, &error),
        }
    }

    fn failed(&self, shard: &mainstay_core::checkpoint::inventory::Shard, to: &str, error: &PeerError) {
        self.counters.failures.fetch_add(1, Ordering::Relaxed);
        if is_ours(error) {
            tracing::error!(
                run = shard.of.run,
                step = shard.of.step,
                rank = shard.rank,
                "the bytes of a shard are not those that were sealed: it is offered no more"
            );
            return self.distrust(self.name(), &shard.root);
        }
        let mut peers = self.peers();
        let Some(peer) = peers.get_mut(to) else { return };
        peer.failures = peer.failures.saturating_add(1);
        let factor = 1_u32 << peer.failures.min(6).saturating_sub(1);
        let wait = match error {
            PeerError::Reported { reason: Reason::Full, .. } => BACK_OFF.1,
            _ => (BACK_OFF.0 * factor).min(BACK_OFF.1),
        };
        peer.not_before = Some(Instant::now() + wait);
        peer.error = Some(error.to_string());
        tracing::warn!(peer = to, step = shard.of.step, rank = shard.rank, %error, "a shard was not taken; another peer is tried");
    }

    /// Steps that the rules do not keep any more.
    pub(crate) fn deletable(&self) -> Vec<StepKey> {
        let copies = self.copies();
        let retention = Retention { keep: self.settings.keep, copies: self.settings.copies + 1 };
        let runs: BTreeSet<&str> = copies.iter().map(|copy| copy.shard.of.run_id()).collect();
        runs.into_iter().flat_map(|run| deletable(&steps(&copies, Some(run)), retention)).collect()
    }

    fn collect(&self) -> usize {
        let gone: BTreeSet<StepKey> = self.deletable().into_iter().collect();
        let held = self.store.list();
        held.iter().filter(|(shard, ..)| gone.contains(&shard.of) && self.store.remove(&shard.root)).count()
    }

    /// The decision for `asker`, made here and told to all who answer.
    pub(crate) fn lead(
        &self,
        run: &str,
        asker: &str,
        distrusted: &[(String, String)],
    ) -> Result<Decision, PeerError> {
        for (holder, root) in distrusted {
            let mut known = self.distrusted.lock().unwrap_or_else(PoisonError::into_inner);
            known.entry((holder.clone(), root.clone())).or_insert_with(Instant::now);
        }
        self.own.look();
        self.refresh();
        self.refresh_durable(run);
        let newest = newest_whole(&self.copies(), run).map(|step| step.key);
        // A peer that knows a newer decision puts the number up; after that many there is something wrong.
        for _ in 0..8 {
            let decision = self.decisions().decide(self.name(), run, asker, newest.as_ref());
            let Some(newer) = self.tell_all(&decision) else { return Ok(decision) };
            let mut decisions = self.decisions();
            let newer = Decision {
                fence: newer.fence.max(decision.fence).saturating_add(1),
                step: newest.clone(),
                by: self.name().to_owned(),
                ..newer
            };
            let _ = decisions.tell(&newer);
        }
        Err(PeerError::Local(format!("peers do not agree on a step of {run}")))
    }

    /// Tells a decision to all peers that answer; the newest that one of them holds against it.
    fn tell_all(&self, decision: &Decision) -> Option<Decision> {
        let alive = self.alive();
        let words = std::thread::scope(|scope| {
            let told: Vec<_> =
                alive.iter().map(|peer| scope.spawn(|| self.asking().tell(peer, decision))).collect();
            told.into_iter().map(|word| word.join()).collect::<Vec<_>>()
        });
        let refused = words.into_iter().filter_map(|word| match word {
            Ok(Ok(Word::Refused(newer))) => Some(newer),
            _ => None,
        });
        refused.max_by_key(|newer| newer.fence)
    }

    /// What is known of a step.
    pub(crate) fn step(&self, key: &StepKey) -> Option<StepState> {
        self.refresh_durable(key.run_id());
        steps(&self.copies(), Some(key.run_id())).into_iter().find(|step| step.key == *key)
    }
}
