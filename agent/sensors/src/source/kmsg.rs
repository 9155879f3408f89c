//! The kernel log: `/dev/kmsg`, or a file or pipe instead of it. Lines become facts, together with the position up to which
//! the log was read, so that nothing is judged twice.
//!
//! `/dev/kmsg` returns one record for each read, starting with the oldest that the kernel still has, and numbers them:
//! records that were read before are skipped, overwritten ones are counted. A file is read on from its last offset, or from
//! its start if it is another file. A pipe cannot be read again.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_health::parse::kmsg::Record;
use mainstay_health::parse::log::LogReader;
use mainstay_model::entry::Fact;
use mainstay_model::id::BootId;
use mainstay_model::kernel::LogCursor;
use mainstay_model::time::Mono;
use nix::libc;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Reads of one batch: enough to keep up, few enough to report facts soon.
const MAX_READS_PER_BATCH: usize = 512;

/// Longer than any record of the kernel.
const BUFFER: usize = 64 * 1024;

/// A longer line is dropped.
const MAX_LINE_BYTES: usize = 64 * 1024;

/// How often a plain file is read: the kernel does not report when it grows.
const FILE_INTERVAL: Duration = Duration::from_millis(20);

/// The log cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {path}: {source}; {advice}", path = path.display())]
pub struct LogError {
    operation: &'static str,
    path: PathBuf,
    source: io::Error,
    advice: &'static str,
}

impl LogError {
    /// Whether it does not exist or may not be opened, as in a container.
    pub fn is_kept_from_us(&self) -> bool {
        self.is_missing() || self.source.kind() == ErrorKind::PermissionDenied
    }

    /// Whether it does not exist.
    pub fn is_missing(&self) -> bool {
        self.source.kind() == ErrorKind::NotFound
    }
}

/// The result of one read.
#[derive(Debug, Default)]
pub struct Batch {
    /// The facts, with their times.
    pub facts: Vec<(Mono, Fact)>,
    /// The number of lines.
    pub lines: u64,
    /// Whether more is available already.
    pub more: bool,
}

#[derive(Debug)]
enum Form {
    /// One record for each read.
    Records,
    /// Lines that can be read once.
    Pipe,
    /// Lines at constant offsets.
    File { device: u64, inode: u64 },
}

/// A kernel log that is being read.
#[derive(Debug)]
pub struct KernelLog {
    path: PathBuf,
    file: File,
    form: Form,
    cursor: LogCursor,
    reader: LogReader,
    buffer: Vec<u8>,
    /// The start of an incomplete line.
    unfinished: Vec<u8>,
}

