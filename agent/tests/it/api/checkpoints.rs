//! An agent that knows one step, which a job sealed on this host.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mainstay_checkpoint_format::{Chunks, Identity, MANIFEST_NAME, Manifest, SealedFile, chunk_sum};
use mainstay_tier::peer::token::Token;
use mainstay_tier::peer::wire::Timeouts;
use mainstay_tier::peer::{Service, Settings, User, WatchedDirectory};
use twox_hash::XxHash3_128;

use super::server::{EPOCH, SECOND};

pub const RUN: &str = "run-7";
pub const STEP: u64 = 40;
/// When it was sealed, in seconds of these tests.
pub const SEALED_AT: u64 = 60;

/// A service that knows the step in `dir`.
pub fn knowing_one_step(dir: &Path) -> Arc<Service> {
    let directory = dir.join("checkpoints");
    seal(&directory);
    let name = format!("127.0.0.1:{}", testing::free_port());
    let settings = Settings {
        listen: name.parse().unwrap(),
        name: name.clone(),
        peers: vec![name],
        domain: String::new(),
        store: dir.join("replicas"),
        quota: 1 << 20,
        copies: 1,
        parity: None,
        keep: 1,
        avoid: Default::default(),
        rate: 0,
        slowdown: 0.01,
        streams: 1,
        interval: Duration::from_millis(20),
        patience: Timeouts { connect: Duration::from_secs(3), stall: Duration::from_secs(5) },
        software: "test".to_owned(),
        users: Arc::default(),
    };
    let service = Service::start(settings, Token::new(b"a secret of sixteen or more").unwrap()).unwrap();
    service.watch(WatchedDirectory { run: RUN.to_owned(), directory, user: User::own(), pool: None });
    // Listing the copies scans the directory first.
    assert_eq!(service.copies().len(), 1);
    Arc::new(service)
}

fn seal(directory: &Path) {
    let bytes = b"what a rank saved";
    let manifest = Manifest {
        identity: Identity { job: "job".to_owned(), attempt: 0, step: STEP, rank: 0, world_size: 1 },
        run: RUN.to_owned(),
        created_unix_s: EPOCH as u64 / SECOND + SEALED_AT,
        serialisation: "safetensors".to_owned(),
        software: BTreeMap::new(),
        file: SealedFile {
            name: "state.safetensors".to_owned(),
            size: bytes.len() as u64,
            xxh3_128: XxHash3_128::oneshot(bytes),
        },
        chunks: Some(Chunks { bytes: 64 << 10, sums: vec![chunk_sum(bytes)] }),
        shared_content: None,
    };
    let home = directory.join(format!("step-{STEP:012}/rank-00000"));
    fs::create_dir_all(&home).unwrap();
    fs::write(home.join("state.safetensors"), bytes).unwrap();
    fs::write(home.join(MANIFEST_NAME), manifest.encode()).unwrap();
}
