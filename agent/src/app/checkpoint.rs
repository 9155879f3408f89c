//! Replicas of checkpoints on other hosts, as the agent is configured to have them.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use mainstay_tier::peer::token::Token;
use mainstay_tier::peer::wire::Patience;
use mainstay_tier::peer::{Service, Settings};

use crate::config::{CheckpointConfig, Config};

/// Starts the service among peers; none where none is configured.
///
/// # Errors
/// The token, the address, the store or a thread cannot be had.
pub(super) fn start(config: &Config) -> anyhow::Result<Option<Arc<Service>>> {
    let CheckpointConfig { listen, peers, name, domain, avoid, redundancy, keep, .. } = &config.checkpoint;
    let Some(listen) = *listen else { return Ok(None) };
    let of = &config.checkpoint;
    let token = Token::read(&of.token_file).context("key `checkpoint.token_file`")?;
    let own = of.store.as_os_str().is_empty();
    let store = if own { config.state_dir.join("replicas") } else { of.store.clone() };
    let settings = Settings {
        listen,
        name: name.clone(),
        peers: peers.clone(),
        domain: domain.clone(),
        store,
        quota: of.quota.0,
        copies: *redundancy as usize,
        keep: *keep as usize,
        avoid: avoid.iter().cloned().collect(),
        rate: of.rate_limit.0,
        streams: of.streams as usize,
        interval: Duration::from_nanos(of.interval.0.0),
        patience: Patience { stall: Duration::from_nanos(of.stall.0.0), ..Patience::default() },
        software: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let service = Service::start(settings, token).context("replicas of checkpoints")?;
    tracing::info!(address = %service.address(), peers = peers.len(), "replicas of checkpoints are kept");
    Ok(Some(Arc::new(service)))
}
