//! A stream of the launcher that never blocks its thread: it is written to only when it accepts data at once.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// A writable pipe accepts this many bytes without blocking (`PIPE_BUF`).
const PIPE_BUF_BYTES: usize = 4096;

/// Lines of files are read only while fewer bytes than this wait.
const ROOM: usize = 256 * 1024;

/// The launcher's own lines are kept only while fewer bytes than this wait. Beyond that they are only counted.
const ROOM_FOR_OWN: usize = 1024 * 1024;

/// At most this many bytes are written before orders are checked again.
const IN_A_TURN: usize = 256 * 1024;

pub(crate) struct Sink {
    stream: Box<dyn AsFd + Send>,
    waiting: VecDeque<u8>,
    /// The launcher's own lines for which there was no room.
    left_out: u64,
    /// Whether the reader is gone: writes are discarded.
    gone: bool,
}

impl Sink {
    pub(crate) fn new(stream: impl AsFd + Send + 'static) -> Sink {
        Sink { stream: Box::new(stream), waiting: VecDeque::new(), left_out: 0, gone: false }
    }

    /// Standard output and standard error. One sink if both are the same file, so that lines are not mixed.
    pub(crate) fn streams() -> Vec<Sink> {
        let (stdout, stderr) = (io::stdout(), io::stderr());
        let same = match (rustix::fs::fstat(&stdout), rustix::fs::fstat(&stderr)) {
            (Ok(a), Ok(b)) => (a.st_dev, a.st_ino, a.st_rdev) == (b.st_dev, b.st_ino, b.st_rdev),
            _ => false,
        };
        if same { vec![Sink::new(stderr)] } else { vec![Sink::new(stdout), Sink::new(stderr)] }
    }

    /// Whether more lines of files may be added.
    pub(crate) fn has_room(&self) -> bool {
        self.waiting.len() < ROOM
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Bytes that the reader has not taken yet.
    pub(crate) fn waiting(&self) -> u64 {
        self.waiting.len() as u64
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if !self.gone {
            self.waiting.extend(bytes);
        }
    }

    /// Adds a line of the launcher, if there is room. Dropped lines are counted, and reported when there is room again.
    pub(crate) fn push_own(&mut self, line: &str) {
        if self.waiting.len() >= ROOM_FOR_OWN {
            self.left_out += 1;
            return;
        }
        if self.left_out > 0 {
            let count = std::mem::take(&mut self.left_out);
            let reported =
                format!("mainstay: {count} line(s) were not shown; they are in launcher.log of the run\n");
            self.push(reported.as_bytes());
        }
        self.push(line.as_bytes());
        self.push(b"\n");
    }

    /// Drops what waits; returns how much that is.
    pub(crate) fn give_up(&mut self) -> u64 {
        let left = self.waiting();
        self.waiting.clear();
        left
    }

    /// Writes what the stream accepts without waiting; returns how much that is.
    pub(crate) fn advance(&mut self) -> u64 {
        let mut taken = 0;
        while !self.waiting.is_empty() && taken < IN_A_TURN && self.is_writable(Duration::ZERO) {
            let (front, _) = self.waiting.as_slices();
            let chunk = &front[..front.len().min(PIPE_BUF_BYTES)];
            match rustix::io::write(&self.stream, chunk) {
                Ok(written) => {
                    taken += written;
                    self.waiting.drain(..written);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => {
                    // A terminal that is gone must not end the launcher: the files contain everything.
                    self.gone = true;
                    self.waiting.clear();
                }
            }
        }
        taken as u64
    }

    /// Waits until the stream is writable, at most `longest`.
    pub(crate) fn is_writable(&self, longest: Duration) -> bool {
        let mut streams = [PollFd::new(&self.stream, PollFlags::OUT)];
        let longest = Timespec { tv_sec: 0, tv_nsec: i64::from(longest.subsec_nanos()) };
        // A stream that cannot be polled counts as writable; the write detects a reader that is gone.
        !matches!(poll(&mut streams, Some(&longest)), Ok(0) | Err(Errno::INTR))
    }
}
