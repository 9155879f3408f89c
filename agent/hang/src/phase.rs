//! What a rank can be doing, and how long that may take: learned from the job itself, or given.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::sketch::Sketch;
use mainstay_model::hang::OUTPUT_LINES;
use mainstay_model::time::Span;

/// A phase needs this many steps before its durations are trusted.
const MIN_STEPS: u32 = 50;

/// An extrapolated tail ends at this many times the longest duration seen.
const BEYOND_LONGEST: u64 = 8;

/// The observations of earlier runs count as this many samples. The present run soon outweighs them.
const RECALLED: u64 = 1000;

/// Until the present run has enough samples of a phase, its limit is at least this, whatever earlier runs took.
const RECALLED_FLOOR: Span = Span::seconds(60);

/// The first step of another run may have to compile its code.
const RECALLED_FIRST: Span = Span::seconds(600);

/// What was learned about a phase, to be kept for the next run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PhaseMemory {
    /// `first_step`, `step`, or a section's name.
    pub name: String,
    /// Steps in which it was seen.
    pub steps: u32,
    /// Its longest duration.
    pub longest: Span,
    /// The histogram of its durations, in buckets that grow by two percent.
    pub parts: Vec<(u16, u32)>,
}

impl PhaseMemory {
    /// Whether it is consistent.
    pub fn is_sound(&self) -> bool {
        let sum = self.parts.iter().map(|(_, count)| u64::from(*count)).sum::<u64>();
        let known = self.steps > 0 && self.longest.0 > 0 && sum > 0;
        known && self.name.len() <= 64 && self.parts.len() <= 2048 && sum <= 16 * RECALLED
    }
}

/// What a rank is doing: the number of a row in [`Phases`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct PhaseId(pub u16);

impl PhaseId {
    /// Before its first step, imports and compilation included.
    pub const FIRST_STEP: PhaseId = PhaseId(0);
    /// In a step, with no section open.
    pub const STEP: PhaseId = PhaseId(1);
}

/// How a phase is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// By its usual duration.
    Learned,
    /// Rare and long: never judged by the duration of steps.
    Long,
}

/// Limits that were given, and those that apply until a phase is learned.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// By phase: `first_step`, `step`, or a section's name. Replaces what was learned.
    pub given: BTreeMap<String, Span>,
    /// For a phase that is not learned yet.
    pub unlearned: Span,
    /// The first step of an attempt.
    pub first_step: Span,
    /// For checkpoints, evaluation and other phases known to be long.
    pub long: Span,
    /// Nothing must have moved for this long before anything is confirmed.
    pub confirm: Span,
    /// For what often passes by itself: a process in uninterruptible sleep, a collective that all have entered.
    pub passing: Span,
    /// For a culprit that spins: it uses CPU time and does nothing else.
    pub spinning: Span,
    /// For a culprit that works: it reads, writes, touches new memory, or has children that do.
    pub working: Span,
    /// For heartbeats without a step.
    pub livelock: Span,
    /// For a job without heartbeats that does nothing.
    pub idle: Span,
    /// No phase and no excuse lasts longer than this, whatever was learned, unless it lasted longer before.
    pub cap: Span,
}

impl Limits {
    /// The longest that something may take whose longest duration so far was `longest`.
    pub(crate) fn most(&self, longest: Span) -> Span {
        self.cap.max(Span(longest.0.saturating_add(longest.0 / 5)))
    }
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            given: BTreeMap::new(),
            unlearned: Span::seconds(600),
            first_step: Span::seconds(1800),
            long: Span::seconds(1800),
            // Together with the interval between looks, detection takes at most two seconds.
            confirm: Span::millis(1800),
            passing: Span::seconds(30),
            spinning: Span::seconds(120),
            working: Span::seconds(600),
            livelock: Span::seconds(1800),
            idle: Span::seconds(600),
            cap: Span::seconds(7200),
        }
    }
}

/// How long a phase may take, and the source of that limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The limit.
    pub span: Span,
    /// Its source.
    pub from: LimitFrom,
}

/// The source of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitFrom {
    /// A person configured it.
    Given,
    /// Durations of the phase in this job.
    Learned,
    /// Durations of the phase in earlier runs of the job.
    Recalled,
    /// The default, because too few durations are known.
    Default,
}

#[derive(Clone, Debug)]
struct Phase {
    name: String,
    class: Class,
    is_data: bool,
    is_collective: bool,
    sketch: Sketch,
    /// Steps in which it was seen.
    steps: u32,
    newest_step: Option<u64>,
    limit: Limit,
    /// Samples since the limit was last computed.
    fresh: u32,
    /// Observations of earlier runs: the number of steps, and the longest duration.
    before: (u32, Span),
}

