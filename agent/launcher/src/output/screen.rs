//! The thread's work: it follows files, takes orders, and writes to the streams as fast as they are read.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use mainstay_sys::sparse::data_from;
use mainstay_sys::timed_files::Patient;
use mainstay_view::progress;

use super::terminal::{Duplicate, FollowedFile, Stream, UndisplayedOutput};
use crate::log_files;
use crate::output::sink::Sink;

/// How often the files are read. The terminal is for people; nothing waits for it.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How long to wait for a stream that takes nothing before orders are checked.
const WAIT_FOR_READER: Duration = Duration::from_millis(20);

/// How long to wait for the files' file system: the launcher's own lines wait behind it.
const FILE_SYSTEM_TIMEOUT: Duration = Duration::from_millis(500);

/// A line longer than this is shown in parts.
const MAX_LINE_BYTES: usize = 64 * 1024;

/// Bytes of a file that are read at once.
const CHUNK: usize = 64 * 1024;

pub(crate) enum Order {
    Follow(FollowedFile),
    /// A line of the launcher: as it is shown on standard error, and as it is kept.
    Line {
        shown: String,
        kept: String,
    },
    /// A line for scripts, on standard output.
    Print(String),
    /// What the last line of the terminal shows: as many of these parts as fit.
    Progress(Vec<String>),
    /// Show the rest of all files and forget them; answered on the sender.
    Flush(Sender<()>),
    /// Drop what was not taken; answers how much it is.
    GiveUp(Sender<UndisplayedOutput>),
}

pub(crate) struct Screen {
    /// Standard output and standard error, or one for both.
    sinks: Vec<Sink>,
    files: Vec<(FollowedFile, Follower)>,
    /// The file that is read first: they take turns.
    first: usize,
    log: Option<PathBuf>,
    disk: Patient,
    /// The same for the files that ranks write while the log directory does not answer.
    aside: Patient,
    flushes: Vec<Sender<()>>,
    taken: Arc<AtomicU64>,
    looked: Instant,
    /// Whether a file has more than was read.
    behind: bool,
    /// What the last line of the terminal shows; empty for nothing.
    progress: Vec<String>,
}

impl Screen {
    pub(crate) fn new(log: Option<PathBuf>, taken: Arc<AtomicU64>) -> Screen {
        Screen {
            sinks: Sink::streams(),
            files: Vec::new(),
            first: 0,
            log,
            disk: Patient::new("output-files"),
            aside: Patient::new("output-aside"),
            flushes: Vec::new(),
            taken,
            looked: Instant::now(),
            behind: false,
            progress: Vec::new(),
        }
    }

    /// Works until the orders end.
    pub(crate) fn run(mut self, orders: &Receiver<Order>) {
        loop {
            let stuck = self.sinks.iter().find(|sink| !sink.is_empty());
            let wait = match stuck {
                Some(sink) => {
                    // Orders wait at most this long.
                    sink.is_writable(WAIT_FOR_READER);
                    Duration::ZERO
                }
                // Do not retry at once if the files do not answer.
                None if self.disk.is_stuck() => WAIT_FOR_READER,
                None if self.behind || !self.flushes.is_empty() => Duration::ZERO,
                None => POLL_INTERVAL.saturating_sub(self.looked.elapsed()),
            };
            let mut next = orders.recv_timeout(wait);
            while let Ok(order) = next {
                self.obey(order);
                next = orders.recv_timeout(Duration::ZERO);
            }
            self.turn();
            if matches!(next, Err(RecvTimeoutError::Disconnected)) {
                return;
            }
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Follow(shown) => match self.files.iter_mut().find(|(known, _)| *known == shown) {
                Some((_, follower)) => follower.is_last_look = false,
                None => self.files.push((shown, Follower::default())),
            },
            Order::Line { shown, kept } => {
                if let Some(log) = &self.log {
                    append(&self.disk, log, kept.into_bytes());
                }
                self.sink(Stream::Stderr).push_own(&shown);
            }
            Order::Print(line) => self.sink(Stream::Stdout).push(format!("{line}\n").as_bytes()),
            // On two terminals, or on one under two names, lines of the other stream would end up in the middle of it.
            Order::Progress(parts) if self.sinks.len() == 1 || !io::stdout().is_terminal() => {
                self.progress = parts;
                let text = self.progress_line();
                self.sink(Stream::Stderr).draw(&text);
            }
            Order::Progress(_) => {}
            Order::Flush(done) => {
                self.files.iter_mut().for_each(|(_, follower)| follower.is_last_look = true);
                self.flushes.push(done);
            }
            Order::GiveUp(answer) => {
                let mut left = UndisplayedOutput::default();
                for (shown, follower) in self.files.drain(..).filter(|(shown, _)| shown.on_terminal) {
                    *left.bytes_mut(shown.stream) += follower.left_of(&self.disk, &shown.path);
                }
                let both = self.sinks.len() == 1;
                for (sink, stream) in self.sinks.iter_mut().zip([Stream::Stdout, Stream::Stderr]) {
                    *left.bytes_mut(if both { Stream::Stdout } else { stream }) += sink.give_up();
                }
                self.flushes.clear();
                let _ = answer.send(left);
            }
        }
    }

