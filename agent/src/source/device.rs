//! GPUs, by way of a probe in a child process that can be abandoned.
//!
//! The probe is asked with a deadline. One that does not answer is killed; while it is not gone (a process inside a
//! driver that hangs survives even SIGKILL) no other is started, and the driver counts as silent since the first call
//! that did not return.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use mainstay_core::device::{DeviceReport, ProbeAnswer};
use mainstay_core::time::Mono;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Longer than any answer: one of a host of 16 GPUs has some 20 KiB.
const LONGEST_ANSWER: usize = 4 << 20;

/// How the probe is started.
#[derive(Clone, Debug)]
pub struct ProbePlan {
    /// The program that has the probe in it: our own.
    pub program: PathBuf,
    /// The library to load; the usual one if none is named.
    pub library: Option<PathBuf>,
    /// Where sysfs is.
    pub sys: PathBuf,
    /// How long an answer may take.
    pub deadline: Duration,
}

/// The GPUs of this host.
#[derive(Debug)]
pub struct DeviceSource {
    plan: ProbePlan,
    probe: Option<Probe>,
    /// One that did not answer and is not gone yet.
    abandoned: Option<Child>,
    silent_since: Option<Mono>,
}

#[derive(Debug)]
struct Probe {
    child: Child,
    requests: ChildStdin,
    answers: ChildStdout,
}

enum Unanswered {
    Late,
    Broken(String),
}

impl DeviceSource {
    /// A source that has not asked yet.
    pub fn new(plan: ProbePlan) -> DeviceSource {
        DeviceSource { plan, probe: None, abandoned: None, silent_since: None }
    }

    /// Asks once, at `now`. Returns within the deadline.
    pub fn sample(&mut self, now: Mono) -> DeviceReport {
        if self.plan.library.is_none() && self.probe.is_none() && !has_nvidia_device(&self.plan.sys) {
            return DeviceReport::NoGpus;
        }
        if let Some(child) = &mut self.abandoned {
            if matches!(child.try_wait(), Ok(None)) {
                return DeviceReport::Silent { since: *self.silent_since.get_or_insert(now) };
            }
            self.abandoned = None;
        }
        let probe = match self.probe.take().map_or_else(|| Probe::start(&self.plan), Ok) {
            Ok(probe) => probe,
            Err(error) => {
                return DeviceReport::Broken(format!("starting {}: {error}", self.plan.program.display()));
            }
        };
        self.ask(probe, now)
    }

    fn ask(&mut self, mut probe: Probe, now: Mono) -> DeviceReport {
        match probe.ask(self.plan.deadline) {
            Ok(answer) => {
                self.silent_since = None;
                self.probe = Some(probe);
                DeviceReport::Answered(answer)
            }
            Err(Unanswered::Late) => {
                // It may be past killing; it is looked after at the next samples.
                let _ = probe.child.kill();
                self.abandoned = Some(probe.child);
                DeviceReport::Silent { since: *self.silent_since.get_or_insert(now) }
            }
            Err(Unanswered::Broken(why)) => {
                let _ = probe.child.kill();
                self.abandoned = Some(probe.child);
                self.silent_since = None;
                DeviceReport::Broken(why)
            }
        }
    }
}

impl Drop for DeviceSource {
    fn drop(&mut self) {
        // Its standard input ends with us, and so does it; one that hangs is not waited for.
        if let Some(probe) = &mut self.probe {
            let _ = probe.child.kill();
            let _ = probe.child.wait();
        }
    }
}

impl Probe {
    fn start(plan: &ProbePlan) -> io::Result<Probe> {
        let mut command = Command::new(&plan.program);
        command.args(["probe", "nvml"]);
        if let Some(library) = &plan.library {
            command.arg("--lib").arg(library);
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let (Some(requests), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        Ok(Probe { child, requests, answers })
    }

    fn ask(&mut self, deadline: Duration) -> Result<ProbeAnswer, Unanswered> {
        let broken = |error: io::Error| Unanswered::Broken(format!("the probe's pipe broke: {error}"));
        self.requests.write_all(b"sample\n").map_err(broken)?;
        let until = Instant::now() + deadline;
        let mut answer = Vec::new();
        let mut buffer = [0; 16 * 1024];
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
                0 => return Err(Unanswered::Broken(self.how_it_ended())),
                length => answer.extend_from_slice(&buffer[..length]),
            }
            if answer.len() > LONGEST_ANSWER {
                return Err(Unanswered::Broken("the probe's answer has no end".to_owned()));
            }
        }
        serde_json::from_slice(&answer)
            .map_err(|error| Unanswered::Broken(format!("the probe's answer is not understood: {error}")))
    }

    fn how_it_ended(&mut self) -> String {
        match self.child.wait() {
            Ok(status) => format!("the probe ended by itself: {status}"),
            Err(error) => format!("the probe ended by itself: {error}"),
        }
    }
}

/// Whether there is a GPU of NVIDIA on the PCI bus, driver or not: display controllers have class 0x03.
pub(super) fn has_nvidia_device(sys: &Path) -> bool {
    let Ok(devices) = std::fs::read_dir(sys.join("bus/pci/devices")) else { return false };
    devices.flatten().any(|device| {
        let read = |name: &str| std::fs::read_to_string(device.path().join(name)).unwrap_or_default();
        read("vendor").trim() == "0x10de" && read("class").starts_with("0x03")
    })
}
