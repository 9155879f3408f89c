//! Syncs the journal to disk on a separate thread: a disk that is busy for half a second must not delay messages of
//! the kernel or the driver.

use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, channel, sync_channel};
use std::thread::JoinHandle;

use super::journal::{JournalError, Unforced};

/// The result: synced, or the error with what has to be synced.
pub type Forced = Result<(), (JournalError, Unforced)>;

/// The thread.
#[derive(Debug)]
pub struct Forcing<T> {
    work: SyncSender<(Unforced, T)>,
    done: Receiver<Forced>,
    busy: bool,
    thread: JoinHandle<()>,
}

impl<T: Send + 'static> Forcing<T> {
    /// Starts the thread. `then` is called with the accompanying value once the journal is on the disk.
    ///
    /// # Errors
    /// The kernel cannot create a thread.
    pub fn start(mut then: impl FnMut(T) + Send + 'static) -> std::io::Result<Forcing<T>> {
        // The one in progress, and the final one.
        let (work, to_do) = sync_channel::<(Unforced, T)>(1);
        let (did, done) = channel();
        let run = move || {
            for (unforced, along) in to_do {
                let forced = unforced.force().map_err(|error| (error, unforced));
                if forced.is_ok() {
                    then(along);
                }
                if did.send(forced).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("forcing".to_owned()).spawn(run)?;
        Ok(Forcing { work, done, busy: false, thread })
    }

    /// The result of the last sync, if it has finished: once for each.
    pub fn done(&mut self) -> Option<Forced> {
        match self.done.try_recv() {
            Ok(forced) => {
                self.busy = false;
                Some(forced)
            }
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => None,
        }
    }

    /// Whether the last sync is still in progress.
    pub fn is_busy(&self) -> bool {
        self.busy
    }

    /// Starts a sync, with an accompanying value. Must not be called while it is busy: the work would be dropped.
    pub fn begin(&mut self, unforced: Unforced, along: T) {
        match self.work.try_send((unforced, along)) {
            Ok(()) => self.busy = true,
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                tracing::error!(
                    "written entries are not synced to the disk: the sync thread has ended or is busy"
                );
            }
        }
    }

    /// Waits until the queued work is done, and ends the thread. Returns the result.
    pub fn finish(self) -> Option<Forced> {
        let Forcing { work, done, thread, .. } = self;
        drop(work);
        // A thread that panicked has reported it.
        let _ = thread.join();
        done.try_iter().last()
    }
}

#[cfg(test)]
mod tests {
    use mainstay_model::entry::{Body, Fact};
    use mainstay_model::id::BootId;
    use mainstay_model::time::Stamp;

    use super::super::journal::{Journal, Limits};
    use super::*;

    #[test]
    fn the_accompanying_value_is_kept_after_the_journal_is_on_the_disk() {
        let directory = testing::tempdir().unwrap();
        let mut journal = Journal::open(directory.path(), Limits::default(), BootId("b".into())).unwrap();
        let (kept, seen) = channel();
        let mut forcing = Forcing::start(move |number: u32| kept.send(number).unwrap()).unwrap();
        for number in 1..=3 {
            journal.append(Stamp::default(), None, None, Body::Fact(Fact::AgentStopped)).unwrap();
            forcing.begin(journal.unforced().unwrap(), number);
            assert!(forcing.is_busy());
            assert_eq!(seen.recv().unwrap(), number);
            while forcing.is_busy() {
                assert!(!matches!(forcing.done(), Some(Err(_))));
            }
        }
        assert!(forcing.finish().is_none(), "each is told once");
    }
}
