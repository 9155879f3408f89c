//! Measures the cost of replication: a shard to a peer and back over loopback, alternating with plain TCP for the same bytes.
//!
//! `replicate_cost MIB ROUNDS [DIRECTORY]` prints one line of JSON: bytes per second of each, and seconds of CPU per GB of both
//! ends together, with a token and then (`_tls`) with certificates. The directory should be on a tmpfs (default: /dev/shm).
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark that cannot go on stops")]

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mainstay_checkpoint_format::{CHUNK_BYTES, Chunks, Identity, Manifest, SealedFile, chunk_sum};
use mainstay_tier::peer::client::{PeerClient, SendOptions};
use mainstay_tier::peer::credentials::Credentials;
use mainstay_tier::peer::pace::Limit;
use mainstay_tier::peer::tls::{Tls, TlsFiles};
use mainstay_tier::peer::token::Token;
use mainstay_tier::peer::wire::Timeouts;
use mainstay_tier::peer::{SealedShard, Service, Settings, User, WatchedDirectory};
use mainstay_tier::seal::Bytes;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use twox_hash::XxHash3_128;

const PIECE: usize = 1 << 20;

/// Maximum number of bytes of replicas.
const QUOTA: u64 = 64 << 30;

/// Size of the receive buffer, which is reused: larger than any CPU cache.
const RECEIVED: usize = 512 << 20;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mebibytes: usize = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(1024);
    let rounds: usize = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(7);
    let root = PathBuf::from(
        arguments.next().unwrap_or_else(|| format!("/dev/shm/mainstay-bench-{}", std::process::id())),
    );
    let measured = std::panic::catch_unwind(|| measure(mebibytes << 20, rounds, &root));
    // Gigabytes of memory: removed whether or not the measurement succeeded.
    let _ = fs::remove_dir_all(&root);
    match measured {
        Ok(result) => println!("{}", serde_json::to_string(&result).unwrap()),
        Err(_) => std::process::exit(1),
    }
}

fn measure(bytes: usize, rounds: usize, root: &Path) -> BTreeMap<String, Vec<f64>> {
    let began = Instant::now();
    let reported = |what: &str| eprintln!("{:7.1} s  {what}", began.elapsed().as_secs_f64());
    fs::create_dir_all(root).unwrap();
    let own = root.join("state.safetensors");
    let (sum, sums) = fill(&own, bytes);
    let file = fs::File::open(&own).unwrap();
    // Mapped once, as an agent maps a launcher's memory, which holds one step after another.
    let from = Bytes::in_memory(file.try_clone().expect("a file can be opened twice"), bytes as u64)
        .expect("a file that is there can be mapped");
    reported("the shard lies in memory");
    let shard = Shard { file, from, bytes, sum, sums };
    let mut result = BTreeMap::new();
    for (suffix, pass) in [("", with_token()), ("_tls", with_certificates(root))] {
        rounds_with(&pass, suffix, &shard, rounds, root, &mut result, &reported);
    }
    result
}

/// What goes to the peer and back.
struct Shard {
    file: fs::File,
    from: Bytes,
    bytes: usize,
    sum: u128,
    sums: Vec<u64>,
}

