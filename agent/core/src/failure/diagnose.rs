//! Whose fault a failed attempt was: what its ranks said and how they ended, put before the attribution.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::id::Rank;
use crate::base::time::{Mono, Span};
use crate::failure::attribution::catalog::{Catalog, Determinism};
use crate::failure::attribution::class::Class;
use crate::failure::attribution::exit::{Exit, Status};
use crate::failure::attribution::explain::{self, Report};
use crate::failure::attribution::fuse::JobSoFar;
use crate::failure::attribution::scan::{Findings, Kind, Scan, Spot};
use crate::failure::attribution::{Attribution, Evidence, Observation, attribute, scan};
use crate::failure::host_evidence;
use crate::failure::root_rank::RankEnd;
use crate::model::entry::{ExitStatus, LineTime, Note};
use crate::model::host_context::HostEvidence;
use crate::model::verdict::{Cause, Doubts, FaultDomain, Verdict};

/// What an OOM kill at the time of a SIGKILL speaks with, in log-odds.
const OUT_OF_MEMORY: f64 = 4.0;

/// Lines of evidence that a verdict quotes.
const QUOTED: usize = 3;

/// So long after an exception a program that goes on has survived it; an interpreter that ends takes less, also on a busy host.
const SURVIVED: Span = Span::seconds(5);

/// Nanoseconds of an hour.
const HOUR: f64 = 3.6e12;

/// Completes the verdict with what the words of the ranks that failed of their own say. A verdict on which they
/// say nothing stays as it is.
///
/// A host that testifies is heard like the ranks: its kernel's lines and its sick components are evidence. How long the
/// attempt had `lived`, with how many ranks and whether it did a step, makes some causes likelier before anything is heard.
pub fn complete(
    verdict: &mut Verdict,
    catalog: &Catalog,
    ends: &BTreeMap<Rank, RankEnd>,
    testimony: &HostEvidence,
    lived: Span,
) {
    let mut evidence = evidence(catalog, ends);
    evidence.job = Some(JobSoFar {
        ranks: u32::try_from(ends.len()).unwrap_or(u32::MAX),
        hours: lived.0 as f64 / HOUR,
        stepped: verdict.heartbeats.then_some(verdict.step.is_some()),
    });
    if !testimony.kernel_lines.is_empty() {
        let lines = testimony.kernel_lines.join("\n");
        evidence.findings.push(Scan::of_text(catalog, "kernel log", None, Kind::Kernel, lines.as_bytes()));
    }
    evidence.observations.extend(host_evidence::observations(testimony, verdict.fault_at));
    if verdict.cause == Cause::OutOfMemory {
        evidence.observations.push(Observation {
            // That of its lines in the kernel log: what is told twice counts once.
            family: "host".to_owned(),
            text: "the kernel's OOM killer was at work when the rank was killed".to_owned(),
            class: Class::HostResource,
            weight: OUT_OF_MEMORY,
            also: Vec::new(),
        });
    }
    let judged = attribute(catalog, &evidence);
    verdict.doubts = doubts(&evidence, &judged);
    if judged.class == Class::Unknown || judged.domain == FaultDomain::Unknown {
        return;
    }
    verdict.domain = judged.domain;
    verdict.class = Some(judged.class.name().to_owned());
    verdict.deterministic = judged.determinism == Determinism::Deterministic;
    verdict.confidence = judged.confidence;
    verdict.evidence.extend(grounds(&judged, verdict.fault_at));
}

