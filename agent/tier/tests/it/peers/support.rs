//! Hosts on separate loopback addresses, shards of any bytes, and a proxy that corrupts traffic.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use mainstay_checkpoint_format::{Chunks, Identity, MANIFEST_NAME, Manifest, SealedFile, chunk_sum};
use mainstay_tier::files::Files;
use mainstay_tier::peer::credentials::Credentials;
use mainstay_tier::peer::token::Token;
use mainstay_tier::peer::wire::Timeouts;
use mainstay_tier::peer::{Service, Settings, User, WatchedDirectory};
use testing::TempDir;
use twox_hash::XxHash3_128;

pub const RUN: &str = "run";
pub const CHUNK: u64 = 64 << 10;
const LONGEST: Duration = Duration::from_secs(300);

/// An address that no other test on this machine uses.
pub fn address() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let process = std::process::id() % 60_000;
    let (host, port) = (1 + next % 250, 7140 + next / 250);
    format!("127.{}.{}.{host}:{port}", 2 + process / 250, 1 + process % 250)
}

pub fn token() -> Token {
    Token::new(b"a secret of sixteen or more").unwrap()
}

pub fn pass() -> Credentials {
    token().into()
}

/// One host: a checkpoint directory, a store and a service.
pub struct Host {
    /// The first to be dropped, before the directories that it uses.
    pub service: Option<Service>,
    pub name: String,
    pub directory: TempDir,
    pub store: TempDir,
    pub settings: Settings,
    pub pass: Credentials,
}

/// A directory for a store, in memory as for real agents.
pub fn in_memory() -> TempDir {
    TempDir::new_in(testing::memory()).unwrap()
}

/// `count` hosts that know each other, each in its own failure domain.
pub fn hosts(count: usize, change: impl Fn(usize, &mut Settings)) -> Vec<Host> {
    let names: Vec<String> = (0..count).map(|_| address()).collect();
    hosts_named(&names, change)
}

pub fn hosts_named(names: &[String], change: impl Fn(usize, &mut Settings)) -> Vec<Host> {
    hosts_with(names, |_| pass(), change)
}

/// Same as [`hosts_named`], each with its own credentials.
pub fn hosts_with(
    names: &[String],
    shows: impl Fn(usize) -> Credentials,
    change: impl Fn(usize, &mut Settings),
) -> Vec<Host> {
    let start = |(index, name): (usize, &String)| {
        let (directory, store) = (TempDir::new().unwrap(), in_memory());
        let mut settings = Settings {
            listen: name.parse().unwrap(),
            name: name.clone(),
            peers: names.to_vec(),
            domain: format!("rack{index}"),
            store: store.path().to_owned(),
            quota: 1 << 30,
            copies: 1,
            parity: None,
            keep: 2,
            avoid: Default::default(),
            rate: 0,
            slowdown: 0.01,
            streams: 2,
            interval: Duration::from_millis(100),
            // A host that is lost refuses connections at once: only a busy machine needs this time.
            patience: Timeouts { connect: Duration::from_secs(30), stall: Duration::from_secs(60) },
            software: "test".to_owned(),
            users: Arc::default(),
        };
        change(index, &mut settings);
        let pass = shows(index);
        let service = Some(Service::start(settings.clone(), pass.clone()).unwrap());
        Host { name: name.clone(), directory, store, service, settings, pass }
    };
    names.iter().enumerate().map(start).collect()
}

impl Host {
    pub fn service(&self) -> &Service {
        self.service.as_ref().unwrap()
    }

    pub fn place(&self) -> WatchedDirectory {
        let directory = self.directory.path().to_owned();
        WatchedDirectory { run: RUN.to_owned(), directory, user: User::own(), pool: None }
    }

    /// Its ranks seal a step, and the agent receives the directory.
    pub fn save(&self, attempt: u64, step: u64, ranks: &[u32], world: u32) {
        for rank in ranks {
            seal(self.directory.path(), &identity(attempt, step, *rank, world), &bytes(step, *rank));
        }
        self.service().watch(self.place());
    }

    /// Waits until `count` peers have answered: before, a host other than the first choice may be chosen.
    pub fn wait_for_peers(&self, count: usize) {
        until("peers to answer", || {
            self.service().nudge();
            self.service().peers().values().filter(|peer| peer.alive).count() >= count
        });
    }

    /// Waits until every shard of a step is on `copies` hosts.
    pub fn wait_for_copies(&self, step: u64, copies: usize) {
        until(&format!("step {step} on {copies} hosts"), || {
            self.service().nudge();
            self.least_copies(step) >= copies
        });
    }

    pub fn least_copies(&self, step: u64) -> usize {
        let copies = self.service().copies();
        let all = mainstay_checkpoint::inventory::steps(&copies, Some(RUN));
        all.iter().filter(|state| state.key.step == step).map(|state| state.least_copies()).max().unwrap_or(0)
    }

