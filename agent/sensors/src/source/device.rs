//! GPUs, read by a probe in a child process that can be abandoned.
//!
//! The probe has a deadline for each GPU. A GPU for which a call does not return is left out and retried from time to time,
//! after the others, so that these are read meanwhile. A probe that does not answer is killed. Until it is gone (a process
//! inside a driver that hangs survives even SIGKILL) no other one is started, and the driver counts as silent since the
//! first call that did not return. Between two samples the probe passes on the driver's events.

mod hung;
mod pipe;
mod presence;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

use mainstay_health::hardware::gpu::{
    DeviceReport, GpuEvent, GpuIdentity, GpuReading, GpuTrouble, ProbeAnswer, ProbeLine, ProbeRequest, settle,
};
use mainstay_model::pci::PciAddress;
use mainstay_model::time::{Mono, Span};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

pub(super) use presence::has_nvidia_device;

use hung::Hung;
use pipe::{Probe, ProbeFailed, timespec};
use presence::{held, is_library_on_path};

/// How often the probe is restarted while a GPU is in trouble or missing: a library that was loaded before a GPU was reset
/// or came back has stale data about it.
const RENEW_EVERY: Span = Span::seconds(60);

/// How long a killed probe may take to exit.
const GONE_WITHIN: Duration = Duration::from_secs(1);

/// Time between two readings of slow or expensive values: NVLink counters, ECC errors by location, limits, versions.
pub const DETAILS_INTERVAL: Span = Span::seconds(60);

/// How the probe is started.
#[derive(Clone, Debug)]
pub struct ProbePlan {
    /// The program that contains the probe: our own.
    pub program: PathBuf,
    /// The library to load; none for the usual one.
    pub library: Option<PathBuf>,
    /// Where sysfs is.
    pub sys: PathBuf,
    /// Where procfs is.
    pub proc: PathBuf,
    /// How long the driver may take for one GPU.
    pub deadline: Duration,
    /// Time between two readings of details.
    pub details_every: Span,
    /// The identities at each index of the driver's list, as known before.
    pub known: Vec<(u32, GpuIdentity)>,
}

/// The GPUs of this host.
#[derive(Debug)]
pub struct DeviceSource {
    plan: ProbePlan,
    probe: Option<Probe>,
    /// A probe that did not answer and is not gone yet.
    abandoned: Option<Child>,
    silent: Option<(Mono, Option<u32>)>,
    known: BTreeMap<u32, GpuIdentity>,
    /// The largest number of GPUs that was counted.
    most: usize,
    /// The number of GPUs at the last count.
    counted: usize,
    details_at: Option<Mono>,
    /// How often the probe died while it read the details.
    fatal_details: u32,
    /// Whether a GPU was in trouble since the probe started.
    was_ill: bool,
    events: Vec<GpuEvent>,
    /// GPUs for which a call has not returned, or has ended the probe, by index in the driver's list.
    hung: BTreeMap<u32, Hung>,
    /// The driver's version, as last reported.
    driver: Option<String>,
}

/// The result of a wait.
#[derive(Debug, PartialEq)]
pub enum Waited {
    /// The time is over.
    Over,
    /// The watched descriptor is readable, or its other end is closed.
    Stopped,
    /// Events of the driver.
    Reported(Vec<GpuEvent>),
}

impl DeviceSource {
    /// A source that has taken no sample yet.
    pub fn new(plan: ProbePlan) -> DeviceSource {
        let known = plan.known.iter().cloned().collect();
        DeviceSource {
            plan,
            probe: None,
            abandoned: None,
            silent: None,
            known,
            most: 0,
            counted: 0,
            details_at: None,
            fatal_details: 0,
            was_ill: false,
            events: Vec::new(),
            hung: BTreeMap::new(),
            driver: None,
        }
    }

