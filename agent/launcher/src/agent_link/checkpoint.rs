//! Before the ranks start: asks the agent for the newest step that is whole anywhere, and reports where this job keeps its checkpoints.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mainstay_proto::v1::checkpoint_service_client::CheckpointServiceClient;
use mainstay_proto::v1::restore_checkpoint_response::Message;
use mainstay_proto::v1::{
    CheckpointStep, ListCheckpointsRequest, RestoreCheckpointRequest, RestoreProgress, RestoreResult,
};
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use crate::agent_link::handover;
use crate::agent_link::lent_files::LentFiles;
use crate::agent_link::stream::connect;
use crate::checkpoints::lineage::Output;

/// How long the agent may take to answer at all.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// How long the agent may take to ask its peers for their steps.
const LIST_WITHIN: Duration = Duration::from_secs(30);

/// How long the agent may be silent while shards are being transferred.
const GO_ON_WITHIN: Duration = Duration::from_secs(600);

/// How often counts are printed.
const REPORT_EVERY: Duration = Duration::from_secs(5);

/// A whole step that the agent knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownStep {
    /// Its run, with the id and without the owner.
    pub run: String,
    /// The step.
    pub step: u64,
}

/// The whole steps of this user that the agent knows, of runs with one name or of all runs. With `refresh` it asks its
/// peers again. None if no agent answers, or it keeps no checkpoints.
pub async fn known(sockets: &[PathBuf], name: Option<&str>, refresh: bool) -> Option<Vec<KnownStep>> {
    for socket in sockets.iter().filter(|socket| socket.exists()) {
        match tokio::time::timeout(LIST_WITHIN, list(socket, name, refresh)).await {
            Ok(Ok(steps)) => return Some(steps),
            Ok(Err(status)) => tracing::debug!(socket = %socket.display(), %status, "no list"),
            Err(_) => tracing::debug!(socket = %socket.display(), "no list in time"),
        }
    }
    None
}

async fn list(socket: &Path, name: Option<&str>, refresh: bool) -> Result<Vec<KnownStep>, Status> {
    let mut client = CheckpointServiceClient::new(channel(socket.to_owned()).await?);
    let owner = Some(nix::unistd::geteuid().as_raw());
    let request = ListCheckpointsRequest { run: name.map(str::to_owned), refresh, owner };
    let steps = client.list_checkpoints(request).await?.into_inner().steps.into_iter();
    let known = |of: CheckpointStep| KnownStep {
        run: of.run.split_once('@').map_or(&*of.run, |(run, _)| run).to_owned(),
        step: of.step,
    };
    Ok(steps.filter(|step| step.whole).map(known).collect())
}

/// The result of a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resumed {
    /// A step is in place.
    Step,
    /// No step of the run is known.
    Nothing,
    /// There was no answer.
    Unknown,
}

/// Has the agent restore the newest whole step of a run to its directory, and from then on replicate what is sealed there
/// and in `pool`, this launcher's memory.
///
/// Without an agent, or with one that keeps no replicas, nothing happens. Errors are reported through `say`, and the job
/// starts with what is there. `watches_trainer`: the trainer's own checkpoints are watched, and their result is printed
/// next. Returns the result, and what keeps copies of what is sealed there, as text; none without an agent.
///
/// # Errors
/// The run belongs to another directory. The message names the remedy.
pub async fn restore(
    sockets: &[PathBuf],
    place: &Output,
    pool: Option<&Path>,
    watches_trainer: bool,
    print: &(dyn Fn(String) + Sync),
) -> Result<(Resumed, Option<String>), String> {
    for socket in sockets.iter().filter(|socket| socket.exists()) {
        match ask(socket, place, pool, false, print).await {
            Ok(Some(result)) => {
                if is_news(&result, watches_trainer) {
                    print(describe(&result));
                }
                return Ok((resumed(&result), Some(result.kept_by)));
            }
            Ok(None) => return Ok((Resumed::Unknown, None)),
            Err(status) if status.code() == Code::AlreadyExists => return Err(status.message().to_owned()),
            Err(status) if status.code() == Code::Aborted => {
                print(format!(
                    "no checkpoint was restored from peers: {}; the ranks load what is on this host",
                    status.message()
                ));
                return Ok((Resumed::Unknown, None));
            }
            Err(status) => {
                tracing::debug!(socket = %socket.display(), %status, "no restore");
            }
        }
    }
    Ok((Resumed::Unknown, None))
}

fn resumed(result: &RestoreResult) -> Resumed {
    if result.step.is_some() { Resumed::Step } else { Resumed::Nothing }
}

/// Why ranks must not be started, as a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotToStart {
    /// No whole step is left of what was sealed.
    Lost(String),
    /// The run belongs to another directory.
    Refused(String),
}

impl NotToStart {
    /// The message.
    pub(crate) fn describe(self) -> String {
        match self {
            NotToStart::Lost(words) | NotToStart::Refused(words) => words,
        }
    }
}

