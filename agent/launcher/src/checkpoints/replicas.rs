//! Copies of checkpoints among the hosts of one job. Each launcher keeps some for the others in its memory: no agent and no
//! configuration are needed.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mainstay_checkpoint::inventory::{Copy, StepKey, steps};
use mainstay_checkpoint::replication_cost::StepTime;
use mainstay_group::merge::{COPIES_AMONG, SUMMED_WITHIN};
use mainstay_model::id::Attempt;
use mainstay_tier::peer::credentials::Credentials;
use mainstay_tier::peer::{FetchedShards, Service, Settings, User, WatchedDirectory};
use mainstay_tier::pool::{self, PoolOwner, PoolView};
use tokio::sync::mpsc;

use crate::checkpoints::copied_step::{self, CopyNews};
use crate::group::plan::HostsPlan;
use crate::ranks::RankSpec;
use crate::run::next_of;

/// The share of training time that copying may cost, as for agents.
const MAX_SLOWDOWN: f64 = 0.01;

/// Connections for one shard, as for agents.
const STREAMS_PER_SHARD: usize = 2;

/// How often each other host is asked what it has. In a job of many hosts it is asked less often, by this much for each host.
const ASK_EVERY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_millis(50));

/// How often to look which step has its copies, multiplied by the number of hosts: a look covers the copies of all hosts.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// How long to wait for checksums of what ranks have saved; the leader waits longer.
const SEALED_WITHIN: Duration = Duration::from_nanos(SUMMED_WITHIN.0);

/// A port reserved for other launchers, before it is known who they are.
#[derive(Debug)]
pub struct Listening(TcpListener);

impl Listening {
    /// Binds a free port on all addresses; none if there is none.
    pub fn new() -> Option<Listening> {
        // Both families where there is IPv6.
        let any = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0));
        any.or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))).ok().map(Listening)
    }

    /// The port.
    pub fn port(&self) -> Option<u16> {
        self.0.local_addr().ok().map(|address| address.port())
    }
}

/// The identity of a launcher among those that keep copies for each other.
#[derive(Clone, Debug)]
pub struct ReplicaPlan {
    /// `HOST:PORT` at which the others reach it.
    pub name: String,
    /// The proof that they show each other.
    pub pass: Credentials,
    /// The failure domain of this host.
    pub domain: String,
    /// Hosts of the job.
    pub hosts: u32,
    /// Copies of each shard on other hosts.
    pub copies: usize,
}

impl ReplicaPlan {
    /// The identity of a launcher that takes part.
    pub(crate) fn new(plan: &HostsPlan, name: String, pass: &Credentials) -> Option<ReplicaPlan> {
        let (domain, hosts, copies) = (plan.fails_together(), plan.hosts.1, plan.copies());
        (!name.is_empty()).then(|| ReplicaPlan { name, pass: pass.clone(), domain, hosts, copies })
    }

    /// The largest number of hosts with which it keeps copies.
    fn others(&self) -> u32 {
        self.hosts.min(u32::try_from(COPIES_AMONG).unwrap_or(u32::MAX))
    }

    /// How copies are kept, for people.
    pub fn describe(&self) -> String {
        let encrypted = match self.pass {
            Credentials::Token(_) => "not encrypted on their way",
            Credentials::Certificate(..) => "encrypted on their way",
        };
        match self.copies {
            1 => format!("a copy in the memory of another host of the job, {encrypted}"),
            copies => format!("copies in the memory of {copies} other hosts of the job, {encrypted}"),
        }
    }
}

/// The copies of checkpoints.
#[derive(Debug)]
pub struct Replicas {
    service: Arc<Service>,
    place: WatchedDirectory,
    ranks: Vec<u32>,
    view: Option<PoolView>,
    sender: mpsc::UnboundedSender<FromReplicas>,
    update: mpsc::UnboundedReceiver<FromReplicas>,
    launch: String,
    every: Duration,
    /// Ends the thread that reports copied steps to the pool.
    stop: Arc<AtomicBool>,
    /// The shards that were fetched last.
    pub(crate) brought: Option<(StepKey, BTreeMap<u32, String>)>,
}

/// The results of work outside the loop.
#[derive(Debug)]
pub(crate) enum FromReplicas {
    Line(String),
    Copies(CopyNews),
    Holding(Attempt, Vec<Copy>),
    Brought(Attempt, StepKey, Result<FetchedShards, String>),
}

impl Replicas {
    /// Starts to keep copies for others and to have others keep copies. The others are named later, before ranks start.
    /// `waits`: this host has no ranks yet.
    ///
    /// # Errors
    /// There is no memory or no thread for it; as a message.
    pub fn start(
        at: Listening,
        known: ReplicaPlan,
        pool_owner: &PoolOwner,
        rank_spec: &RankSpec,
        waits: bool,
    ) -> Result<Replicas, String> {
        let listen = at.0.local_addr().map_err(|error| error.to_string())?;
        let (base, each) = ASK_EVERY;
        let others = known.others();
        let settings = Settings {
            listen,
            name: known.name,
            domain: known.domain,
            quota: pool::available(pool_owner.directory()) / 4,
            copies: known.copies,
            slowdown: MAX_SLOWDOWN,
            streams: STREAMS_PER_SHARD,
            interval: base.max(each * others),
            ..Settings::alone(store(pool_owner.directory()), String::new())
        };
        let service = Service::start_at(at.0, settings, known.pass).map_err(|error| error.to_string())?;
        let service = Arc::new(service);
        let place = WatchedDirectory {
            run: rank_spec.checkpoint_run().to_owned(),
            directory: rank_spec.checkpoint_dir.clone(),
            user: User::own(),
            pool: Some(pool_owner.directory().to_owned()),
        };
        service.watch(place.clone());
        // Until a step is kept, all copies are.
        service.keep_from(&rank_spec.launch, (0, 0));
        let (sender, update) = mpsc::unbounded_channel();
        let mut replicas = Replicas {
            service,
            place,
            ranks: ranks_of(rank_spec),
            view: (!waits).then(|| pool_owner.view()),
            sender,
            update,
            launch: rank_spec.launch.clone(),
            every: POLL_INTERVAL * others,
            stop: Arc::default(),
            brought: None,
        };
        replicas.keep_what_is_copied().map_err(|error| error.to_string())?;
        Ok(replicas)
    }