impl KernelLog {
    /// Opens the log and reads on from `cursor` if that is from this log (and from this boot, for the kernel's own).
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(path: &Path, boot: BootId, cursor: Option<&LogCursor>) -> Result<KernelLog, LogError> {
        let fail = |source| LogError {
            operation: "opening",
            path: path.to_owned(),
            advice: advice(&source),
            source,
        };
        let is_pipe = fs::metadata(path).map_err(fail)?.file_type().is_fifo();
        // A pipe that is also open for writing never ends when its writers close it.
        let file = OpenOptions::new()
            .read(true)
            .write(is_pipe)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY)
            .open(path)
            .map_err(fail)?;
        let metadata = file.metadata().map_err(fail)?;
        let form = form_of(&metadata);
        let log = match &form {
            Form::Records => "kmsg".to_owned(),
            Form::Pipe => "pipe".to_owned(),
            Form::File { device, inode } => format!("file {device}:{inode}"),
        };
        let same_boot = |cursor: &&LogCursor| cursor.boot == boot || matches!(form, Form::File { .. });
        let known = cursor.filter(|cursor| cursor.log == log).filter(same_boot);
        let mut next = known.map_or(0, |cursor| cursor.next);
        let mut opened = file;
        match form {
            Form::File { .. } => {
                if next > metadata.len() {
                    next = 0;
                }
                opened.seek(SeekFrom::Start(next)).map_err(fail)?;
            }
            Form::Pipe => next = 0,
            Form::Records => {}
        }
        Ok(KernelLog {
            path: path.to_owned(),
            file: opened,
            form,
            cursor: LogCursor { boot, log, next, journal: None },
            reader: LogReader::default(),
            buffer: vec![0; BUFFER],
            unfinished: Vec::new(),
        })
    }

    /// The position up to which it was read.
    pub fn cursor(&self) -> &LogCursor {
        &self.cursor
    }

    /// Reads the available lines, up to a batch. Does not wait.
    ///
    /// # Errors
    /// It cannot be read, or no longer; open it again after a while.
    pub fn read(&mut self, now: Mono) -> Result<Batch, LogError> {
        let mut batch = Batch::default();
        for _ in 0..MAX_READS_PER_BATCH {
            match self.file.read(&mut self.buffer) {
                // Only files end. A device that ends is no kernel log, and would be read in an endless loop.
                Ok(0) if !matches!(self.form, Form::File { .. }) => {
                    return Err(self.failed(ErrorKind::UnexpectedEof.into()));
                }
                Ok(0) => {
                    self.follow_renamed()?;
                    batch.facts.extend(self.reader.held_back(now).into_iter().map(|fact| (now, fact)));
                    return Ok(batch);
                }
                Ok(length) => self.take_in(now, length, &mut batch),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN) => {
                        batch.facts.extend(self.reader.held_back(now).into_iter().map(|fact| (now, fact)));
                        return Ok(batch);
                    }
                    Some(libc::EINTR) => {}
                    // The kernel overwrote the next record; the one after it shows how many.
                    Some(libc::EPIPE) if matches!(self.form, Form::Records) => {}
                    _ => return Err(self.failed(error)),
                },
            }
        }
        batch.more = true;
        Ok(batch)
    }

    /// Waits until there may be more, `stop` ends or `longest` is over.
    ///
    /// # Errors
    /// The log cannot be waited for.
    pub fn wait(&self, stop: &impl AsFd, longest: Duration) -> Result<(), LogError> {
        let in_file = matches!(self.form, Form::File { .. });
        let longest = if in_file { longest.min(FILE_INTERVAL) } else { longest };
        let timeout = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
        let waited = if in_file {
            poll(&mut [PollFd::new(stop, PollFlags::IN)], Some(&timeout))
        } else {
            let mut both = [PollFd::new(stop, PollFlags::IN), PollFd::new(&self.file, PollFlags::IN)];
            poll(&mut both, Some(&timeout))
        };
        match waited {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(self.failed(error.into())),
        }
    }

    fn failed(&self, source: io::Error) -> LogError {
        LogError { operation: "reading", path: self.path.clone(), advice: advice(&source), source }
    }

    fn take_in(&mut self, now: Mono, length: usize, batch: &mut Batch) {
        let buffer = std::mem::take(&mut self.buffer);
        let bytes = &buffer[..length];
        match self.form {
            Form::Records => {
                batch.lines += 1;
                self.record(now, bytes, &mut batch.facts);
            }
            Form::Pipe | Form::File { .. } => self.lines(now, bytes, batch),
        }
        self.buffer = buffer;
    }

    fn record(&mut self, now: Mono, bytes: &[u8], facts: &mut Vec<(Mono, Fact)>) {
        let text = String::from_utf8_lossy(bytes);
        let record = Record::parse(&text);
        let Some(sequence) = record.sequence else { return };
        if sequence < self.cursor.next {
            return;
        }
        // Before the first record that we read of a boot, nothing is missing.
        if self.cursor.next > 0 && sequence > self.cursor.next {
            let records = Some(sequence - self.cursor.next);
            facts.push((now, Fact::KernelLogGap { records }));
        }
        self.cursor.next = sequence.saturating_add(1);
        facts.extend(self.reader.read(now, &record, self.cursor.next));
    }

    fn lines(&mut self, now: Mono, bytes: &[u8], batch: &mut Batch) {
        let mut rest = bytes;
        while let Some(end) = memchr::memchr(b'\n', rest) {
            let (line, after) = rest.split_at(end);
            rest = &after[1..];
            batch.lines += 1;
            if self.unfinished.is_empty() {
                self.line(now, line, &mut batch.facts);
            } else {
                let mut whole = std::mem::take(&mut self.unfinished);
                whole.extend_from_slice(line);
                self.line(now, &whole, &mut batch.facts);
            }
        }
        self.unfinished.extend_from_slice(rest);
        if self.unfinished.len() > MAX_LINE_BYTES {
            // Counted as read, so that the offset in the file stays right.
            self.cursor.next = self.cursor.next.saturating_add(self.unfinished.len() as u64);
            self.unfinished.clear();
        }
    }

    fn line(&mut self, now: Mono, line: &[u8], facts: &mut Vec<(Mono, Fact)>) {
        self.cursor.next = self.cursor.next.saturating_add(line.len() as u64 + 1);
        facts.extend(self.reader.line(now, &String::from_utf8_lossy(line), self.cursor.next));
    }

    /// Continues in the new file at the path if the old one was moved away or truncated.
    fn follow_renamed(&mut self) -> Result<(), LogError> {
        let Form::File { device, inode } = self.form else { return Ok(()) };
        // While it is being replaced there may be none.
        let Ok(there) = fs::metadata(&self.path) else { return Ok(()) };
        let read = self.cursor.next.saturating_add(self.unfinished.len() as u64);
        let same = there.dev() == device && there.ino() == inode;
        if same && there.len() >= read {
            return Ok(());
        }
        let reader = std::mem::take(&mut self.reader);
        *self = KernelLog { reader, ..KernelLog::open(&self.path, self.cursor.boot.clone(), None)? };
        Ok(())
    }
}

fn form_of(metadata: &fs::Metadata) -> Form {
    let kind = metadata.file_type();
    if kind.is_file() {
        Form::File { device: metadata.dev(), inode: metadata.ino() }
    } else if kind.is_char_device() {
        Form::Records
    } else {
        Form::Pipe
    }
}

/// What a user can do about it.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::PermissionDenied => {
            "run the agent as root or give it CAP_SYSLOG, or set kernel_log.path to \"\" to do without"
        }
        ErrorKind::NotFound => {
            "in a container, give it the host's /dev/kmsg, or set kernel_log.path to \"\" to do without"
        }
        _ => "set kernel_log.path to another log, or to \"\" to do without",
    }
}
