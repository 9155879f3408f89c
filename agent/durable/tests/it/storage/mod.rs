//! Steps are uploaded and restored from storage alone; requests are refused, processes die at every request, bytes change.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "in a test, a panic is the report")]

mod faulty;

use std::cell::RefCell;
use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mainstay_checkpoint::inventory::{Copy, Medium, StepState, steps};
use mainstay_checkpoint_format::{Chunks, Identity, MANIFEST_NAME, Manifest, SealedFile, chunk_sum};
use mainstay_durable::direct::DirectBucket;
use mainstay_durable::upload::{self, UploadOptions};
use mainstay_durable::{Bucket, Settings, Tier, listing};
use mainstay_tier::disk::Pace;
use mainstay_tier::peer::token::Token;
use mainstay_tier::peer::wire::Timeouts;
use mainstay_tier::peer::{self, SealedShard, Service, User, WatchedDirectory, look_directory};
use mainstay_tier::seal::Bytes;
use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt};
use testing::TempDir;
use twox_hash::XxHash3_128;

use faulty::{Fault, Faulty};

const RUN: &str = "run/ä";
const CHUNK: u64 = 64 << 10;
const SIZE: usize = 400_000;

fn bytes(step: u64, rank: u32) -> Vec<u8> {
    let seed = step << 8 | u64::from(rank);
    (0..SIZE as u64 / 8)
        .flat_map(|word| (word ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect()
}

fn save(directory: &Path, step: u64, world: u32) {
    for rank in 0..world {
        let content = bytes(step, rank);
        let manifest = Manifest {
            identity: Identity { job: "job".to_owned(), attempt: 0, step, rank, world_size: world },
            run: RUN.to_owned(),
            created_unix_s: 1_700_000_000 + step,
            serialisation: "safetensors".to_owned(),
            software: Default::default(),
            file: SealedFile {
                name: "state.safetensors".to_owned(),
                size: content.len() as u64,
                xxh3_128: XxHash3_128::oneshot(&content),
            },
            shared_content: None,
            chunks: Some(Chunks {
                bytes: CHUNK,
                sums: content.chunks(CHUNK as usize).map(chunk_sum).collect(),
            }),
        };
        let home = directory.join(format!("step-{step:012}/rank-{rank:05}"));
        fs::create_dir_all(&home).unwrap();
        fs::write(home.join("state.safetensors"), &content).unwrap();
        fs::write(home.join(MANIFEST_NAME), manifest.encode()).unwrap();
    }
}

fn assert_is_in(directory: &Path, step: u64, world: u32) {
    for rank in 0..world {
        let home = directory.join(format!("step-{step:012}/rank-{rank:05}"));
        assert!(
            fs::read(home.join("state.safetensors")).unwrap() == bytes(step, rank),
            "rank {rank} of step {step}"
        );
        assert!(home.join(MANIFEST_NAME).exists());
    }
}

fn offered(direct: &DirectBucket) -> Vec<u64> {
    let (states, _) = direct.list(Some(RUN)).unwrap();
    states.iter().filter(|state| state.is_whole()).map(|state| state.key.step).collect()
}

fn quick(store: Faulty) -> Bucket {
    Bucket::over(Arc::new(store), "memory://").with_patience(Duration::from_millis(1))
}

fn in_memory() -> (Arc<InMemory>, DirectBucket) {
    let store = Arc::new(InMemory::new());
    let direct = DirectBucket::over(quick(Faulty::new(&store, Fault::None))).unwrap();
    (store, direct)
}

/// Uploads all shards of a step as an agent does, in parts.
fn bring(bucket: &Bucket, directory: &Path, notes: Option<&Path>) -> Result<upload::UploadResult, String> {
    let mut found: Vec<SealedShard> = Vec::new();
    let mut files = Vec::new();
    look_directory(directory, |path, sealed| {
        let sealed = sealed.unwrap();
        files.push(Bytes::from(File::open(path.join(&sealed.file)).unwrap()));
        found.push(sealed);
    });
    let copies = found.iter().map(|sealed| Copy {
        holder: "".into(),
        medium: Medium::Disk,
        own: true,
        verified: true,
        shard: sealed.shard.clone(),
    });
    let states: Vec<StepState> = steps(&copies.collect::<Vec<_>>(), Some(RUN));
    let record = listing::record(&states[0]).unwrap();
    let pace = Pace::default();
    let how = UploadOptions { notes, pace: &pace, part_bytes: Some(CHUNK), given_up: &|| false };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let mut sent = upload::UploadResult::default();
        upload::begin(bucket, &record.name).await.map_err(|error| error.to_string())?;
        for (sealed, file) in found.iter().zip(&files) {
            let one = upload::shard(bucket, sealed, file, &how).await.map_err(|error| error.to_string())?;
            (sent.bytes, sent.there) = (sent.bytes + one.bytes, sent.there + one.there);
        }
        assert_eq!(listing::missing(bucket, &record).await.unwrap_or_default(), [0; 0]);
        upload::commit(bucket, &record).await.map_err(|error| error.to_string())?;
        Ok(sent)
    })
}