    /// The next result of work outside the loop.
    pub(crate) async fn next(&mut self) -> FromReplicas {
        // It has a sender itself.
        next_of(self.update.recv().await.map(std::future::ready)).await
    }

    /// Drops the memory of this host's ranks. What is kept for others stays.
    pub(crate) fn leave(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        (self.view, self.brought) = (None, None);
    }

    /// Whether this host has no ranks yet.
    pub(crate) fn waits(&self) -> bool {
        self.view.is_none()
    }

    /// Sets where launchers of the job keep copies from now on.
    pub(crate) fn meet(&self, hosts: &[String], spares: Vec<String>) {
        self.service.meet_with_spares(hosts, spares);
    }

    /// The newest step of which a copy is kept here for other hosts, and of how many of its ranks. A step with copies of
    /// all ranks comes first.
    pub(crate) fn kept(&self) -> Option<(StepKey, usize)> {
        let held = self.service.holding(&self.place.run);
        let steps = steps(&held, None).into_iter().filter(|step| step.key.run == self.launch);
        let counted: Vec<(StepKey, usize)> = steps.map(|step| (step.key, step.ranks.len())).collect();
        let all = counted.iter().find(|(key, ranks)| *ranks == key.world as usize);
        all.or(counted.first()).cloned()
    }

    /// Takes other ranks for this host, whose memory is that of `pool_owner`.
    pub(crate) fn take_over(&mut self, pool_owner: &PoolOwner, rank_spec: &RankSpec) {
        self.ranks = ranks_of(rank_spec);
        self.place.pool = Some(pool_owner.directory().to_owned());
        self.service.watch(self.place.clone());
        self.view = Some(pool_owner.view());
        if let Err(error) = self.keep_what_is_copied() {
            let line = format!("checkpoint: steps do not wait in memory for their copies: {error}");
            let _ = self.sender.send(FromReplicas::Line(line));
        }
    }

    /// Starts to report to the pool which steps have their copies.
    fn keep_what_is_copied(&mut self) -> std::io::Result<()> {
        let view = self.view.clone();
        self.stop.store(true, Ordering::SeqCst);
        self.stop = Arc::default();
        let (weak, sender, stop) =
            (Arc::downgrade(&self.service), self.sender.clone(), Arc::clone(&self.stop));
        let (launch, every) = (self.launch.clone(), self.every);
        let keep = move || {
            // The receiver goes only when the launcher does.
            let report = |update| drop(sender.send(FromReplicas::Copies(update)));
            copied_step::keep_what_is_copied(&weak, view.as_ref(), (&launch, every), &stop, &report);
        };
        std::thread::Builder::new().name("ckpt-copied".to_owned()).spawn(keep).map(drop)
    }

    /// A rank of this host completed steps. Their times show what copying costs training.
    pub(crate) fn stepped(&self, steps: &[StepTime]) {
        self.service.record_steps(&self.place.run, steps);
    }

    pub(crate) fn gather(&self, attempt: Attempt, peers: Vec<String>) {
        let (service, view, run) = (Arc::clone(&self.service), self.view.clone(), self.place.run.clone());
        let sender = self.sender.clone();
        tokio::task::spawn_blocking(move || {
            service.meet(&peers);
            if let Some(view) = view {
                view.settle(SEALED_WITHIN);
            }
            // The receiver goes only when the launcher does.
            let _ = sender.send(FromReplicas::Holding(attempt, service.holding(&run)));
        });
    }

    /// Fetches the shards of this host's ranks. Of a step with another number of ranks it fetches the first shard, which is
    /// complete if all ranks have the same state.
    pub(crate) fn bring(&self, attempt: Attempt, step: StepKey, world: u32) {
        let ranks = if step.world == world { self.ranks.clone() } else { vec![0] };
        let (service, place) = (Arc::clone(&self.service), self.place.clone());
        let sender = self.sender.clone();
        tokio::task::spawn_blocking(move || {
            let print = |line: String| {
                let _ = sender.send(FromReplicas::Line(format!("checkpoint: {line}")));
            };
            let brought = service.fetch_shards(&step, &place, &ranks, &|at| {
                if !at.message.is_empty() {
                    print(at.message);
                }
            });
            let brought = brought.map_err(|error| error.to_string());
            let _ = sender.send(FromReplicas::Brought(attempt, step, brought));
        });
    }
}

fn ranks_of(rank_spec: &RankSpec) -> Vec<u32> {
    rank_spec.own_ranks().collect()
}

/// Where copies for others are stored: in the same memory as the pool, and removed with it.
fn store(pool: &Path) -> std::path::PathBuf {
    pool.join("replicas")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_says_whether_copies_are_encrypted() {
        let token = mainstay_tier::peer::token::Token::random().expect("random bytes");
        let known = ReplicaPlan {
            name: "a:1".to_owned(),
            pass: token.into(),
            domain: String::new(),
            hosts: 2,
            copies: 1,
        };
        testing::snapshot!("launcher", "copies are not encrypted", known.describe());
    }
}
