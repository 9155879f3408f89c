//! How long the ranks' output files were, and when: the times of their lines. A separate thread reads the lengths, so that
//! no file system blocks the launcher and no unread terminal delays a reading.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mainstay_model::time::Mono;
use mainstay_model::timeline::{Moment, Timeline};
use mainstay_sys::clock;

/// How often lengths are read: the resolution of a line's time.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The files under watch, shared with the thread that looks.
#[derive(Debug)]
pub struct Growths {
    files: Files,
    /// The thread ends when this is dropped.
    _ends: Sender<()>,
}

type Files = Arc<Mutex<BTreeMap<PathBuf, Growth>>>;

#[derive(Clone, Debug, Default)]
pub struct Growth {
    /// The file's lengths with their times.
    pub timeline: Timeline,
    /// The last look, whether or not it found more.
    looked: Mono,
}

impl Growth {
    /// Records the length that a look between `before` and `after` found.
    pub fn grown(&mut self, before: Mono, after: Mono, length: u64) {
        self.timeline.push(Moment { not_before: self.looked, at: after, value: length });
        self.looked = self.looked.max(before);
    }
}

impl Growths {
    /// Starts the thread. Without a thread, the lines of a rank get the time of its end.
    pub fn start() -> Growths {
        let (ends, ended) = channel();
        let files = Files::default();
        let seen = Arc::clone(&files);
        let started =
            std::thread::Builder::new().name("growth".to_owned()).spawn(move || look(&seen, &ended));
        if let Err(error) = started {
            tracing::warn!(%error, "no thread to time the ranks' output");
        }
        Growths { files, _ends: ends }
    }

    /// Watches a file that a rank is about to write.
    pub fn watch(&self, path: &Path) {
        let new = Growth { looked: clock::mono(), ..Growth::default() };
        lock(&self.files).insert(path.to_owned(), new);
    }

    pub fn clear(&self) {
        lock(&self.files).clear();
    }

    pub fn get(&self, path: &Path) -> Growth {
        lock(&self.files).get(path).cloned().unwrap_or_default()
    }
}

fn look(files: &Files, ended: &Receiver<()>) {
    while ended.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let paths: Vec<PathBuf> = lock(files).keys().cloned().collect();
        for path in paths {
            // What a look finds was there when it ended. What it does not find was written after it started.
            let before = clock::mono();
            // Without the lock: a file system may be slow.
            let Ok(length) = std::fs::metadata(&path).map(|metadata| metadata.len()) else { continue };
            if let Some(growth) = lock(files).get_mut(&path) {
                growth.grown(before, clock::mono(), length);
            }
        }
    }
}

/// A holder that panics leaves no inconsistent state here.
fn lock(files: &Files) -> MutexGuard<'_, BTreeMap<PathBuf, Growth>> {
    files.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_was_written_between_the_look_that_missed_it_and_the_look_that_found_it() {
        let mut growth = Growth::default();
        for (before, after, length) in [(10, 11, 5), (20, 21, 5), (30, 31, 9)] {
            growth.grown(Mono(before), Mono(after), length);
        }
        let moment = growth.timeline.reached(9).expect("reached");
        assert_eq!((moment.not_before, moment.at), (Mono(20), Mono(31)));
        assert_eq!(growth.timeline.reached(10), None);
    }

    #[test]
    fn the_thread_sees_a_file_grow() {
        let dir = testing::tempdir().expect("a folder");
        let path = dir.path().join("stdout.log");
        let growths = Growths::start();
        growths.watch(&path);
        let started = clock::mono();
        std::fs::write(&path, "four").expect("written");
        let seen = loop {
            match growths.get(&path).timeline.reached(4) {
                Some(seen) => break seen,
                None => std::thread::yield_now(),
            }
        };
        assert!(seen.at >= started);
    }
}
