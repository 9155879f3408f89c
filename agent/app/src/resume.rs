//! Before a job starts: which run its checkpoints belong to, and the newest whole step of that run.

use std::path::{Path, PathBuf};

use mainstay_launcher::Settings;
use mainstay_launcher::agent_link::checkpoint::{self, NotToStart, Resumed};
use mainstay_launcher::agent_link::handover;
use mainstay_launcher::checkpoints::lineage::{self, Output};
use mainstay_launcher::checkpoints::sealing::{Sealing, protection};

/// The outputs of a job with their runs.
#[derive(Debug)]
pub(super) struct Bound {
    outputs: Vec<Output>,
    /// Whether the user named the run, so that others may have the same name.
    pub(super) is_named: bool,
}

impl Bound {
    /// The run of `mainstay.checkpoint`, before a leader announces another one.
    pub(super) fn run(&self) -> &str {
        self.outputs.first().map_or("", |own| &own.run)
    }

    /// The outputs, with ranks saving under the run of the job's leader.
    pub(super) fn of_job(&self, run: &str) -> Vec<Output> {
        let mut outputs = self.outputs.clone();
        if let Some(own) = outputs.first_mut() {
            run.clone_into(&mut own.run);
        }
        outputs
    }
}

/// Finds the run of each output.
///
/// # Errors
/// A run that the user named cannot be resumed there.
pub(super) async fn bind(
    settings: &Settings,
    log_dir: &Path,
    checkpoint_dir: &Path,
    sockets: &[PathBuf],
    print: &dyn Fn(String),
) -> anyhow::Result<Bound> {
    let (of, logs, place) = (settings.clone(), log_dir.to_owned(), checkpoint_dir.to_owned());
    let outputs = tokio::task::spawn_blocking(move || lineage::outputs(&of, &logs, &place)).await?;
    let asked = settings.checkpoints.resume_from.clone();
    let is_named = settings.checkpoints.is_named;
    if asked.is_empty() {
        return Ok(Bound { outputs, is_named });
    }
    // All steps of this user, once: their number is limited by retention.
    let steps = checkpoint::known(sockets, None, true).await;
    let logs = log_dir.to_owned();
    let chosen = tokio::task::spawn_blocking(move || {
        let known = steps.as_deref().ok_or("no agent that keeps checkpoints of other directories answers");
        let mut outputs = outputs;
        let mut messages = Vec::new();
        for output in &mut outputs {
            messages.extend(lineage::choose(output, &asked, &logs, known)?);
        }
        anyhow::Ok((outputs, messages))
    });
    let (outputs, messages) = chosen.await??;
    messages.into_iter().for_each(print);
    Ok(Bound { outputs, is_named })
}

/// Records which run each output belongs to, for later launches.
pub(super) async fn note(log_dir: &Path, run_dir: &Path, outputs: &[Output]) {
    let (logs, runs, outputs) = (log_dir.to_owned(), run_dir.to_owned(), outputs.to_vec());
    // It reports errors itself.
    let _ = tokio::task::spawn_blocking(move || lineage::note(&logs, &runs, &outputs)).await;
}

/// The directories that are handed over to the agent.
pub(super) fn directories(outputs: &[Output], pool: Option<&Path>) -> Vec<PathBuf> {
    outputs.iter().map(|output| output.directory.clone()).chain(pool.map(Path::to_owned)).collect()
}

/// Hands directories to an agent that may not act as this user; one that may does not need them.
async fn hand_over(sockets: &[PathBuf], directories: Vec<PathBuf>) {
    let sockets: Vec<PathBuf> = sockets.iter().filter(|socket| socket.exists()).cloned().collect();
    let give = move || {
        for socket in sockets {
            match handover::hand_over(&socket, &directories) {
                Ok(refused) if refused.is_empty() => {}
                Ok(refused) => tracing::warn!("the agent did not take a checkpoint directory: {refused}"),
                Err(error) => {
                    tracing::debug!(socket = %socket.display(), %error, "no directory was handed over")
                }
            }
        }
    };
    let _ = tokio::task::spawn_blocking(give).await;
}

/// Restores the newest whole step into each output. Reports runs that only have the same name as not used.
/// `kept_by_hosts`: how the other hosts of the job keep copies, in words. Returns the line about what is protected
/// and how.
///
/// # Errors
/// Why the ranks must not be started.
pub(super) async fn restore(
    sockets: &[PathBuf],
    outputs: &[Output],
    (pool, kept_by_hosts): (Option<&Path>, Option<&str>),
    is_named: bool,
    sealing: Option<&Sealing>,
    print: &(dyn Fn(String) + Sync),
) -> Result<String, NotToStart> {
    hand_over(sockets, directories(outputs, pool)).await;
    let Some(own) = outputs.iter().find(|output| output.kind.is_empty()) else { return Ok(String::new()) };
    let restored = checkpoint::restore(sockets, own, pool, sealing.is_some(), print).await;
    let (resumed, kept_by) = restored.map_err(NotToStart::Refused)?;
    let watched = match sealing {
        Some(sealing) => sealing.go_back(false, print).await?,
        None => Vec::new(),
    };
    let found = watched.iter().map(|watched| (&watched.output, watched.resumed));
    for (output, resumed) in std::iter::once((own, resumed)).chain(found) {
        if resumed == Resumed::Nothing && is_named {
            let steps = checkpoint::known(sockets, Some(output.name()), false).await.unwrap_or_default();
            lineage::others(output, &steps).into_iter().for_each(print);
        }
    }
    let saved = (own.directory.as_path(), pool.is_some());
    let watched: Vec<String> = watched.into_iter().map(|watched| watched.protection).collect();
    let kept_by = match (kept_by_hosts, kept_by) {
        (Some(hosts), Some(agent)) if !agent.is_empty() => Some(format!("{hosts}; {agent}")),
        (Some(hosts), _) => Some(hosts.to_owned()),
        (None, kept_by) => kept_by,
    };
    Ok(protection(saved, kept_by.as_deref(), &watched))
}
