//! When lines of a rank's output were written, and how many steps the job completed after each: lines printed before healthy steps are
//! not the cause of a failure.
//!
//! The launcher polls the length of the file, so a line was written between two polls. If ranks send no heartbeats, steps are counted
//! from the programs' output (`attribution::progress`). All counts are lower bounds: a step counts for a line only if it certainly
//! started after the line was written.

use crate::attribution::progress::{is_progress, step_of};
use mainstay_model::entry::{LineTime, StepDone};
use mainstay_model::time::Mono;
use mainstay_model::timeline::{Moment, Timeline};

/// The steps that a rank completed in an attempt, as reported by its heartbeat page.
#[derive(Clone, Debug, Default)]
pub struct Steps {
    /// When each started. The value is the number of completed steps including it.
    started: Timeline,
    done: u64,
}

impl Steps {
    /// Adds a completed step.
    pub fn completed(&mut self, step: &StepDone) {
        self.done += 1;
        self.started.push(Moment { not_before: step.start, at: step.start, value: self.done });
    }

    /// How many of them started at or after this time. `None` if the rank reported no step.
    pub fn started_since(&self, at: Mono) -> Option<u64> {
        let first = self.started.since(at);
        (self.done > 0).then(|| first.map_or(0, |first| self.done + 1 - first.value))
    }
}

/// The end of a file that a rank writes.
#[derive(Clone, Copy, Debug)]
pub struct Written<'a> {
    /// The content from `start` on.
    pub bytes: &'a [u8],
    /// The offset of `bytes` in the file.
    pub start: u64,
    /// The file's length over time.
    pub growth: &'a Timeline,
}

/// The completed steps that a file reports.
#[derive(Clone, Debug, Default)]
pub struct Reports {
    reports: Vec<Report>,
}

#[derive(Clone, Copy, Debug)]
struct Report {
    /// The offset of the end of its line.
    end: u64,
    /// The earliest time at which it was written.
    not_before: Mono,
    /// How many steps were certainly done between this report and the last one.
    later: u64,
}

impl Reports {
    /// Parses a file's reports. Each state of a progress bar that redraws itself is one.
    pub fn of(written: Written<'_>) -> Reports {
        let mut found = Vec::new();
        let mut end = written.start;
        for piece in written.bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            end += piece.len() as u64;
            let line = String::from_utf8_lossy(piece);
            if is_progress(&line) {
                let not_before = written.growth.reached(end).map_or(Mono::default(), |seen| seen.not_before);
                found.push((end, not_before, step_of(&line)));
            }
        }
        Reports { reports: counted(&found) }
    }

    /// Whether there are no reports.
    pub fn is_empty(&self) -> bool {
        self.reports.is_empty()
    }

    /// The steps that certainly started after this offset of the same file was written.
    fn after_place(&self, end: u64) -> u64 {
        self.later(|report| report.end > end)
    }

    /// The steps that certainly started after this time.
    fn after_time(&self, at: Mono) -> u64 {
        self.later(|report| report.not_before >= at)
    }

    /// Relies on ascending offsets and times. The step of the first report that counts may have started before.
    fn later(&self, counts: impl Fn(&Report) -> bool) -> u64 {
        let first = self.reports.partition_point(|report| !counts(report));
        self.reports.get(first).map_or(0, |report| report.later)
    }
}

/// Counts the steps from each report to the last: by step numbers while these only increase, else one per change.
fn counted(found: &[(u64, Mono, Option<u64>)]) -> Vec<Report> {
    let mut reports: Vec<Report> = Vec::with_capacity(found.len());
    let last_number = found.last().and_then(|(_, _, step)| *step);
    let (mut changes, mut only_grows) = (0, true);
    let mut following: Option<Option<u64>> = None;
    for &(end, not_before, step) in found.iter().rev() {
        if let Some(following) = following {
            only_grows &= step.is_some() && step <= following;
            changes += u64::from(step.is_none() || step != following);
        }
        let later = match (step, last_number) {
            (Some(step), Some(last)) if only_grows => last - step,
            _ => changes,
        };
        reports.push(Report { end, not_before, later });
        following = Some(step);
    }
    reports.reverse();
    reports
}

/// The source of the step count after a line.
#[derive(Clone, Copy, Debug)]
pub enum Progress<'a> {
    /// The steps of the rank that wrote it.
    Steps(&'a Steps),
    /// The reports of the line's own file and of all other files.
    Reports {
        /// The line's own file.
        own: &'a Reports,
        /// All other files.
        others: &'a [&'a Reports],
    },
}

