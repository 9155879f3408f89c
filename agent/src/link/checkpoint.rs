//! Before the ranks start: the agent is asked for the newest step that is whole anywhere, and is told where this job keeps
//! its checkpoints.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mainstay_proto::v1::checkpoint_service_client::CheckpointServiceClient;
use mainstay_proto::v1::restore_checkpoint_response::Message;
use mainstay_proto::v1::{RestoreCheckpointRequest, RestoreProgress, RestoreResult};
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use super::agent::connect;

/// How long the agent may take to answer at all.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// How long nothing may come from it while shards are on their way.
const GO_ON_WITHIN: Duration = Duration::from_secs(600);

/// How often counts are told.
const TELL_EVERY: Duration = Duration::from_secs(5);

/// Has the agent bring the newest whole step of `run` into `directory`, and replicate from then on what is sealed there and in `pool`,
/// this launcher's memory.
///
/// Without an agent, or with one that keeps no replicas, nothing happens. Whatever goes wrong is said, and the job begins
/// with what lies there. `watches_trainer`: the trainer's own checkpoints are watched, and of them is said next what was found.
///
/// What keeps copies of what is sealed there, in words; none where no agent does.
pub async fn restore(
    sockets: &[PathBuf],
    run: &str,
    directory: &Path,
    pool: Option<&Path>,
    watches_trainer: bool,
    say: &(dyn Fn(String) + Sync),
) -> Option<String> {
    for socket in sockets.iter().filter(|socket| socket.exists()) {
        match ask(socket, run, Asking { directory, pool, kind: "", again: false }, say).await {
            Ok(Some(result)) => {
                if is_news(&result, watches_trainer) {
                    say(told(&result));
                }
                return Some(result.kept_by);
            }
            Ok(None) => return None,
            Err(status) if status.code() == Code::Aborted => {
                say(format!(
                    "no checkpoint was restored from peers: {}; the ranks load what lies on this host",
                    status.message()
                ));
                return None;
            }
            Err(status) => {
                tracing::debug!(socket = %socket.display(), %status, "no restore");
            }
        }
    }
    None
}

/// What came of asking for a directory into which the trainer writes in its own way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is watched, and what was found is said; what keeps copies of it, in words.
    Done(String),
    /// Nothing whole is left of what was sealed: the trainer is not to be started.
    Lost(String),
    /// No agent answers, or it keeps no checkpoints.
    NoAgent,
}

/// What is asked for.
struct Asking<'a> {
    directory: &'a Path,
    pool: Option<&'a Path>,
    kind: &'a str,
    again: bool,
}

/// The same for a directory into which the trainer writes in its own way, and which is watched from then on. `again`: the job has run
/// before.
pub async fn restore_files(
    sockets: &[PathBuf],
    run: &str,
    directory: &Path,
    kind: &str,
    again: bool,
    say: &(dyn Fn(String) + Sync),
) -> Answer {
    let place = directory.display();
    for socket in sockets.iter().filter(|socket| socket.exists()) {
        match ask(socket, run, Asking { directory, pool: None, kind, again }, say).await {
            Ok(result) => {
                say(format!("{place}: {}", result.as_ref().map_or_else(|| "watched".to_owned(), told)));
                return Answer::Done(result.map(|result| result.kept_by).unwrap_or_default());
            }
            Err(status) if status.code() == Code::DataLoss => {
                return Answer::Lost(status.message().to_owned());
            }
            Err(status) if is_no_keeper(&status) => {
                tracing::debug!(socket = %socket.display(), %status, "no restore");
            }
            Err(status) => {
                say(format!(
                    "{place}: not restored: {}; the trainer finds what lies there",
                    status.message()
                ));
                return Answer::Done(String::new());
            }
        }
    }
    Answer::NoAgent
}

/// Whether whoever answered, if anyone did, keeps no checkpoints at all.
fn is_no_keeper(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::FailedPrecondition | Code::DeadlineExceeded)
}

async fn ask(
    socket: &Path,
    run: &str,
    asking: Asking<'_>,
    say: &(dyn Fn(String) + Sync),
) -> Result<Option<RestoreResult>, Status> {
    let Asking { directory, pool, kind, again } = asking;
    let late = |_| Status::deadline_exceeded("the agent does not answer");
    let channel = tokio::time::timeout(ANSWER_WITHIN, channel(socket.to_owned())).await.map_err(late)??;
    let mut client = CheckpointServiceClient::new(channel);
    let directory = directory.display().to_string();
    let pool = pool.map(|pool| pool.display().to_string()).unwrap_or_default();
    let (run, files_kind) = (run.to_owned(), kind.to_owned());
    let request = RestoreCheckpointRequest { run, directory, ranks: Vec::new(), pool, files_kind, again };
    let answer =
        tokio::time::timeout(ANSWER_WITHIN, client.restore_checkpoint(request)).await.map_err(late)?;
    let mut messages = answer?.into_inner();
    let mut last_told = Instant::now();
    loop {
        let next = tokio::time::timeout(GO_ON_WITHIN, messages.message()).await.map_err(late)?;
        match next?.and_then(|message| message.message) {
            Some(Message::Result(result)) => return Ok(Some(result)),
            Some(Message::Progress(at)) if !at.told.is_empty() => say(format!("checkpoint: {}", at.told)),
            Some(Message::Progress(at)) => {
                if at.bytes > 0 && last_told.elapsed() >= TELL_EVERY {
                    last_told = Instant::now();
                    say(progress(&at));
                }
            }
            None => return Ok(None),
        }
    }
}

async fn channel(socket: PathBuf) -> Result<Channel, Status> {
    // The address is never looked up: the connector goes to the socket.
    let endpoint = Endpoint::from_static("http://agent.local");
    let connector = tower::service_fn(move |_: Uri| connect(socket.clone()));
    endpoint.connect_with_connector(connector).await.map_err(|error| Status::unavailable(error.to_string()))
}

fn progress(at: &RestoreProgress) -> String {
    let RestoreProgress { step, shards_done, shards, bytes_done, bytes, .. } = at;
    let (done, all) = (mebibytes(*bytes_done), mebibytes(*bytes));
    format!(
        "checkpoint: step {step} is being restored: {shards_done} of {shards} shards, {done} of {all} MiB from peers"
    )
}

/// Whether a result is said: that nothing is here would contradict what is said of the trainer's own checkpoints.
fn is_news(result: &RestoreResult, watches_trainer: bool) -> bool {
    result.step.is_some() || !watches_trainer
}

fn told(result: &RestoreResult) -> String {
    let Some(step) = result.step else {
        return "checkpoint: no whole step is known here or at peers".to_owned();
    };
    let (here, fetched, by) = (result.shards_here, result.shards_fetched, &result.decided_by);
    let size = mebibytes(result.bytes_fetched);
    format!(
        "checkpoint: step {step} (decision {}, by {by}): {here} shard(s) here, {fetched} from peers ({size} MiB), {:.1} s",
        result.fence, result.seconds
    )
}

fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_says_what_was_found_of_a_trainers_checkpoints() {
        let none = RestoreResult::default();
        assert!(is_news(&none, false) && !is_news(&none, true));
        assert!(is_news(&RestoreResult { step: Some(40), ..none }, true));
    }
}