impl Phase {
    fn longest(&self) -> Span {
        self.sketch.longest().max(self.before.1)
    }
}

/// All phases of a job.
#[derive(Clone, Debug)]
pub struct Phases {
    limits: Limits,
    rows: Vec<Phase>,
    /// That of ranks whose steps are known only from lines of their output.
    output: Option<PhaseId>,
}

impl Phases {
    /// Phases without anything learned.
    pub fn new(limits: Limits) -> Phases {
        let mut phases = Phases { limits, rows: Vec::new(), output: None };
        phases.push("first_step", Class::Long);
        phases.push("step", Class::Learned);
        phases
    }

    /// The limits passed to `new`.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The phase with a section's name; it is created if needed.
    pub fn section(&mut self, name: &str) -> PhaseId {
        let known = self.rows.iter().skip(2).position(|row| row.name == name);
        let index = match known {
            Some(index) => index + 2,
            // A job that invents names without end is judged by the step.
            None if self.rows.len() >= 4096 => 1,
            None => self.push(name, class_of(name)),
        };
        let phase = PhaseId(u16::try_from(index).unwrap_or(1));
        if name == OUTPUT_LINES && index > 1 {
            self.output = Some(phase);
        }
        phase
    }

    fn push(&mut self, name: &str, class: Class) -> usize {
        let mut row = Phase {
            name: name.to_owned(),
            class,
            is_data: has_word(name, &["data", "batch", "fetch", "input"]),
            is_collective: has_word(
                name,
                &["reduce", "gather", "scatter", "broadcast", "barrier", "sync", "comm", "nccl"],
            ),
            sketch: Sketch::default(),
            steps: 0,
            newest_step: None,
            limit: Limit { span: Span::default(), from: LimitFrom::Default },
            fresh: 0,
            before: (0, Span::default()),
        };
        row.limit = compute(&self.limits, &row);
        self.rows.push(row);
        self.rows.len() - 1
    }

    /// Records the duration of a phase in a step of any rank.
    pub fn learn(&mut self, phase: PhaseId, step: u64, took: Span) {
        let Some(row) = self.rows.get_mut(usize::from(phase.0)) else { return };
        row.sketch.add(took);
        if row.newest_step.is_none_or(|newest| step > newest) {
            row.newest_step = Some(step);
            row.steps = row.steps.saturating_add(1);
        }
        row.fresh = row.fresh.saturating_add(1);
    }

    /// A new attempt counts its steps from where it resumes. What was learned is kept.
    pub fn begin_attempt(&mut self) {
        for row in &mut self.rows {
            row.newest_step = None;
        }
    }

    /// What was learned so far, for the next run.
    pub fn remembered(&self) -> Vec<PhaseMemory> {
        let row_of = |row: &Phase| {
            let own = row.sketch.longest();
            // A single long duration fades over the runs.
            let longest = match (row.before.1, own) {
                (before, Span(0)) => before,
                (before, own) => own.max(Span(own.0.saturating_add(before.0) / 2)),
            };
            let steps = row.steps.saturating_add(row.before.0);
            PhaseMemory { name: row.name.clone(), steps, longest, parts: row.sketch.parts(RECALLED) }
        };
        self.rows.iter().map(row_of).filter(PhaseMemory::is_sound).collect()
    }

    /// Loads what earlier runs of the job learned.
    pub fn recall(&mut self, remembered: &[PhaseMemory]) {
        for phase in remembered.iter().filter(|phase| phase.is_sound()) {
            let index = match phase.name.as_str() {
                "first_step" => 0,
                "step" => 1,
                name => usize::from(self.section(name).0),
            };
            let Some(row) = self.rows.get_mut(index) else { continue };
            row.sketch.add_parts(&phase.parts);
            row.before = (row.before.0.max(phase.steps), row.before.1.max(phase.longest));
            row.limit = compute(&self.limits, row);
        }
    }

    /// Computes the limits of the phases that have new samples.
    pub fn refresh(&mut self) {
        for row in self.rows.iter_mut().filter(|row| row.fresh > 0) {
            row.fresh = 0;
            row.limit = compute(&self.limits, row);
        }
    }

    /// How long a phase may take, as of the last [`refresh`](Self::refresh).
    pub fn limit(&self, phase: PhaseId) -> Limit {
        self.row(phase).limit
    }

    /// Whether the phase reads data.
    pub fn is_data(&self, phase: PhaseId) -> bool {
        self.row(phase).is_data
    }

    /// Whether ranks wait for each other in the phase.
    pub fn is_collective(&self, phase: PhaseId) -> bool {
        self.row(phase).is_collective
    }

