//! The ranks' output: each rank writes to files of its own, so that nothing of ours can ever hold it up, and a
//! thread shows what the files grow by on the terminal, line by line, with the rank before it. What the launcher
//! has to say itself goes the same way: a terminal that nobody reads must not stop it either.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often the files are looked at. The terminal is for people; nothing waits for it.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A line longer than this is shown in parts.
const LONGEST_LINE: usize = 64 * 1024;

/// Which stream of the launcher a file is shown on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A file to be shown.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shown {
    /// The file.
    pub path: PathBuf,
    /// What stands before each line: `[rank 1] `.
    pub prefix: String,
    /// Where it is shown.
    pub stream: Stream,
}

enum Order {
    Follow(Shown),
    /// A line of the launcher's own, on standard error.
    Say(String),
    /// A line for scripts, on standard output.
    Print(String),
    /// Show what is left of all files and forget them; answered on the sender.
    Flush(Sender<()>),
}

/// The thread that shows output.
#[derive(Debug)]
pub struct Terminal {
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Terminal {
    /// Starts the thread.
    ///
    /// # Errors
    /// The kernel gives no more threads.
    pub fn start() -> io::Result<Terminal> {
        let (orders, receiver) = channel();
        let thread = std::thread::Builder::new().name("output".to_owned()).spawn(move || show(&receiver))?;
        Ok(Terminal { orders: Some(orders), thread: Some(thread) })
    }

    /// Shows a file from its beginning as it grows.
    pub fn follow(&self, shown: Shown) {
        if let Some(orders) = &self.orders {
            let _ = orders.send(Order::Follow(shown));
        }
    }

    /// Says a line of the launcher's own. The terminal may be stuck; only the thread waits for it.
    pub fn say(&self, line: String) {
        if let Some(orders) = &self.orders {
            let _ = orders.send(Order::Say(line));
        }
    }

    /// Prints a line for scripts.
    pub fn print(&self, line: String) {
        if let Some(orders) = &self.orders {
            let _ = orders.send(Order::Print(line));
        }
    }

    /// Shows what all files hold by now and stops following them. Waits at most `patience` for the terminal.
    pub fn flush(&self, patience: Duration) {
        let (done, wait) = channel();
        if let Some(orders) = &self.orders
            && orders.send(Order::Flush(done)).is_ok()
        {
            let _ = wait.recv_timeout(patience);
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // The thread ends when its orders end. It is not waited for: it may be stuck on a terminal that nobody
        // reads, and the files hold all there is.
        self.orders.take();
        self.thread.take();
    }
}

fn show(orders: &Receiver<Order>) {
    let mut files: BTreeMap<Shown, Follower> = BTreeMap::new();
    loop {
        match orders.recv_timeout(LOOK_EVERY) {
            Ok(Order::Follow(shown)) => {
                files.entry(shown).or_default();
            }
            Ok(Order::Say(line)) => {
                let _ = writeln!(io::stderr(), "mainstay: {line}");
            }
            Ok(Order::Print(line)) => {
                let _ = writeln!(io::stdout(), "{line}");
            }
            Ok(Order::Flush(done)) => {
                for (shown, follower) in &mut files {
                    follower.advance(shown);
                    follower.finish(shown);
                }
                files.clear();
                let _ = done.send(());
            }
            Err(RecvTimeoutError::Timeout) => {
                for (shown, follower) in &mut files {
                    follower.advance(shown);
                }
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// How far a file was shown, and the start of a line whose end has not come yet.
#[derive(Default)]
struct Follower {
    offset: u64,
    line: Vec<u8>,
}

impl Follower {
    fn advance(&mut self, shown: &Shown) {
        let Ok(mut file) = File::open(&shown.path) else { return };
        if file.seek(SeekFrom::Start(self.offset)).is_err() {
            return;
        }
        let mut chunk = vec![0; 64 * 1024];
        while let Ok(read) = file.read(&mut chunk) {
            if read == 0 {
                return;
            }
            self.offset += read as u64;
            for byte in &chunk[..read] {
                self.line.push(*byte);
                if *byte == b'\n' || self.line.len() >= LONGEST_LINE {
                    self.finish(shown);
                }
            }
        }
    }

    fn finish(&mut self, shown: &Shown) {
        if self.line.is_empty() {
            return;
        }
        if !self.line.ends_with(b"\n") {
            self.line.push(b'\n');
        }
        let mut text = shown.prefix.clone().into_bytes();
        text.append(&mut self.line);
        // A terminal that is gone must not end the launcher: the files hold all there is.
        let _ = match shown.stream {
            Stream::Stdout => io::stdout().write_all(&text),
            Stream::Stderr => io::stderr().write_all(&text),
        };
    }
}

/// The end of a file.
#[derive(Debug, Default)]
pub struct Tail {
    /// What it holds from `start` on.
    pub bytes: Vec<u8>,
    /// Where in the file that begins.
    pub start: u64,
}

impl Tail {
    /// How long the file was when it was read.
    pub fn length(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }
}

/// The last bytes of a file, at most so many; nothing if it cannot be read.
pub fn tail(path: &Path, most: u64) -> Tail {
    let read = || -> io::Result<Tail> {
        let mut file = File::open(path)?;
        let start = file.metadata()?.len().saturating_sub(most);
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.take(most).read_to_end(&mut bytes)?;
        Ok(Tail { bytes, start })
    };
    read().unwrap_or_default()
}
