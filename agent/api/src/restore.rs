//! One call of `RestoreCheckpoint`: the work on a thread that may block, and the limit of concurrent restores.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use mainstay_checkpoint::choice::{RestoreRequest, choose};
use mainstay_checkpoint::inventory::restorable;
use mainstay_durable::Tier;
use mainstay_proto::v1::restore_checkpoint_response::Message;
use mainstay_proto::v1::{RestoreCheckpointResponse, RestoreProgress, RestoreResult};
use mainstay_tier::files::{Files, FilesError, Started};
use mainstay_tier::peer::{Progress, Service, User, WatchedDirectory};
use tokio::sync::mpsc;
use tonic::Status;

use super::convert::checkpoint::{kept_by, progress_out, put_back_out, result_out};
use super::refusal::Reason;
use super::run_directories::{Home, Homes};
use super::watching::{Watching, problem_of};

/// Restores of one user that may run at once.
const MOST_OF_ONE_USER: usize = 16;

/// Restores that run, by the user's number.
pub type RestoresByUser = Mutex<BTreeMap<u32, usize>>;

/// A running restore. It counts against its user until it is dropped.
#[derive(Debug)]
pub struct Running {
    all: Arc<RestoresByUser>,
    uid: u32,
}

impl Running {
    /// Starts one more restore of this user.
    ///
    /// # Errors
    /// The user has too many.
    pub fn begin(all: &Arc<RestoresByUser>, user: User) -> Result<Running, String> {
        let mut running = all.lock().unwrap_or_else(PoisonError::into_inner);
        let of_user = running.entry(user.uid).or_insert(0);
        if *of_user >= MOST_OF_ONE_USER {
            return Err(format!(
                "user {} has {MOST_OF_ONE_USER} restores running, which is the most: wait until one has ended",
                user.uid
            ));
        }
        *of_user += 1;
        Ok(Running { all: Arc::clone(all), uid: user.uid })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut running = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(of_user) = running.get_mut(&self.uid) {
            *of_user -= 1;
            if *of_user == 0 {
                running.remove(&self.uid);
            }
        }
    }
}

/// What to restore, and from where.
pub struct Restore {
    /// The other agents.
    pub peers: Arc<Service>,
    /// Storage that outlives the hosts.
    pub durable: Option<Arc<Tier>>,
    /// Directories into which trainers write in their own format.
    pub files: Option<Arc<Files>>,
    /// Which directories are watched.
    pub watching: Watching,
    /// Which directories runs wrote into.
    pub homes: Arc<Homes>,
    /// The run and its directory.
    pub place: WatchedDirectory,
    /// The directory as the launcher found it; none if the launcher does not send it.
    pub home: Option<Home>,
    /// The ranks whose shards are wanted; none for all.
    pub ranks: Vec<u32>,
    /// How the trainer writes its checkpoints; empty where ranks' own shards are restored.
    pub files_kind: String,
    /// The user confirmed that this directory continues this run.
    pub on_purpose: bool,
    /// The launcher asks again because its ranks restart.
    pub again: bool,
    /// Ends a restore whose files the launcher itself has put back.
    pub put_back_token: String,
    /// To the caller.
    pub sender: mpsc::Sender<Result<RestoreCheckpointResponse, Status>>,
}

impl Restore {
    /// Restores, reports progress to the caller, and finally the result.
    pub fn answer(self) {
        let result = if self.put_back_token.is_empty() { self.restore() } else { self.end() };
        let last = result.map(|result| {
            let result = RestoreResult { kept_by: kept_by(&self.peers, self.durable.as_deref()), ..result };
            RestoreCheckpointResponse { message: Some(Message::Result(result)) }
        });
        let _ = self.sender.blocking_send(last);
    }

    /// The launcher has put back the files that the agent may not write.
    fn end(&self) -> Result<RestoreResult, Status> {
        let watch = self.files.as_ref().and_then(|files| files.find(&self.place.directory, &self.place.run));
        let gone =
            || Reason::DIRECTORY_GONE.refuse(format!("{} is not watched", self.place.directory.display()));
        watch.ok_or_else(gone)?.end_restore(&self.put_back_token).map(result_out).map_err(refused)
    }

    fn restore(&self) -> Result<RestoreResult, Status> {
        self.enter_home()?;
        // A directory on a file system that does not answer blocks only this thread.
        let watch = self.watching.watch_files(&self.place, &self.files_kind)?;
        if watch.is_none() {
            self.watching.remember(&self.place);
        }
        self.files.iter().for_each(|files| pull_caches(files, self.place.user));
        let progress = |at: Progress| self.report(at);
        let Some(watch) = watch else {
            let ranks = (!self.ranks.is_empty()).then_some(self.ranks.as_slice());
            let restored = self.peers.restore(&self.place, ranks, &progress);
            return restored
                .map(result_out)
                .map_err(|error| Reason::RESTORE_FAILED.refuse(error.to_string()));
        };
        if let Some(reported) = problem_of(&self.peers, &self.place) {
            tracing::warn!("{reported}");
            let reported =
                Message::Progress(RestoreProgress { told: reported, ..RestoreProgress::default() });
            let _ = self.sender.blocking_send(Ok(RestoreCheckpointResponse { message: Some(reported) }));
        }
        Ok(match watch.begin_restore(self.again, &progress).map_err(refused)? {
            Started::Done(restored) => result_out(restored),
            Started::Left(left) => put_back_out(left),
        })
    }

    /// No directory continues another run by accident.
    fn enter_home(&self) -> Result<(), Status> {
        let Some(home) = &self.home else { return Ok(()) };
        let newest = || {
            self.peers.refresh();
            self.peers.refresh_durable(&home.run);
            let wanted = RestoreRequest { run: Some(&home.run), ..RestoreRequest::default() };
            choose(&restorable(self.peers.copies()), wanted).key().map(|key| key.step)
        };
        self.homes
            .enter(home, self.on_purpose, newest)
            .map_err(|why| Reason::RUN_OF_ANOTHER_DIRECTORY.refuse(why))
    }

    fn report(&self, at: Progress) {
        let is_waited_for = at.files_wanted > 0;
        let message = Message::Progress(progress_out(at));
        let message = Ok(RestoreCheckpointResponse { message: Some(message) });
        if is_waited_for {
            let _ = self.sender.blocking_send(message);
        } else {
            // Progress that the caller has not read yet is not waited for.
            let _ = self.sender.try_send(message);
        }
    }
}

/// Fetches caches of programs that were compiled elsewhere.
fn pull_caches(files: &Files, user: User) {
    for (cache, pulled) in files.pull_caches(user) {
        if let Err(error) = pulled {
            tracing::warn!(cache, %error, "a cache could not be brought");
        }
    }
}

/// Permanent loss has its own status: nothing may be started over it.
fn refused(error: FilesError) -> Status {
    match error {
        FilesError::Lost(words) => Reason::STEPS_LOST.refuse(words),
        error => Reason::RESTORE_FAILED.refuse(error.to_string()),
    }
}
