//! Completes the verdict on a failed attempt: passes its ranks' output and exits to the attribution.

use std::collections::BTreeMap;

use crate::attribution::catalog::{Catalog, Determinism};
use crate::attribution::class::Class;
use crate::attribution::exit::{Exit, Status};
use crate::attribution::explain::{self, Report};
use crate::attribution::fuse::JobSoFar;
use crate::attribution::scan::{Findings, Kind, RelevantLine, Scan};
use crate::attribution::{Attribution, Evidence, Observation, attribute, scan};
use crate::host_evidence;
use crate::root_rank::RankEnd;
use mainstay_model::entry::{ExitStatus, LineTime, Note};
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::Rank;
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::{Cause, Doubts, FaultDomain, Verdict};

mod discount;

/// The class of a verdict on a failure of Mainstay's own client.
pub const CLIENT_FAILED: &str = "mainstay_client";

/// Log-odds of an OOM kill at the time of a SIGKILL.
const OOM_KILL_LOG_ODDS: f64 = 4.0;

/// Lines of evidence that a verdict quotes.
const MAX_QUOTED_LINES: usize = 3;

/// Nanoseconds of an hour.
const NANOSECONDS_PER_HOUR: f64 = 3.6e12;

/// How an attempt failed.
#[derive(Clone, Debug, Default)]
pub struct FailedAttempt {
    /// How its ranks ended, and their last output.
    pub ends: BTreeMap<Rank, RankEnd>,
    /// How long it ran.
    pub lived: Span,
    /// The kernel's OOM kills since it started: of the job's control group, or of the whole host if only that is counted.
    pub out_of_memory_kills: u64,
    /// Why the host had no process, thread or file descriptor left, if it was seen to have none.
    pub exhausted: Option<String>,
}

/// Whether a verdict is that a limit of the host or of a control group was reached, by the kernel's own count. That
/// passes, whatever the program did.
pub fn is_exhaustion(verdict: &Verdict) -> bool {
    verdict.domain == FaultDomain::Infrastructure
        && verdict.class.as_deref() == Some(Class::HostResource.name())
}

/// Sets a verdict on a failure for which a limit was reached.
pub fn blame_the_limit(verdict: &mut Verdict, limit: &str) {
    verdict.domain = FaultDomain::Infrastructure;
    verdict.class = Some(Class::HostResource.name().to_owned());
    verdict.deterministic = false;
    verdict.evidence.push(limit.to_owned());
}

/// Adds to the verdict what the output of the ranks that failed by themselves shows. A verdict without such evidence does not change.
///
/// The kernel lines and unhealthy components in the host evidence count like the ranks' output. The prior depends on how long the
/// attempt ran, on how many ranks, and on whether it completed a step.
pub fn complete(
    verdict: &mut Verdict,
    catalog: &Catalog,
    failed: &FailedAttempt,
    host_evidence: &HostEvidence,
) {
    let mut evidence = evidence(catalog, failed);
    if failed.out_of_memory_kills == 0 && discount::forget_unexplained_kills(catalog, &mut evidence.findings)
    {
        verdict
            .evidence
            .push("the kernel counted no OOM kill: what killed the worker process is unknown".to_owned());
    }
    evidence.job = Some(JobSoFar {
        ranks: u32::try_from(failed.ends.len()).unwrap_or(u32::MAX),
        hours: failed.lived.0 as f64 / NANOSECONDS_PER_HOUR,
        stepped: verdict.heartbeats.then_some(verdict.step.is_some()),
    });
    if !host_evidence.kernel_lines.is_empty() {
        let lines = host_evidence.kernel_lines.join("\n");
        evidence.findings.push(Scan::of_text(catalog, "kernel log", None, Kind::Kernel, lines.as_bytes()));
    }
    // That the same failure came before shows nothing about the program if the kernel counts what it refused.
    let without_past = HostEvidence { seen_before: Default::default(), ..host_evidence.clone() };
    let host_evidence = if failed.exhausted.is_some() { &without_past } else { host_evidence };
    evidence.observations.extend(host_evidence::observations(host_evidence, verdict.fault_at));
    if verdict.cause == Cause::OutOfMemory {
        evidence.observations.push(Observation {
            // The family of its lines in the kernel log, so that one kill counts once.
            family: "host".to_owned(),
            text: "the kernel's OOM killer was active when the rank was killed".to_owned(),
            class: Class::HostResource,
            weight: OOM_KILL_LOG_ODDS,
            also: Vec::new(),
        });
    }
    let judged = attribute(catalog, &evidence);
    verdict.doubts = doubts(&evidence, &judged);
    if judged.class == Class::Unknown || judged.domain == FaultDomain::Unknown {
        return;
    }
    verdict.domain = judged.domain;
    let class = if judged.is_of_client() { CLIENT_FAILED } else { judged.class.name() };
    verdict.class = Some(class.to_owned());
    verdict.deterministic = judged.determinism == Determinism::Deterministic;
    verdict.confidence = judged.confidence;
    verdict.evidence.extend(grounds(&judged, verdict.fault_at));
    if let Some(limit) = failed.exhausted.as_ref().filter(|_| judged.class == Class::HostResource) {
        blame_the_limit(verdict, limit);
    }
}

