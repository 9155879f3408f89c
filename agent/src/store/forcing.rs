//! What was written is forced onto the disk by a thread of its own: a disk that is busy for half a second must not keep
//! waiting what the kernel or the driver has to tell.

use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, channel, sync_channel};
use std::thread::JoinHandle;

use super::journal::{JournalError, Unforced};

/// What came of it: forced, or why not, with what was to be.
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
    /// Starts it. `then` is called with what came along once the journal is on the disk.
    ///
    /// # Errors
    /// The kernel gives no more threads.
    pub fn start(mut then: impl FnMut(T) + Send + 'static) -> std::io::Result<Forcing<T>> {
        // One that is being done, and the last one of all.
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

    /// What came of the last one, if that is over: once for each.
    pub fn done(&mut self) -> Option<Forced> {
        match self.done.try_recv() {
            Ok(forced) => {
                self.busy = false;
                Some(forced)
            }
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => None,
        }
    }

    /// Whether the disk still has to do with the last one.
    pub fn is_busy(&self) -> bool {
        self.busy
    }

    /// Hands it what is to be forced, and what comes along. Not to be called while it is busy: it would be dropped.
    pub fn begin(&mut self, unforced: Unforced, along: T) {
        match self.work.try_send((unforced, along)) {
            Ok(()) => self.busy = true,
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                tracing::error!("what was written is not forced onto the disk: its thread is gone or busy");
            }
        }
    }

    /// Waits until what it was handed is done, and ends it. Returns what came of it.
    pub fn finish(self) -> Option<Forced> {
        let Forcing { work, done, thread, .. } = self;
        drop(work);
        // A thread that panicked has said so.
        let _ = thread.join();
        done.try_iter().last()
    }
}

#[cfg(test)]
mod tests {
    use mainstay_core::base::id::BootId;
    use mainstay_core::base::time::Stamp;
    use mainstay_core::model::entry::{Body, Fact};

    use super::super::journal::{Journal, Limits};
    use super::*;

    #[test]
    fn what_comes_along_is_kept_after_the_journal_is_on_the_disk() {
        let directory = tempfile::tempdir().unwrap();
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
