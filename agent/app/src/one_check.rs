//! The agent's sensors without an agent, for one check: in a child process that can be abandoned if a file system or
//! a driver hangs. It answers on a socket in the caller's directory and performs no actions.

use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use mainstay_health::hardware::gpu::reset::ResetMode;
use mainstay_model::entry::{Body, Entry, Fact};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::agent::{MAX_QUEUED_INPUTS, start_forcing, start_probing, watch_hardware};
use crate::earlier_entries::Recalled;
use crate::{about, catalog, device, sensors};
use mainstay_api::{self as api, Listeners, Mode, UnixSocket};
use mainstay_journal::state::StateWriter;
use mainstay_journal::store::journal::{Journal, JournalReader};
use mainstay_node::config::Config;
use mainstay_node::hook::Hooks;
use mainstay_node::{Before, GpuLook, Node};
use mainstay_sys::clock;

/// The socket's name in the directory.
pub const SOCKET: &str = "check.sock";

/// Printed on standard output once the socket answers.
pub const READY: &str = "ready";

/// Reads the host and answers on `directory/check.sock` until standard input ends.
///
/// # Errors
/// It could not start.
pub async fn run_look(config: Config, directory: &Path) -> anyhow::Result<()> {
    let stop = CancellationToken::new();
    let recalled = Recalled::of_rooms(observed_before(&config));
    take_what_was_learned(&config.state_dir, directory);
    let own = of_one_look(config, directory);
    let journal = Journal::open(&own.journal_dir(), own.journal_limits(), clock::boot_id())?;
    let snapshots = StateWriter::open(journal)?;
    let socket = UnixSocket::bind(&directory.join(SOCKET), 0o600)?;
    let (inputs, node_inputs) = mpsc::channel(MAX_QUEUED_INPUTS);
    let (reader, roster) = (snapshots.reader(), snapshots.roster().clone());
    let sensors = sensors::start(&own, &recalled.observed, &inputs, &reader, None)?;
    let (hardware, following) =
        watch_hardware(&own, &catalog::load(&own.catalog.files)?, &recalled, &inputs, &roster)?;
    let probing = start_probing(&own, &recalled, &inputs, &roster)?;
    let look = GpuLook {
        nudge: probing.as_ref().map(device::Probing::nudge).transpose()?,
        memory_held: own.limits.preflight.gpu_memory_held,
        resets: None,
        reset_mode: ResetMode::Off,
    };
    let forcing = start_forcing(&own)?;
    let before = Before { origins: recalled.origins, repeats: recalled.repeats, ..Before::default() };
    let node = Node::new(snapshots, before, hardware, look, Hooks::default(), inputs, forcing);
    // No launcher may attach.
    let (_callers, node_callers) = mpsc::channel(1);
    let node = tokio::spawn(node.run(node_inputs, node_callers, || {}, stop.clone()));
    stop_with_standard_input(stop.clone())?;
    writeln!(std::io::stdout(), "{READY}").context("telling that the checks can be asked for")?;
    let listeners = Listeners { unix: Some(socket), ..Listeners::default() };
    let served = api::serve(
        listeners,
        reader,
        about(Mode::Agent),
        Arc::new(clock::now),
        Routes::default(),
        stop.clone(),
    )
    .await;
    stop.cancel();
    drop((sensors, following, probing));
    node.await.context("the node task crashed")?;
    served.context("serving the checks")
}

/// The configuration for a single look: its state is in the directory, and one reading counts.
fn of_one_look(mut config: Config, directory: &Path) -> Config {
    config.host.watch_paths.push(std::mem::replace(&mut config.state_dir, directory.to_owned()));
    config.limits.host.worsen_after = 1;
    config.limits.host.recover_after = 1;
    config.limits.gpu.worsen_after = 1;
    config.limits.gpu.recover_after = 1;
    config
}

/// What the agent learned about the host (which links exist) is used for this look too; the copy is discarded.
fn take_what_was_learned(state: &Path, directory: &Path) {
    for entry in std::fs::read_dir(state).into_iter().flatten().flatten() {
        let is_learned = entry.path().extension().is_some_and(|extension| extension == "json");
        if is_learned && let Err(error) = std::fs::copy(entry.path(), directory.join(entry.file_name())) {
            tracing::debug!(%error, "the learned state of the host cannot be read");
        }
    }
}

/// Observations of this host's agent, if its journal can be read: flaps and notices have their history there.
fn observed_before(config: &Config) -> Vec<sensors::StampedObservation> {
    let mut observed = Vec::new();
    let take = |entry: Entry| {
        if let (None, Body::Fact(Fact::Observed(observation))) = (&entry.job, entry.body) {
            observed.push((entry.at, entry.boot, observation));
        }
    };
    if let Err(error) = JournalReader::new(&config.journal_dir()).replay(take) {
        tracing::debug!(%error, "there is no history to read");
    }
    observed
}

/// The caller holds the other end: nothing outlives it.
fn stop_with_standard_input(stop: CancellationToken) -> std::io::Result<()> {
    let wait = move || {
        let mut buffer = [0; 64];
        while matches!(std::io::stdin().lock().read(&mut buffer), Ok(1..)) {}
        stop.cancel();
    };
    std::thread::Builder::new().name("stdin".to_owned()).spawn(wait)?;
    Ok(())
}
