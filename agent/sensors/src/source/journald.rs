//! The kernel's lines in systemd's journal, followed by `journalctl` in a child process, for agents that cannot open
//! `/dev/kmsg`, as in containers.
//!
//! `journalctl` is silent if there is no journal or if we may not read it, just as without kernel messages. So it starts at
//! the entry that was read last, not after it: a journal that returns this entry is readable.

use std::io::{self, ErrorKind, Read};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::time::Duration;

use mainstay_health::parse::journal::JournalEntry;
use mainstay_health::parse::log::LogReader;
use mainstay_model::id::BootId;
use mainstay_model::kernel::{LogCursor, journal_position};
use mainstay_model::time::Mono;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::kmsg::Batch;
use mainstay_sys::spawn::spawn_bound;

/// The name of this source in `kernel_log.path` and in the cursor.
pub const JOURNALD: &str = "journald";

/// The program, found on the path.
pub const JOURNALCTL: &str = "journalctl";

/// Reads of one batch: enough to keep up, few enough to report facts soon.
const MAX_READS_PER_BATCH: usize = 64;

/// Bytes of one read.
const BUFFER: usize = 64 * 1024;

/// A longer line is no entry of the kernel, even with its message as a list of bytes.
const MAX_LINE_BYTES: usize = 256 * 1024;

/// Bytes of error output that are kept.
const COMPLAINT: usize = 300;

/// The journal cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum JournaldError {
    /// The program does not run.
    #[error("starting journalctl: {0}")]
    Start(io::Error),
    /// Its output cannot be read.
    #[error("reading from journalctl: {0}")]
    Read(io::Error),
    /// It ended, although it should follow the journal.
    #[error("journalctl ended: {0}")]
    Ended(String),
}

/// The kernel's part of the journal, being followed.
#[derive(Debug)]
pub struct Journald {
    child: Child,
    entries: ChildStdout,
    complaints: ChildStderr,
    complaint: Vec<u8>,
    cursor: LogCursor,
    /// Positions up to here were read before the restart, although the cursor is before them.
    read_to: u64,
    /// It returned an entry of this boot's kernel.
    proven: bool,
    reader: LogReader,
    buffer: Vec<u8>,
    /// The start of an incomplete line.
    unfinished: Vec<u8>,
}

