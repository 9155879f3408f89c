//! The end of the demo: the timeline, what was lost, and whether all checks passed.

use mainstay_model::entry::Entry;
use mainstay_model::time::Span;
use mainstay_model::verdict::Action;
use mainstay_progress::goodput::TimeAccounting;

use super::recovery::{Recovery, started};
use super::run::{Followed, Kill};
use super::{Trained, equalities, print_checks, print_losses};
use mainstay_model::entry::Body;

/// What is reported.
pub(super) struct Report<'a> {
    pub(super) kill: Kill,
    pub(super) followed: &'a Followed,
    /// The script's result without the kill.
    pub(super) undisturbed: &'a Trained,
    /// The script's result with it.
    pub(super) disturbed: &'a Trained,
}

/// Prints it, and returns whether all checks passed.
pub(super) fn print(report: &Report) -> bool {
    let recoveries = Recovery::all(&report.followed.entries);
    say!("");
    say!("Timeline, since the fault:");
    for (at, what, detail) in timeline(report, recoveries.first()) {
        let since = Span(at.saturating_sub(report.followed.killed_at));
        say!("  {:>9}  {what:<15} {detail}", milliseconds(since));
    }
    say!("");
    if let Some(first) = recoveries.first() {
        say!("Steps lost (done twice): {}", first.outcome.steps_lost);
    }
    if let Some(time) = &report.followed.time {
        print_goodput(time);
    }
    print_losses(report.undisturbed, report.disturbed);
    print_checks(checks(report, &recoveries))
}

/// The known rows, in the order of time.
fn timeline(report: &Report, recovery: Option<&Recovery>) -> Vec<(u64, &'static str, String)> {
    let Followed { killed_at, killed_at_step, entries, .. } = report.followed;
    let kill = format!("SIGKILL to rank {} at step {killed_at_step}", report.kill.rank);
    let mut rows = vec![(*killed_at, "fault", kill)];
    let Some(of) = recovery else { return rows };
    let fault = of.verdict.fault_at;
    let judged = entries.iter().find(|entry| matches!(entry.body, Body::Verdict(_)));
    rows.push((of.verdict.detected_at.0, "detected", "reported by the kernel, not by a timeout".to_owned()));
    rows.extend(judged.map(|entry| (entry.at.mono.0, "cause", of.verdict.headline.clone())));
    rows.push((of.decided_at, "decision", of.decided()));
    let running = fault.after(of.outcome.to_ranks_started).0;
    rows.push((running, "ranks running", "every rank has a new process".to_owned()));
    rows.extend(
        of.outcome.to_ranks_connected.map(|span| {
            (fault.after(span).0, "ranks connected", "every rank's heartbeat is back".to_owned())
        }),
    );
    let step = format!("step {} done by every rank", of.outcome.step);
    rows.push((fault.after(of.outcome.to_first_step).0, "first step", step));
    rows.sort_by_key(|(at, ..)| *at);
    rows
}

fn milliseconds(span: Span) -> String {
    let ms = span.as_seconds() * 1e3;
    match ms {
        _ if ms < 10.0 => format!("{ms:.1} ms"),
        _ if ms < 1000.0 => format!("{ms:.0} ms"),
        _ => format!("{:.2} s", ms / 1e3),
    }
}

fn print_goodput(time: &TimeAccounting) {
    let (total, goodput) = (time.wall.as_seconds(), 100.0 * time.goodput.unwrap_or(0.0));
    say!("Goodput: {goodput:.1} % of {total:.1} s (a short run: starting up weighs heavily)");
    let mut parts: Vec<_> = time.parts.iter().filter(|(_, span)| span.0 > 0).collect();
    parts.sort_by_key(|(_, span)| std::cmp::Reverse(span.0));
    for (state, span) in parts {
        let seconds = span.as_seconds();
        say!("  {:<20} {seconds:>7.2} s  {:>5.1} %", state.to_string(), 100.0 * seconds / total);
    }
}

/// The conditions under which the demo has succeeded.
fn checks(report: &Report, recoveries: &[Recovery]) -> Vec<(String, bool)> {
    let Report { kill, disturbed, undisturbed, followed } = report;
    let restarts = |entry: &&Entry| match &entry.body {
        Body::Decision(decision) => matches!(decision.action, Action::RestartInJob { .. }),
        _ => false,
    };
    let restarts = followed.entries.iter().filter(restarts).count();
    let starts = followed.entries.iter().filter(|entry| started(entry).is_some()).count();
    let first = recoveries.first();
    let culprit = first.and_then(|recovery| recovery.verdict.culprit).map(|rank| rank.0);
    // The progress of the run when the signal arrived; the demo's last reading was already old then.
    let reached = first.map_or(0, |recovery| recovery.outcome.reached_before);
    let resumed = disturbed.resumed_from;
    let mut checks = vec![
        (
            format!("the death of rank {} was detected and named as the cause", kill.rank),
            culprit == Some(kill.rank),
        ),
        ("exactly one restart".to_owned(), restarts == 1 && starts == 2),
        (format!("resumed from the checkpoint of step {resumed}"), resumed > 0 && resumed <= reached),
    ];
    checks.extend(equalities(undisturbed, disturbed));
    checks
}
