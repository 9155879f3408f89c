//! Replicas of checkpoints on other hosts and in durable storage, as configured in the agent.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use mainstay_durable::{Bucket, Tier};
use mainstay_tier::files::{CacheRequest, Files, FilesSettings, WatchRequest};
use mainstay_tier::peer::credentials::Credentials;
use mainstay_tier::peer::tls::{Tls, TlsFiles};
use mainstay_tier::peer::token::Token;
use mainstay_tier::peer::wire::Timeouts;
use mainstay_tier::peer::{Service, Settings, Users};
use tokio_util::sync::CancellationToken;

use mainstay_node::config::{CacheConfig, CacheTable, CheckpointConfig, Config, WatchConfig};
use mainstay_sys::inotify::{WatchId, Watcher};

/// Connections for one shard.
const STREAMS_PER_SHARD: usize = 2;

/// How often the agent looks for new directories.
const LOOK_FOR_DIRECTORIES: Duration = Duration::from_secs(2);

/// Events within this time count as one.
const AFTER_A_WRITE: Duration = Duration::from_millis(100);

/// Where checkpoints are kept beyond this host.
#[derive(Debug, Default)]
pub(super) struct Keeping {
    /// Replicas on peers.
    pub(super) peers: Option<Arc<Service>>,
    /// Durable storage.
    pub(super) durable: Option<Arc<Tier>>,
    /// Files of others: trainers' own checkpoints, and compile caches.
    pub(super) files: Option<Arc<Files>>,
}

/// Starts the peer service and durable storage; each is none if it is not configured.
///
/// # Errors
/// The token, address, store, storage URL or a thread is not available.
pub(super) fn start(config: &Config, users: Arc<Users>) -> anyhow::Result<Keeping> {
    let keys = &config.checkpoint;
    let bucket = match keys.durable.as_str() {
        "" => None,
        url => Some(Bucket::open(url).context("key `checkpoint.durable`")?),
    };
    if keys.listen.is_none() && bucket.is_none() {
        return Ok(Keeping::default());
    }
    let (settings, pass) = settings(config, users)?;
    let service = Service::start(settings, pass).context("replicas of checkpoints")?;
    let service = Arc::new(service);
    tracing::info!(address = %service.address(), peers = keys.peers.len(), "replicas of checkpoints are kept");
    let durable = bucket.map(|bucket| {
        let tier = Tier::start(bucket, durable_settings(config), &service).context("durable storage")?;
        tracing::info!(url = keys.durable, "checkpoints are brought into durable storage");
        anyhow::Ok(Arc::new(tier))
    });
    let files = Some(Arc::new(files(config, &service)?));
    Ok(Keeping { peers: Some(service), durable: durable.transpose()?, files })
}

fn settings(config: &Config, users: Arc<Users>) -> anyhow::Result<(Settings, Credentials)> {
    let keys = &config.checkpoint;
    let CheckpointConfig { listen, peers, name, domain, avoid, redundancy, keep, .. } = keys;
    let own = keys.store.as_os_str().is_empty();
    let store = if own { config.state_dir.join("replicas") } else { keys.store.clone() };
    let (listen, name, pass) = match listen {
        Some(listen) => (*listen, name.clone(), pass(keys)?),
        // Durable storage only: no one knows this token, so no peer is answered.
        None => {
            let host = nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned());
            let name = if name.is_empty() { host.unwrap_or_default() } else { name.clone() };
            (SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), name, Token::random()?.into())
        }
    };
    let alone = peers.iter().all(|peer| *peer == name);
    let settings = Settings {
        listen,
        name,
        peers: peers.clone(),
        domain: domain.clone(),
        store,
        quota: keys.quota.0,
        copies: if alone && keys.listen.is_none() { 0 } else { *redundancy as usize },
        // Checked with the rest of the configuration; empty means none.
        parity: keys.parity.parse().ok(),
        keep: *keep as usize,
        avoid: avoid.iter().cloned().collect(),
        rate: keys.rate_limit.0,
        slowdown: f64::from(keys.slowdown_percent) / 100.0,
        streams: STREAMS_PER_SHARD,
        interval: Duration::from_nanos(keys.interval.0.0),
        patience: Timeouts::default(),
        software: env!("CARGO_PKG_VERSION").to_owned(),
        users,
    };
    Ok((settings, pass))
}

