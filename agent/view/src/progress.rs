//! What one line of a terminal shows of a job that runs.

use mainstay_model::finding::FindingKind;
use mainstay_model::time::Mono;

use crate::node::{JobPhase, JobView};

/// The parts of the line, the most important first: a narrow terminal shows as many as fit. `rate`: steps per second.
/// `checkpoint`: the age of the newest whole checkpoint in seconds.
pub fn parts(job: &JobView, now: Mono, rate: Option<f64>, checkpoint: Option<f64>) -> Vec<String> {
    let mut parts = vec![job.id.0.clone()];
    let in_attempt = now.since(job.attempt_started).as_seconds();
    match job.phase {
        JobPhase::Starting => parts.push(format!("starting for {}", spoken(in_attempt))),
        JobPhase::Recovering => parts.push("recovering".to_owned()),
        JobPhase::Stopping => parts.push("stopping".to_owned()),
        JobPhase::Running | JobPhase::Ended(_) | JobPhase::Lost => {}
    }
    if let Some(step) = job.step {
        parts.push(match job.total_steps() {
            Some(total) => format!("step {step} of {total}"),
            None => format!("step {step}"),
        });
    }
    if let Some(rate) = rate.filter(|_| job.phase == JobPhase::Running) {
        parts.push(paced(rate));
        parts.extend(remaining(job, rate).map(|left| format!("{} left", spoken(left))));
    }
    if job.hang.is_some() {
        parts.push("hangs".to_owned());
    }
    let slow = job.findings.values().find(|finding| finding.what == FindingKind::SlowRank);
    if let Some(slow) = slow
        && let Some(rank) = slow.ranks.first()
    {
        let cost = slow.cost_percent.map_or_else(String::new, |percent| format!(" (costs {percent:.0} %)"));
        parts.push(format!("{rank} is slow{cost}"));
    }
    if let Some(age) = checkpoint {
        parts.push(format!("checkpoint {} ago", spoken(age)));
    }
    if job.restarts > 0 {
        parts.push(format!("restart {} of {}", job.restarts, job.spec.max_restarts));
    }
    parts
}

/// Seconds to the last step of a job at this rate in steps per second. None if the number of its steps is unknown.
pub fn remaining(job: &JobView, rate: f64) -> Option<f64> {
    let left = job.total_steps()?.saturating_sub(job.step?);
    Some(left as f64 / rate).filter(|seconds| seconds.is_finite())
}

/// Steps per second, or the time of a step if it takes more than a second.
fn paced(rate: f64) -> String {
    if rate >= 1.0 { format!("{rate:.1} steps/s") } else { format!("{} per step", spoken(1.0 / rate)) }
}

/// As many parts as fit into a line of this many columns. Control characters are removed.
pub fn line(parts: &[String], columns: usize) -> String {
    let clean = |part: &String| part.chars().filter(|letter| !letter.is_control()).collect::<String>();
    let mut line = String::new();
    for part in parts.iter().map(clean) {
        let between = if line.is_empty() { "" } else { "  " };
        let length = line.chars().count() + between.len() + part.chars().count();
        if length > columns {
            if line.is_empty() {
                line.extend(part.chars().take(columns));
            }
            break;
        }
        line.push_str(between);
        line.push_str(&part);
    }
    line
}

