//! Converts recorded sections of ranks to steps that can be judged, for traces that were recorded elsewhere.

use std::collections::BTreeMap;

use super::judge::Judge;
use super::learn;
use super::link::Links;
use super::measurements::{Limits, Row};
use super::peers::{Peers, Role};
use super::repeated_steps;
use super::score::median;
use super::section::SectionKind;
use super::sentences::{Names, OpenFindings};
use super::times::Times;
use mainstay_model::finding::{Finding, Hint};
use mainstay_model::id::{Attempt, Rank};

/// One section of one rank in one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TraceSpan {
    /// The rank.
    pub rank: u32,
    /// The step.
    pub step: u64,
    /// The attempt. It distinguishes steps that are repeated after a restart.
    pub attempt: u64,
    /// The section's name; empty for the step as a whole.
    pub section: String,
    /// The start, in seconds. `None` if only its length is known.
    pub start: Option<f64>,
    /// The duration, in seconds.
    pub duration: f64,
    /// The rank's pipeline stage.
    pub stage: Option<u32>,
    /// Its kind of work, if ranks of a stage differ in that.
    pub role: Option<String>,
    /// The rank's host.
    pub host: Option<String>,
    /// The rank's device.
    pub device: Option<String>,
    /// For a collective: the communicator.
    pub communicator: Option<String>,
    /// For a collective: its number within the communicator and step.
    pub sequence: Option<u64>,
}

/// The result for a trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Ranks seen.
    pub ranks: usize,
    /// Steps seen.
    pub steps: usize,
    /// How self time was determined, as text.
    pub self_time: &'static str,
    /// What the trace lacks for a good judgement, one sentence each.
    pub notes: Vec<String>,
    /// Findings in the order of their reports. A finding that is over is reported again.
    pub findings: Vec<Finding>,
}

/// With fewer steps the judge has no findings.
const FEWEST_STEPS: usize = 8;

/// The labels of a rank from its spans.
#[derive(Clone, Debug, Default)]
struct RankLabels {
    stage: Option<u32>,
    role: Option<String>,
    host: Option<String>,
    device: Option<String>,
}

/// A step: attempt and number.
type Step = (u64, u64);

/// A collective: step, communicator, number within both, section.
type Exchange = (Step, String, u64, String);

/// A trace, added span by span.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    about: BTreeMap<u32, RankLabels>,
    steps: BTreeMap<Step, BTreeMap<u32, Times>>,
    exchanges: BTreeMap<Exchange, BTreeMap<u32, f64>>,
    kinds: BTreeMap<String, SectionKind>,
    waits_named: bool,
    work_named: bool,
    /// Whether stages were learned from the trace instead of given in it.
    learned: bool,
}

impl Trace {
    /// Adds a span. A span with a duration that is negative or not a number is ignored.
    pub fn push(&mut self, span: TraceSpan) {
        if !span.duration.is_finite() || span.duration < 0.0 {
            return;
        }
        let about = self.about.entry(span.rank).or_default();
        about.stage = about.stage.or(span.stage);
        about.role = about.role.take().or(span.role);
        about.host = about.host.take().or(span.host);
        about.device = about.device.take().or(span.device);
        let step = (span.attempt, span.step);
        let times = self.steps.entry(step).or_default().entry(span.rank).or_default();
        if span.section.is_empty() || span.section == "step" {
            // A step reported twice was repeated: the last time counts.
            if times.whole.is_none() || span.start >= times.whole_start {
                (times.whole, times.whole_start) = (Some(span.duration), span.start);
            }
            return;
        }
        let kind = match self.kinds.get(&span.section) {
            Some(kind) => *kind,
            None => {
                let kind = SectionKind::from_name(&span.section);
                self.kinds.insert(span.section.clone(), kind);
                kind
            }
        };
        let of_kind = match kind {
            SectionKind::Wait => {
                self.waits_named = true;
                &mut times.wait
            }
            SectionKind::Pause => &mut times.pause,
            SectionKind::Data | SectionKind::Compute | SectionKind::Work => {
                self.work_named = true;
                &mut times.work
            }
        };
        // Without start times, sections are laid end to end: their union is then their sum.
        let begin = span.start.unwrap_or_else(|| of_kind.last().map_or(0.0, |(_, end)| *end));
        of_kind.push((begin, begin + span.duration));
        if let Some(communicator) = span.communicator.filter(|_| kind == SectionKind::Wait) {
            let key = (step, communicator, span.sequence.unwrap_or(0), span.section);
            *self.exchanges.entry(key).or_default().entry(span.rank).or_default() += span.duration;
        }
    }