    /// Takes one sample, at `now`. Returns within the deadline for each GPU.
    pub fn sample(&mut self, now: Mono) -> DeviceReport {
        let unseen =
            self.plan.library.is_none() && self.probe.is_none() && !has_nvidia_device(&self.plan.sys);
        if unseen && !is_library_on_path() {
            return DeviceReport::NoGpus;
        }
        if let Some(child) = &mut self.abandoned {
            if matches!(child.try_wait(), Ok(None)) {
                return self.is_silent(now, None);
            }
            self.abandoned = None;
        }
        let details = self.details_at.is_none_or(|at| now.since(at) >= self.details_every());
        let mut known = Vec::new();
        let probe = match self.probe.take() {
            Some(probe) => Ok(probe),
            None => {
                known.extend(self.known.clone());
                Probe::start(&self.plan, now)
            }
        };
        let asked = probe.map_err(|error| format!("starting {}: {error}", self.plan.program.display()));
        let (last, skip) = self.doubtful(now);
        let places = if details { self.places() } else { Vec::new() };
        match asked {
            Ok(probe) => match self.ask(probe, &ProbeRequest { details, known, places, skip, last }, now) {
                // A library without devices reports that there are none.
                DeviceReport::Answered(ProbeAnswer::Trouble { .. }) if unseen && self.most == 0 => {
                    DeviceReport::NoGpus
                }
                report => report,
            },
            Err(why) => DeviceReport::Broken(why),
        }
    }

    /// Releases all GPUs, which the probe has open. Returns whether that succeeded; the next sample starts a new probe.
    pub fn let_go(&mut self) -> bool {
        if let Some(probe) = self.probe.take() {
            self.put_away(probe);
        }
        (self.details_at, self.hung) = (None, BTreeMap::new());
        match self.abandoned.as_mut().map(Child::try_wait) {
            Some(Ok(None)) => false,
            _ => {
                self.abandoned = None;
                true
            }
        }
    }

    /// Details that crash the probe are read less and less often: each crash loses the reading of all GPUs.
    fn details_every(&self) -> Span {
        match self.fatal_details {
            0 => self.plan.details_every,
            times => Span(self.plan.details_every.max(RENEW_EVERY).0 << times.min(6)),
        }
    }

    /// The driver's events during samples.
    pub fn take_events(&mut self) -> Vec<GpuEvent> {
        std::mem::take(&mut self.events)
    }

    /// Waits until the driver sends an event, `stop` is readable, or `longest` is over.
    pub fn wait(&mut self, stop: BorrowedFd<'_>, longest: Duration) -> Waited {
        let until = Instant::now() + longest;
        loop {
            if !self.events.is_empty() {
                return Waited::Reported(self.take_events());
            }
            let left = until.saturating_duration_since(Instant::now());
            let mut watched = vec![PollFd::from_borrowed_fd(stop, PollFlags::IN)];
            watched.extend(self.probe.as_ref().map(|probe| PollFd::new(probe.answers(), PollFlags::IN)));
            match poll(&mut watched, Some(&timespec(left))) {
                Ok(0) => return Waited::Over,
                Ok(_) if !watched[0].revents().is_empty() => return Waited::Stopped,
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                // The next sample reports what is wrong.
                Err(_) => return Waited::Over,
            }
            if let Some(mut probe) = self.probe.take() {
                match probe.read() {
                    Ok(lines) => {
                        self.take_lines(lines);
                        self.probe = Some(probe);
                    }
                    // The probe ended: the next sample starts another one.
                    Err(_) => self.put_away(probe),
                }
            }
        }
    }

    /// GPUs for which calls have hung: those that are retried now, and those that are left out. If calls hang for all of
    /// them, the driver hangs, and all are retried.
    fn doubtful(&mut self, now: Mono) -> (Vec<u32>, Vec<u32>) {
        if self.hung.len() >= self.counted {
            self.hung.clear();
        }
        let places = |free: bool| {
            let some = self.hung.iter().filter(|(_, hung)| hung.is_due(now) == free);
            some.map(|(index, _)| *index).collect()
        };
        (places(true), places(false))
    }