    /// What the last line of the terminal shows now.
    fn progress_line(&mut self) -> String {
        if self.progress.is_empty() {
            return String::new();
        }
        // The last column stays empty: some terminals go to the next line once it is written.
        let columns = self.sink(Stream::Stderr).columns().map(|columns| columns - 1);
        columns.map(|columns| progress::line(&self.progress, columns)).unwrap_or_default()
    }

    fn sink(&mut self, stream: Stream) -> &mut Sink {
        let last = self.sinks.len() - 1;
        &mut self.sinks[if stream == Stream::Stderr { last } else { 0 }]
    }

    fn turn(&mut self) {
        if self.behind || !self.flushes.is_empty() || self.looked.elapsed() >= POLL_INTERVAL {
            self.look();
        }
        let taken: u64 = self.sinks.iter_mut().map(Sink::advance).sum();
        self.taken.fetch_add(taken, Ordering::Relaxed);
        if taken > 0 && self.sinks.iter().all(Sink::is_empty) {
            // Lines were shown in its place.
            let text = self.progress_line();
            self.sink(Stream::Stderr).draw(&text);
        }
        let is_done = self.sinks.iter().all(Sink::is_empty)
            && self.files.iter().all(|(_, follower)| !follower.is_last_look);
        if is_done {
            for done in self.flushes.drain(..) {
                let _ = done.send(());
            }
        }
    }

    /// Reads on in each file whose stream has room.
    fn look(&mut self) {
        self.looked = Instant::now();
        self.behind = false;
        let count = self.files.len();
        let places: Vec<usize> = (0..count)
            .map(|place| (self.first + place) % count)
            .filter(|at| {
                let shown = &self.files[*at].0;
                !shown.on_terminal || self.sinks[self.sink_of(shown)].has_room()
            })
            .collect();
        // If a file system does not answer, the content of its files is shown later.
        let (aside, in_place): (Vec<usize>, Vec<usize>) =
            places.into_iter().partition(|at| log_files::is_aside(&self.files[*at].0.path));
        let mut read = self.read(&self.disk, in_place);
        read.extend(self.read(&self.aside, aside));
        let mut over = Vec::new();
        for (at, chunk) in read {
            let sink = self.sink_of(&self.files[at].0);
            let (shown, follower) = &mut self.files[at];
            let sink = &mut self.sinks[sink];
            if shown.on_terminal && !sink.has_room() {
                continue;
            }
            let has_more = follower.advance(chunk, shown, sink, &self.disk);
            self.behind |= has_more;
            if !has_more && follower.is_last_look {
                follower.finish(shown, sink, &self.disk);
                over.push(at);
            }
        }
        self.first = self.first.wrapping_add(1) % count.max(1);
        over.sort_unstable_by(|a, b| b.cmp(a));
        for at in over {
            self.files.swap_remove(at);
        }
    }