fn evidence(catalog: &Catalog, ends: &BTreeMap<Rank, RankEnd>) -> Evidence {
    let failed = ends.iter().filter(|(_, end)| end.failed());
    let mut evidence = Evidence { live: true, ..Evidence::default() };
    let mut deaths: Vec<(&Rank, &RankEnd)> = failed.collect();
    deaths.sort_by_key(|(rank, end)| (end.failed_at(), **rank));
    for (order, (rank, end)) in deaths.into_iter().enumerate() {
        evidence.findings.extend(words(catalog, *rank, end));
        // A rank that raised was stopped by us on its way out: its status says nothing.
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

/// What a rank said last: its exit note, which is whole, or else the end of its standard error; what it wrote there before
/// its traceback; and the end of its standard output, where NCCL warns.
///
/// Each line comes with its time, so that what was printed before healthy steps is no cause.
fn words(catalog: &Catalog, rank: Rank, end: &RankEnd) -> Vec<Findings> {
    let of_lines = |source: &str, lines: &[String], times: &[LineTime]| {
        let times = times.get(..lines.len()).unwrap_or_default();
        Scan::of_lines(catalog, source, Some(rank.0), lines, times)
    };
    let (stderr, stderr_times) = (&end.stderr_tail, &end.stderr_times);
    let mut said = Vec::new();
    match &end.note {
        Some(note) => {
            let text = text_of(note);
            let found = Scan::of_text(catalog, "exit note", Some(rank.0), Kind::default(), text.as_bytes());
            said.push(Findings { ended: true, ..found });
            let traceback =
                stderr.iter().rposition(|line| line.contains("Traceback (most recent call last):"));
            let before = &stderr[..traceback.unwrap_or(stderr.len())];
            if !before.is_empty() {
                let mut found = of_lines("standard error", before, stderr_times);
                forget_what_it_caught(catalog, &mut found);
                said.push(found);
            }
        }
        None => said.push(of_lines("standard error", stderr, stderr_times)),
    }
    if !end.stdout_tail.is_empty() {
        let mut found = of_lines("standard output", &end.stdout_tail, &end.stdout_times);
        if end.note.is_some() {
            forget_what_it_caught(catalog, &mut found);
        }
        said.push(found);
    }
    if was_ended_from_outside(end) {
        said.iter_mut().for_each(|findings| keep_what_lies_in_wait(catalog, findings));
    }
    if let Some(since) = chose_its_exit_at(end) {
        said.iter_mut().for_each(|findings| forget_what_it_survived(catalog, findings, since));
    }
    said
}

/// When a rank ended that chose an exit status: an uncaught exception always gives 1.
fn chose_its_exit_at(end: &RankEnd) -> Option<Mono> {
    match (&end.note, end.exit) {
        (None, Some((ExitStatus::Code(code), at))) if code != 1 => Some(at),
        _ => None,
    }
}

/// A program that exits because of an exception does so soon after it printed it. What it printed long before, it survived.
fn forget_what_it_survived(catalog: &Catalog, findings: &mut Findings, ended: Mono) {
    let survived = |spot: &Spot| spot.seen.is_some_and(|seen| ended.since(seen.at) > SURVIVED);
    let lies_in_wait = |of: usize| catalog.signatures().get(of).is_some_and(|of| of.latent.is_some());
    for sighting in &mut findings.sightings {
        let keeps = lies_in_wait(sighting.signature);
        sighting.spots.retain(|spot| keeps || !survived(spot));
    }
    findings.sightings.retain(|sighting| !sighting.spots.is_empty());
    findings.exceptions.retain(|exception| !survived(&exception.spot));
    if findings.words.as_ref().is_some_and(|(spot, _)| survived(spot)) {
        findings.words = None;
    }
}

/// A rank that ended by an exception caught those that it printed before. A fault of the program among them ended nothing; what a
/// device or a service said may still be the cause.
fn forget_what_it_caught(catalog: &Catalog, findings: &mut Findings) {
    let lines: BTreeSet<u64> = findings.exceptions.iter().map(|exception| exception.spot.line).collect();
    let of_user = |of: usize| {
        let signature = catalog.signatures().get(of);
        signature.is_some_and(|of| of.class.domain() == FaultDomain::User && of.latent.is_none())
    };
    for sighting in &mut findings.sightings {
        if of_user(sighting.signature) {
            sighting.spots.retain(|spot| !lines.contains(&spot.line));
        }
    }
    findings.sightings.retain(|sighting| !sighting.spots.is_empty());
    let is_users = |class: Class| class.domain() == FaultDomain::User;
    findings.exceptions.retain(|of| catalog.exception(&of.name).is_some_and(|rule| !is_users(rule.class)));
}

/// Whether somebody else ended the rank by a signal: then nothing that it printed did.
fn was_ended_from_outside(end: &RankEnd) -> bool {
    let Some((ExitStatus::Signal(signal), _)) = end.exit else { return false };
    end.note.is_none() && Cause::Signal { signal }.is_signal_from_outside()
}

/// Of the words of a rank that was killed only those count that tell why somebody killed it: memory that ran out, a machine
/// that is taken away, a device that fails.
fn keep_what_lies_in_wait(catalog: &Catalog, findings: &mut Findings) {
    let lies_in_wait = |of: usize| catalog.signatures().get(of).is_some_and(|of| of.latent.is_some());
    findings.sightings.retain(|sighting| lies_in_wait(sighting.signature));
    findings.exceptions.clear();
    findings.vocabulary.clear();
    findings.words = None;
}

/// The traceback as Python prints it: with the exception as its last line.
fn text_of(note: &Note) -> String {
    let exception = note.exception.strip_prefix("builtins.").unwrap_or(&note.exception);
    let last = format!("{exception}: {}", note.message);
    if note.traceback.contains(&last) {
        note.traceback.clone()
    } else {
        format!("{}\n{last}", note.traceback)
    }
}

/// What speaks for something else, and what would have to be seen for another judgement.
fn doubts(evidence: &Evidence, judged: &Attribution) -> Doubts {
    let Report { against, would_change, .. } = explain::report(evidence, judged);
    let against = against.into_iter().take(QUOTED).map(|ground| match ground.quotes.into_iter().next() {
        Some(quote) => format!("{}: {}", ground.meaning, quote.text.trim()),
        None => ground.meaning,
    });
    Doubts { against: against.collect(), would_change }
}

fn grounds(judged: &Attribution, failed_at: Mono) -> Vec<String> {
    judged
        .evidence
        .iter()
        .take(QUOTED)
        .map(|vote| match vote.spots.first() {
            Some((_, spot)) => format!("{}{}: {}", vote.meaning, when(spot, failed_at), spot.text.trim()),
            None => vote.meaning.clone(),
        })
        .collect()
}

/// How long before the failure a line was printed, and how many steps were done after it; empty for the rank's own note, which
/// is the failure.
fn when(spot: &Spot, failed_at: Mono) -> String {
    match (spot.seen, spot.steps_after) {
        (Some(seen), steps_after) => {
            format!(" ({})", LineTime { steps_after, ..seen }.before_failure(failed_at))
        }
        (None, None | Some(0)) => String::new(),
        (None, Some(1)) => " (1 step before the failure)".to_owned(),
        (None, Some(steps)) => format!(" ({steps} steps before the failure)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::id::{Attempt, Incident};
    use crate::failure::root_rank::judge;

    fn verdict(ends: [RankEnd; 2], out_of_memory_kills: u64) -> Verdict {
        let ends = ends.into_iter().enumerate().map(|(n, end)| (Rank(n as u32), end)).collect();
        let mut verdict = judge(Incident(1), Attempt(0), &ends, out_of_memory_kills);
        let catalog = Catalog::built_in().expect("the catalogue is compiled in");
        complete(&mut verdict, catalog, &ends, &HostEvidence::default(), Span::seconds(600));
        verdict
    }

    #[test]
    fn the_kernels_word_turns_an_illegal_access_into_the_hardwares_fault() {
        let ends = [raised("builtins.RuntimeError", "CUDA error: unspecified launch failure", 5), stopped()];
        let ends: BTreeMap<Rank, RankEnd> =
            ends.into_iter().enumerate().map(|(n, end)| (Rank(n as u32), end)).collect();
        let catalog = Catalog::built_in().expect("the catalogue is compiled in");
        let blamed = |lines: &[&str]| {
            let mut verdict = judge(Incident(1), Attempt(0), &ends, 0);
            let kernel_lines = lines.iter().map(|line| (*line).to_owned()).collect();
            let told = HostEvidence { kernel_lines, ..HostEvidence::default() };
            complete(&mut verdict, catalog, &ends, &told, Span::seconds(600));
            verdict
        };
        let lost = "NVRM: Xid (PCI:0000:3b:00): 79, pid=812, name=python, GPU has fallen off the bus.";
        let verdict = blamed(&[lost]);
        assert_eq!(verdict.domain, FaultDomain::Hardware);
        assert!(
            verdict.evidence.iter().any(|line| line.contains("fallen off the bus")),
            "{:?}",
            verdict.evidence
        );
        // A program's own fault in the kernel log is none of the GPU's.
        let own = "NVRM: Xid (PCI:0000:3b:00): 31, pid=812, name=python, MMU Fault: ENGINE GRAPHICS faulted";
        assert_ne!(blamed(&[own]).domain, FaultDomain::Hardware);
    }

    fn raised(exception: &str, message: &str, at: u64) -> RankEnd {
        let note =
            Note { exception: exception.into(), message: message.into(), at: Mono(at), ..Note::default() };
        RankEnd { note: Some(note), detected_at: Some(Mono(at)), ..RankEnd::default() }
    }

    fn killed(at: u64) -> RankEnd {
        RankEnd { exit: Some((ExitStatus::Signal(9), Mono(at))), ..RankEnd::default() }
    }

    fn stopped() -> RankEnd {
        RankEnd { exit: Some((ExitStatus::Signal(15), Mono(90))), after_stop: true, ..RankEnd::default() }
    }

    #[test]
    fn an_uncorrectable_memory_error_is_the_hardwares() {
        let message = "CUDA error: uncorrectable ECC error encountered";
        let verdict = verdict([raised("builtins.RuntimeError", message, 5), stopped()], 0);
        assert_eq!(verdict.domain, FaultDomain::Hardware);
        assert_eq!(verdict.class.as_deref(), Some("hardware_gpu"));
    }

    #[test]
    fn a_verdict_tells_what_speaks_against_it_and_what_would_change_it() {
        let message = "CUDA error: uncorrectable ECC error encountered";
        let mut other = raised("builtins.FileNotFoundError", "No such file: /data/shard-7", 6);
        other.detected_at = Some(Mono(6));
        let doubted = verdict([raised("builtins.RuntimeError", message, 5), other], 0);
        assert_eq!(doubted.domain, FaultDomain::Hardware);
        let against = doubted.doubts.against.join("\n");
        assert!(against.contains("/data/shard-7"), "{against}");
        assert!(!doubted.doubts.would_change.is_empty());
        let plain = verdict([raised("builtins.RuntimeError", message, 5), stopped()], 0);
        assert!(plain.doubts.against.is_empty(), "{:?}", plain.doubts);
    }

    #[test]
    fn what_nccl_warned_of_on_standard_output_is_heard_beside_the_exception() {
        let message = "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)";
        let warned = |lines: &[&str]| {
            let mut end = raised("torch.distributed.DistBackendError", message, 5);
            end.stdout_tail = lines.iter().map(|line| (*line).to_owned()).collect();
            verdict([end, stopped()], 0)
        };
        let full = "node-7:812:900 [0] NCCL WARN Error: failed to extend /dev/shm/nccl-a8Zk2d to 33030532 bytes, error: No space left on device (28)";
        assert_ne!(warned(&["step 3 loss 2.1"]).class.as_deref(), Some("host_resource"));
        assert_eq!(warned(&["step 3 loss 2.1", full]).class.as_deref(), Some("host_resource"));
    }

    #[test]
    fn a_quoted_line_says_how_long_before_the_failure_it_was_printed() {
        let full = "node-7:812:900 [0] NCCL WARN Error: failed to extend /dev/shm/nccl-a8Zk2d to 33030532 bytes, error: No space left on device (28)";
        let told = |at: u64, steps_after: Option<u64>| {
            let mut end = raised("torch.distributed.DistBackendError", "NCCL error", 5_000_000_000);
            end.stdout_tail = vec![full.to_owned()];
            end.stdout_times = vec![LineTime { at: Mono(at), steps_after }];
            verdict([end, stopped()], 0).evidence.join("\n")
        };
        let (before, at_once) = (told(3_500_000_000, Some(1)), told(5_000_000_000, Some(0)));
        assert!(before.contains("(1.50 s and 1 step before the failure): node-7"), "{before}");
        assert!(at_once.contains("(at the failure): node-7"), "{at_once}");
    }

    #[test]
    fn an_exception_that_was_caught_before_is_no_reason_of_the_one_that_ended_the_rank() {
        let domain_where = |in_output: bool, before: &str| {
            let message = "HTTP Error 503: Service Unavailable";
            let mut end = raised("urllib.error.HTTPError", message, 5);
            if in_output {
                end.stdout_tail = vec![before.to_owned()];
            }
            end.stderr_tail = vec![
                if in_output { String::new() } else { before.to_owned() },
                "Traceback (most recent call last):".to_owned(),
                format!("urllib.error.HTTPError: {message}"),
            ];
            verdict([end, stopped()], 0).domain
        };
        let shapes = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x11 and 12x24)";
        let domain = |before: &str| {
            let (logged, printed) = (domain_where(true, before), domain_where(false, before));
            assert_eq!(logged, printed, "wherever it is printed");
            printed
        };
        assert_eq!(domain("retrying"), FaultDomain::Infrastructure);
        assert_eq!(domain(shapes), FaultDomain::Infrastructure, "it was caught");
        let lost = "RuntimeError: CUDA error: uncorrectable ECC error encountered";
        assert_eq!(domain(lost), FaultDomain::Hardware, "a device's own word counts");
    }

    #[test]
    fn what_a_program_survived_for_long_is_no_reason_of_the_exit_that_it_chose() {
        let domain = |code: i32, printed: u64| {
            let stderr_tail = [
                "Traceback (most recent call last):",
                "  File \"train.py\", line 9, in step",
                "KeyError: 'labels'",
            ];
            let line = LineTime { at: Mono(printed * 1_000_000_000), steps_after: None };
            let end = RankEnd {
                exit: Some((ExitStatus::Code(code), Mono(20_000_000_000))),
                stderr_tail: stderr_tail.map(str::to_owned).to_vec(),
                stderr_times: vec![line; 3],
                ..RankEnd::default()
            };
            verdict([end, stopped()], 0).domain
        };
        assert_eq!(domain(3, 12), FaultDomain::Unknown);
        assert_eq!(domain(3, 19), FaultDomain::User);
        // With 1 the exception may have ended the program, and its cleaning up took long.
        assert_eq!(domain(1, 12), FaultDomain::User);
    }

    #[test]
    fn a_missing_module_is_the_users() {
        let verdict =
            verdict([raised("builtins.ModuleNotFoundError", "No module named 'x'", 5), stopped()], 0);
        assert_eq!(verdict.domain, FaultDomain::User);
    }

    #[test]
    fn a_bare_sigkill_blames_nobody_and_with_an_oom_kill_the_hosts_memory() {
        assert_eq!(verdict([killed(5), stopped()], 0).domain, FaultDomain::Unknown);
        assert_eq!(verdict([killed(5), stopped()], 1).class.as_deref(), Some("host_resource"));
    }

    #[test]
    fn what_the_kernel_counts_and_what_it_logs_of_one_kill_is_no_second_witness() {
        let ends: BTreeMap<Rank, RankEnd> = [(Rank(0), killed(5)), (Rank(1), stopped())].into();
        let catalog = Catalog::built_in().expect("the catalogue is compiled in");
        let line = "Out of memory: Killed process 812 (python) total-vm:22533256kB, anon-rss:7728636kB";
        let told = HostEvidence { kernel_lines: vec![line.to_owned()], ..HostEvidence::default() };
        let log_odds = |kills| {
            let mut verdict = judge(Incident(1), Attempt(0), &ends, kills);
            complete(&mut verdict, catalog, &ends, &told, Span::seconds(600));
            assert_eq!(verdict.class.as_deref(), Some("host_resource"));
            (verdict.confidence / (1.0 - verdict.confidence)).ln()
        };
        let (logged, both) = (log_odds(0), log_odds(1));
        assert!((logged..logged + 1.0).contains(&both), "{logged} and {both}");
    }

    #[test]
    fn a_lone_victim_blames_nobody() {
        let lost =
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4";
        let verdict = verdict([raised("builtins.RuntimeError", lost, 5), stopped()], 0);
        assert_eq!(verdict.domain, FaultDomain::Unknown);
    }
}
