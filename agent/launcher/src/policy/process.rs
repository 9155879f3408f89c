//! The process of a policy: what it is sent, what it says and what it prints.

use std::io::{self, ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream as StdStream;
use std::process::{Child, Command, Stdio};

use mainstay_model::id::Pid;
use mainstay_sys::child::kill_group;
use mainstay_sys::{pidfd, spawn};
use rustix::io::{FdFlags, fcntl_setfd};
use serde_json::Value;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::net::unix::pipe;

use crate::group::plan::TOKEN_VARIABLE;
use crate::run::next_of;

const PROGRAM: &str = include_str!("child.py");

const MAX_ANSWER_BYTES: usize = 1 << 20;

/// What it may print for one failure. Beyond it nothing more is read, and it waits in its `print` until it is late.
const MAX_PRINTED_BYTES: usize = 64 << 10;

/// A shorter line counts as one of this length: each costs the launcher the same.
const MIN_LINE_BYTES: usize = 64;

const MAX_LINE_BYTES: usize = 4 << 10;

/// What happened to a process.
pub(super) enum Turn {
    Said(Vec<u8>),
    Printed(Vec<String>),
    /// It has closed its end.
    Ended,
    /// It has not answered in time.
    Late,
    /// Bytes were moved, and no line is complete.
    Moved,
}

#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    channel: UnixStream,
    /// What it prints, until it has closed it.
    output: Option<pipe::Receiver>,
    to_send: Vec<u8>,
    received: Vec<u8>,
    printed: Vec<u8>,
    /// How many bytes it may still print.
    room: usize,
    /// Whether it has loaded the script.
    pub(super) ready: bool,
}

impl Process {
    /// Starts it, within a tokio runtime.
    pub(super) fn start(interpreter: &str, mark: Option<&str>) -> io::Result<Process> {
        let (ours, theirs) = StdStream::pair()?;
        let (output, print_to) = io::pipe()?;
        // No other child is started between here and the spawn that inherits it.
        fcntl_setfd(&theirs, FdFlags::empty())?;
        let mut command = Command::new(interpreter);
        command.args(["-u", "-", &theirs.as_raw_fd().to_string()]);
        command
            .env_remove("MAINSTAY_PAGE")
            .env_remove(TOKEN_VARIABLE)
            .envs(mark.and_then(|mark| mark.split_once('=')));
        command.stdin(Stdio::piped()).stdout(print_to.try_clone()?).stderr(print_to);
        let mut child = spawn::spawn_bound(&mut command, None)?;
        drop(theirs);
        if let Some(mut program) = child.stdin.take() {
            // It is shorter than what a pipe holds.
            program.write_all(PROGRAM.as_bytes())?;
        }
        ours.set_nonblocking(true)?;
        Ok(Process {
            child,
            channel: UnixStream::from_std(ours)?,
            output: Some(pipe::Receiver::from_owned_fd(output.into())?),
            to_send: Vec::new(),
            received: Vec::new(),
            printed: Vec::new(),
            room: MAX_PRINTED_BYTES,
            ready: false,
        })
    }

    pub(super) fn pid(&self) -> Pid {
        Pid(i32::try_from(self.child.id()).unwrap_or(0))
    }

    pub(super) fn send(&mut self, message: &Value) {
        self.to_send.extend_from_slice(format!("{message}\n").as_bytes());
    }

    /// Gives it room to print about the next failure.
    pub(super) fn may_print(&mut self) {
        self.room = MAX_PRINTED_BYTES;
    }

    /// The next turn; never [`Turn::Late`]. The future may be dropped and created again at any time.
    pub(super) async fn turn(&mut self) -> Turn {
        if let Some(line) = line_of(&mut self.received) {
            return Turn::Said(line);
        }
        let writes = if self.to_send.is_empty() { Interest::READABLE } else { Interest::WRITABLE };
        tokio::select! {
            biased;
            ready = self.channel.ready(Interest::READABLE | writes) => {
                if ready.is_ok_and(|ready| !ready.is_readable() || self.receive()) {
                    self.write();
                    return Turn::Moved;
                }
                Turn::Ended
            }
            _ = next_of(self.output.as_ref().map(pipe::Receiver::readable)), if self.room > 0 => {
                self.read_printed();
                Turn::Printed(self.lines_printed())
            }
        }
    }

    /// Whether the process has not closed its end.
    fn receive(&mut self) -> bool {
        let mut buffer = [0; 8192];
        match self.channel.try_read(&mut buffer) {
            Ok(0) => return false,
            Ok(length) => self.received.extend_from_slice(&buffer[..length]),
            Err(error) => return error.kind() == ErrorKind::WouldBlock,
        }
        if self.received.len() > MAX_ANSWER_BYTES && !self.received.contains(&b'\n') {
            // As a line it is not understood.
            self.received.push(b'\n');
        }
        true
    }

    fn write(&mut self) {
        // A process that has closed its end is noticed when it is read.
        while let Ok(length @ 1..) = self.channel.try_write(&self.to_send) {
            self.to_send.drain(..length);
        }
    }

    /// Returns whether there may be more.
    fn read_printed(&mut self) -> bool {
        let Some(output) = self.output.as_ref().filter(|_| self.room > 0) else { return false };
        let mut buffer = [0; 8192];
        let most = self.room.min(buffer.len());
        match output.try_read(&mut buffer[..most]) {
            Ok(length @ 1..) => {
                self.printed.extend_from_slice(&buffer[..length]);
                let short = buffer[..length].iter().filter(|byte| **byte == b'\n').count() * MIN_LINE_BYTES;
                self.room = self.room.saturating_sub(length.max(short));
                if self.room == 0 {
                    self.printed.extend_from_slice(b"\n(what it prints beyond this is not shown)\n");
                } else if self.printed.len() > MAX_LINE_BYTES && !self.printed.contains(&b'\n') {
                    self.printed.push(b'\n');
                }
                true
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            Ok(_) | Err(_) => {
                self.output = None;
                false
            }
        }
    }

    /// The lines that are complete, without control characters.
    fn lines_printed(&mut self) -> Vec<String> {
        let lines = std::iter::from_fn(|| line_of(&mut self.printed));
        lines.map(|line| String::from_utf8_lossy(&line).trim_end().replace(char::is_control, " ")).collect()
    }

    /// Tells the process that there are no more questions.
    pub(super) fn close(&self) {
        let _ = rustix::net::shutdown(&self.channel, rustix::net::Shutdown::Write);
    }

    /// Kills it, and what it has started in its process group. Returns what it has printed last.
    pub(super) fn kill(mut self) -> Vec<String> {
        // Once it is reaped, its number may be another's.
        if pidfd::exit_status(self.pid()).is_ok() {
            kill_group(&self.child);
            pidfd::reap(self.pid());
        }
        while self.read_printed() {}
        if !self.printed.is_empty() {
            self.printed.push(b'\n');
        }
        self.lines_printed()
    }
}

fn line_of(received: &mut Vec<u8>) -> Option<Vec<u8>> {
    let end = received.iter().position(|byte| *byte == b'\n')?;
    Some(received.drain(..=end).collect())
}