/// Measures with agents that authenticate by `pass`. `suffix` is appended to the names of the results.
fn rounds_with(
    pass: &Credentials,
    suffix: &str,
    shard: &Shard,
    rounds: usize,
    root: &Path,
    result: &mut BTreeMap<String, Vec<f64>>,
    reported: &impl Fn(&str),
) {
    let bytes = shard.bytes;
    let holder = service(&root.join("holder"), pass);
    let at = holder.address().to_string();
    let mut add = |name: &str, value: f64| result.entry(format!("{name}{suffix}")).or_default().push(value);
    let mut received = vec![0; bytes.min(RECEIVED)];
    // The first round pays for fresh pages, so its results have separate names.
    for round in 0..=rounds {
        let name = |steady: &'static str, first: &'static str| if round == 0 { first } else { steady };
        let plain = plain_tcp(&shard.file, bytes, &mut received);
        add(name("plain_tcp_bytes_per_s", "plain_tcp_first_bytes_per_s"), bytes as f64 / plain);

        // A different step with the same bytes: the holder cannot detect that.
        let sealed = sealed(round as u64, bytes as u64, shard.sum, &shard.sums);
        let asking = PeerClient { pass, patience: Timeouts::default() };
        let sending = SendOptions { limit: &Limit::new(0), streams: STREAMS, going: &|| (), lock: None };
        let (began, cpu) = (Instant::now(), cpu());
        asking.put(&at, &sealed, &shard.from, &sending).expect("the holder takes it");
        let (took, cpu) = (began.elapsed().as_secs_f64(), self::cpu() - cpu);
        add(name("replicate_bytes_per_s", "replicate_first_bytes_per_s"), bytes as f64 / took);
        add(name("replicate_cpu_s_per_gb", "replicate_first_cpu_s_per_gb"), cpu * 1e9 / bytes as f64);

        // A host without shards asks for the newest step: once after it was on standby, once right after its start.
        for (standby, kind) in [(true, "restore"), (false, "restore_fresh")] {
            let (took, cpu) = restore(root, pass, &at, standby.then_some(bytes as u64));
            if round > 0 {
                add(&format!("{kind}_bytes_per_s"), bytes as f64 / took);
                add(&format!("{kind}_cpu_s_per_gb"), cpu * 1e9 / bytes as f64);
            }
            reported(&format!("{kind}{suffix}: {:.2} GB/s", bytes as f64 / took / 1e9));
        }
        // Frees the pages for the next shard.
        holder.remove(&sealed.shard.key).expect("the replica can be deleted");
        reported(&format!("round {round} of {rounds}{suffix}"));
    }
    drop(holder);
    fs::remove_dir_all(root.join("holder")).expect("what is kept can be deleted");
}

fn with_token() -> Credentials {
    Credentials::from(Token::new(b"a token for a benchmark").expect("it is long enough"))
}

/// A certificate for both ends, which have the same address, signed by an authority that both trust.
fn with_certificates(root: &Path) -> Credentials {
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let authorities = authority.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(authority, key);
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &issuer).unwrap().pem();
    let write = |name: &str, content: &str| {
        let path = root.join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    };
    let files = TlsFiles {
        certificate: write("agent.pem", &certificate),
        key: write("agent.key", &key.serialize_pem()),
        authorities: write("authorities.pem", &authorities),
    };
    Credentials::Certificate(Tls::read(files).expect("they were just made"), None)
}

/// Wall-clock seconds and CPU seconds from the order until the step is verified in its directory. With `standby`, memory is prepared first.
fn restore(root: &Path, token: &Credentials, holder: &str, standby: Option<u64>) -> (f64, f64) {
    let back = root.join("back");
    let place =
        WatchedDirectory { run: "bench".to_owned(), directory: back.clone(), user: User::own(), pool: None };
    let quota = if standby.is_some() { QUOTA } else { 0 };
    let restorer = restorer(&root.join("restorer"), token, holder, quota);
    let ready = || standby.is_none_or(|bytes| restorer.ready() >= bytes);
    let waiting = Instant::now();
    while !ready() {
        // Without room for it, the measurement would be of something else.
        assert!(waiting.elapsed() < Duration::from_secs(60), "no memory was made ready");
        std::thread::sleep(Duration::from_millis(10));
    }
    let (began, cpu) = (Instant::now(), self::cpu());
    let restored = restorer.restore(&place, None, &|_| {}).expect("the holder has it");
    let took = (began.elapsed().as_secs_f64(), self::cpu() - cpu);
    assert_eq!(restored.fetched, 1);
    drop(restorer);
    fs::remove_dir_all(&back).unwrap();
    took
}

/// Connections for one shard: the default of the configuration.
const STREAMS: usize = 2;

