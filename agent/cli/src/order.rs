//! Orders of people: their recipient, and the output about the result.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::client::{AskError, Client};
use super::find::{SocketAt, find};
use super::{exit, output};

/// The agent of this host: the first socket that answers, or the named one.
pub(super) async fn agent(socket: Option<PathBuf>) -> Result<Client, AskError> {
    let found = find(socket.as_deref());
    let agents = found.places.iter().filter(|place| place.job.is_none());
    let (answering, why) = answering(agents, 1).await;
    match answering.into_iter().next() {
        Some((_, client)) => Ok(client),
        None => Err(no_one(why, found.looked_at.first())),
    }
}

/// The launcher of the job that is meant: the one on this socket, the one with this name, or the only one.
pub(super) async fn launcher(socket: Option<PathBuf>, job: Option<&str>) -> Result<Client, AskError> {
    let named = socket.is_some();
    let found = find(socket.as_deref());
    let is_meant = |place: &&SocketAt| {
        named || place.job.as_deref().is_some_and(|name| job.is_none_or(|wanted| name == wanted))
    };
    let (mut answering, why) = answering(found.places.iter().filter(is_meant), MAX_NAMED_JOBS + 1).await;
    match answering.pop() {
        Some((_, client)) if answering.is_empty() => {
            if let Some(job) = job.filter(|_| named) {
                must_know(&client, job).await?;
            }
            Ok(client)
        }
        Some((socket, _)) => {
            let names = answering.iter().map(|(socket, _)| *socket).chain([socket]).map(job_at);
            let mut names: Vec<String> = names.take(MAX_NAMED_JOBS).collect();
            names.sort();
            Err(AskError::Other {
                socket: socket.parent().and_then(Path::parent).unwrap_or(socket).to_owned(),
                reason: format!("more than one job runs here: name one with --job ({})", names.join(", ")),
            })
        }
        None => Err(no_one(why, found.looked_at.last())),
    }
}

/// An order for a job must not reach another one whose socket was given.
async fn must_know(client: &Client, job: &str) -> Result<(), AskError> {
    let jobs = client.snapshot().await?.jobs;
    if jobs.iter().any(|of| of.id == job) {
        return Ok(());
    }
    let known: Vec<String> = jobs.iter().take(MAX_NAMED_JOBS).map(|of| output::clean(&of.id)).collect();
    let reason = format!("no job {job:?} here; known: {known:?}");
    Err(AskError::Other { socket: client.socket().to_owned(), reason })
}

/// Maximum number of jobs that are named if the user has to choose one.
const MAX_NAMED_JOBS: usize = 8;

/// The job whose launcher has this socket in its default place.
fn job_at(socket: &Path) -> String {
    let directory = socket.parent().and_then(Path::file_name).unwrap_or_default();
    output::clean(&directory.to_string_lossy())
}

/// The first servers that answer, at most `most`; and why the first of the others does not.
async fn answering<'a>(
    places: impl Iterator<Item = &'a SocketAt>,
    most: usize,
) -> (Vec<(&'a Path, Client)>, Option<AskError>) {
    let (mut answering, mut why) = (Vec::new(), None);
    for place in places {
        if answering.len() == most {
            break;
        }
        match Client::connect(&place.socket).await {
            Ok(client) => answering.push((place.socket.as_path(), client)),
            Err(error) => why = why.or(Some(error)),
        }
    }
    (answering, why)
}

fn no_one(why: Option<AskError>, looked_at: Option<&String>) -> AskError {
    why.unwrap_or_else(|| AskError::Missing(looked_at.cloned().unwrap_or_default().into()))
}

/// Prints that it was done, or why not.
pub(super) fn done(response: Result<(), AskError>, words: &str) -> anyhow::Result<ExitCode> {
    match response {
        Ok(()) => {
            output::print(words)?;
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => {
            output::note(&format!("error: {error}"));
            Ok(ExitCode::from(exit::UNKNOWN))
        }
    }
}