fn evidence(catalog: &Catalog, failed: &FailedAttempt) -> Evidence {
    let mut evidence = Evidence { live: true, ..Evidence::default() };
    let mut deaths: Vec<(&Rank, &RankEnd)> = failed.ends.iter().filter(|(_, end)| end.failed()).collect();
    deaths.sort_by_key(|(rank, end)| (end.failed_at(), **rank));
    for (order, (rank, end)) in deaths.into_iter().enumerate() {
        evidence.findings.extend(last_output(catalog, *rank, end));
        // The launcher stopped a rank that raised while it was exiting: its status shows nothing.
        if let (None, Some((status, _))) = (&end.note, end.exit) {
            let status = match status {
                ExitStatus::Code(code) => Status::Code(code),
                ExitStatus::Signal(signal) => Status::Signal(signal),
            };
            evidence.exits.push(Exit { rank: Some(rank.0), status, order: u32::try_from(order).ok() });
        }
    }
    scan::relate(&mut evidence.findings);
    evidence
}

/// The last output of a rank: its exit note, which is complete, or else the end of its standard error; its standard error before the
/// traceback; and the end of its standard output, where NCCL warns.
///
/// Each line has its time, so that lines printed before healthy steps are no cause.
fn last_output(catalog: &Catalog, rank: Rank, end: &RankEnd) -> Vec<Findings> {
    let of_lines = |source: &str, lines: &[String], times: &[LineTime]| {
        let times = times.get(..lines.len()).unwrap_or_default();
        Scan::of_lines(catalog, source, Some(rank.0), lines, times)
    };
    let (stderr, stderr_times) = (&end.stderr_tail, &end.stderr_times);
    let mut findings = Vec::new();
    match &end.note {
        Some(note) => {
            let text = text_of(note);
            let found = Scan::of_text(catalog, "exit note", Some(rank.0), Kind::default(), text.as_bytes());
            findings.push(Findings { ended: true, ..found });
            let traceback =
                stderr.iter().rposition(|line| line.contains("Traceback (most recent call last):"));
            let before = &stderr[..traceback.unwrap_or(stderr.len())];
            if !before.is_empty() {
                let mut found = of_lines("standard error", before, stderr_times);
                discount::forget_what_it_caught(catalog, &mut found);
                findings.push(found);
            }
        }
        None => findings.push(of_lines("standard error", stderr, stderr_times)),
    }
    if !end.stdout_tail.is_empty() {
        let mut found = of_lines("standard output", &end.stdout_tail, &end.stdout_times);
        if end.note.is_some() {
            discount::forget_what_it_caught(catalog, &mut found);
        }
        findings.push(found);
    }
    if was_ended_from_outside(end) {
        findings.iter_mut().for_each(|findings| discount::keep_what_is_latent(catalog, findings));
    }
    if let Some(since) = chose_its_exit_at(end) {
        findings.iter_mut().for_each(|findings| discount::forget_what_it_survived(catalog, findings, since));
    }
    findings
}

/// When a rank that chose an exit status ended. An uncaught exception always exits with 1.
fn chose_its_exit_at(end: &RankEnd) -> Option<Mono> {
    match (&end.note, end.exit) {
        (None, Some((ExitStatus::Code(code), at))) if code != 1 => Some(at),
        _ => None,
    }
}

/// Whether another process ended the rank by a signal. Then nothing that it printed is the cause.
fn was_ended_from_outside(end: &RankEnd) -> bool {
    let Some((ExitStatus::Signal(signal), _)) = end.exit else { return false };
    end.note.is_none() && Cause::Signal { signal }.is_signal_from_outside()
}

/// The traceback as Python prints it, with the exception as its last line.
fn text_of(note: &Note) -> String {
    let exception = note.exception.strip_prefix("builtins.").unwrap_or(&note.exception);
    let last = format!("{exception}: {}", note.message);
    if note.traceback.contains(&last) {
        note.traceback.clone()
    } else {
        format!("{}\n{last}", note.traceback)
    }
}

/// The evidence for other causes, and what would change the result.
fn doubts(evidence: &Evidence, judged: &Attribution) -> Doubts {
    let Report { against, would_change, set_aside, .. } = explain::report(evidence, judged);
    let against =
        against.into_iter().take(MAX_QUOTED_LINES).map(|ground| match ground.quotes.into_iter().next() {
            Some(quote) => format!("{}: {}", ground.meaning, quote.text.trim()),
            None => ground.meaning,
        });
    let aside = set_aside.into_iter().map(|line| {
        format!("set aside, because it was caught or healthy steps followed: {}", line.text.trim())
    });
    Doubts { against: against.chain(aside).collect(), would_change }
}

fn grounds(judged: &Attribution, failed_at: Mono) -> Vec<String> {
    judged
        .evidence
        .iter()
        .take(MAX_QUOTED_LINES)
        .map(|vote| match vote.spots.first() {
            Some((_, spot)) => format!("{}{}: {}", vote.meaning, when(spot, failed_at), spot.text.trim()),
            None => vote.meaning.clone(),
        })
        .collect()
}

/// How long before the failure a line was printed, and how many steps completed after it. Empty for the rank's own note, which is the
/// failure.
fn when(spot: &RelevantLine, failed_at: Mono) -> String {
    match (spot.line_time, spot.steps_after) {
        (Some(time), steps_after) => {
            format!(" ({})", LineTime { steps_after, ..time }.before_failure(failed_at))
        }
        (None, None | Some(0)) => String::new(),
        (None, Some(1)) => " (1 step before the failure)".to_owned(),
        (None, Some(steps)) => format!(" ({steps} steps before the failure)"),
    }
}

#[cfg(test)]
mod tests;
