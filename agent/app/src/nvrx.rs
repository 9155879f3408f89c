//! The interfaces for NVRx: its node health service, and its segment health files.

mod segment_file;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio_util::sync::CancellationToken;

use self::segment_file::SegmentFiles;
use mainstay_api::nvrx::{NodeHealthService, health};
use mainstay_api::{self as api, Clock, UnixSocket};
use mainstay_journal::state::StateReader;
use mainstay_node::config::{Config, NvrxConfig};
use mainstay_sensors::source::host::identify;
use mainstay_sensors::source::slurm;
use mainstay_sys::clock;

/// How often to look for new jobs while the node is unfit: that scans all processes.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Minimum time between two looks at the snapshots.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Starts what is configured, until `stop` is cancelled. The socket answers when this returns: launchers look for
/// it only once, at their start.
///
/// # Errors
/// The socket cannot be created.
pub fn open(config: &Config, snapshots: &StateReader, stop: &CancellationToken) -> anyhow::Result<()> {
    let NvrxConfig { health_socket, fail_on_unknown, segment_health_dir } = &config.nvrx;
    let now: Clock = Arc::new(clock::now);
    if !health_socket.as_os_str().is_empty() {
        if let Some(directory) = health_socket.parent() {
            std::fs::create_dir_all(directory).with_context(|| {
                format!("making the directory {} (nvrx.health_socket)", directory.display())
            })?;
        }
        // Any user's launcher may ask: the answer is only whether the node is fit.
        let socket = UnixSocket::bind(health_socket, 0o666).context("key `nvrx.health_socket`")?;
        let service = NodeHealthService::new(snapshots.clone(), now.clone(), *fail_on_unknown);
        let stop = stop.clone();
        tokio::spawn(async move {
            if let Err(error) = api::serve_node_health(socket, service, stop).await {
                tracing::error!(%error, "NVRx receives no more reports of the node, and takes it for healthy");
            }
        });
    }
    if !segment_health_dir.as_os_str().is_empty() {
        let host = identify().host_name.unwrap_or_else(|| "unknown".to_owned());
        let files = SegmentFiles::new(segment_health_dir, &host);
        let (snapshots, fail_on_unknown) = (snapshots.clone(), *fail_on_unknown);
        let proc = config.host.proc_root.clone();
        let keep = keep_files(files, snapshots, now, fail_on_unknown, proc);
        let stop = stop.clone();
        tokio::spawn(async move { stop.run_until_cancelled(keep).await });
    }
    Ok(())
}

/// Keeps the files in line with the node's state. The directory is shared: a call that hangs there blocks nothing
/// else.
async fn keep_files(
    files: SegmentFiles,
    mut snapshots: StateReader,
    clock: Clock,
    fail_on_unknown: bool,
    proc: PathBuf,
) {
    // Files of an earlier run of the agent are checked once the node's state is known.
    let mut written = true;
    let mut walked = None;
    loop {
        if snapshots.roster().is_complete() {
            let node = health(&snapshots, &clock, fail_on_unknown);
            let due = !written || walked.is_none_or(|at: Instant| at.elapsed() >= POLL_INTERVAL);
            let change = match (node.is_fit(), written) {
                (true, true) => Some(None),
                (false, _) if due => Some(Some(node.failed.join("; "))),
                (true, false) | (false, _) => None,
            };
            if let Some(unfit) = change {
                written = unfit.is_some();
                walked = written.then(Instant::now);
                let (files, proc) = (files.clone(), proc.clone());
                let done = tokio::task::spawn_blocking(move || match unfit {
                    Some(reason) => slurm::segments(&proc)
                        .iter()
                        .try_for_each(|segment| files.exclude(&segment.job, &segment.task, &reason)),
                    None => files.admit_all(),
                });
                if let Ok(Err(error)) = done.await {
                    tracing::warn!(%error, "the segment health files cannot be kept (nvrx.segment_health_dir)");
                    written = true;
                }
            }
        }
        // The snapshot is published at every look of a sensor; that is more often than needed.
        tokio::time::sleep(MIN_POLL_INTERVAL).await;
        if tokio::time::timeout(POLL_INTERVAL, snapshots.changed()).await == Ok(false) {
            return;
        }
    }
}