    /// How a phase is judged.
    pub fn class(&self, phase: PhaseId) -> Class {
        self.row(phase).class
    }

    /// Whether the rank's steps are known only from lines of its output.
    pub fn is_output(&self, phase: PhaseId) -> bool {
        self.output == Some(phase)
    }

    /// The name of a phase: `first_step`, `step`, or the section's name.
    pub fn name(&self, phase: PhaseId) -> &str {
        &self.row(phase).name
    }

    /// The median duration of a phase, if known.
    pub fn median(&self, phase: PhaseId) -> Option<Span> {
        let row = self.row(phase);
        (row.steps >= MIN_STEPS).then(|| row.sketch.quantile(0.5))
    }

    /// The longest duration of a phase.
    pub fn longest(&self, phase: PhaseId) -> Span {
        self.row(phase).longest()
    }

    fn row(&self, phase: PhaseId) -> &Phase {
        self.rows.get(usize::from(phase.0)).unwrap_or(&self.rows[1])
    }
}

/// Classifies a section as rare and long by the words in its name.
fn class_of(name: &str) -> Class {
    const LONG: [&str; 12] = [
        "checkpoint",
        "ckpt",
        "save",
        "load",
        "restore",
        "eval",
        "valid",
        "test",
        "compile",
        "warmup",
        "init",
        "setup",
    ];
    // "dataload", "load_batch" and "offload" are part of every step.
    let everyday = has_word(name, &["data", "batch", "offload", "upload"]);
    if !everyday && has_word(name, &LONG) { Class::Long } else { Class::Learned }
}

fn has_word(name: &str, words: &[&str]) -> bool {
    let name = name.to_ascii_lowercase();
    words.iter().any(|word| name.contains(word))
}

fn compute(limits: &Limits, row: &Phase) -> Limit {
    // Whoever prints its steps gives the limit of a step.
    let name = if row.name == OUTPUT_LINES { "step" } else { &row.name };
    if let Some(given) = limits.given.get(name) {
        return Limit { span: *given, from: LimitFrom::Given };
    }
    let limit = by_what_is_known(limits, row);
    Limit { span: limit.span.min(limits.most(row.longest())), ..limit }
}

fn by_what_is_known(limits: &Limits, row: &Phase) -> Limit {
    let capped = Span(row.longest().0.saturating_mul(5));
    if row.class == Class::Long {
        let first = row.name == "first_step";
        let floor = match row.steps {
            // Rare phases have few samples. A first step may also have to compile what the step before found
            // compiled.
            1.. if first => Span::seconds(120),
            _ if first && row.before.0 > 0 => RECALLED_FIRST.min(limits.first_step),
            steps if steps.saturating_add(row.before.0) >= 3 => Span::seconds(300),
            _ if first => limits.first_step,
            _ => limits.long,
        };
        return Limit { span: capped.max(floor), from: LimitFrom::Default };
    }
    if row.steps < MIN_STEPS && row.before.0 >= MIN_STEPS {
        return Limit { span: capped.max(RECALLED_FLOOR), from: LimitFrom::Recalled };
    }
    if row.steps < MIN_STEPS {
        return Limit { span: capped.max(limits.unlearned), from: LimitFrom::Default };
    }
    let span = learned(&row.sketch).max(Span(row.before.1.0 / 10 * 11));
    // Programs, pipes and file systems hold lines back.
    let span = if row.name == OUTPUT_LINES { span.max(limits.passing).max(capped) } else { span };
    Limit { span, from: LimitFrom::Learned }
}

/// The limit of a phase with known durations: beyond what its own tail predicts.
fn learned(sketch: &Sketch) -> Span {
    let (median, q99, q999) = (sketch.quantile(0.5), sketch.quantile(0.99), sketch.quantile(0.999));
    let far = Span((q999.0 as f64 * 1.4) as u64);
    let spread = median.plus(Span(sketch.scaled_mad().0.saturating_mul(8)));
    // Each power of ten in rarity multiplies a heavy tail by about the same: three more take it to one in a million.
    let decade = (q999.0.max(1) as f64 / q99.0.max(1) as f64).max(1.0);
    // With few samples, both quantiles may come from one stall, and its cube may be hours.
    let most = Span(sketch.longest().0.saturating_mul(BEYOND_LONGEST));
    let tail = Span((q999.0 as f64 * decade.powi(3)) as u64).min(most);
    let seen = Span((sketch.longest().0 as f64 * 1.1) as u64);
    Span::seconds(1).max(far).max(spread).max(tail).max(seen)
}

#[cfg(test)]
mod tests;
