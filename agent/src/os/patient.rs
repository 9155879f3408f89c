//! File work that is waited for only so long. A file system that does not answer, such as a network mount whose server is gone,
//! holds up a thread of its own, and not the loop that needs the answer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often it is looked whether work that is waited for is over.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A thread for one file system. It is started when it is first needed.
#[derive(Debug)]
pub struct Patient {
    name: &'static str,
    worker: Mutex<Option<Worker>>,
}

#[derive(Debug)]
struct Worker {
    work: Sender<Work>,
    /// Whether it still has to do with what nobody waits for any more.
    busy: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

type Work = Box<dyn FnOnce() + Send>;

impl Patient {
    /// One whose thread has this name.
    #[must_use]
    pub const fn new(name: &'static str) -> Patient {
        Patient { name, worker: Mutex::new(None) }
    }

    /// What the work returns; none if it takes longer than `patience`. It goes on then, and until it is over nothing else is begun:
    /// each further call returns at once, with none, and drops its work.
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
            // Nobody waits any more if it took too long.
            let _ = answer.send(result);
        };
        worker.work.send(Box::new(work)).ok()?;
        answered.recv_timeout(patience).ok()
    }

    /// Waits for the last work to be over, but no longer than this; whether it is.
    pub fn settle(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        while self.is_stuck() {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        true
    }

    /// Whether the last work is not over.
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
    fn work_that_does_not_end_is_left_and_none_is_begun_until_it_has() {
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