    /// Whether no span was added.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Judges the trace from its first step to its last.
    pub fn judge(&mut self, limits: Limits, hints: &[Hint]) -> Report {
        let ranks: Vec<u32> = self.about.keys().copied().collect();
        let again = repeated_steps::keep_the_last(&mut self.steps);
        self.learn_stages();
        let (peers, names) = self.peers();
        let mut judge = Judge::new(peers, limits);
        let mut report = Report {
            ranks: ranks.len(),
            steps: self.steps.len(),
            self_time: self.self_time(),
            notes: Vec::new(),
            findings: Vec::new(),
        };
        let (mut self_times, mut waits, mut changes) = (Vec::new(), Vec::new(), Vec::new());
        let (mut standing, mut took_by_step) = (OpenFindings::default(), BTreeMap::new());
        for ((attempt, step), of_ranks) in &mut self.steps {
            self_times.clear();
            waits.clear();
            let mut lengths = Vec::new();
            for rank in &ranks {
                let times = of_ranks.get_mut(rank);
                let measured = times.map(|times| times.measure(self.work_named, self.waits_named));
                let measured = measured.unwrap_or_default();
                self_times.push(measured.own.unwrap_or(f32::NAN));
                waits.push(measured.wait.unwrap_or(f32::NAN));
                lengths.extend(measured.took);
            }
            let took = median(&mut lengths);
            took_by_step.insert((*attempt, *step), took);
            changes.clear();
            judge.step(Row { step: *step, self_times: &self_times, waits: &waits, took }, &mut changes);
            for change in &changes {
                let number = numbered(&report.findings) + 1;
                let place = (judge.peers(), &names, hints);
                let attempt = Attempt(u32::try_from(*attempt).unwrap_or(u32::MAX));
                report.findings.extend(standing.report(change, number, attempt, place));
            }
        }
        let links = self.links().judge(limits, numbered(&report.findings) + 1, |step| {
            took_by_step.get(&step).copied().unwrap_or(f32::NAN)
        });
        report.findings.extend(links);
        report.notes = self.notes(again);
        report
    }

    fn links(&self) -> Links {
        let mut links = Links::default();
        for ((step, communicator, _, section), members) in &self.exchanges {
            links.push(*step, communicator, section, members);
        }
        links.name_hosts(|rank| self.about.get(&rank)?.host.clone());
        links
    }

    /// Learns the stages from the first steps, if they are not given. Whole steps are not sufficient for that.
    fn learn_stages(&mut self) {
        let is_given = |about: &RankLabels| about.stage.is_some() || about.role.is_some();
        if self.about.values().any(is_given) || !(self.work_named || self.waits_named) {
            return;
        }
        let (work, waits) = (self.work_named, self.waits_named);
        let mut rows = Vec::new();
        for of_ranks in self.steps.values_mut().take(learn::MAX_STEPS) {
            let own = |rank: &u32| of_ranks.get_mut(rank)?.measure(work, waits).own;
            rows.push(self.about.keys().map(own).map(|own| own.unwrap_or(f32::NAN)).collect());
        }
        let Some(stages) = learn::stages(&rows) else { return };
        for (about, stage) in self.about.values_mut().zip(stages) {
            about.stage = Some(stage);
        }
        self.learned = true;
    }

    /// Notes about the trace for the reader, in addition to the findings.
    fn notes(&self, again: usize) -> Vec<String> {
        let mut notes = Vec::new();
        let (ranks, steps) = (self.about.len(), self.steps.len());
        if ranks < 2 {
            notes.push("a single rank has no peer to compare with".to_owned());
        }
        if steps < FEWEST_STEPS {
            notes.push(format!("{steps} step(s) are too few to judge: it takes at least {FEWEST_STEPS}"));
        }
        if again > 0 {
            notes.push(format!(
                "{again} step(s) of ranks were done again after a restart: the last time counts"
            ));
        }
        let mut seen: BTreeMap<u32, usize> = BTreeMap::new();
        self.steps.values().flat_map(BTreeMap::keys).for_each(|rank| *seen.entry(*rank).or_default() += 1);
        let rare = seen.iter().filter(|(_, count)| **count * 5 < steps * 3).count();
        if rare > 0 {
            notes.push(format!(
                "{rare} of {ranks} rank(s) reported less than 60 % of the steps and are judged by few"
            ));
        }
        if self.learned {
            notes.push(
                "stages are unknown: ranks are compared with those whose first steps look similar".to_owned(),
            );
        }
        if !self.work_named && !self.waits_named {
            notes.push(
                "no sections are known: where ranks wait for each other in each step, all of them take the same time for it"
                    .to_owned(),
            );
        }
        notes
    }