#[test]
fn a_step_is_restored_from_storage_alone() {
    let (from, to, shared) = (TempDir::new().unwrap(), TempDir::new().unwrap(), TempDir::new().unwrap());
    let url = format!("file://{}", shared.path().join("bucket").display());
    let direct = DirectBucket::open(&url).unwrap();
    assert_eq!(direct.push(RUN, from.path()).unwrap(), None, "there is nothing yet");
    save(from.path(), 10, 3);
    save(from.path(), 20, 3);
    let (step, sent) = direct.push(RUN, from.path()).unwrap().unwrap();
    assert_eq!((step, sent.bytes), (20, 3 * SIZE as u64));
    let (_, again) = direct.push(RUN, from.path()).unwrap().unwrap();
    assert_eq!((again.bytes, again.there), (0, 3 * SIZE as u64), "what lies there is not sent again");
    let pulled = DirectBucket::open(&url).unwrap().pull(RUN, &[], to.path(), &|_| {}).unwrap().unwrap();
    assert_eq!((pulled.step, pulled.shards), (20, 3));
    assert_is_in(to.path(), 20, 3);
    assert_eq!(direct.pull("another run", &[], to.path(), &|_| {}).unwrap(), None);
}

#[test]
fn shards_uploaded_in_parts_are_stored_in_files_as_they_were_sealed() {
    let (from, shared) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let url = format!("file://{}", shared.path().display());
    save(from.path(), 10, 2);
    let sent = bring(&Bucket::open(&url).unwrap(), from.path(), None).unwrap();
    assert_eq!(sent.bytes, 2 * SIZE as u64);
    let left = fs::read_dir(shared.path().join(".uploads")).unwrap().count();
    assert_eq!(left, 0, "no upload is left under way");
    let (mut good, to) = (0, TempDir::new().unwrap());
    let direct = DirectBucket::open(&url).unwrap();
    direct.verify(None, |shard| good += usize::from(shard.is_ok())).unwrap();
    assert_eq!(good, 2);
    direct.pull(RUN, &[1], to.path(), &|_| {}).unwrap();
    assert!(!to.path().join("step-000000000010/rank-00000").exists(), "only rank 1 was asked for");
}

#[test]
fn changed_bytes_are_detected_reported_and_skipped_for_the_older_step() {
    let (store, direct) = in_memory();
    let (from, to) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    for step in [10, 20] {
        save(from.path(), step, 2);
        direct.push(RUN, from.path()).unwrap();
    }
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let mut objects = store.list(None);
        let mut of_newest = Vec::new();
        while let Some(object) = futures_util::StreamExt::next(&mut objects).await {
            let path = object.unwrap().location;
            if path.as_ref().contains("step-000000000020") && path.as_ref().ends_with(".data") {
                of_newest.push(path);
            }
        }
        let mut content = store.get(&of_newest[0]).await.unwrap().bytes().await.unwrap().to_vec();
        content[SIZE / 2] ^= 1;
        store.put(&of_newest[0], content.into()).await.unwrap();
    });
    let mut bad = Vec::new();
    direct.verify(None, |shard| bad.extend(shard.err())).unwrap();
    assert_eq!(bad.len(), 1, "{bad:?}");
    let reports = RefCell::new(Vec::new());
    let pulled = direct.pull(RUN, &[], to.path(), &|line| reports.borrow_mut().push(line)).unwrap().unwrap();
    assert_eq!(pulled.step, 10);
    testing::snapshot!(
        "errors",
        "storage: changed bytes are detected reported and skipped for the older step",
        reports.borrow()[0]
    );
    assert_is_in(to.path(), 10, 2);
}

#[test]
fn bytes_that_changed_on_disk_are_not_uploaded() {
    let (_, direct) = in_memory();
    let from = TempDir::new().unwrap();
    save(from.path(), 10, 2);
    let path = from.path().join("step-000000000010/rank-00001/state.safetensors");
    let mut content = fs::read(&path).unwrap();
    content[SIZE - 1] ^= 0x80;
    fs::write(&path, content).unwrap();
    let error = direct.push(RUN, from.path()).unwrap_err().to_string();
    assert!(error.contains("rank 1") && error.contains("changed"), "{error}");
    assert_eq!(offered(&direct), [0; 0]);
}

