//! What a rank can be at, and how long that may take: learned from the job itself, or given.

use std::collections::BTreeMap;

use crate::hang::sketch::Sketch;
use crate::time::Span;

/// So many steps have to be seen before what they took is believed.
const ENOUGH: u32 = 50;

/// What a rank is at: the number of a row in [`Phases`].
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
    /// By what it usually takes.
    Learned,
    /// It comes rarely and takes long: never judged by what steps take.
    Long,
}

/// Limits that were given rather than learned, and those that hold while nothing is learned.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// By phase: `first_step`, `step`, or a section's name. Holds instead of what was learned.
    pub given: BTreeMap<String, Span>,
    /// While nothing is learned of a phase.
    pub unlearned: Span,
    /// The first step of an attempt.
    pub first_step: Span,
    /// Checkpoints, evaluation and other phases known to be long.
    pub long: Span,
    /// Nothing moved for at least so long before anything is confirmed.
    pub confirm: Span,
    /// What often passes by itself: a process in uninterruptible sleep, a collective that all have entered.
    pub passing: Span,
    /// The culprit spins: it uses CPU time and does nothing else.
    pub spinning: Span,
    /// The culprit works: it reads, writes, touches new memory, or has children that do.
    pub working: Span,
    /// Beats and no step.
    pub livelock: Span,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            given: BTreeMap::new(),
            unlearned: Span::seconds(600),
            first_step: Span::seconds(1800),
            long: Span::seconds(1800),
            // With the time of a look it stays within two seconds.
            confirm: Span::millis(1800),
            passing: Span::seconds(30),
            spinning: Span::seconds(120),
            working: Span::seconds(600),
            livelock: Span::seconds(1800),
        }
    }
}

/// How long a phase may take, and where that comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The limit.
    pub span: Span,
    /// Where it comes from.
    pub from: LimitFrom,
}

/// Where a limit comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitFrom {
    /// A person gave it.
    Given,
    /// From what the phase took in this job.
    Learned,
    /// Too little was seen of the phase.
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
    /// Samples since the limit was computed.
    fresh: u32,
}

/// All phases of a job.
#[derive(Clone, Debug)]
pub struct Phases {
    limits: Limits,
    rows: Vec<Phase>,
}

impl Phases {
    /// Nothing learned yet.
    pub fn new(limits: Limits) -> Phases {
        let mut phases = Phases { limits, rows: Vec::new() };
        phases.push("first_step", Class::Long);
        phases.push("step", Class::Learned);
        phases
    }

    /// The limits that it was made with.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The phase of a section's name, new if need be.
    pub fn section(&mut self, name: &str) -> PhaseId {
        let known = self.rows.iter().skip(2).position(|row| row.name == name);
        let index = match known {
            Some(index) => index + 2,
            // A job that makes up names without end is judged by the step.
            None if self.rows.len() >= 4096 => 1,
            None => self.push(name, class_of(name)),
        };
        PhaseId(u16::try_from(index).unwrap_or(1))
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
        };
        row.limit = compute(&self.limits, &row);
        self.rows.push(row);
        self.rows.len() - 1
    }

    /// Takes in what a phase took in a step of any rank.
    pub fn learn(&mut self, phase: PhaseId, step: u64, took: Span) {
        let Some(row) = self.rows.get_mut(usize::from(phase.0)) else { return };
        row.sketch.add(took);
        if row.newest_step.is_none_or(|newest| step > newest) {
            row.newest_step = Some(step);
            row.steps = row.steps.saturating_add(1);
        }
        row.fresh = row.fresh.saturating_add(1);
    }

    /// A new attempt counts its steps from wherever it goes on; what was learned stays.
    pub fn begin_attempt(&mut self) {
        for row in &mut self.rows {
            row.newest_step = None;
        }
    }

    /// Computes the limits of the phases of which something was learned since.
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

    /// Whether the phase is one of reading data.
    pub fn is_data(&self, phase: PhaseId) -> bool {
        self.row(phase).is_data
    }

    /// Whether the phase is one in which ranks wait for each other.
    pub fn is_collective(&self, phase: PhaseId) -> bool {
        self.row(phase).is_collective
    }

    /// How a phase is judged.
    pub fn class(&self, phase: PhaseId) -> Class {
        self.row(phase).class
    }

    /// What a phase is called: `first_step`, `step`, or the section's name.
    pub fn name(&self, phase: PhaseId) -> &str {
        &self.row(phase).name
    }

    /// What a phase takes in the middle, if it is known.
    pub fn median(&self, phase: PhaseId) -> Option<Span> {
        let row = self.row(phase);
        (row.steps >= ENOUGH).then(|| row.sketch.quantile(0.5))
    }

    /// The longest that a phase took.
    pub fn longest(&self, phase: PhaseId) -> Span {
        self.row(phase).sketch.longest()
    }

    fn row(&self, phase: PhaseId) -> &Phase {
        self.rows.get(usize::from(phase.0)).unwrap_or(&self.rows[1])
    }
}

/// Sections that come rarely and take long, by the words in their names.
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
    // "dataload", "load_batch" and "offload" are everyday work.
    let everyday = has_word(name, &["data", "batch", "offload", "upload"]);
    if !everyday && has_word(name, &LONG) { Class::Long } else { Class::Learned }
}

