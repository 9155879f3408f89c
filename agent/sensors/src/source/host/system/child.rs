//! A child process that answers one request, and may never answer.

use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use mainstay_model::time::Mono;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Longer than any answer.
const MAX_ANSWER_BYTES: usize = 256 << 10;

/// A request in progress.
#[derive(Debug)]
pub(super) struct PendingRequest {
    /// When it was sent.
    pub(super) at: Mono,
    child: Child,
    answer: Option<ChildStdout>,
    text: Vec<u8>,
    killed: bool,
}

impl PendingRequest {
    pub(super) fn start(program: &Path, arguments: &[&str], at: Mono) -> io::Result<PendingRequest> {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        // Other languages have other words for the same states.
        command.env("LC_ALL", "C");
        let mut child = command.spawn()?;
        let answer = child.stdout.take();
        Ok(PendingRequest { at, child, answer, text: Vec::new(), killed: false })
    }

    /// The answer, if it is complete: the child's output until it closes its end. Waits at most `patience`.
    pub(super) fn answer(&mut self, patience: Duration) -> Option<io::Result<String>> {
        let until = Instant::now() + patience;
        let mut buffer = [0; 4096];
        loop {
            let Some(answer) = &mut self.answer else {
                return self.ended().then(|| Err(io::Error::other("it was ended without an answer")));
            };
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(answer, PollFlags::IN)], Some(&left)) {
                Ok(0) => return None,
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Some(Err(error.into())),
            }
            match answer.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => self.text.extend_from_slice(&buffer[..length]),
                Err(error) => return Some(Err(error)),
            }
            if self.text.len() > MAX_ANSWER_BYTES {
                self.kill();
                break;
            }
        }
        self.answer = None;
        // It has closed its end: it has ended, or is being killed.
        let _ = self.child.wait();
        let text = std::mem::take(&mut self.text);
        Some(match text.as_slice() {
            [] if self.killed => Err(io::Error::other("it was ended without an answer")),
            [] => Err(io::Error::other("the probe ended without an answer")),
            text => Ok(String::from_utf8_lossy(text).into_owned()),
        })
    }

    /// Kills it, unless no signal reaches it.
    pub(super) fn kill(&mut self) {
        if !self.killed {
            self.killed = true;
            let _ = self.child.kill();
        }
    }

    pub(super) fn was_killed(&self) -> bool {
        self.killed
    }

    fn ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for PendingRequest {
    /// A child that hangs is abandoned: waiting for it would block us too.
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.try_wait();
    }
}
