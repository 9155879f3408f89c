//! Tests with a server of the S3 protocol: `MAINSTAY_TEST_S3` names the program (`pip install 'moto[server]'` has one, `moto_server`).
//! Without it, or in a build without `--features cloud`, nothing is tested.
#![allow(clippy::unwrap_used, clippy::panic, reason = "in a test, a panic is the report")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use mainstay_checkpoint::inventory::{Copy, Medium, steps};
use mainstay_checkpoint_format::bucket::{StepName, run_directory, shard_names};
use mainstay_checkpoint_format::{Chunks, Identity, MANIFEST_NAME, Manifest, SealedFile, chunk_sum};
use mainstay_durable::direct::DirectBucket;
use mainstay_durable::upload::{self, UploadOptions};
use mainstay_durable::{Bucket, listing};
use mainstay_tier::disk::Pace;
use mainstay_tier::peer::{SealedShard, look_directory};
use mainstay_tier::seal::Bytes;
use object_store::ObjectStoreExt;
use object_store::aws::AmazonS3Builder;
use testing::TempDir;
use twox_hash::XxHash3_128;

const PROGRAM: &str = "MAINSTAY_TEST_S3";
const SERVER: &str = "MAINSTAY_TEST_S3_AT";
const RUN: &str = "run";
const STEP: u64 = 10;
const CHUNK: u64 = 1 << 20;
/// The smallest part that S3 accepts, except for the last.
const PART: u64 = 5 << 20;
const SIZE: usize = (11 << 20) + 77;
const LONGEST: Duration = Duration::from_secs(120);

/// The server, which stops with the test.
struct Server(Child, SocketAddr);

