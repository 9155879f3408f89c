//! Waits for events, woken by the kernel and not by a timer.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// No event of a scenario takes as long as this on any machine; a longer wait has failed.
pub const DEADLINE: Duration = Duration::from_secs(180);

/// A wait for a condition that changes with the content of directories or with the end of a process.
#[derive(Debug)]
pub struct Waiting<'a> {
    /// Directories whose changes cause another check; also those above a directory that does not exist yet.
    pub directories: Vec<PathBuf>,
    /// A process whose end causes a last check.
    pub process: Option<BorrowedFd<'a>>,
}

/// Why a wait failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// It took longer than [`DEADLINE`].
    TooLong,
    /// The process ended without it.
    Ended,
}

impl Waiting<'_> {
    /// Checks until `look` finds something.
    ///
    /// # Errors
    /// The deadline passed, or the process ended first.
    pub fn until<T>(&self, mut look: impl FnMut() -> Option<T>) -> Result<T, Failed> {
        let deadline = Instant::now() + DEADLINE;
        let changes = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).expect("inotify");
        loop {
            for directory in &self.directories {
                let kinds = WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::MODIFY;
                // If a directory does not exist yet, its creation is a change of its parent.
                let _ = inotify::add_watch(&changes, directory, kinds);
            }
            let over = self.process.is_some_and(has_ended);
            if let Some(found) = look() {
                return Ok(found);
            }
            if over {
                return Err(Failed::Ended);
            }
            if Instant::now() >= deadline {
                return Err(Failed::TooLong);
            }
            self.sleep_until_something_happens(&changes, deadline);
        }
    }

    fn sleep_until_something_happens(&self, changes: &OwnedFd, deadline: Instant) {
        let mut fds = vec![PollFd::new(changes, PollFlags::IN)];
        fds.extend(self.process.iter().map(|process| PollFd::from_borrowed_fd(*process, PollFlags::IN)));
        wait(&mut fds, deadline.saturating_duration_since(Instant::now()));
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(changes, &mut buffer);
        while reader.next().is_ok() {}
    }
}

/// A handle on a process; none if it is gone.
pub fn handle(pid: i32) -> Option<OwnedFd> {
    pidfd_open(Pid::from_raw(pid)?, PidfdFlags::NONBLOCK).ok()
}

/// Waits for a process to end; whether it did before the deadline.
pub fn ended(process: impl AsFd) -> bool {
    wait(&mut [PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN)], DEADLINE)
}

fn has_ended(process: BorrowedFd<'_>) -> bool {
    wait(&mut [PollFd::from_borrowed_fd(process, PollFlags::IN)], Duration::ZERO)
}

fn wait(fds: &mut [PollFd<'_>], patience: Duration) -> bool {
    let patience = Timespec::try_from(patience).expect("a deadline is no eternity");
    // An interruption by a signal counts as a wake-up: every caller checks again.
    poll(fds, Some(&patience)).unwrap_or(0) > 0
}