/// The credentials that this agent presents: the token, a certificate, or both.
fn pass(keys: &CheckpointConfig) -> anyhow::Result<Credentials> {
    let is_there = |path: &PathBuf| !path.as_os_str().is_empty();
    let token = is_there(&keys.token_file).then(|| Token::read(&keys.token_file));
    let token = token.transpose().context("key `checkpoint.token_file`")?;
    if let Some(tls) = tls("checkpoint.tls", &keys.tls)? {
        return Ok(Credentials::Certificate(tls, token));
    }
    token.map(Credentials::Token).context("key `checkpoint.token_file`: it is not set")
}

/// TLS with the files of the directory in this key, if it is set.
pub(super) fn tls(key: &str, directory: &Path) -> anyhow::Result<Option<Tls>> {
    if directory.as_os_str().is_empty() {
        return Ok(None);
    }
    Tls::read(TlsFiles::of(directory)).map(Some).with_context(|| format!("key `{key}`"))
}

/// The configured directories of others' files.
fn files(config: &Config, service: &Arc<Service>) -> anyhow::Result<Files> {
    let keys = &config.checkpoint;
    let store = if keys.store.as_os_str().is_empty() {
        config.state_dir.join("replicas")
    } else {
        keys.store.clone()
    };
    let plan = FilesSettings {
        home: config.state_dir.join("checkpoint-files"),
        spool: store.join("files"),
        hosts: keys.peers.clone(),
        interval: Duration::from_nanos(keys.interval.0.0),
    };
    let files = Files::new(Arc::clone(service), plan);
    for WatchConfig(table) in &keys.watch {
        let wanted = WatchRequest {
            directory: table.directory.clone(),
            run: table.run.clone(),
            user: None,
            rules: table.rules().map_err(anyhow::Error::msg).context("key `checkpoint.watch`")?,
            expect: table.expect,
            quiet: table.quiet_s,
            hosts: table.hosts.clone(),
            shared: table.shared,
        };
        files.watch(wanted).context("key `checkpoint.watch`")?;
    }
    for directory in &keys.replicator {
        files.replicate(directory).context("key `checkpoint.replicator`")?;
    }
    for CacheConfig(table) in &keys.cache {
        let CacheTable { name, directory, quota, quiet_s } = table.clone();
        let wanted = CacheRequest { name, directory, quota: quota.0, quiet: quiet_s };
        files.cache(wanted).context("key `checkpoint.cache`")?;
    }
    Ok(files)
}

/// The same as [`follow`] on a separate thread: a directory on a file system that does not answer blocks nothing
/// else.
///
/// # Errors
/// The kernel cannot create a thread.
pub(super) fn follow_aside(files: Arc<Files>, stop: CancellationToken) -> std::io::Result<()> {
    let work = move || match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(follow(files, stop)),
        Err(error) => tracing::warn!(%error, "watched directories are looked at from time to time only"),
    };
    std::thread::Builder::new().name("ckpt-follow".to_owned()).spawn(work).map(drop)
}

/// Scans watched directories soon after a write, not only at the next regular scan.
async fn follow(files: Arc<Files>, stop: CancellationToken) {
    let Ok(watcher) = Watcher::new() else { return };
    let mut known: BTreeMap<PathBuf, WatchId> = BTreeMap::new();
    loop {
        let directories = files.directories();
        known.retain(|directory, watch| {
            let stays = directories.contains(directory) && directory.is_dir();
            if !stays {
                watcher.forget(*watch);
            }
            stays
        });
        for directory in directories {
            if !known.contains_key(&directory)
                && let Ok(watch) = watcher.watch(&directory)
            {
                known.insert(directory, watch);
            }
        }
        let events = tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOOK_FOR_DIRECTORIES) => continue,
            events = watcher.next() => events.unwrap_or_default(),
        };
        let rung: BTreeSet<WatchId> = events.iter().map(|event| event.watch).collect();
        known
            .iter()
            .filter(|(_, watch)| rung.contains(watch))
            .for_each(|(directory, _)| files.nudge(directory));
        // A file in progress causes an event at each write.
        tokio::time::sleep(AFTER_A_WRITE).await;
    }
}

fn durable_settings(config: &Config) -> mainstay_durable::Settings {
    let keys = &config.checkpoint;
    mainstay_durable::Settings {
        every: keys.durable_every,
        keep: keys.durable_keep as usize,
        bandwidth: (keys.durable_bandwidth.0 > 0).then_some(keys.durable_bandwidth.0),
        part_bytes: None,
        notes: config.state_dir.join("durable-uploads"),
        interval: Duration::from_nanos(keys.interval.0.0),
    }
}
