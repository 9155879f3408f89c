//! The ranks' output. Each rank writes to separate files, so that the launcher can never block it, and a thread prints what
//! the files grow by on the terminal, line by line, with the rank before each line. The launcher's own lines take the same
//! way: an unread terminal must not stop it either. Lines wait in the files until the terminal is read again, so a pause of
//! the reader loses none.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use mainstay_model::escape::printable;
use mainstay_sys::clock;

use super::screen::{Order, Screen};
use crate::log_files;

/// The stream of the launcher on which a file is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FollowedFile {
    pub path: PathBuf,
    /// The text before each line: `[rank 1] `.
    pub prefix: String,
    pub stream: Stream,
    /// Whether it is shown at all; a file may be followed for its duplicates alone.
    pub on_terminal: bool,
    /// Which of its lines are also written to another file.
    pub duplicate: Option<Duplicate>,
}

/// Lines that are also written to a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Duplicate {
    pub path: PathBuf,
    /// Only lines that contain one of these texts.
    pub filters: Vec<String>,
}

/// The format of the launcher's own lines.
#[derive(Clone, Debug, Default)]
pub struct LineStyle {
    /// Whether each line starts with its time (UTC).
    pub timestamps: bool,
    /// Where they are kept, each with its time, whether or not the terminal is read.
    pub log: Option<PathBuf>,
    /// Whether the last line of the terminal shows the progress of the job.
    pub progress: bool,
    /// The role whose lines they are, if several have the terminal.
    pub role: Option<String>,
}

/// The ranks' output that could not be shown, in bytes; all of it is in the files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UndisplayedOutput {
    /// On standard output.
    pub stdout: u64,
    /// On standard error.
    pub stderr: u64,
}

impl UndisplayedOutput {
    /// The notice for the terminal; none if all was shown.
    pub fn notice(self, run_dir: &Path) -> Option<String> {
        let unread = |bytes: u64, stream| (bytes > 0).then(|| format!("{bytes} bytes on {stream}"));
        let parts: Vec<String> =
            [unread(self.stdout, "standard output"), unread(self.stderr, "standard error")]
                .into_iter()
                .flatten()
                .collect();
        (!parts.is_empty()).then(|| {
            format!(
                "the ranks' output was not shown in full because it was not read ({}); all of it is in {}",
                parts.join(", "),
                run_dir.display()
            )
        })
    }
}

/// The thread that shows output.
#[derive(Debug)]
pub struct Terminal {
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
    timestamps: bool,
    progress: bool,
    /// What each line starts with.
    speaker: String,
    /// Bytes of both streams that the reader has taken.
    taken: Arc<AtomicU64>,
}

impl Terminal {
    /// Starts the thread.
    ///
    /// # Errors
    /// The kernel gives no more threads.
    pub fn start(voice: LineStyle) -> io::Result<Terminal> {
        let (orders, receiver) = channel();
        let taken = Arc::new(AtomicU64::new(0));
        let screen = Screen::new(voice.log.clone(), taken.clone());
        let thread =
            std::thread::Builder::new().name("output".to_owned()).spawn(move || screen.run(&receiver))?;
        let LineStyle { timestamps, progress, role, .. } = voice;
        let speaker = role.map_or_else(|| "mainstay:".to_owned(), |role| format!("mainstay [{role}]:"));
        Ok(Terminal { orders: Some(orders), thread: Some(thread), timestamps, progress, speaker, taken })
    }

    /// Shows a file from its start, as it grows.
    pub fn follow(&self, shown: FollowedFile) {
        self.order(Order::Follow(shown));
    }

    /// Prints a line of the launcher. Only the thread waits if the terminal is stuck.
    pub fn print(&self, line: String) {
        self.print_as(&line, &line);
    }

    /// The same for lines that are kept in another form, on one line.
    pub fn print_as(&self, shown: &str, kept: &str) {
        let (at, shown, kept) = (time(), printable(shown), printable(kept));
        let speaker = &self.speaker;
        let shown =
            if self.timestamps { format!("{speaker} {at} {shown}") } else { format!("{speaker} {shown}") };
        self.order(Order::Line { shown, kept: format!("{at} {kept}") });
    }

    /// Whether the terminal shows the progress of the job.
    pub fn shows_progress(&self) -> bool {
        self.progress
    }

    /// Shows as many of these parts as fit on the last line of the terminal, until the next call; nothing if there are
    /// none.
    pub fn progress(&self, parts: Vec<String>) {
        if self.progress {
            self.order(Order::Progress(parts));
        }
    }

    /// Prints a line for scripts, without prefix and time.
    pub fn print_plain(&self, line: String) {
        self.order(Order::Print(line));
    }

    /// Shows what all files contain by now and stops following them. Waits at most `patience` for the terminal; the rest is
    /// shown later.
    pub fn flush(&self, patience: Duration) {
        let (done, wait) = channel();
        self.order(Order::Flush(done));
        let _ = wait.recv_timeout(patience);
    }

    /// Shows all that is left while the terminal is read: until no byte was read for `patience`, or `enough` is set.
    /// Returns what was not shown.
    pub fn finish(&self, patience: Duration, enough: &AtomicBool) -> UndisplayedOutput {
        let (done, wait) = channel();
        self.order(Order::Flush(done));
        let (mut seen, mut still) = (self.taken.load(Ordering::Relaxed), Duration::ZERO);
        let look_every = Duration::from_millis(50).min(patience);
        while still < patience && !enough.load(Ordering::Relaxed) {
            match wait.recv_timeout(look_every) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return UndisplayedOutput::default(),
            }
            let taken = self.taken.load(Ordering::Relaxed);
            still = if taken == seen { still + look_every } else { Duration::ZERO };
            seen = taken;
        }
        let (answer, left) = channel();
        self.order(Order::GiveUp(answer));
        left.recv_timeout(patience).unwrap_or_default()
    }

    fn order(&self, order: Order) {
        if let Some(orders) = &self.orders {
            // The thread lives as long as this value.
            let _ = orders.send(order);
        }
    }
}

/// The time of a line, in milliseconds (RFC 3339, UTC).
fn time() -> String {
    let now = jiff::Timestamp::from_nanosecond(clock::now().wall.0.into()).unwrap_or_default();
    format!("{now:.3}")
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // The thread ends when its orders end. Do not wait for it: it may be stuck on an unread terminal, and the files
        // contain everything.
        self.orders.take();
        self.thread.take();
    }
}

#[derive(Debug, Default)]
pub struct Tail {
    /// The content from `start` on.
    pub bytes: Vec<u8>,
    /// The offset of the first byte in the file.
    pub start: u64,
}

impl Tail {
    /// The length of the file when it was read.
    pub fn length(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }
}

/// The last bytes of a file in the log directory, at most `most`; empty if it cannot be read.
pub fn tail(path: &Path, most: u64) -> Tail {
    let file = path.to_owned();
    let read = move || -> io::Result<Tail> {
        let mut file = File::open(file)?;
        let start = file.metadata()?.len().saturating_sub(most);
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.take(most).read_to_end(&mut bytes)?;
        Ok(Tail { bytes, start })
    };
    log_files::ask_at(path, read).and_then(Result::ok).unwrap_or_default()
}
