//! The end of a job as its user sees it: the remaining output, the summary and the closing line.

use std::cmp::Reverse;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mainstay_model::time::Span;
use mainstay_progress::goodput::TimeCategory;
use mainstay_proto::json::versioned;
use mainstay_recovery::job::Summary;
use mainstay_view::progress::spoken;
use serde_json::Value;

use super::signals::caught;
use mainstay_launcher::log_files;
use mainstay_launcher::log_mirror::LogMirror;
use mainstay_launcher::output::Terminal;

/// A terminal that accepts no output for this long is treated as unread.
const UNREAD_FOR: Duration = Duration::from_secs(5);

/// Said of a program that does not number its steps.
const UNKNOWN_REPEATS: &str =
    "an unknown number of them done twice, because the program does not call mainstay.step";

/// How long to wait for the closing line if no one reads.
const CLOSING_WITHIN: Duration = Duration::from_millis(500);

/// A signal arrived before there were ranks: none of the job runs, so there is nothing to wait for.
pub(super) fn ended_before(signal: i32, terminal: &Terminal) -> i32 {
    terminal.print(format!("ended by signal {signal} before the ranks were started"));
    terminal.flush(Duration::from_millis(500));
    128 + signal
}

/// Shows the rest of the ranks' output for as long as it is read, and always prints the closing line. A further
/// signal ends the wait. What is not copied to where people find the logs is reported.
pub(super) async fn show_the_rest(
    terminal: Terminal,
    closing: Closing,
    run_dir: &Path,
    mut mirror: Option<LogMirror>,
    of_signals: &[i32],
) {
    let enough = Arc::new(AtomicBool::new(false));
    let (stop, run_dir) = (enough.clone(), run_dir.to_owned());
    let showing = tokio::task::spawn_blocking(move || {
        let left = terminal.finish(UNREAD_FOR, &stop);
        if let Some(notice) = left.notice(&run_dir) {
            terminal.print(notice);
        }
        mirror.as_mut().and_then(LogMirror::copy_all).into_iter().for_each(|line| terminal.print(line));
        terminal.print_as(&closing.shown, &closing.line);
        terminal.finish(CLOSING_WITHIN, &AtomicBool::new(false));
        if let Some(mirror) = mirror {
            mirror.end();
        }
    });
    tokio::pin!(showing);
    let mut again = caught(of_signals).ok();
    let asked = async {
        match &mut again {
            Some(signals) => signals.recv().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = &mut showing => return,
        _ = asked => enough.store(true, Ordering::Relaxed),
    }
    let _ = showing.await;
}

/// The summary for scripts.
pub(super) fn versioned_summary(summary: &Summary) -> serde_json::Result<Value> {
    serde_json::to_value(summary).map(versioned)
}

fn document(summary: &Summary) -> serde_json::Result<Vec<u8>> {
    serde_json::to_vec_pretty(&versioned_summary(summary)?)
}

/// Writes `summary.json` next to the logs.
pub(super) fn write_summary(run_dir: &Path, summary: &Summary, terminal: &Terminal) {
    let path = run_dir.join("summary.json");
    let written = document(summary).map_err(std::io::Error::from).and_then(|text| {
        let path = path.clone();
        let written = log_files::ask(move || std::fs::write(path, text));
        written.unwrap_or_else(|| Err(std::io::Error::other("its file system does not answer")))
    });
    if let Err(error) = written {
        terminal.print(format!("writing {}: {error}", path.display()));
    }
}

/// Writes the summary to the file that the user named, in one step: each host of the job may write the same file.
pub(super) fn write_status(file: &Path, summary: &Summary, terminal: &Terminal) {
    let part = format!("{}.{}-{:x}", file.display(), std::process::id(), mainstay_sys::clock::now().wall.0);
    let path = file.to_owned();
    let written = document(summary).map_err(std::io::Error::from).and_then(|text| {
        let written = log_files::ask(move || {
            std::fs::write(&part, text)?;
            std::fs::rename(&part, path).inspect_err(|_| drop(std::fs::remove_file(&part)))
        });
        written.unwrap_or_else(|| Err(std::io::Error::other("its file system does not answer")))
    });
    if let Err(error) = written {
        terminal.print(format!("--status-file {}: {error}", file.display()));
    }
}

/// The number of losses that the closing table names.
const MAX_LOSSES: usize = 3;

/// The end of a job as a terminal shows it.
pub(super) struct Closing {
    /// What the terminal shows: the line, or a short table.
    pub(super) shown: String,
    /// What the log keeps: the line.
    pub(super) line: String,
}

impl Closing {
    /// The line alone.
    pub(super) fn line(line: String) -> Closing {
        Closing { shown: line.clone(), line }
    }

    /// The end of a job: a table for a terminal, else a line.
    pub(super) fn of(job: &str, summary: &Summary, is_terminal: bool) -> Closing {
        let line = closing_line(job, summary);
        let shown = if is_terminal { closing_table(job, summary) } else { line.clone() };
        Closing { shown, line }
    }
}

/// The end of a job as a short table: what came of it, the largest losses, and what to look at next.
fn closing_table(job: &str, summary: &Summary) -> String {
    let accounting = &summary.accounting;
    let mut rows = vec![format!("job {job} ended with status {}: {}", summary.exit, summary.reason)];
    if summary.attempts == 0 {
        return rows.remove(0);
    }
    let mut row = |name: &str, value: String| rows.push(format!("  {name:<11}{value}"));
    row("time", spoken(accounting.wall.as_seconds()));
    if let Some(share) = accounting.goodput {
        let repeats = match (accounting.counted, accounting.steps_lost) {
            (_, 0) => String::new(),
            (false, again) => format!(", {again} of them done twice"),
            (true, most) => format!(", at most {most} of them done twice"),
        };
        row("steps", format!("{}{repeats}", accounting.steps));
        row("goodput", format!("{}{:.1} %", goodput_bound(summary), share * 100.0));
    }
    if summary.attempts > 1 {
        row("restarts", (summary.attempts - 1).to_string());
    }
    let losses = losses(summary);
    if !losses.is_empty() {
        let named = losses.iter().map(|(name, time)| format!("{name} {}", spoken(time.as_seconds())));
        row("losses", named.collect::<Vec<_>>().join(", "));
    }
    if let Some(advised) = &summary.saving {
        row(
            "checkpoints",
            format!("saving every {:.0} s costs least, not every {:.0} s", advised.every, advised.was),
        );
    }
    if !summary.exclude.is_empty() {
        row("exclude", summary.exclude.join(","));
    }
    let next = if summary.incidents.is_empty() { "goodput" } else { "explain" };
    row("next", format!("mainstay {next} {job}"));
    rows.join("\n")
}

/// The largest losses of time, from a tenth of a second on.
fn losses(summary: &Summary) -> Vec<(String, Span)> {
    let accounting = &summary.accounting;
    // Without heartbeats it is unknown what of the time was lost.
    let parts = accounting.parts.iter().filter(|_| accounting.goodput.is_some());
    let lost = parts.filter(|(state, time)| **state != TimeCategory::Training && time.as_seconds() >= 0.1);
    let mut lost: Vec<(String, Span)> = lost.map(|(state, time)| (state.to_string(), *time)).collect();
    lost.sort_by_key(|(_, time)| Reverse(*time));
    lost.truncate(MAX_LOSSES);
    lost
}

/// Steps that ranks in their old processes do again have new numbers, so that none seems to be done twice.
fn goodput_bound(summary: &Summary) -> &'static str {
    match (summary.accounting.counted, summary.accounting.steps_lost) {
        (false, _) => "",
        (true, 0) => "at most ",
        (true, _) => "at least ",
    }
}