/// Fills a file and returns the checksums that a rank's keeper computes.
fn fill(path: &Path, bytes: usize) -> (u128, Vec<u64>) {
    let mut file = fs::File::create(path).unwrap();
    let (mut whole, mut sums) = (XxHash3_128::new(), Vec::new());
    let mut words = (0..bytes as u64 / 8).map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut chunk = vec![0; CHUNK_BYTES as usize];
    for at in (0..bytes).step_by(chunk.len()) {
        let chunk = &mut chunk[..(bytes - at).min(CHUNK_BYTES as usize)];
        for (place, word) in chunk.chunks_exact_mut(8).zip(&mut words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        whole.write(chunk);
        sums.push(chunk_sum(chunk));
        file.write_all(chunk).unwrap();
    }
    (whole.finish_128(), sums)
}

/// Seconds for the bytes over the same number of loopback connections, from warm memory into warm memory.
fn plain_tcp(file: &fs::File, bytes: usize, received: &mut [u8]) -> f64 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    // Of a large shard only the first part, repeatedly.
    let mut sent = vec![0; received.len()];
    file.read_exact_at(&mut sent, 0).unwrap();
    let turns = bytes / sent.len();
    let part = sent.len() / STREAMS;
    std::thread::scope(|scope| {
        let began = Instant::now();
        let sending: Vec<_> = sent
            .chunks(part)
            .map(|sent| {
                scope.spawn(move || {
                    let mut stream = TcpStream::connect(at).unwrap();
                    for _ in 0..turns {
                        sent.chunks(PIECE).for_each(|piece| stream.write_all(piece).unwrap());
                    }
                    stream.read_exact(&mut [0]).unwrap();
                })
            })
            .collect();
        for received in received.chunks_mut(part) {
            let (mut stream, _) = listener.accept().unwrap();
            scope.spawn(move || {
                for _ in 0..turns {
                    received.chunks_mut(PIECE).for_each(|piece| stream.read_exact(piece).unwrap());
                }
                stream.write_all(&[1]).unwrap();
            });
        }
        sending.into_iter().for_each(|sending| sending.join().unwrap());
        began.elapsed().as_secs_f64()
    })
}

fn service(store: &Path, token: &Credentials) -> Service {
    Service::start(settings(store, Vec::new(), QUOTA), token.clone()).expect("the service starts")
}

fn restorer(store: &Path, token: &Credentials, peer: &str, quota: u64) -> Service {
    Service::start(settings(store, vec![peer.to_owned()], quota), token.clone()).expect("the service starts")
}

fn settings(store: &Path, peers: Vec<String>, quota: u64) -> Settings {
    Settings {
        listen: ([127, 0, 0, 1], 0).into(),
        name: String::new(),
        peers,
        domain: String::new(),
        store: store.to_owned(),
        quota,
        // Only what is measured is sent.
        copies: 0,
        parity: None,
        keep: 2,
        avoid: Default::default(),
        rate: 0,
        slowdown: 0.0,
        streams: STREAMS,
        interval: Duration::from_secs(3600),
        patience: Timeouts::default(),
        software: String::new(),
        users: Default::default(),
    }
}

fn sealed(step: u64, size: u64, sum: u128, sums: &[u64]) -> SealedShard {
    let manifest = Manifest {
        identity: Identity { job: "bench".to_owned(), attempt: 0, step, rank: 0, world_size: 1 },
        run: "bench".to_owned(),
        created_unix_s: step,
        serialisation: "safetensors".to_owned(),
        software: BTreeMap::new(),
        file: SealedFile { name: "state.safetensors".to_owned(), size, xxh3_128: sum },
        chunks: Some(Chunks { bytes: CHUNK_BYTES, sums: sums.to_vec() }),
        shared_content: None,
    };
    SealedShard::of(manifest.encode()).unwrap()
}

/// Seconds of CPU that this process has used. It runs both ends.
fn cpu() -> f64 {
    let used = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF).unwrap();
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    seconds(used.user_time()) + seconds(used.system_time())
}