/// When the line that ends at `end`, including its newline, was written, and how many steps followed. A line that no poll has covered
/// was written by `now`.
pub fn line_time(end: u64, growth: &Timeline, now: Mono, progress: Progress<'_>) -> LineTime {
    let at = growth.reached(end).map_or(now, |seen| seen.at).min(now);
    let steps_after = match progress {
        Progress::Steps(steps) => steps.started_since(at),
        Progress::Reports { own, others } => {
            let is_known = !own.is_empty() || others.iter().any(|other| !other.is_empty());
            let others = others.iter().map(|other| other.after_time(at));
            is_known.then(|| others.fold(own.after_place(end), u64::max))
        }
    };
    LineTime { at, steps_after }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that is polled every 100 ns: at poll n it has the first n of these texts.
    fn file(texts: &[&str]) -> (Vec<u8>, Timeline) {
        let (mut bytes, mut growth) = (Vec::new(), Timeline::default());
        for (look, text) in texts.iter().enumerate() {
            let look = look as u64;
            bytes.extend_from_slice(text.as_bytes());
            let value = bytes.len() as u64;
            growth.push(Moment { not_before: Mono(look * 100), at: Mono(look * 100 + 100), value });
        }
        (bytes, growth)
    }

    fn reports(texts: &[&str]) -> Reports {
        let (bytes, growth) = file(texts);
        Reports::of(Written { bytes: &bytes, start: 0, growth: &growth })
    }

    fn own(texts: &[&str], line: &str) -> LineTime {
        let (bytes, growth) = file(texts);
        let text = String::from_utf8(bytes.clone()).expect("text");
        let end = (text.find(line).expect("the line") + line.len()) as u64;
        let own = Reports::of(Written { bytes: &bytes, start: 0, growth: &growth });
        line_time(end, &growth, Mono(9999), Progress::Reports { own: &own, others: &[] })
    }

    #[test]
    fn steps_in_the_same_file_count_by_their_order() {
        let texts =
            ["UserWarning: x\n", "step 1 loss 2.0\nstep 2 loss 1.9\n", "late\n", "step 3 loss 1.8\nlast\n"];
        // Step 1 may have been in progress when the warning was printed.
        assert_eq!(own(&texts, "UserWarning: x"), LineTime { at: Mono(100), steps_after: Some(2) });
        assert_eq!(own(&texts, "late"), LineTime { at: Mono(300), steps_after: Some(0) });
        assert_eq!(own(&texts, "last"), LineTime { at: Mono(400), steps_after: Some(0) });
    }

    #[test]
    fn reports_of_every_tenth_step_count_all_of_them() {
        let texts = ["x\n", "iter 100: loss 2.0, time 1ms\n", "iter 110: loss 2.0, time 1ms\n"];
        assert_eq!(own(&texts, "x").steps_after, Some(10));
        // Numbers that start again in each epoch cannot be subtracted.
        let texts =
            ["x\n", "epoch 1 step 90 loss 1.0\n", "epoch 1 step 99 loss 1.0\n", "epoch 2 step 9 loss 1.0\n"];
        assert_eq!(own(&texts, "x").steps_after, Some(2));
        let texts = ["x\n", "{'loss': 2.0, 'epoch': 0.1}\n{'loss': 2.0, 'epoch': 0.2}\n"];
        assert_eq!(own(&texts, "x").steps_after, Some(1));
    }

    #[test]
    fn each_state_of_a_bar_is_a_report() {
        let bar = "\r  1%|▏| 1/100 [00:01<01:39, 1.0it/s]\r  2%|▏| 2/100 [00:02<01:38, 1.0it/s]\r  3%|▏| 3/100 [00:03<01:37, 1.0it/s]";
        assert_eq!(own(&["x\n", bar], "x").steps_after, Some(2));
    }

    #[test]
    fn a_line_precedes_steps_of_another_file_only_if_a_poll_is_between() {
        let growth = file(&["UserWarning: x\n"]).1;
        let after = |texts: &[&str]| {
            let (own, other) = (Reports::default(), reports(texts));
            line_time(14, &growth, Mono(9999), Progress::Reports { own: &own, others: &[&other] }).steps_after
        };
        // Found in the same poll as the warning: the order is unknown.
        let steps =
            |numbers: &[u64]| numbers.iter().map(|step| format!("step {step} loss 2\n")).collect::<String>();
        assert_eq!(after(&[&steps(&[1, 2, 3])]), Some(0));
        assert_eq!(after(&["", &steps(&[1, 2, 3])]), Some(2));
        assert_eq!(after(&[&steps(&[1]), &steps(&[2, 3])]), Some(1));
        assert_eq!(after(&["no number\n"]), None);
    }

    #[test]
    fn a_line_that_no_poll_covered_was_written_by_now_and_has_no_steps_after_it() {
        let (bytes, growth) = file(&["step 1 loss 2\n"]);
        let mut more = bytes.clone();
        more.extend_from_slice(b"step 2 loss 2\nstep 3 loss 2\n");
        let other = Reports::of(Written { bytes: &more, start: 0, growth: &growth });
        let progress = Progress::Reports { own: &Reports::default(), others: &[&other] };
        let time = line_time(5, &Timeline::default(), Mono(7), progress);
        assert_eq!(time, LineTime { at: Mono(7), steps_after: Some(0) });
    }

    #[test]
    fn steps_of_the_page_count_by_their_own_times() {
        let mut steps = Steps::default();
        assert_eq!(steps.started_since(Mono(0)), None);
        for step in 0..50_000 {
            let (start, end) = (Mono(step * 10), Mono(step * 10 + 10));
            steps.completed(&StepDone { step, start, end, ..StepDone::default() });
        }
        assert_eq!(steps.started_since(Mono(499_990)), Some(1));
        assert_eq!(steps.started_since(Mono(499_985)), Some(1));
        assert_eq!(steps.started_since(Mono(499_991)), Some(0));
        let early = steps.started_since(Mono(1000)).expect("steps");
        assert!((40_000..=49_900).contains(&early), "{early}");
    }
}