    fn self_time(&self) -> &'static str {
        match (self.work_named, self.waits_named) {
            (true, true) => "the time in sections of work",
            (false, true) => "the step without the time in sections that wait",
            (true, false) => "the time in sections (none of them waits for other ranks)",
            (false, false) => "the whole step (no sections are known)",
        }
    }

    fn peers(&self) -> (Peers, Names) {
        let mut groups: Vec<(Option<u32>, Option<&str>)> =
            self.about.values().map(|about| (about.stage, about.role.as_deref())).collect();
        groups.sort_unstable();
        groups.dedup();
        let mut hosts: Vec<&str> = self.about.values().filter_map(|about| about.host.as_deref()).collect();
        hosts.sort_unstable();
        hosts.dedup();
        let place = |at: Result<usize, usize>| at.unwrap_or(0) as u32;
        let role = |about: &RankLabels| Role {
            group: place(groups.binary_search(&(about.stage, about.role.as_deref()))),
            stage: about.stage,
            host: about.host.as_deref().map(|host| place(hosts.binary_search(&host))),
        };
        let names = Names {
            ranks: self.about.keys().map(|rank| Rank(*rank)).collect(),
            devices: self.about.values().map(|about| about.device.clone()).collect(),
            hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
        };
        (Peers::new(self.about.values().map(role).collect()), names)
    }
}

/// The number of findings. A finding that is over has the number of its start.
fn numbered(findings: &[Finding]) -> u64 {
    findings.iter().filter(|finding| !finding.over).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_model::finding::FindingKind;

    /// Ranks work for `work` seconds and wait until 0.3 s have passed. They start at `start`.
    fn push(trace: &mut Trace, rank: u32, step: u64, start: f64, work: f64) {
        let span = |section: &str, start: f64, duration: f64| TraceSpan {
            rank,
            step,
            section: section.to_owned(),
            start: Some(start),
            duration,
            communicator: (section == "allreduce").then(|| format!("group {}", rank / 2)),
            ..TraceSpan::default()
        };
        trace.push(span("forward", start, work));
        trace.push(span("allreduce", start + work, 0.3 - work));
    }

    fn wobble(rank: u32, step: u64) -> f64 {
        ((u64::from(rank) * 7 + step * 13) % 11) as f64 * 1e-4
    }

    #[test]
    fn steps_that_were_repeated_after_a_restart_make_no_rank_slow() {
        let mut trace = Trace::default();
        for rank in 0..8 {
            // After step 29 all start again at step 20, except ranks 6 and 7, which had not got that far.
            let first: Vec<u64> = (0..if rank < 6 { 30 } else { 20 }).collect();
            let all = first.iter().map(|step| (*step, 0.0)).chain((20..50).map(|step| (step, 60.0)));
            all.for_each(|(step, later)| {
                push(&mut trace, rank, step, step as f64 * 0.3 + later, 0.1 + wobble(rank, step))
            });
        }
        let report = trace.judge(Limits::default(), &[]);
        assert_eq!(report.findings, []);
        assert!(report.notes.iter().any(|note| note.contains("done again")), "{:?}", report.notes);
    }

    #[test]
    fn unsynchronized_clocks_make_no_slow_link() {
        let mut trace = Trace::default();
        for (step, rank) in (0..40).flat_map(|step| (0..8).map(move |rank| (step, rank))) {
            // Each host's clock is seconds away from the others'.
            let start = step as f64 * 0.3 + f64::from(rank) * 1.7;
            push(&mut trace, rank, step, start, 0.1 + wobble(rank, step));
        }
        assert_eq!(trace.judge(Limits::default(), &[]).findings, []);
    }

    #[test]
    fn a_trace_that_is_too_short_or_of_one_rank_has_notes() {
        let mut trace = Trace::default();
        (0..4).for_each(|step| push(&mut trace, 0, step, step as f64, 0.1));
        let report = trace.judge(Limits::default(), &[]);
        assert!(report.findings.is_empty() && report.notes.len() == 2, "{report:?}");
    }

    #[test]
    fn stages_without_a_column_are_learned() {
        let mut trace = Trace::default();
        for (step, rank) in (0..40).flat_map(|step| (0..8).map(move |rank| (step, rank))) {
            let work = if rank < 4 { 0.1 } else { 0.14 };
            push(&mut trace, rank, step, step as f64 * 0.3, work + wobble(rank, step));
        }
        let report = trace.judge(Limits::default(), &[]);
        let kinds: Vec<FindingKind> = report.findings.iter().map(|finding| finding.what).collect();
        assert_eq!(kinds, [FindingKind::StageImbalance], "{report:?}");
    }
}