impl Server {
    fn start(program: &str) -> Server {
        let at = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        let mut command = Command::new(program);
        command.args(["-H", "127.0.0.1", "-p", &at.port().to_string()]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let mut server = Server(child, at);
        let started = Instant::now();
        while TcpStream::connect(at).is_err() {
            assert!(server.0.try_wait().unwrap().is_none(), "{program} has ended");
            assert!(started.elapsed() < LONGEST, "{program} does not answer");
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Creates the bucket without a signature, which the server does not require here.
fn make_bucket(at: SocketAddr) {
    let mut stream = TcpStream::connect(at).unwrap();
    write!(stream, "PUT /bucket HTTP/1.1\r\nHost: {at}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        .unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
}

fn content() -> Vec<u8> {
    (0..SIZE as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn save(directory: &Path) {
    let content = content();
    let manifest = Manifest {
        identity: Identity { job: "job".to_owned(), attempt: 0, step: STEP, rank: 0, world_size: 1 },
        run: RUN.to_owned(),
        created_unix_s: 1_700_000_000,
        serialisation: "safetensors".to_owned(),
        software: BTreeMap::new(),
        file: SealedFile {
            name: "state.safetensors".to_owned(),
            size: SIZE as u64,
            xxh3_128: XxHash3_128::oneshot(&content),
        },
        chunks: Some(Chunks { bytes: CHUNK, sums: content.chunks(CHUNK as usize).map(chunk_sum).collect() }),
        shared_content: None,
    };
    let home = directory.join(format!("step-{STEP:012}/rank-00000"));
    fs::create_dir_all(&home).unwrap();
    fs::write(home.join("state.safetensors"), &content).unwrap();
    fs::write(home.join(MANIFEST_NAME), manifest.encode()).unwrap();
}

/// The shard in a directory.
fn sealed(directory: &Path) -> (SealedShard, Bytes) {
    let mut found = None;
    look_directory(directory, |path, sealed| {
        let sealed = sealed.unwrap();
        let file = File::open(path.join(&sealed.file)).unwrap();
        found = Some((sealed, Bytes::from(file)));
    });
    found.unwrap()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// Uploads the shard as an agent does, in parts, and completes the step.
fn bring(
    bucket: &Bucket,
    directory: &Path,
    notes: &Path,
    given_up: &(dyn Fn() -> bool + Sync),
) -> Result<upload::UploadResult, String> {
    let (sealed, bytes) = sealed(directory);
    let copy = Copy {
        holder: "".into(),
        medium: Medium::Disk,
        own: true,
        verified: true,
        shard: sealed.shard.clone(),
    };
    let record = listing::record(&steps(&[copy], Some(RUN))[0]).unwrap();
    let how = UploadOptions { notes: Some(notes), pace: &Pace::default(), part_bytes: Some(PART), given_up };
    let done = runtime().block_on(async {
        upload::begin(bucket, &record.name).await?;
        let sent = upload::shard(bucket, &sealed, &bytes, &how).await?;
        upload::commit(bucket, &record).await?;
        Ok::<_, mainstay_durable::DurableError>(sent)
    });
    done.map_err(|error| error.to_string())
}

#[test]
fn a_step_is_uploaded_to_an_s3_server_and_restored() {
    let Ok(program) = std::env::var(PROGRAM) else {
        return testing::skip(&format!(
            "{PROGRAM} names no server of S3's protocol (pip install 'moto[server]': moto_server)"
        ));
    };
    let server = Server::start(&program);
    make_bucket(server.1);
    // Endpoint and credentials come from the environment, as for an agent. A process must not change its own environment.
    let mut inside = Command::new(std::env::current_exe().unwrap());
    inside.args(["--exact", "s3::inside", "--nocapture", "--test-threads", "1"]);
    inside.env(SERVER, server.1.to_string());
    inside.envs([("AWS_ENDPOINT", format!("http://{}", server.1)), ("AWS_ALLOW_HTTP", "true".to_owned())]);
    inside.envs([
        ("AWS_ACCESS_KEY_ID", "id"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "us-east-1"),
    ]);
    let done = inside.output().unwrap();
    let output = [done.stdout, done.stderr].concat();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&output));
}

/// The part of the test above that runs in a separate process.
#[test]
fn inside() {
    if std::env::var_os(SERVER).is_none() {
        return;
    }
    a_kill_offers_nothing_and_the_next_try_goes_on();
    what_lies_there_comes_back();
    what_was_changed_there_is_seen();
}

fn a_kill_offers_nothing_and_the_next_try_goes_on() {
    let (from, notes) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    save(from.path());
    let url = "s3://bucket/killed";
    let bucket = Bucket::open(url).unwrap();
    let asked = AtomicU32::new(0);
    // It stops when the first part is uploaded.
    bring(&bucket, from.path(), notes.path(), &|| asked.fetch_add(1, Ordering::SeqCst) >= 2).unwrap_err();
    assert!(DirectBucket::open(url).unwrap().list(Some(RUN)).unwrap().0.is_empty(), "half a step is none");
    let sent = bring(&bucket, from.path(), notes.path(), &|| false).unwrap();
    assert_eq!(sent.bytes + sent.there, SIZE as u64);
    let (states, _) = DirectBucket::open(url).unwrap().list(Some(RUN)).unwrap();
    assert!(states.len() == 1 && states[0].is_whole());
}

fn what_lies_there_comes_back() {
    let (from, to) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    save(from.path());
    let direct = DirectBucket::open("s3://bucket/whole").unwrap();
    let (step, sent) = direct.push(RUN, from.path()).unwrap().unwrap();
    assert_eq!((step, sent.bytes), (STEP, SIZE as u64));
    let (_, again) = direct.push(RUN, from.path()).unwrap().unwrap();
    assert_eq!((again.bytes, again.there), (0, SIZE as u64));
    DirectBucket::open("s3://bucket/whole").unwrap().pull(RUN, &[], to.path(), &|_| {}).unwrap().unwrap();
    let got = to.path().join(format!("step-{STEP:012}/rank-00000/state.safetensors"));
    assert!(fs::read(got).unwrap() == content());
}

fn what_was_changed_there_is_seen() {
    let (from, to) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    save(from.path());
    let url = "s3://bucket/changed";
    DirectBucket::open(url).unwrap().push(RUN, from.path()).unwrap().unwrap();
    let mut spoilt = content();
    spoilt[SIZE / 2] ^= 1;
    let (sealed, _) = sealed(from.path());
    let step = StepName { job: "job".to_owned(), run: RUN.to_owned(), attempt: 0, step: STEP, world_size: 1 };
    let (data, _) = shard_names(0, &sealed.shard.root);
    let name = format!("changed/{}/{}/{data}", run_directory(RUN), step.directory());
    let store = AmazonS3Builder::from_env().with_bucket_name("bucket").build().unwrap();
    runtime().block_on(async {
        let path = object_store::path::Path::from(name);
        assert_eq!(store.head(&path).await.unwrap().size, SIZE as u64, "it is the shard that is replaced");
        store.put(&path, spoilt.into()).await.unwrap();
    });
    let pulled = DirectBucket::open(url).unwrap().pull(RUN, &[], to.path(), &|_| {});
    assert!(!matches!(pulled, Ok(Some(_))), "bytes that were not sealed were given back");
    assert!(!to.path().join(format!("step-{STEP:012}/rank-00000")).exists());
}
