//! A simulated job with hang detection: its clock, heartbeat pages and processes.

use mainstay_hang::{Class, Count, Hang, HangStatus, Limits, PhaseId, Probe, RankSample, Watch};
use mainstay_model::id::Rank;
use mainstay_model::time::{Mono, Span};

pub const RANKS: usize = 8;
pub const LOOK: Span = Span::millis(100);

/// A job whose ranks make their steps together.
pub struct Job {
    pub now: Mono,
    pub watch: Watch,
    pub sights: Vec<RankSample>,
    pub counts: Vec<Vec<Count>>,
    pub probes: Vec<Option<Probe>>,
}

impl Job {
    pub fn started(limits: Limits) -> Job {
        let now = Mono(Span::seconds(1000).0);
        let mut job = Job {
            now,
            watch: Watch::new(limits, Rank(0), RANKS, now),
            sights: vec![RankSample::default(); RANKS],
            counts: vec![Vec::new(); RANKS],
            probes: vec![None; RANKS],
        };
        for sample in &mut job.sights {
            (sample.registered, sample.claim, sample.since) = (true, 1, now);
        }
        job
    }

    /// A job after `steps` steps of 200 ms.
    pub fn trained(steps: u64) -> Job {
        let mut job = Job::started(Limits::default());
        for step in 0..steps {
            job.step_together(step, Span::millis(200));
        }
        job
    }

    pub fn step_together(&mut self, step: u64, took: Span) {
        self.wait(took, &mut |_| panic!("verdict on a healthy job"));
        for rank in 0..RANKS {
            self.step_of(rank, step);
            self.watch.phases().learn(PhaseId::STEP, step, took);
        }
    }

    /// A step in which all ranks use the CPU for 90 % of the time.
    pub fn busy_step(&mut self, step: u64, took: Span) {
        let until = self.now.after(took);
        while self.now < until {
            (0..RANKS).for_each(|rank| self.works(rank, Span::millis(90), 0));
            self.is_calm_for(LOOK);
        }
        for rank in 0..RANKS {
            self.step_of(rank, step);
            self.watch.phases().learn(PhaseId::STEP, step, took);
        }
    }

    pub fn step_of(&mut self, rank: usize, step: u64) {
        let sample = &mut self.sights[rank];
        (sample.step, sample.since, sample.phase, sample.long) = (Some(step), self.now, PhaseId::STEP, None);
        self.beat(rank);
    }

    pub fn beat(&mut self, rank: usize) {
        self.sights[rank].beats += 1;
        self.sights[rank].beat_at = self.now;
    }

    pub fn enter(&mut self, rank: usize, section: &str) {
        let phase = self.watch.phases().section(section);
        let is_long = self.watch.phases().class(phase) == Class::Long;
        (self.sights[rank].phase, self.sights[rank].since) = (phase, self.now);
        self.sights[rank].long = is_long.then_some(phase);
        self.beat(rank);
    }

    pub fn look(&mut self) -> HangStatus {
        for rank in 0..RANKS {
            self.watch.sample(rank, self.now, &self.sights[rank]);
            self.watch.counts(rank, self.now, &self.counts[rank]);
        }
        if self.watch.wants_probes(self.now) {
            for rank in 0..RANKS {
                if let Some(probe) = &mut self.probes[rank] {
                    probe.at = self.now;
                    self.watch.probe(rank, *probe);
                }
            }
        }
        self.watch.look(self.now)
    }

    /// Lets time pass and looks every 100 ms, as the launcher does.
    pub fn wait(&mut self, span: Span, judged: &mut dyn FnMut(Hang)) {
        let until = self.now.after(span);
        while self.now < until {
            self.now = self.now.after(LOOK).min(until);
            if let HangStatus::Confirmed(hang) = self.look() {
                return judged(*hang);
            }
        }
    }

    /// Waits for a verdict. Returns it and the time it took.
    pub fn hangs(&mut self, within: Span) -> (Hang, Span) {
        let began = self.now;
        let mut found = None;
        self.wait(within, &mut |hang| found = Some(hang));
        let hang = found.unwrap_or_else(|| panic!("no verdict within {within}"));
        (hang, self.now.since(began))
    }

    pub fn is_calm_for(&mut self, span: Span) {
        self.wait(span, &mut |hang| panic!("unexpected verdict: {hang:?}"));
    }

    pub fn all_still(&mut self) {
        self.probes = vec![Some(Probe { processes: 1, ..Probe::default() }); RANKS];
    }

    pub fn works(&mut self, rank: usize, cpu: Span, bytes: u64) {
        let probe = self.probes[rank].get_or_insert_default();
        (probe.cpu, probe.bytes) = (probe.cpu.plus(cpu), probe.bytes + bytes);
    }
}

/// A job with steps of 2 s on the CPU. With `holds_device`, its ranks have an accelerator, which may compute a longer
/// step while they wait for it.
pub fn computes_by_itself(holds_device: bool) -> Job {
    let mut job = Job::started(Limits::default());
    let probe = Probe { processes: 1, holds_device, ..Probe::default() };
    job.probes = vec![Some(probe); RANKS];
    (0..60).for_each(|step| job.busy_step(step, Span::seconds(2)));
    job
}
