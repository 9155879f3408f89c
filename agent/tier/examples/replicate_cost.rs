//! What replication costs: a shard to a peer and back over loopback, beside plain TCP with the same bytes, in turn.
//!
//! `replicate_cost MIB ROUNDS [DIRECTORY]` prints one line of JSON: bytes a second of each, and seconds of CPU per GB of both
//! ends together. The directory should be on a tmpfs (default: /dev/shm).
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark that cannot go on stops")]

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mainstay_checkpoint::{CHUNK_BYTES, Chunks, Identity, MANIFEST_NAME, Manifest, SealedFile, chunk_sum};
use mainstay_tier::peer::client::{Asking, Sending};
use mainstay_tier::peer::pace::Limit;
use mainstay_tier::peer::token::Token;
use mainstay_tier::peer::wire::Patience;
use mainstay_tier::peer::{Sealed, Service, Settings, User, Watched};
use twox_hash::XxHash3_128;

const PIECE: usize = 1 << 20;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mebibytes: usize = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(1024);
    let rounds: usize = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(7);
    let root = PathBuf::from(
        arguments.next().unwrap_or_else(|| format!("/dev/shm/mainstay-bench-{}", std::process::id())),
    );
    let bytes = mebibytes << 20;
    let content: Vec<u8> = (0..bytes as u64 / 8)
        .flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect();
    let token = Token::new(b"a token for a benchmark").expect("it is long enough");
    let holder = service(&root.join("holder"), &token);
    let directory = root.join("own");

    let mut result: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    let mut received = vec![0; bytes];
    // The first round pays for fresh pages; it is told apart.
    for round in 0..=rounds {
        let name = |steady: &'static str, first: &'static str| if round == 0 { first } else { steady };
        let plain = plain_tcp(&content, &mut received);
        result
            .entry(name("plain_tcp_bytes_per_s", "plain_tcp_first_bytes_per_s"))
            .or_default()
            .push(bytes as f64 / plain);

        let sealed = seal(&directory, round as u64, &content);
        let file = fs::File::open(home(&directory, round as u64).join(&sealed.file)).unwrap();
        let asking = Asking { token: &token, patience: Patience::default() };
        let sending = Sending { limit: &Limit::new(0), streams: 1 };
        let at = holder.address().to_string();
        let (began, cpu) = (Instant::now(), cpu());
        asking.put(&at, &sealed, &file, &sending).expect("the holder takes it");
        let (took, cpu) = (began.elapsed().as_secs_f64(), self::cpu() - cpu);
        result
            .entry(name("replicate_bytes_per_s", "replicate_first_bytes_per_s"))
            .or_default()
            .push(bytes as f64 / took);
        result
            .entry(name("replicate_cpu_s_per_gb", "replicate_first_cpu_s_per_gb"))
            .or_default()
            .push(cpu * 1e9 / bytes as f64);

        // A host that lost its directory asks for the newest step.
        fs::remove_dir_all(&directory).unwrap();
        let back = root.join("back");
        let place = Watched { run: "bench".to_owned(), directory: back.clone(), user: User::own() };
        let began = Instant::now();
        let restorer = restorer(&root.join("restorer"), &token, &at);
        let cpu = self::cpu();
        let asked = Instant::now();
        let restored = restorer.restore(&place, None, &|_| {}).expect("the holder has it");
        let (took, cpu) = (asked.elapsed().as_secs_f64(), self::cpu() - cpu);
        assert!(restored.fetched == 1 && began.elapsed() >= asked.elapsed());
        result
            .entry(name("restore_bytes_per_s", "restore_first_bytes_per_s"))
            .or_default()
            .push(bytes as f64 / took);
        result
            .entry(name("restore_cpu_s_per_gb", "restore_first_cpu_s_per_gb"))
            .or_default()
            .push(cpu * 1e9 / bytes as f64);
        drop(restorer);
        fs::remove_dir_all(&back).unwrap();
        // The next shard finds the pages of this one.
        let key = sealed.shard.of.clone();
        holder.remove(&key).expect("the replica can be deleted");
    }
    drop(holder);
    let _ = fs::remove_dir_all(&root);
    println!("{}", serde_json::to_string(&result).unwrap());
}

/// Bytes to the other end of a loopback connection and into a warm buffer, in seconds.
fn plain_tcp(content: &[u8], received: &mut [u8]) -> f64 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        let receiving = scope.spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            received.chunks_mut(PIECE).for_each(|piece| stream.read_exact(piece).unwrap());
            stream.write_all(&[1]).unwrap();
        });
        let mut stream = TcpStream::connect(at).unwrap();
        let began = Instant::now();
        content.chunks(PIECE).for_each(|piece| stream.write_all(piece).unwrap());
        stream.read_exact(&mut [0]).unwrap();
        let took = began.elapsed().as_secs_f64();
        receiving.join().unwrap();
        took
    })
}

fn service(store: &Path, token: &Token) -> Service {
    Service::start(settings(store, Vec::new()), token.clone()).expect("the service starts")
}

fn restorer(store: &Path, token: &Token, peer: &str) -> Service {
    Service::start(settings(store, vec![peer.to_owned()]), token.clone()).expect("the service starts")
}

fn settings(store: &Path, peers: Vec<String>) -> Settings {
    Settings {
        listen: ([127, 0, 0, 1], 0).into(),
        name: String::new(),
        peers,
        domain: String::new(),
        store: store.to_owned(),
        quota: 64 << 30,
        // Nothing is sent but what is measured.
        copies: 0,
        keep: 2,
        avoid: Default::default(),
        rate: 0,
        streams: 1,
        interval: Duration::from_secs(3600),
        patience: Patience::default(),
        software: String::new(),
    }
}

fn home(directory: &Path, step: u64) -> PathBuf {
    directory.join(format!("step-{step:012}/rank-00000"))
}

fn seal(directory: &Path, step: u64, content: &[u8]) -> Sealed {
    let manifest = Manifest {
        identity: Identity { job: "bench".to_owned(), attempt: 0, step, rank: 0, world_size: 1 },
        run: "bench".to_owned(),
        created_unix_s: 0,
        serialisation: "safetensors".to_owned(),
        software: BTreeMap::new(),
        file: SealedFile {
            name: "state.safetensors".to_owned(),
            size: content.len() as u64,
            xxh3_128: XxHash3_128::oneshot(content),
        },
        chunks: Some(Chunks {
            bytes: CHUNK_BYTES,
            sums: content.chunks(CHUNK_BYTES as usize).map(chunk_sum).collect(),
        }),
    };
    let home = home(directory, step);
    fs::create_dir_all(&home).unwrap();
    fs::write(home.join(&manifest.file.name), content).unwrap();
    fs::write(home.join(MANIFEST_NAME), manifest.encode()).unwrap();
    Sealed::of(manifest.encode()).unwrap()
}

/// Seconds of CPU that this process has used: it is both ends.
fn cpu() -> f64 {
    let used = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF).unwrap();
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    seconds(used.user_time()) + seconds(used.system_time())
}