/// The same for a directory into which the trainer writes in its own format. The agent watches it from then on. `again`:
/// the job has run before. None if no agent answers, or it keeps no checkpoints.
pub(crate) async fn restore_files(
    sockets: &[PathBuf],
    files: &Output,
    again: bool,
    print: &(dyn Fn(String) + Sync),
) -> Result<Option<(Resumed, String)>, NotToStart> {
    let place = files.directory.display();
    let directory = files.directory.clone();
    let open = sockets.to_vec();
    let _ = tokio::task::spawn_blocking(move || offer_directory(&open, &directory, again)).await;
    for socket in sockets.iter().filter(|socket| socket.exists()) {
        match ask(socket, files, None, again, print).await {
            Ok(result) => {
                print(format!("{place}: {}", result.as_ref().map_or_else(|| "watched".to_owned(), describe)));
                let found = result.as_ref().map_or(Resumed::Unknown, resumed);
                return Ok(Some((found, result.map(|result| result.kept_by).unwrap_or_default())));
            }
            Err(status) if status.code() == Code::AlreadyExists => {
                return Err(NotToStart::Refused(status.message().to_owned()));
            }
            Err(status) if status.code() == Code::DataLoss => {
                return Err(NotToStart::Lost(status.message().to_owned()));
            }
            Err(status) if is_no_keeper(&status) => {
                tracing::debug!(socket = %socket.display(), %status, "no restore");
            }
            Err(status) => {
                print(format!(
                    "{place}: not restored: {}; the trainer resumes from the files as they are",
                    status.message()
                ));
                return Ok(Some((Resumed::Unknown, String::new())));
            }
        }
    }
    Ok(None)
}

/// An agent that may only read what is handed over needs the present directory, which may have been created again.
fn offer_directory(sockets: &[PathBuf], directory: &Path, again: bool) {
    for socket in sockets.iter().filter(|socket| socket.exists()) {
        if handover::may_act_as_this_user(socket).unwrap_or(true) {
            continue;
        }
        if !again && let Err(error) = std::fs::create_dir_all(directory) {
            tracing::debug!(directory = %directory.display(), %error, "the directory cannot be made");
        }
        if let Err(error) = handover::hand_over(socket, &[directory.to_owned()]) {
            tracing::debug!(socket = %socket.display(), %error, "the directory was not handed over");
        }
    }
}

/// Whether the agent, if there is one, keeps no checkpoints at all.
fn is_no_keeper(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::FailedPrecondition | Code::DeadlineExceeded)
}

async fn ask(
    socket: &Path,
    place: &Output,
    pool: Option<&Path>,
    again: bool,
    print: &(dyn Fn(String) + Sync),
) -> Result<Option<RestoreResult>, Status> {
    let files = match &*place.kind {
        "" => LentFiles::new(&place.directory),
        _ => LentFiles::for_trainer(&place.directory),
    };
    let asking = Asking { socket, place, pool, again, files: &files, print };
    let Some(mut result) = asking.ask(String::new()).await? else { return Ok(None) };
    let Some(asked) = result.put_back.take() else { return Ok(Some(result)) };
    let token = asked.token.clone();
    let done = files.put_back(&place.kind, result.step, asked).await;
    // The agent has found the steps that the trainer must not start from.
    let lines = done.map_err(|error| {
        let place = place.directory.display();
        Status::data_loss(format!("{place}: the checkpoint to go on from cannot be put back: {error}"))
    })?;
    lines.into_iter().for_each(|line| print(format!("checkpoint: {line}")));
    asking.ask(token).await
}

struct Asking<'a> {
    socket: &'a Path,
    place: &'a Output,
    pool: Option<&'a Path>,
    again: bool,
    files: &'a LentFiles,
    print: &'a (dyn Fn(String) + Sync),
}

impl Asking<'_> {
    /// `put_back_token`: the agent's request with this token was carried out.
    async fn ask(&self, put_back_token: String) -> Result<Option<RestoreResult>, Status> {
        let Asking { socket, place, pool, again, files, print } = *self;
        let late = |_| Status::deadline_exceeded("the agent does not answer");
        let channel =
            tokio::time::timeout(ANSWER_WITHIN, channel(socket.to_owned())).await.map_err(late)??;
        let mut client = CheckpointServiceClient::new(channel);
        let request = RestoreCheckpointRequest {
            run: place.run.clone(),
            directory: place.directory.display().to_string(),
            ranks: Vec::new(),
            pool: pool.map(|pool| pool.display().to_string()).unwrap_or_default(),
            files_kind: place.kind.clone(),
            directory_id: place.id_text(),
            on_purpose: place.on_purpose,
            again,
            put_back_token,
        };
        let answer =
            tokio::time::timeout(ANSWER_WITHIN, client.restore_checkpoint(request)).await.map_err(late)?;
        let mut messages = answer?.into_inner();
        let mut last_report = Instant::now();
        loop {
            let next = tokio::time::timeout(GO_ON_WITHIN, messages.message()).await.map_err(late)?;
            match next?.and_then(|message| message.message) {
                Some(Message::Result(mut result)) => {
                    let settled = files.settle(std::mem::take(&mut result.lent)).await;
                    settled.map_err(|error| Status::aborted(format!("what was restored: {error}")))?;
                    return Ok(Some(result));
                }
                Some(Message::Progress(at)) if at.files_wanted > 0 => {
                    // The agent waits for them, and reports that none arrived.
                    if let Err(error) = files.lend(socket, at).await {
                        print(format!("checkpoint: no files can be lent to the agent: {error}"));
                    }
                }
                Some(Message::Progress(at)) if !at.told.is_empty() => {
                    print(format!("checkpoint: {}", at.told))
                }
                Some(Message::Progress(at)) => {
                    if at.bytes > 0 && last_report.elapsed() >= REPORT_EVERY {
                        last_report = Instant::now();
                        print(progress(&at));
                    }
                }
                None => return Ok(None),
            }
        }
    }
}

pub(crate) async fn channel(socket: PathBuf) -> Result<Channel, Status> {
    // The address is never resolved: the connector uses the socket.
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

/// Whether to print a result: "nothing is here" would contradict the result for the trainer's own checkpoints.
fn is_news(result: &RestoreResult, watches_trainer: bool) -> bool {
    result.step.is_some() || !watches_trainer
}

fn describe(result: &RestoreResult) -> String {
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