impl Journald {
    /// Starts `program` (`journalctl`) and reads on from `cursor` if that is from this journal and boot. The program is
    /// killed when this is dropped, and when the calling thread ends.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(
        program: &Path,
        boot: BootId,
        cursor: Option<&LogCursor>,
    ) -> Result<Journald, JournaldError> {
        let known = cursor.filter(|cursor| cursor.log == JOURNALD && cursor.boot == boot).cloned();
        let cursor =
            known.unwrap_or_else(|| LogCursor { boot, log: JOURNALD.to_owned(), next: 0, journal: None });
        let mut command = Command::new(program);
        // Without --no-tail it returns only the last ten lines.
        command.args(["-k", "-b", "-o", "json", "-f", "--no-tail"]);
        if let Some(last) = &cursor.journal {
            command.arg(format!("--cursor={last}"));
        }
        command.env("LC_ALL", "C").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = spawn_bound(&mut command, None).map_err(JournaldError::Start)?;
        let (Some(entries), Some(complaints)) = (child.stdout.take(), child.stderr.take()) else {
            return Err(JournaldError::Start(ErrorKind::BrokenPipe.into()));
        };
        let journald = Journald {
            child,
            entries,
            complaints,
            complaint: Vec::new(),
            read_to: cursor.next,
            cursor,
            proven: false,
            reader: LogReader::default(),
            buffer: vec![0; BUFFER],
            unfinished: Vec::new(),
        };
        never_waits(&journald.entries).map_err(JournaldError::Start)?;
        never_waits(&journald.complaints).map_err(JournaldError::Start)?;
        Ok(journald)
    }

    /// The position up to which it was read.
    pub fn cursor(&self) -> &LogCursor {
        &self.cursor
    }

    /// Why it is unknown whether the journal can be read; none once it returned an entry of this boot's kernel.
    pub fn doubt(&self) -> Option<String> {
        if self.proven {
            return None;
        }
        let why = match self.complaint() {
            Some(complaint) => format!(" ({complaint})"),
            None => String::new(),
        };
        Some(format!(
            "journalctl gives no line of this boot's kernel{why}: there is none yet, or the journal may not be read"
        ))
    }

    /// Reads the available lines, up to a batch. Does not wait.
    ///
    /// # Errors
    /// It ended or cannot be read; start it again after a while.
    pub fn read(&mut self, now: Mono) -> Result<Batch, JournaldError> {
        let mut batch = Batch::default();
        self.listen_to_complaints();
        for _ in 0..MAX_READS_PER_BATCH {
            match self.entries.read(&mut self.buffer) {
                // Report its last lines before its end.
                Ok(0) if !batch.facts.is_empty() => return Ok(batch),
                Ok(0) => return Err(self.ended()),
                Ok(length) => self.lines(now, length, &mut batch),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    batch.facts.extend(self.reader.held_back(now).into_iter().map(|fact| (now, fact)));
                    return Ok(batch);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(JournaldError::Read(error)),
            }
        }
        batch.more = true;
        Ok(batch)
    }

    /// Waits until there may be more, `stop` ends or `longest` is over.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn wait(&self, stop: &impl AsFd, longest: Duration) -> Result<(), JournaldError> {
        let timeout = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
        let mut both = [PollFd::new(stop, PollFlags::IN), PollFd::new(&self.entries, PollFlags::IN)];
        match poll(&mut both, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(JournaldError::Read(error.into())),
        }
    }

    fn lines(&mut self, now: Mono, length: usize, batch: &mut Batch) {
        let buffer = std::mem::take(&mut self.buffer);
        let mut rest = &buffer[..length];
        while let Some(end) = memchr::memchr(b'\n', rest) {
            let mut line = std::mem::take(&mut self.unfinished);
            line.extend_from_slice(&rest[..end]);
            rest = &rest[end + 1..];
            batch.lines += 1;
            if let Some(entry) = JournalEntry::parse(&String::from_utf8_lossy(&line)) {
                batch.facts.extend(self.entry(now, &entry));
            }
        }
        self.unfinished.extend_from_slice(rest);
        if self.unfinished.len() > MAX_LINE_BYTES {
            self.unfinished.clear();
        }
        self.buffer = buffer;
    }

    fn entry(&mut self, now: Mono, entry: &JournalEntry) -> Option<(Mono, mainstay_model::entry::Fact)> {
        let of_another_boot = entry.boot.as_ref().is_some_and(|boot| *boot != self.cursor.boot);
        if of_another_boot || !entry.by_kernel {
            return None;
        }
        self.proven = true;
        // With the time of its fact: not after now.
        let position = entry.at.map(|at| journal_position(at.min(now)));
        if self.cursor.journal.is_some() && self.cursor.journal == entry.cursor {
            // Read before. More lines of the same microsecond may follow, so only later ones are new.
            if position.is_some_and(|position| self.read_to <= position) {
                self.read_to = 0;
            }
            return None;
        }
        self.cursor.journal.clone_from(&entry.cursor);
        if position.is_some_and(|position| position <= self.read_to) {
            return None;
        }
        self.read_to = 0;
        self.cursor.next = position.unwrap_or(self.cursor.next);
        self.reader.entry(now, entry, position.unwrap_or(0))
    }

    fn listen_to_complaints(&mut self) {
        let mut buffer = [0; 1024];
        // Read all of it, so that it never blocks on us; an error counts as silence.
        while let Ok(length @ 1..) = self.complaints.read(&mut buffer) {
            let room = COMPLAINT.saturating_sub(self.complaint.len());
            self.complaint.extend_from_slice(&buffer[..length.min(room)]);
        }
    }

    fn complaint(&self) -> Option<String> {
        let text = String::from_utf8_lossy(&self.complaint);
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        (!lines.is_empty()).then(|| lines.join("; "))
    }

    fn ended(&mut self) -> JournaldError {
        // It has closed its end: it has ended, or is about to.
        let status = match self.child.try_wait() {
            Ok(None) => {
                let _ = self.child.kill();
                self.child.wait()
            }
            Ok(Some(status)) => Ok(status),
            Err(error) => Err(error),
        };
        self.listen_to_complaints();
        let status = status.map_or_else(|error| error.to_string(), |status| status.to_string());
        JournaldError::Ended(match self.complaint() {
            Some(complaint) => format!("{status}: {complaint}"),
            None => status,
        })
    }
}

impl Drop for Journald {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn never_waits(pipe: &impl AsFd) -> io::Result<()> {
    fcntl(pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok(())
}
