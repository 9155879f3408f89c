//! The pipes to the probe: one line at a time in each direction.

use std::io::{self, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use mainstay_health::hardware::gpu::{ProbeLine, ProbeRequest};
use mainstay_model::time::Mono;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::ProbePlan;
use mainstay_sys::spawn::spawn_bound;

/// Longer than any answer: that of a host with 16 GPUs has about 60 KiB.
const MAX_LINE_BYTES: usize = 4 << 20;

/// Why a probe is no longer usable.
#[derive(Debug)]
pub(super) struct ProbeFailed(pub(super) String);

#[derive(Debug)]
pub(super) struct Probe {
    child: Child,
    requests: ChildStdin,
    answers: ChildStdout,
    /// Bytes of an incomplete line.
    unread: Vec<u8>,
    pub(super) started: Mono,
}

impl Probe {
    pub(super) fn start(plan: &ProbePlan, now: Mono) -> io::Result<Probe> {
        let mut command = Command::new(&plan.program);
        command.args(["probe", "nvml"]);
        if let Some(library) = &plan.library {
            command.arg("--lib").arg(library);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // A probe that hangs in the driver does not see its pipes close: it must end with an agent that is killed.
        let mut child = spawn_bound(&mut command, None)?;
        let (Some(requests), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        Ok(Probe { child, requests, answers, unread: Vec::new(), started: now })
    }

    pub(super) fn answers(&self) -> &ChildStdout {
        &self.answers
    }

    /// Closes the pipes, which ends a healthy probe.
    pub(super) fn into_child(self) -> Child {
        self.child
    }

    pub(super) fn send(&mut self, request: &ProbeRequest) -> Result<(), ProbeFailed> {
        let mut line = serde_json::to_vec(request).map_err(io::Error::from)?;
        line.push(b'\n');
        Ok(self.requests.write_all(&line)?)
    }

    /// Waits until there is something to read. Returns false after `until`.
    pub(super) fn wait(&self, until: Instant) -> Result<bool, ProbeFailed> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match poll(&mut [PollFd::new(&self.answers, PollFlags::IN)], Some(&timespec(left))) {
                Ok(0) => return Ok(false),
                Ok(_) => return Ok(true),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }

    /// Reads once, and returns the complete lines.
    pub(super) fn read(&mut self) -> Result<Vec<ProbeLine>, ProbeFailed> {
        let mut buffer = [0; 16 * 1024];
        match self.answers.read(&mut buffer)? {
            0 => return Err(ProbeFailed(self.how_it_ended())),
            length => self.unread.extend_from_slice(&buffer[..length]),
        }
        let mut lines = Vec::new();
        while let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.unread.drain(..=end).collect();
            let line = serde_json::from_slice(&line)
                .map_err(|error| ProbeFailed(format!("the probe's answer is not understood: {error}")))?;
            lines.push(line);
        }
        if self.unread.len() > MAX_LINE_BYTES {
            return Err(ProbeFailed("the probe's answer has no end".to_owned()));
        }
        Ok(lines)
    }

    fn how_it_ended(&mut self) -> String {
        // Kill a probe that closes its pipe without ending.
        let _ = self.child.kill();
        match self.child.wait() {
            Ok(status) => format!("the probe ended by itself: {status}"),
            Err(error) => format!("the probe ended by itself: {error}"),
        }
    }
}

pub(super) fn timespec(span: Duration) -> Timespec {
    Timespec { tv_sec: span.as_secs() as i64, tv_nsec: span.subsec_nanos().into() }
}
