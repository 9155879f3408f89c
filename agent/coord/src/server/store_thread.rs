//! The thread that owns the store. It handles requests in order, writes their changes to the log, and only then
//! answers them and notifies watches. Queued requests share one write.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tonic::{Code, Status};

use super::log::Log;
use super::store::{Refusal, Store};
use super::watchers::{Answers, Watchers};
use crate::error::CoordError;
use crate::etcd::etcdserverpb as pb;

/// The maximum number of queued requests; more are refused as etcd refuses them.
const MAX_QUEUED_REQUESTS: usize = 4096;
/// The maximum number of requests that share one write to the log.
const MAX_BATCH_REQUESTS: usize = 256;
/// The maximum interval of checks of leases.
const TICK: Duration = Duration::from_millis(200);
/// The interval of checks of readers that have to wait.
const WAIT: Duration = Duration::from_millis(20);
/// If the thread wakes up later than this, it was stalled: its clients could not renew their leases.
const STALL: Duration = Duration::from_millis(500);

/// A request to the thread.
pub(super) enum Job {
    /// Reads or changes the store.
    Ask(Question),
    /// Opens a watch stream; its number is sent back.
    Open(Answers, oneshot::Sender<Result<u64, Status>>),
    Create(u64, pb::WatchCreateRequest),
    Cancel(u64, i64),
    Progress(u64),
    Close(u64),
    Stop,
}

/// An operation on the store at a time in milliseconds.
pub(super) type Question = Box<dyn FnOnce(&mut Store, u64) -> Reply + Send>;

/// An answer that waits until the log has the changes that it is based on. True: it may be sent, false: the log
/// cannot be written.
pub(super) type Reply = Box<dyn FnOnce(bool) + Send>;

/// Sends requests to the thread.
#[derive(Clone)]
pub(super) struct Handle {
    jobs: SyncSender<Job>,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Handle")
    }
}

impl Handle {
    /// The answer to a question, after its changes are on disk.
    pub(super) async fn ask<A: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Store, u64) -> Result<A, Refusal> + Send + 'static,
    ) -> Result<A, Status> {
        let (answer, answered) = oneshot::channel();
        let job = Job::Ask(Box::new(move |store, now| {
            let result = question(store, now);
            Box::new(move |kept| {
                let result = if kept { result.map_err(Status::from) } else { Err(unwritten()) };
                let _ = answer.send(result);
            })
        }));
        self.send(job)?;
        answered.await.map_err(|_| stopped())?
    }

    pub(super) async fn open(&self, answers: Answers) -> Result<u64, Status> {
        let (answer, answered) = oneshot::channel();
        self.send(Job::Open(answers, answer))?;
        answered.await.map_err(|_| stopped())?
    }

    pub(super) fn send(&self, job: Job) -> Result<(), Status> {
        self.jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => Status::new(Code::ResourceExhausted, "etcdserver: too many requests"),
            TrySendError::Disconnected(_) => stopped(),
        })
    }

    /// Waits for a place in the queue: for jobs that must not be lost.
    pub(super) fn send_surely(&self, job: Job) {
        let _ = self.jobs.send(job);
    }
}

fn stopped() -> Status {
    Status::unavailable("etcdserver: server stopped")
}

fn unwritten() -> Status {
    Status::unavailable("the built-in store cannot write its log: check the disk of its host")
}

/// Starts the thread.
pub(super) fn start(
    store: Store,
    log: Option<Log>,
    epoch: Instant,
) -> Result<(Handle, JoinHandle<()>), CoordError> {
    let (jobs, received) = sync_channel(MAX_QUEUED_REQUESTS);
    let store_thread = StoreThread { store, log, epoch, watchers: Watchers::default(), unwritten: false };
    let thread = std::thread::Builder::new()
        .name("mainstay-coord".to_owned())
        .spawn(move || store_thread.run(&received))
        .map_err(|error| CoordError::io("the thread of the built-in store", error))?;
    Ok((Handle { jobs }, thread))
}