    /// The next bytes of these files; none if their file system does not answer in time.
    fn read(&self, disk: &Patient, places: Vec<usize>) -> Vec<(usize, Chunk)> {
        if places.is_empty() {
            return Vec::new();
        }
        let wanted: Vec<(PathBuf, u64)> =
            places.iter().map(|at| (self.files[*at].0.path.clone(), self.files[*at].1.offset)).collect();
        let read = move || wanted.iter().map(|(path, offset)| chunk(path, *offset)).collect::<Vec<_>>();
        let chunks = disk.ask(FILE_SYSTEM_TIMEOUT, read).unwrap_or_default();
        places.into_iter().zip(chunks).collect()
    }

    /// The sink that shows a file.
    fn sink_of(&self, shown: &FollowedFile) -> usize {
        if shown.stream == Stream::Stderr { self.sinks.len() - 1 } else { 0 }
    }
}

impl UndisplayedOutput {
    fn bytes_mut(&mut self, stream: Stream) -> &mut u64 {
        match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        }
    }
}

/// How much of a file was shown, and the start of an incomplete line.
#[derive(Default)]
struct Follower {
    offset: u64,
    line: Vec<u8>,
    /// Whether to forget the file once it is shown to its end.
    is_last_look: bool,
}

impl Follower {
    /// Takes in the next chunk. Returns whether there may be more.
    fn advance(&mut self, chunk: Chunk, shown: &FollowedFile, sink: &mut Sink, disk: &Patient) -> bool {
        let Chunk { start, bytes } = chunk;
        if start > self.offset {
            self.finish(shown, sink, disk);
            self.line = format!("({} bytes were not shown in time)\n", start - self.offset).into_bytes();
            self.finish(shown, sink, disk);
        }
        self.offset = start + bytes.len() as u64;
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            for part in part.chunks(MAX_LINE_BYTES) {
                self.line.extend(part);
                if part.ends_with(b"\n") || self.line.len() >= MAX_LINE_BYTES {
                    self.finish(shown, sink, disk);
                }
            }
        }
        bytes.len() == CHUNK
    }

    fn finish(&mut self, shown: &FollowedFile, sink: &mut Sink, disk: &Patient) {
        if self.line.is_empty() {
            return;
        }
        if !self.line.ends_with(b"\n") {
            self.line.push(b'\n');
        }
        let line = std::mem::take(&mut self.line);
        let mut text = shown.prefix.clone().into_bytes();
        text.extend(&line);
        if shown.on_terminal {
            sink.push(&text);
        }
        if let Some(Duplicate { path, filters }) = &shown.duplicate
            && filters.iter().any(|filter| contains(&line, filter.as_bytes()))
        {
            append(disk, path, text.strip_suffix(b"\n").unwrap_or(&text).to_vec());
        }
    }

    /// Bytes of the file that were not passed on.
    fn left_of(&self, disk: &Patient, path: &Path) -> u64 {
        let path = path.to_owned();
        let length =
            disk.ask(FILE_SYSTEM_TIMEOUT, move || std::fs::metadata(path).ok().map(|file| file.len()));
        let length = length.flatten().unwrap_or(self.offset);
        length.saturating_sub(self.offset) + self.line.len() as u64
    }
}

/// A part of a file.
struct Chunk {
    start: u64,
    bytes: Vec<u8>,
}

fn contains(line: &[u8], text: &[u8]) -> bool {
    !text.is_empty() && line.windows(text.len()).any(|window| window == text)
}

/// The next bytes of a file. They start later than at `offset` if what was there is removed; empty if it cannot be read.
fn chunk(path: &Path, offset: u64) -> Chunk {
    let read = || -> std::io::Result<Chunk> {
        let mut file = File::open(path)?;
        let start = data_from(&file, offset);
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = vec![0; CHUNK];
        let read = file.read(&mut bytes)?;
        bytes.truncate(read);
        Ok(Chunk { start, bytes })
    };
    read().unwrap_or(Chunk { start: offset, bytes: Vec::new() })
}

/// Adds a line to a file. A line that cannot be written is lost here, but its content is also elsewhere.
fn append(disk: &Patient, path: &Path, line: Vec<u8>) {
    let path = path.to_owned();
    disk.ask(FILE_SYSTEM_TIMEOUT, move || {
        let mut text = line;
        text.push(b'\n');
        let opened = File::options().create(true).append(true).open(path);
        let _ = opened.and_then(|mut file| file.write_all(&text));
    });
}