/// A duration in words: "0.3 s", "42 s", "3 min 5 s", "2 h 10 min", "3 d 4 h".
pub fn spoken(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    match whole {
        _ if seconds < 9.95 => format!("{:.1} s", seconds.max(0.0)),
        0..=59 => format!("{whole} s"),
        60..=3599 => format!("{} min {} s", whole / 60, whole % 60),
        3600..=86_399 => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
        _ => format!("{} d {} h", whole / 86_400, whole % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mainstay_model::entry::{Body, Entry, Fact, JobSpec};
    use mainstay_model::finding::Finding;
    use mainstay_model::id::{Attempt, BootId, JobId, Pid, Rank};
    use mainstay_model::time::Stamp;
    use mainstay_model::verdict::FaultDomain;

    use super::*;
    use crate::node::{BeatView, NodeView, RankPhase, RankView};

    fn at(second: u64) -> Mono {
        Mono(second * 1_000_000_000)
    }

    /// A job that started a second after the boot of its host.
    fn job() -> JobView {
        let mut view = NodeView::default();
        let id = JobId("exp".to_owned());
        view.apply(&Entry {
            seq: 1,
            at: Stamp { mono: at(1), ..Stamp::default() },
            boot: BootId::default(),
            job: Some(id.clone()),
            origin_seq: None,
            body: Body::Fact(Fact::JobStarted(JobSpec::default())),
        });
        view.jobs.remove(&id).unwrap()
    }

    fn shown(job: &JobView, rate: Option<f64>, checkpoint: Option<f64>, columns: usize) -> String {
        line(&parts(job, at(4), rate, checkpoint), columns)
    }

    #[test]
    fn a_job_is_on_one_line() {
        let mut job = job();
        testing::snapshot!("progress", "a job that starts", shown(&job, None, None, 80));
        (job.phase, job.step) = (JobPhase::Running, Some(1200));
        testing::snapshot!("progress", "a job that trains", shown(&job, Some(9.9), Some(42.0), 80));
        testing::snapshot!("progress", "steps of some seconds", shown(&job, Some(0.25), None, 80));
        let beat = BeatView { total_steps: Some(5000), ..BeatView::default() };
        let rank = RankView {
            rank: Rank(0),
            local_rank: 0,
            pid: Pid(1),
            start_ticks: None,
            host: None,
            page: None,
            phase: RankPhase::Connected,
            refusal: None,
            beat: Some(beat),
            last_step: None,
        };
        job.ranks.insert(rank.rank, Arc::new(rank));
        testing::snapshot!(
            "progress",
            "the number of steps is known",
            shown(&job, Some(9.9), Some(42.0), 80)
        );
        job.step = Some(5001);
        assert_eq!((remaining(&job, 9.9), remaining(&job, 0.0)), (Some(0.0), None));
        job.ranks.clear();
        job.step = Some(1200);
        job.restarts = 1;
        Arc::make_mut(&mut job.spec).max_restarts = 3;
        let slow = Finding {
            finding: 1,
            attempt: Attempt(0),
            what: FindingKind::SlowRank,
            over: false,
            headline: String::new(),
            domain: FaultDomain::Unknown,
            confidence: 0.9,
            ranks: vec![Rank(3)],
            device: None,
            host: None,
            stage: None,
            since_step: 1000,
            step: 1100,
            cost_percent: Some(12.3),
            evidence: Vec::new(),
            last_agreed_step: None,
            doubtful_steps: Vec::new(),
        };
        job.findings.insert(1, slow);
        let whole = shown(&job, Some(9.9), Some(42.0), 100);
        testing::snapshot!("progress", "a slow rank after a restart", whole);
        for columns in 0..whole.chars().count() {
            let line = shown(&job, Some(9.9), Some(42.0), columns);
            assert!(line.chars().count() <= columns && whole.starts_with(&line), "{columns}: {line}");
        }
        job.phase = JobPhase::Recovering;
        testing::snapshot!("progress", "a job that recovers", shown(&job, Some(9.9), None, 80));
    }

    #[test]
    fn a_name_cannot_drive_the_terminal() {
        assert_eq!(line(&["a\x1b[2J\nb".to_owned()], 80), "a[2Jb");
    }

    #[test]
    fn times_are_spoken_as_people_do() {
        let response: Vec<String> =
            [-1.0, 0.04, 9.94, 9.96, 59.4, 61.0, 7321.0, 100_000.0].map(spoken).into();
        assert_eq!(
            response,
            ["0.0 s", "0.0 s", "9.9 s", "10 s", "59 s", "1 min 1 s", "2 h 2 min", "1 d 3 h"]
        );
    }
}