/// The closing line.
fn closing_line(job: &str, summary: &Summary) -> String {
    let accounting = &summary.accounting;
    let mut parts: Vec<(&TimeCategory, f64)> =
        accounting.parts.iter().map(|(state, span)| (state, span.as_seconds())).collect();
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    // Without heartbeats the end of the start is unknown: the time counted as start is mostly training.
    let name = |state: &TimeCategory| match (state, accounting.goodput) {
        (TimeCategory::Starting, None) => "starting and training, without heartbeats".to_owned(),
        (state, _) => state.to_string(),
    };
    let parts: Vec<String> =
        parts.iter().map(|(state, seconds)| format!("{} {seconds:.1} s", name(state))).collect();
    let saving = summary.saving.map_or(String::new(), |advised| format!(". {}", advised.describe()));
    let bound = goodput_bound(summary);
    let goodput = accounting
        .goodput
        .map_or_else(String::new, |share| format!("goodput {bound}{:.1} % of ", share * 100.0));
    let steps = match (accounting.goodput, accounting.counted, accounting.steps_lost) {
        // Without heartbeats the steps are unknown.
        (None, ..) => String::new(),
        (Some(_), false, 0) => format!(", {} step(s)", accounting.steps),
        (Some(_), false, again) => format!(", {} step(s), {again} of them done twice", accounting.steps),
        (Some(_), true, 0) => format!(", {} step(s), {UNKNOWN_REPEATS}", accounting.steps),
        (Some(_), true, most) => {
            format!(", {} step(s), {UNKNOWN_REPEATS} (at most {most})", accounting.steps + most)
        }
    };
    let restarts = match summary.attempts.saturating_sub(1) {
        0 => "no restart".to_owned(),
        1 => "1 restart".to_owned(),
        many => format!("{many} restarts"),
    };
    let ended = format!("job {job} ended with status {}: {}", summary.exit, summary.reason);
    if summary.attempts == 0 {
        // If another launcher decided, or the job never started, no more is known here.
        return ended;
    }
    format!("{ended}; {restarts}{steps}, {goodput}{} ({}){saving}", accounting.wall, parts.join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_terminal_gets_a_short_table_and_the_log_one_line() {
        const SECOND: u64 = 1_000_000_000;
        let summary = json!({
            "exit": 0,
            "reason": "all ranks succeeded",
            "attempts": 2,
            "books": {
                "wall": 1200 * SECOND,
                "parts": {
                    "training": 1100 * SECOND, "lost_work": 40 * SECOND, "starting": 30 * SECOND,
                    "initialising": 20 * SECOND, "stopping": 10 * SECOND,
                },
                "goodput": 1100.0 / 1200.0,
                "steps": 5000,
                "steps_lost": 180,
            },
            "incidents": [{
                "incident": 1, "headline": "rank 1 was killed", "decision": "restart", "fault_at": 1, "detected_at": 2,
            }],
        });
        let summary: Summary = serde_json::from_value(summary).unwrap();
        let closing = Closing::of("exp-7", &summary, true);
        testing::snapshot!("closing", "on a terminal", closing.shown);
        testing::snapshot!("closing", "in the log", closing.line);
        assert_eq!(Closing::of("exp-7", &summary, false).shown, closing.line);
    }
}
