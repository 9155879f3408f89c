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

/// Goes to the start of the line, and erases it.
const ERASE: &[u8] = b"\r\x1b[K";

/// At most this many bytes are written before orders are checked again.
const IN_A_TURN: usize = 256 * 1024;

pub(crate) struct Sink {
    stream: Box<dyn AsFd + Send>,
    waiting: VecDeque<u8>,
    /// The launcher's own lines for which there was no room.
    left_out: u64,
    /// Whether the reader is gone: writes are discarded.
    gone: bool,
    /// The text on the last line of the terminal, which the next line replaces; empty if there is none.
    drawn: String,
    /// How many of the waiting bytes are that text. They are the first ones.
    drawing: usize,
}

impl Sink {
    pub(crate) fn new(stream: impl AsFd + Send + 'static) -> Sink {
        Sink {
            stream: Box::new(stream),
            waiting: VecDeque::new(),
            left_out: 0,
            gone: false,
            drawn: String::new(),
            drawing: 0,
        }
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

    /// Bytes of lines that the reader has not taken yet.
    pub(crate) fn waiting(&self) -> u64 {
        self.waiting.len().saturating_sub(self.drawing) as u64
    }

    /// Adds whole lines. They replace what is drawn on the last line.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if self.gone {
            return;
        }
        if !std::mem::take(&mut self.drawn).is_empty() {
            self.waiting.extend(ERASE);
        }
        self.waiting.extend(bytes);
    }

    /// Shows a text on the last line of the terminal, or none if it is empty, once all lines are shown. The cursor stays
    /// behind the text, so that nothing has to be restored if the launcher is killed.
    pub(crate) fn draw(&mut self, text: &str) {
        if self.gone || !self.is_empty() || self.drawn == text {
            return;
        }
        if !self.drawn.is_empty() {
            self.waiting.extend(ERASE);
        }
        self.waiting.extend(text.as_bytes());
        self.drawing = self.waiting.len();
        text.clone_into(&mut self.drawn);
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
        self.drawing = 0;
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
                    self.drawing = self.drawing.saturating_sub(written);
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

    /// The columns of the terminal, if this is one and the launcher is in its foreground: lines of a job in the background
    /// may appear while the user types, but nothing else.
    pub(crate) fn columns(&self) -> Option<usize> {
        let foreground = rustix::termios::tcgetpgrp(&self.stream).ok()?;
        let is_foreground = foreground == rustix::process::getpgrp();
        let size = rustix::termios::tcgetwinsize(&self.stream).ok().filter(|_| is_foreground)?;
        Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
    }

    /// Waits until the stream is writable, at most `longest`.
    pub(crate) fn is_writable(&self, longest: Duration) -> bool {
        let mut streams = [PollFd::new(&self.stream, PollFlags::OUT)];
        let longest = Timespec { tv_sec: 0, tv_nsec: i64::from(longest.subsec_nanos()) };
        // A stream that cannot be polled counts as writable; the write detects a reader that is gone.
        !matches!(poll(&mut streams, Some(&longest)), Ok(0) | Err(Errno::INTR))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// A sink, and what its terminal has received.
    fn sink() -> (Sink, std::io::PipeReader) {
        let (reader, writer) = std::io::pipe().unwrap();
        (Sink::new(writer), reader)
    }

    fn received(mut sink: Sink, mut reader: std::io::PipeReader) -> String {
        sink.advance();
        drop(sink);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn a_line_replaces_what_is_drawn() {
        let (mut sink, reader) = sink();
        sink.draw("step 1");
        sink.advance();
        sink.draw("step 1");
        assert!(sink.is_empty(), "it is drawn already");
        sink.draw("step 2");
        sink.push(b"[rank 0] a\n");
        sink.draw("step 3");
        sink.push(b"[rank 0] b\n");
        sink.advance();
        sink.draw("step 4");
        sink.advance();
        sink.draw("");
        let shown = "step 1\r\x1b[Kstep 2\r\x1b[K[rank 0] a\n[rank 0] b\nstep 4\r\x1b[K";
        assert_eq!(received(sink, reader), shown, "step 3 would be between two lines");
    }

    #[test]
    fn what_is_drawn_does_not_count_as_output() {
        let (mut sink, _reader) = sink();
        sink.draw("step 1");
        assert_eq!((sink.waiting(), sink.is_empty()), (0, false));
        sink.push(b"a line\n");
        assert_eq!(sink.waiting(), (ERASE.len() + 7) as u64);
        assert_eq!(sink.give_up(), (ERASE.len() + 7) as u64);
    }
}