fn has_word(name: &str, words: &[&str]) -> bool {
    let name = name.to_ascii_lowercase();
    words.iter().any(|word| name.contains(word))
}

fn compute(limits: &Limits, row: &Phase) -> Limit {
    if let Some(given) = limits.given.get(&row.name) {
        return Limit { span: *given, from: LimitFrom::Given };
    }
    let capped = Span(row.sketch.longest().0.saturating_mul(5));
    if row.class == Class::Long {
        let first = row.name == "first_step";
        let floor = match row.steps {
            // Rare phases have few samples; and a first step may compile what the one before found compiled.
            1.. if first => Span::seconds(120),
            3.. => Span::seconds(300),
            _ if first => limits.first_step,
            _ => limits.long,
        };
        return Limit { span: capped.max(floor), from: LimitFrom::Default };
    }
    if row.steps < ENOUGH {
        return Limit { span: capped.max(limits.unlearned), from: LimitFrom::Default };
    }
    Limit { span: learned(&row.sketch), from: LimitFrom::Learned }
}

/// What a phase may take when it is known what it takes: beyond what its own tail promises.
fn learned(sketch: &Sketch) -> Span {
    let (median, q99, q999) = (sketch.quantile(0.5), sketch.quantile(0.99), sketch.quantile(0.999));
    let far = Span((q999.0 as f64 * 1.4) as u64);
    let spread = median.plus(Span(sketch.scaled_mad().0.saturating_mul(8)));
    // Each power of ten in rarity multiplies a heavy tail by about the same: three more take it to one in a million.
    let decade = (q999.0.max(1) as f64 / q99.0.max(1) as f64).max(1.0);
    let tail = Span((q999.0 as f64 * decade.powi(3)) as u64);
    let seen = Span((sketch.longest().0 as f64 * 1.1) as u64);
    Span::seconds(1).max(far).max(spread).max(tail).max(seen)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learned_from(phases: &mut Phases, phase: PhaseId, millis: impl IntoIterator<Item = u64>) {
        for (step, span) in millis.into_iter().enumerate() {
            phases.learn(phase, step as u64, Span::millis(span));
        }
        phases.refresh();
    }

    #[test]
    fn little_seen_is_not_believed() {
        let mut phases = Phases::new(Limits::default());
        learned_from(&mut phases, PhaseId::STEP, [100; 49]);
        assert_eq!(phases.limit(PhaseId::STEP).from, LimitFrom::Default);
        learned_from(&mut phases, PhaseId::STEP, [100; 51]);
        assert_eq!(phases.limit(PhaseId::STEP), Limit { span: Span::seconds(1), from: LimitFrom::Learned });
    }

    #[test]
    fn eight_ranks_are_not_eight_times_the_steps() {
        let mut phases = Phases::new(Limits::default());
        for step in 0..10 {
            for _ in 0..8 {
                phases.learn(PhaseId::STEP, step, Span::millis(100));
            }
        }
        phases.refresh();
        assert_eq!(phases.limit(PhaseId::STEP).from, LimitFrom::Default);
    }

    #[test]
    fn an_even_pace_is_judged_at_less_than_one_and_a_half_of_its_quantile() {
        let mut phases = Phases::new(Limits::default());
        learned_from(&mut phases, PhaseId::STEP, (0..1000).map(|n| 10_000 + n % 200));
        let limit = phases.limit(PhaseId::STEP).span.as_seconds();
        assert!((14.2..=15.3).contains(&limit), "{limit}");
    }

    #[test]
    fn a_heavy_tail_is_given_more_room() {
        let mut phases = Phases::new(Limits::default());
        // A tenth takes twice, a hundredth four times, a thousandth eight times as long.
        let tail = |n: u64| match n {
            n if n % 1000 == 0 => 8_000,
            n if n % 100 == 0 => 4_000,
            n if n % 10 == 0 => 2_000,
            _ => 1_000,
        };
        learned_from(&mut phases, PhaseId::STEP, (0..3000).map(tail));
        assert!(phases.limit(PhaseId::STEP).span >= Span::seconds(11));
    }

    #[test]
    fn long_sections_are_never_judged_by_quantiles() {
        let mut phases = Phases::new(Limits::default());
        for (name, class) in [
            ("checkpoint", Class::Long),
            ("Validation", Class::Long),
            ("compile_model", Class::Long),
            ("dataloader", Class::Learned),
            ("forward", Class::Learned),
        ] {
            let phase = phases.section(name);
            assert_eq!(phases.class(phase), class, "{name}");
        }
        let checkpoint = phases.section("checkpoint");
        learned_from(&mut phases, checkpoint, [10; 1000]);
        assert_eq!(phases.limit(checkpoint).span, Span::seconds(300));
    }

    #[test]
    fn a_given_limit_stands() {
        let given = [("step".to_owned(), Span::seconds(3))].into();
        let mut phases = Phases::new(Limits { given, ..Limits::default() });
        learned_from(&mut phases, PhaseId::STEP, [10_000; 1000]);
        assert_eq!(phases.limit(PhaseId::STEP), Limit { span: Span::seconds(3), from: LimitFrom::Given });
    }
}