#[test]
fn requests_to_a_busy_store_are_repeated() {
    let store = Arc::new(InMemory::new());
    let from = TempDir::new().unwrap();
    save(from.path(), 10, 2);
    bring(&quick(Faulty::new(&store, Fault::Busy(3))), from.path(), Some(from.path())).unwrap();
    let direct = DirectBucket::over(quick(Faulty::new(&store, Fault::Busy(2)))).unwrap();
    assert_eq!(offered(&direct), [10]);
    let to = TempDir::new().unwrap();
    direct.pull(RUN, &[], to.path(), &|_| {}).unwrap();
    assert_is_in(to.path(), 10, 2);
}

#[test]
fn a_kill_at_any_request_offers_no_half_step_and_the_next_try_resumes_with_the_uploaded_parts() {
    let from = TempDir::new().unwrap();
    save(from.path(), 10, 2);
    let whole = Faulty::new(&Arc::new(InMemory::new()), Fault::None);
    bring(&quick(whole.clone()), from.path(), None).unwrap();
    let (requests, parts) = (whole.requests(), whole.parts.load(Ordering::SeqCst));
    assert!(requests > 2 * parts && parts > 10, "{requests} requests, {parts} parts");
    let mut saved = 0;
    for at in 0..requests {
        let (store, notes) = (Arc::new(InMemory::new()), TempDir::new().unwrap());
        let killed = Faulty::new(&store, Fault::Dead(at));
        assert!(bring(&quick(killed.clone()), from.path(), Some(notes.path())).is_err(), "request {at}");
        let direct = DirectBucket::over(quick(Faulty::new(&store, Fault::None))).unwrap();
        assert_eq!(offered(&direct), [0; 0], "killed at request {at}");
        let next = Faulty::new(&store, Fault::None);
        bring(&quick(next.clone()), from.path(), Some(notes.path())).unwrap();
        let both = killed.parts.load(Ordering::SeqCst) + next.parts.load(Ordering::SeqCst);
        // Parts in flight when it died may be sent twice: at most four, and all parts of an upload whose completion was refused.
        assert!(both <= 2 * parts, "{both} parts");
        saved += usize::from(both < parts + killed.parts.load(Ordering::SeqCst));
        assert_eq!(offered(&direct), [10]);
        let mut bad = 0;
        direct.verify(None, |shard| bad += usize::from(shard.is_err())).unwrap();
        assert_eq!(bad, 0, "killed at request {at}");
        assert_eq!(fs::read_dir(notes.path()).unwrap().count(), 0, "no notes are left");
    }
    assert!(saved > requests / 3, "uploads are gone on with: {saved} of {requests}");
}

fn service(store: &TempDir) -> Arc<Service> {
    let settings = peer::Settings {
        listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        name: "host".to_owned(),
        peers: Vec::new(),
        domain: String::new(),
        store: store.path().join("replicas"),
        quota: 1 << 30,
        copies: 0,
        parity: None,
        keep: 2,
        avoid: Default::default(),
        rate: 0,
        slowdown: 0.01,
        streams: 1,
        interval: Duration::from_millis(50),
        patience: Timeouts::default(),
        software: "test".to_owned(),
        users: Arc::default(),
    };
    Arc::new(Service::start(settings, Token::new(b"a secret of sixteen or more").unwrap()).unwrap())
}

fn tier(store: &Arc<InMemory>, state: &TempDir, service: &Arc<Service>) -> Tier {
    let settings = Settings {
        every: 10,
        keep: 2,
        bandwidth: None,
        part_bytes: Some(CHUNK),
        notes: state.path().join("notes"),
        interval: Duration::from_millis(20),
    };
    Tier::start(quick(Faulty::new(store, Fault::None)), settings, service).unwrap()
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < end, "{what} did not come about");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_agent_uploads_due_steps_keeps_the_newest_and_one_without_history_restores_them() {
    let (store, direct) = in_memory();
    let (state, from) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let first = service(&state);
    let durable = tier(&store, &state, &first);
    let watched = |directory: &Path| WatchedDirectory {
        run: RUN.to_owned(),
        directory: directory.to_owned(),
        user: User::own(),
        pool: None,
    };
    first.watch(watched(from.path()));
    for step in [10, 20, 25, 30] {
        save(from.path(), step, 2);
        first.nudge();
        if step != 25 {
            until(&format!("step {step}"), || offered(&direct).first() == Some(&step));
        }
    }
    until("older steps gone", || offered(&direct) == [30, 20]);
    assert_eq!(durable.status().steps, 3, "25 is not the first of its ten");
    drop((durable, first));

    let (state, to) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let fresh = service(&state);
    let _durable = tier(&store, &state, &fresh);
    let restored = fresh.restore(&watched(to.path()), None, &|_| {}).unwrap();
    assert_eq!(restored.decision.step.unwrap().step, 30);
    assert_eq!((restored.fetched, restored.here), (2, 0));
    assert_is_in(to.path(), 30, 2);
    let again = fresh.restore(&watched(to.path()), None, &|_| {}).unwrap();
    assert_eq!((again.fetched, again.here), (0, 2), "what lies here is not fetched");
}
