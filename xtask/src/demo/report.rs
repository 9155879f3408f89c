//! The end of the demo: the timeline, what was lost, and whether all checks passed.

use super::{Followed, Kill, Trained};
use crate::journal::{self, Incident, Summary};

/// The input of the report.
pub struct RunSummary<'a> {
    /// The kill.
    pub kill: Kill,
    /// The observed run.
    pub followed: &'a Followed,
    /// The launcher's summary.
    pub summary: &'a Summary,
    /// The script's result without the kill.
    pub undisturbed: &'a Trained,
    /// The script's result with it.
    pub disturbed: &'a Trained,
}

/// Prints it, and returns whether all checks passed.
pub fn print(reported: &RunSummary) -> bool {
    let incident = journal::first_incident(&reported.followed.entries).unwrap_or_default();
    let fault = reported.followed.killed_at.unwrap_or(0);

    println!();
    println!("Timeline, since the fault:");
    for (at, what, detail) in timeline(reported, &incident, fault) {
        println!("  {:>9}  {what:<15} {detail}", since(fault, at));
    }
    println!();
    match incident.steps_lost {
        Some(lost) => println!("Steps lost (done twice): {lost}"),
        None => println!("Steps lost: the journal does not say"),
    }
    print_goodput(reported.summary);
    print_losses(reported.undisturbed, reported.disturbed);

    println!();
    let mut held = true;
    for (what, ok) in checks(reported, &incident) {
        println!("  {} {what}", if ok { "[ok]  " } else { "[FAIL]" });
        held &= ok;
    }
    held
}

/// The known rows, in the order of time.
fn timeline(reported: &RunSummary, incident: &Incident, fault: u64) -> Vec<(u64, &'static str, String)> {
    let kill = format!("SIGKILL to rank {} at step {}", reported.kill.rank, reported.followed.killed_at_step);
    let mut rows = vec![(fault, "fault", kill)];
    let mut add = |at: Option<u64>, what, detail: String| rows.extend(at.map(|at| (at, what, detail)));
    add(incident.detected, "detected", "reported by the kernel, not by a timeout".into());
    let (at, headline) = split(incident.verdict.clone());
    add(at, "cause", headline);
    let (at, why) = split(incident.decision.clone());
    add(at, "decision", why);
    add(incident.ranks_started, "ranks running", "every rank has a new process".into());
    add(incident.ranks_connected, "ranks connected", "every rank's heartbeat is back".into());
    let (at, step) = split(incident.first_step);
    add(at, "first step", format!("step {} done by every rank", step));
    rows.sort_by_key(|(at, ..)| *at);
    rows
}

fn split<T: Default>(timed: Option<(u64, T)>) -> (Option<u64>, T) {
    timed.map_or((None, T::default()), |(at, what)| (Some(at), what))
}

fn since(fault: u64, at: u64) -> String {
    let ms = at.saturating_sub(fault) as f64 / 1e6;
    if ms < 10.0 {
        format!("{ms:.1} ms")
    } else if ms < 1000.0 {
        format!("{ms:.0} ms")
    } else {
        format!("{:.2} s", ms / 1e3)
    }
}

fn print_goodput(summary: &Summary) {
    let total: f64 = summary.ledger.iter().map(|(_, seconds)| seconds).sum();
    let share = summary.goodput().map_or_else(|| "unknown".into(), |percent| format!("{percent:.1} %"));
    println!("Goodput: {share} of {total:.1} s (a short run: starting up weighs heavily)");
    for (state, seconds) in summary.ledger.iter().filter(|(_, seconds)| *seconds > 0.0) {
        println!("  {:<20} {seconds:>7.2} s  {:>5.1} %", state.replace('_', " "), 100.0 * seconds / total);
    }
}

fn print_losses(undisturbed: &Trained, disturbed: &Trained) {
    println!();
    println!("Final loss  undisturbed: {:<22} {}", undisturbed.loss_hex, undisturbed.loss);
    println!("              disturbed: {:<22} {}", disturbed.loss_hex, disturbed.loss);
    let equal = undisturbed.loss_hex == disturbed.loss_hex;
    println!("            {}", if equal { "equal, bit for bit" } else { "NOT EQUAL" });
}

/// The conditions under which the demo has succeeded.
fn checks(reported: &RunSummary, incident: &Incident) -> Vec<(String, bool)> {
    let RunSummary { disturbed, undisturbed, .. } = reported;
    let restarts = reported.followed.entries.iter().filter(|entry| entry.decides_restart()).count();
    let starts = reported.followed.entries.iter().filter(|entry| entry.attempt_started().is_some()).count();
    // The progress of the run when the signal arrived; the demo's last reading was already old then.
    let reached = incident.reached_before.unwrap_or(0);
    vec![
        (
            format!("the death of rank {} was detected and named as the cause", reported.kill.rank),
            incident.detected.is_some() && incident.culprit == Some(reported.kill.rank),
        ),
        ("exactly one restart".into(), restarts == 1 && starts == 2),
        (
            format!("resumed from the checkpoint of step {}", disturbed.resumed_from),
            disturbed.resumed_from > 0 && disturbed.resumed_from <= reached,
        ),
        ("both runs trained the same steps".into(), disturbed.steps == undisturbed.steps),
        ("the final loss is equal bit for bit".into(), disturbed.loss_hex == undisturbed.loss_hex),
        (
            "every parameter is equal bit for bit".into(),
            disturbed.parameters_sha256 == undisturbed.parameters_sha256,
        ),
    ]
}