    /// The host dies; its disk is lost.
    pub fn lose(&mut self) {
        self.service = None;
        self.directory = TempDir::new().unwrap();
        // Threads of the stopped service may still create a file there.
        until("an empty store", || {
            let mut entries = fs::read_dir(self.store.path()).unwrap().flatten();
            let gone = |path: PathBuf| fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path)).is_ok();
            entries.all(|entry| gone(entry.path()))
        });
    }

    pub fn start(&mut self) {
        let mut last = None;
        // The old listener may need a moment to close.
        until("the address", || match Service::start(self.settings.clone(), self.pass.clone()) {
            Ok(service) => {
                self.service = Some(service);
                true
            }
            Err(error) => {
                last = Some(error.to_string());
                false
            }
        });
    }

    pub fn restore(&self) -> Result<(Option<u64>, Vec<String>), String> {
        let reported = std::sync::Mutex::new(Vec::new());
        let report = |at: mainstay_tier::peer::Progress| {
            if !at.message.is_empty() {
                reported.lock().unwrap().push(at.message);
            }
        };
        let restored =
            self.service().restore(&self.place(), None, &report).map_err(|error| error.to_string())?;
        Ok((restored.decision.step.map(|key| key.step), reported.into_inner().unwrap()))
    }

    /// Compares the files in its directory with what was saved.
    pub fn has(&self, step: u64, ranks: &[u32]) {
        for rank in ranks {
            let home = shard(self.directory.path(), step, *rank);
            assert_eq!(fs::read(home.join("state.safetensors")).unwrap(), bytes(step, *rank), "rank {rank}");
            let manifest = Manifest::decode(&fs::read(home.join(MANIFEST_NAME)).unwrap()).unwrap();
            assert_eq!((manifest.identity.step, manifest.identity.rank), (step, *rank));
        }
    }

    /// The files of all its replicas.
    pub fn replicas(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut open = vec![self.store.path().join("replicas")];
        while let Some(directory) = open.pop() {
            // A directory that disappears during the check has no replicas.
            for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    open.push(path);
                } else if path.ends_with("shard") {
                    found.push(path);
                }
            }
        }
        found
    }
}

pub fn shard(directory: &Path, step: u64, rank: u32) -> PathBuf {
    directory.join(format!("step-{step:012}/rank-{rank:05}"))
}

pub fn identity(attempt: u64, step: u64, rank: u32, world_size: u32) -> Identity {
    Identity { job: "job".to_owned(), attempt, step, rank, world_size }
}

/// What a rank saves: different bytes for each step and rank, with several chunks and a partial one.
pub fn bytes(step: u64, rank: u32) -> Vec<u8> {
    let mut state = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(rank);
    let next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(5 * CHUNK as usize + 1234).collect()
}

/// Seals a shard as a rank does: the manifest last.
pub fn seal(directory: &Path, identity: &Identity, content: &[u8]) -> Manifest {
    let manifest = manifest(identity, content);
    let home = shard(directory, identity.step, identity.rank);
    fs::create_dir_all(&home).unwrap();
    fs::write(home.join("state.safetensors"), content).unwrap();
    fs::write(home.join(".manifest.tmp"), manifest.encode()).unwrap();
    fs::rename(home.join(".manifest.tmp"), home.join(MANIFEST_NAME)).unwrap();
    manifest
}

pub fn manifest(identity: &Identity, content: &[u8]) -> Manifest {
    Manifest {
        identity: identity.clone(),
        run: RUN.to_owned(),
        created_unix_s: 1_700_000_000 + identity.step,
        serialisation: "safetensors".to_owned(),
        software: BTreeMap::new(),
        file: SealedFile {
            name: "state.safetensors".to_owned(),
            size: content.len() as u64,
            xxh3_128: XxHash3_128::oneshot(content),
        },
        chunks: Some(Chunks { bytes: CHUNK, sums: content.chunks(CHUNK as usize).map(chunk_sum).collect() }),
        shared_content: None,
    }
}

/// Ends the watches of a host, and waits for their threads, which hold the service: they write notes until they end, and
/// would create the directory of notes again after its removal.
pub fn end_watches(files: &mut Option<Files>, service: Option<&Arc<Service>>) {
    *files = None;
    let started = Instant::now();
    while service.is_some_and(|service| Arc::strong_count(service) > 1) && started.elapsed() < LONGEST {
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < LONGEST, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A proxy between a host and its peers that changes what is sent to the host.
pub struct Proxy {
    pub passed: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    address: SocketAddr,
}

impl Proxy {
    /// Listens on `at` and forwards everything to `to`. `spoil` gets what is forwarded, with the number of its first byte over
    /// all connections, and closes the connection by returning false.
    pub fn start(
        at: &str,
        to: &str,
        spoil: impl Fn(usize, &mut [u8]) -> bool + Send + Sync + 'static,
    ) -> Proxy {
        let listener = TcpListener::bind(at).unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, passed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stopping, counting, to, spoil) =
            (Arc::clone(&stop), Arc::clone(&passed), to.to_owned(), Arc::new(spoil));
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if stopping.load(Ordering::SeqCst) {
                    return;
                }
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(&to)) else { continue };
                let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
                std::thread::spawn(move || pass_on(back.0, back.1, |_| true));
                let (counting, spoil) = (Arc::clone(&counting), Arc::clone(&spoil));
                std::thread::spawn(move || {
                    pass_on(client, server, |piece| {
                        spoil(counting.fetch_add(piece.len(), Ordering::SeqCst), piece)
                    });
                });
            }
        });
        Proxy { passed, stop, address }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
    }
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, spoil: impl Fn(&mut [u8]) -> bool) {
    let mut buffer = vec![0; 32 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if !spoil(&mut buffer[..count]) || to.write_all(&buffer[..count]).is_err() {
            let _ = from.shutdown(Shutdown::Both);
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}
