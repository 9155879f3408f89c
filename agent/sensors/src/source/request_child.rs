//! A child process that answers requests line by line, with a deadline. It is abandoned when it hangs: no other one is
//! started until the killed one is gone.

use std::io::{self, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Longer than any answer.
const LONGEST_ANSWER: usize = 16 << 20;

/// The child, if there is one.
#[derive(Debug, Default)]
pub struct RequestChild {
    running: Option<Running>,
    /// A child that did not answer and is not gone yet.
    abandoned: Option<Child>,
}

#[derive(Debug)]
struct Running {
    child: Child,
    requests: ChildStdin,
    answers: ChildStdout,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Unanswered {
    /// It has not answered in time.
    #[error("no answer in time")]
    Late,
    /// It ended, could not be started, or its pipe broke.
    #[error("{0}")]
    Broken(String),
}

impl RequestChild {
    /// Whether a child is running.
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Sends a request for one line; first starts `command` if no child runs. Returns within the deadline.
    ///
    /// # Errors
    /// There was no answer. The child is then killed, and abandoned if it does not end.
    pub fn ask(&mut self, mut command: Command, deadline: Duration) -> Result<Vec<u8>, Unanswered> {
        if let Some(child) = &mut self.abandoned {
            if matches!(child.try_wait(), Ok(None)) {
                return Err(Unanswered::Late);
            }
            self.abandoned = None;
        }
        let mut running = match self.running.take() {
            Some(running) => running,
            None => Running::start(&mut command).map_err(|error| {
                Unanswered::Broken(format!("starting {}: {error}", command.get_program().display()))
            })?,
        };
        let answer = running.ask(deadline);
        if answer.is_ok() {
            self.running = Some(running);
        } else {
            // It may not die; the next request checks again.
            let _ = running.child.kill();
            self.abandoned = Some(running.child);
        }
        answer
    }
}

impl Drop for RequestChild {
    fn drop(&mut self) {
        // The child ends when we close its standard input. Do not wait for one that hangs.
        if let Some(running) = &mut self.running {
            let _ = running.child.kill();
            let _ = running.child.wait();
        }
    }
}

impl Running {
    fn start(command: &mut Command) -> io::Result<Running> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let (Some(requests), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        Ok(Running { child, requests, answers })
    }

    fn ask(&mut self, deadline: Duration) -> Result<Vec<u8>, Unanswered> {
        let broken = |error: io::Error| Unanswered::Broken(format!("the child's pipe broke: {error}"));
        // A child that needs no request, such as a probe, may have answered and ended before this is written: its
        // answer is still in the pipe.
        match self.requests.write_all(b"ask\n") {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(broken(error)),
            _ => {}
        }
        let until = Instant::now() + deadline;
        let (mut answer, mut buffer) = (Vec::new(), [0; 16 * 1024]);
        while answer.last() != Some(&b'\n') {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.answers, PollFlags::IN)], Some(&timeout)) {
                Ok(0) => return Err(Unanswered::Late),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(broken(error.into())),
            }
            match self.answers.read(&mut buffer).map_err(broken)? {
                0 => return Err(Unanswered::Broken("it ended without an answer".to_owned())),
                length => answer.extend_from_slice(&buffer[..length]),
            }
            if answer.len() > LONGEST_ANSWER {
                return Err(Unanswered::Broken("its answer has no end".to_owned()));
            }
        }
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    /// A child that has ended before it is asked.
    fn ended(script: &str) -> Running {
        let mut running = Running::start(&mut shell(script)).expect("a shell");
        let status = running.child.wait().expect("its end");
        assert_eq!(status.signal(), None);
        running
    }

    #[test]
    fn an_answer_counts_also_if_the_child_has_ended_without_reading_its_request() {
        let mut running = ended("echo answer");
        let answer = running.ask(Duration::from_secs(60)).expect("an answer");
        assert_eq!(answer, b"answer\n");
    }

    #[test]
    fn a_child_that_has_ended_without_an_answer_is_reported() {
        let mut running = ended("true");
        let answer = running.ask(Duration::from_secs(60));
        assert!(matches!(answer, Err(Unanswered::Broken(_))), "{answer:?}");
    }
}