    fn ask(&mut self, mut probe: Probe, request: &ProbeRequest, now: Mono) -> DeviceReport {
        let mut reading = None;
        let mut gpus: Vec<GpuReading> = Vec::new();
        let mut until = Instant::now() + self.plan.deadline;
        let mut sent = probe.send(request);
        let broken = loop {
            if let Err(ProbeFailed(why)) = sent {
                break why;
            }
            sent = Ok(());
            match probe.wait(until) {
                Ok(true) => {}
                Ok(false) => {
                    // It may not die; the next samples check again.
                    let mut child = probe.into_child();
                    let _ = child.kill();
                    if !ended(&mut child, GONE_WITHIN) {
                        self.abandoned = Some(child);
                    }
                    self.details_at = None;
                    return self.hangs(now, reading, gpus);
                }
                Err(ProbeFailed(why)) => break why,
            }
            let lines = match probe.read() {
                Ok(lines) => lines,
                Err(ProbeFailed(why)) => break why,
            };
            for line in lines {
                match line {
                    // Each GPU has a separate deadline.
                    ProbeLine::Reading(index) => {
                        reading = Some(index);
                        until = Instant::now() + self.plan.deadline;
                    }
                    ProbeLine::Event(event) => self.events.push(event),
                    ProbeLine::Counted(count) => self.counted = count as usize,
                    ProbeLine::Gpu(gpu) => {
                        self.hung.remove(&gpu.index);
                        gpus.push(*gpu);
                        // A failure from here on is not the failure of a GPU.
                        reading = None;
                    }
                    ProbeLine::Answer(answer) => {
                        let answer = self.whole(answer, gpus);
                        self.silent = None;
                        if request.details {
                            (self.details_at, self.fatal_details) = (Some(now), 0);
                        }
                        self.keep(probe, &answer, now);
                        return DeviceReport::Answered(answer);
                    }
                }
            }
        };
        self.put_away(probe);
        self.silent = None;
        self.crashed(now, reading, request.details);
        self.of_the_others(gpus).unwrap_or(DeviceReport::Broken(broken))
    }

    /// The probe ended by itself. A library that crashes for one GPU, or when details are read, must not hide any other reading.
    fn crashed(&mut self, now: Mono, reading: Option<u32>, details: bool) {
        let Some(index) = reading else { return };
        if details {
            (self.details_at, self.fatal_details) = (Some(now), self.fatal_details.saturating_add(1));
        } else {
            let hung = self.hung.entry(index).or_insert(Hung::new(now, true));
            (hung.tried, hung.tries) = (now, hung.tries.saturating_add(1));
        }
    }

    /// A call for the GPU at `reading` has not returned. The readings of the others are kept, if they are complete.
    fn hangs(&mut self, now: Mono, reading: Option<u32>, gpus: Vec<GpuReading>) -> DeviceReport {
        let Some(index) = reading else { return self.is_silent(now, None) };
        let since = self.silent.map_or(now, |(since, _)| since);
        let hung = self.hung.entry(index).or_insert(Hung::new(since, false));
        (hung.tried, hung.tries) = (now, hung.tries.saturating_add(1));
        match self.of_the_others(gpus) {
            Some(report) => {
                self.silent = None;
                report
            }
            None => self.is_silent(now, reading),
        }
    }

    /// The readings from before the probe hung or crashed, if only GPUs are missing for which it does.
    fn of_the_others(&mut self, gpus: Vec<GpuReading>) -> Option<DeviceReport> {
        let all = gpus.len() + self.hung.len() >= self.counted;
        if gpus.is_empty() || !all {
            return None;
        }
        let answer = ProbeAnswer::Gpus { driver: self.driver.clone(), gpus: Vec::new(), bound: Vec::new() };
        Some(DeviceReport::Answered(self.whole(answer, gpus)))
    }