struct StoreThread {
    store: Store,
    log: Option<Log>,
    /// The start of the milliseconds.
    epoch: Instant,
    watchers: Watchers,
    /// The log could not be written: nothing is acknowledged until it has been rewritten as a whole.
    unwritten: bool,
}

impl StoreThread {
    fn run(mut self, jobs: &Receiver<Job>) {
        let mut patience = TICK;
        loop {
            let planned = Instant::now() + patience;
            let first = match jobs.recv_timeout(patience) {
                Ok(job) => Some(job),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            self.forgive(planned.elapsed());
            let mut replies = Vec::new();
            let batch = first.into_iter().chain(jobs.try_iter().take(MAX_BATCH_REQUESTS));
            for job in batch {
                if matches!(job, Job::Stop) {
                    self.finish(replies);
                    self.watchers.close_all();
                    return;
                }
                self.take(job, &mut replies);
            }
            let now = self.now();
            self.store.expire(now);
            let waiting = self.finish(replies);
            patience = if waiting { WAIT } else { TICK.min(self.until_expiry()) };
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn until_expiry(&self) -> Duration {
        let ends = self.store.next_expiry().unwrap_or(u64::MAX);
        Duration::from_millis(ends.saturating_sub(self.now()).max(1))
    }

    /// This thread or its host was stopped: no client could renew a lease meanwhile.
    fn forgive(&mut self, late: Duration) {
        if late > STALL {
            tracing::warn!(?late, "the built-in store stood still; leases are prolonged by as much");
            self.store.prolong(u64::try_from(late.as_millis()).unwrap_or(u64::MAX));
        }
    }

    fn take(&mut self, job: Job, replies: &mut Vec<Reply>) {
        match job {
            Job::Ask(question) => {
                let now = self.now();
                replies.push(question(&mut self.store, now));
            }
            Job::Open(answers, answer) => {
                let opened = if self.is_full() {
                    Err(Status::resource_exhausted("etcdserver: too many watches"))
                } else {
                    Ok(self.watchers.open(answers))
                };
                if let Err(Ok(stream)) = answer.send(opened) {
                    self.watchers.close(stream);
                }
            }
            Job::Create(stream, question) => {
                // The changes of this batch are not on disk yet: a watch must not see them earlier.
                self.finish(std::mem::take(replies));
                let full = self.is_full();
                self.watchers.create(stream, &question, &self.store, full);
            }
            Job::Cancel(stream, id) => self.watchers.cancel(stream, id, &self.store),
            Job::Progress(stream) => {
                self.finish(std::mem::take(replies));
                self.watchers.progress(stream, &self.store);
            }
            Job::Close(stream) => self.watchers.close(stream),
            Job::Stop => {}
        }
    }

    fn is_full(&self) -> bool {
        self.watchers.count() >= self.store.limits().watches
    }

    /// Writes the changes, then sends answers and events. Returns whether a watch has to wait for its reader.
    fn finish(&mut self, replies: Vec<Reply>) -> bool {
        let kept = self.write();
        for reply in replies {
            reply(kept);
        }
        // Without the log, no change may be visible, since a restart would undo it.
        kept && self.watchers.deliver(&self.store)
    }

    fn write(&mut self) -> bool {
        let records = self.store.take_records();
        let Some(log) = &mut self.log else { return true };
        if self.unwritten || log.is_grown() {
            match log.rewrite(&self.store) {
                Ok(()) => self.unwritten = false,
                Err(error) => self.failed(&error),
            }
            return !self.unwritten;
        }
        if let Err(error) = log.append(&records) {
            self.failed(&error);
        }
        !self.unwritten
    }

    fn failed(&mut self, error: &std::io::Error) {
        if !self.unwritten {
            tracing::error!(%error, "the log of the built-in store cannot be written; nothing is acknowledged until it can");
        }
        self.unwritten = true;
    }
}
