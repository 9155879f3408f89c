//! Replicas of checkpoints on other hosts and in durable storage, as the agent is configured to have them.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use mainstay_durable::{Bucket, Tier};
use mainstay_tier::peer::token::Token;
use mainstay_tier::peer::wire::Patience;
use mainstay_tier::peer::{Service, Settings};

use crate::config::{CheckpointConfig, Config};

/// What keeps checkpoints beyond this host.
#[derive(Debug, Default)]
pub(super) struct Keeping {
    /// Replicas on peers.
    pub(super) peers: Option<Arc<Service>>,
    /// Durable storage.
    pub(super) durable: Option<Arc<Tier>>,
}

/// Starts the service among peers and the one for durable storage; none where none is configured.
///
/// # Errors
/// The token, the address, the store, the storage's URL or a thread cannot be had.
pub(super) fn start(config: &Config) -> anyhow::Result<Keeping> {
    let of = &config.checkpoint;
    let bucket = match of.durable.as_str() {
        "" => None,
        url => Some(Bucket::open(url).context("key `checkpoint.durable`")?),
    };
    if of.listen.is_none() && bucket.is_none() {
        return Ok(Keeping::default());
    }
    let (settings, token) = settings(config)?;
    let service = Service::start(settings, token).context("replicas of checkpoints")?;
    let service = Arc::new(service);
    tracing::info!(address = %service.address(), peers = of.peers.len(), "replicas of checkpoints are kept");
    let durable = bucket.map(|bucket| {
        let tier = Tier::start(bucket, durable_settings(config), &service).context("durable storage")?;
        tracing::info!(url = of.durable, "checkpoints are brought into durable storage");
        anyhow::Ok(Arc::new(tier))
    });
    Ok(Keeping { peers: Some(service), durable: durable.transpose()? })
}

fn settings(config: &Config) -> anyhow::Result<(Settings, Token)> {
    let of = &config.checkpoint;
    let CheckpointConfig { listen, peers, name, domain, avoid, redundancy, keep, .. } = of;
    let own = of.store.as_os_str().is_empty();
    let store = if own { config.state_dir.join("replicas") } else { of.store.clone() };
    let (listen, name, token) = match listen {
        Some(listen) => {
            let token = Token::read(&of.token_file).context("key `checkpoint.token_file`")?;
            (*listen, name.clone(), token)
        }
        // Durable storage alone: nobody knows this token, so that nobody is answered.
        None => {
            let host = nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned());
            let name = if name.is_empty() { host.unwrap_or_default() } else { name.clone() };
            (SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), name, nobodys_token()?)
        }
    };
    let alone = peers.iter().all(|peer| *peer == name);
    let settings = Settings {
        listen,
        name,
        peers: peers.clone(),
        domain: domain.clone(),
        store,
        quota: of.quota.0,
        copies: if alone && of.listen.is_none() { 0 } else { *redundancy as usize },
        keep: *keep as usize,
        avoid: avoid.iter().cloned().collect(),
        rate: of.rate_limit.0,
        streams: of.streams as usize,
        interval: Duration::from_nanos(of.interval.0.0),
        patience: Patience { stall: Duration::from_nanos(of.stall.0.0), ..Patience::default() },
        software: env!("CARGO_PKG_VERSION").to_owned(),
    };
    Ok((settings, token))
}

fn nobodys_token() -> anyhow::Result<Token> {
    let mut bytes = [0; 32];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)?;
    let words: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(Token::new(words.as_bytes())?)
}

fn durable_settings(config: &Config) -> mainstay_durable::Settings {
    let of = &config.checkpoint;
    mainstay_durable::Settings {
        every: of.durable_every,
        keep: of.durable_keep as usize,
        bandwidth: (of.durable_bandwidth.0 > 0).then_some(of.durable_bandwidth.0),
        part_bytes: None,
        notes: config.state_dir.join("durable-uploads"),
        interval: Duration::from_nanos(of.interval.0.0),
    }
}