    /// The answer with the readings of each GPU, and the state of those that were left out.
    fn whole(&mut self, answer: ProbeAnswer, mut gpus: Vec<GpuReading>) -> ProbeAnswer {
        let ProbeAnswer::Gpus { driver, .. } = answer else { return answer };
        self.driver.clone_from(&driver);
        for (index, hung) in &self.hung {
            let crashes = || GpuTrouble::Other("NVIDIA's library crashes when it is read".to_owned());
            gpus.push(GpuReading {
                index: *index,
                identity: self.known.get(index).cloned(),
                trouble: Some(if hung.crashed { crashes() } else { GpuTrouble::Hangs(hung.since) }),
                ..GpuReading::default()
            });
        }
        gpus.sort_by_key(|gpu| gpu.index);
        settle(&mut gpus, self.known.values());
        ProbeAnswer::Gpus { driver, gpus, bound: self.bound() }
    }

    fn bound(&self) -> Vec<PciAddress> {
        held(&self.plan.proc).into_iter().map(|(address, _)| address).collect()
    }

    /// The bus addresses of the GPUs, by name.
    fn places(&self) -> Vec<(String, PciAddress)> {
        held(&self.plan.proc).into_iter().filter_map(|(address, name)| Some((name?, address))).collect()
    }

    /// Keeps the probe for the next sample, unless it needs a restart.
    fn keep(&mut self, probe: Probe, answer: &ProbeAnswer, now: Mono) {
        let ProbeAnswer::Gpus { gpus, .. } = answer else {
            // A library that failed as a whole starts again each time.
            return self.put_away(probe);
        };
        self.known.extend(gpus.iter().filter_map(|gpu| Some((gpu.index, gpu.identity.clone()?))));
        let fewer = gpus.len() < self.most;
        self.most = self.most.max(gpus.len());
        let ill = fewer || gpus.iter().any(|gpu| gpu.trouble.is_some());
        // The probe gets no events of a GPU that was in trouble when the probe started and has recovered.
        let is_well_again = !ill && std::mem::replace(&mut self.was_ill, ill);
        self.was_ill |= ill;
        if is_well_again || (ill && now.since(probe.started) >= RENEW_EVERY) {
            self.details_at = None;
            self.put_away(probe);
        } else {
            self.probe = Some(probe);
        }
    }

    fn take_lines(&mut self, lines: Vec<ProbeLine>) {
        self.events.extend(lines.into_iter().filter_map(|line| match line {
            ProbeLine::Event(event) => Some(event),
            _ => None,
        }));
    }

    /// Ends a probe. If it does not exit soon, the next samples check again.
    fn put_away(&mut self, probe: Probe) {
        let mut child = probe.into_child();
        let _ = child.kill();
        if !ended(&mut child, GONE_WITHIN) {
            self.abandoned = Some(child);
        }
    }

    fn is_silent(&mut self, now: Mono, reading: Option<u32>) -> DeviceReport {
        let (since, reading) = *self.silent.get_or_insert((now, reading));
        DeviceReport::Silent { since, reading }
    }
}

impl Drop for DeviceSource {
    fn drop(&mut self) {
        // The probe ends when we close its standard input. Do not wait for one that hangs.
        if let Some(probe) = self.probe.take() {
            self.put_away(probe);
        }
    }
}

/// Whether a killed child is gone and reaped within `within`.
fn ended(child: &mut Child, within: Duration) -> bool {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    if let Some(Ok(handle)) = pid.map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
        // Also after an interrupt: only whether it is gone counts.
        let _ = poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&timespec(within)));
    }
    !matches!(child.try_wait(), Ok(None))
}

impl From<io::Error> for ProbeFailed {
    fn from(error: io::Error) -> ProbeFailed {
        ProbeFailed(format!("the probe's pipe broke: {error}"))
    }
}
