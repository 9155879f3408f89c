//! File work with a time limit. A file system that does not answer, such as a network mount whose server is gone,
//! blocks a separate thread and not the loop that needs the result.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often to check whether the work is finished.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A thread for one file system. It is started on first use.
#[derive(Debug)]
pub struct Patient {
    name: &'static str,
    worker: Mutex<Option<Worker>>,
}

#[derive(Debug)]
struct Worker {
    work: Sender<Work>,
    /// Whether it is still busy with work whose caller no longer waits.
    busy: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

type Work = Box<dyn FnOnce() + Send>;

impl Patient {
    /// A value whose thread has this name.
    #[must_use]
    pub const fn new(name: &'static str) -> Patient {
        Patient { name, worker: Mutex::new(None) }
    }

    /// Returns the result of the work; none if it takes longer than `patience`. The work then continues, and no
    /// other work starts until it has finished: each further call returns none at once and drops its work.
    pub fn ask<T: Send + 'static>(
        &self,
        patience: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        // A holder that panicked has left a worker or none.
        let mut slot = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        if slot.as_ref().is_none_or(|worker| worker.thread.is_finished()) {
            *slot = Worker::start(self.name)
                .inspect_err(|error| tracing::warn!(%error, "no thread for file work: it is left out"))
                .ok();
        }
        let worker = slot.as_ref()?;
        if worker.busy.swap(true, Ordering::AcqRel) {
            return None;
        }
        let (answer, answered) = channel();
        let busy = Arc::clone(&worker.busy);
        let work = move || {
            let result = work();
            busy.store(false, Ordering::Release);
            // The caller no longer waits if it took too long.
            let _ = answer.send(result);
        };
        worker.work.send(Box::new(work)).ok()?;
        answered.recv_timeout(patience).ok()
    }

    /// Waits for the last work to finish, but at most this long. Returns whether it has finished.
    pub fn settle(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        while self.is_stuck() {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        true
    }

    /// Whether the last work has not finished.
    pub fn is_stuck(&self) -> bool {
        let slot = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        slot.as_ref()
            .is_some_and(|worker| worker.busy.load(Ordering::Acquire) && !worker.thread.is_finished())
    }
}

impl Worker {
    fn start(name: &str) -> std::io::Result<Worker> {
        let (work, to_do) = channel::<Work>();
        let run = move || to_do.into_iter().for_each(|work| work());
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run)?;
        Ok(Worker { work, busy: Arc::default(), thread })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn work_that_does_not_end_is_abandoned_and_blocks_further_work() {
        let patient = Patient::new("test");
        assert_eq!(patient.ask(LONG, || 1), Some(1));
        let (go_on, wait) = channel::<()>();
        assert_eq!(patient.ask(Duration::from_millis(1), move || wait.recv().is_ok()), None);
        assert!(patient.is_stuck() && !patient.settle(Duration::ZERO));
        assert_eq!(patient.ask(LONG, || 2), None, "its time is not waited for again");
        go_on.send(()).expect("it waits");
        assert!(patient.settle(LONG));
        assert_eq!(patient.ask(LONG, || 3), Some(3));
    }

    #[test]
    fn work_that_panics_costs_that_work_only() {
        let patient = Patient::new("test");
        assert_eq!(patient.ask(LONG, || -> u8 { panic!("a fault of the work") }), None);
        assert!(patient.settle(LONG));
        assert_eq!(patient.ask(LONG, || 3), Some(3));
    }
}
