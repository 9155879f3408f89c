//! `mainstay ranks`: the ranks of a job as a table, once or again and again.

use std::fmt::Write;
use std::process::ExitCode;
use std::time::Duration;

use mainstay_proto::v1::{Job, Rank, RankPhase};
use serde_json::{Value, json};

use super::find::{Ask, find};
use super::json::seconds;
use super::output::{self, Paint, clean, shortened, spoken};
use super::status::{ask_all, is_over, nothing_answers, told_once};
use super::{exit, json};

/// How often the table is shown again.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Show the ranks of a job: step, section, last heartbeat, what a step takes
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay ranks                 the ranks of all jobs that run here
  mainstay ranks demo --watch    one job, again every second
  mainstay ranks demo --json | jq '.jobs[0].ranks[] | select(.suspect)'

Exit status: 0 shown, 3 nothing answers or there is no such job, 64 the command line was not understood.")]
pub(super) struct Args {
    /// The job; all that run if not given
    job: Option<String>,
    #[command(flatten)]
    ask: Ask,
    /// Show it again every second until interrupted
    #[arg(long, conflicts_with = "json")]
    watch: bool,
}

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    loop {
        let found = find(&args.ask);
        let mut answers = ask_all(found.places.clone()).await;
        told_once(&mut answers);
        let jobs: Vec<Job> = answers
            .into_iter()
            .filter_map(|answer| answer.result.ok())
            .flat_map(|snapshot| snapshot.jobs)
            .filter(|job| args.job.as_ref().map_or(!is_over(job), |id| job.id == *id))
            .collect();
        if args.ask.json {
            let jobs: Vec<Value> = jobs.iter().map(json::job).collect();
            output::print(&format!("{}\n", json!({ "jobs": jobs })))?;
        } else if jobs.is_empty() {
            output::note(&match &args.job {
                Some(job) => format!("no job {job:?} is known here; `mainstay status` shows those that are"),
                None => nothing_answers(&found),
            });
        } else {
            // From the top left, and nothing of the last table below it.
            let home = if args.watch { "\x1b[H\x1b[J" } else { "" };
            let paint = Paint::for_stdout();
            let tables: Vec<String> = jobs.iter().map(|job| table(job, paint)).collect();
            output::print(&format!("{home}{}", tables.join("\n")))?;
        }
        if !args.watch {
            return Ok(ExitCode::from(if jobs.is_empty() { exit::UNKNOWN } else { exit::OK }));
        }
        tokio::time::sleep(AGAIN_AFTER).await;
    }
}

const COLUMNS: [&str; 8] = ["RANK", "PID", "PHASE", "STEP", "SECTION", "HEARTBEAT", "MEDIAN STEP", ""];

fn table(job: &Job, paint: Paint) -> String {
    let rows: Vec<[String; 8]> = job.ranks.iter().map(|rank| cells(job, rank)).collect();
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([COLUMNS[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..COLUMNS.len()).map(width).collect();
    let mut text = format!("job {}  attempt {}\n", paint.bold(&clean(&job.id)), job.attempt);
    if let Some(hang) = &job.hang {
        let _ = writeln!(text, "{}", paint.bad(&clean(&hang.headline)));
    }
    let _ = writeln!(text, "{}", paint.dim(&line(&COLUMNS.map(str::to_owned), &widths)));
    for (row, rank) in rows.iter().zip(&job.ranks) {
        let told = line(row, &widths);
        let _ = writeln!(text, "{}", if is_suspect(job, rank) { paint.bad(&told) } else { told });
    }
    text
}

fn line(cells: &[String; 8], widths: &[usize]) -> String {
    let mut text = String::new();
    for (column, cell) in cells.iter().enumerate() {
        let width = widths[column];
        let _ = match column {
            // Words stand to the left, numbers to the right.
            2 | 4 | 7 => write!(text, " {cell:<width$} "),
            _ => write!(text, " {cell:>width$} "),
        };
    }
    text.trim_end().to_owned()
}

fn is_suspect(job: &Job, rank: &Rank) -> bool {
    job.hang.as_ref().is_some_and(|hang| hang.culprits.contains(&rank.rank))
}

fn cells(job: &Job, rank: &Rank) -> [String; 8] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let sections = rank.sections.iter().map(|section| clean(section)).collect::<Vec<_>>().join(" > ");
    let phase = json::plain(rank.phase().as_str_name(), "RANK_PHASE").to_lowercase();
    let beats = matches!(rank.phase(), RankPhase::Connected);
    [
        rank.rank.to_string(),
        rank.pid.to_string(),
        phase,
        or_dash(rank.step.map(|step| step.to_string())),
        or_dash(Some(shortened(&sections, 40)).filter(|sections| !sections.is_empty())),
        or_dash(rank.heartbeat_age.as_ref().map(|age| format!("{} ago", spoken(seconds(age))))),
        or_dash(rank.median_step.as_ref().map(|median| format!("{:.3} s", seconds(median)))),
        if is_suspect(job, rank) && beats { "suspect".to_owned() } else { String::new() },
    ]
}

#[cfg(test)]
mod tests {
    use mainstay_proto::v1::Hang;

    use super::*;

    #[test]
    fn a_suspect_is_marked_and_the_others_are_not() {
        let rank = |rank| Rank {
            rank,
            phase: RankPhase::Connected.into(),
            step: Some(7),
            sections: vec!["forward".into(), "attention".into()],
            median_step: Some(prost_types::Duration { seconds: 0, nanos: 250_000_000 }),
            ..Rank::default()
        };
        let hang = Hang { headline: "rank 1 hangs".into(), culprits: vec![1], ..Hang::default() };
        let job =
            Job { id: "demo".into(), ranks: vec![rank(0), rank(1)], hang: Some(hang), ..Job::default() };
        let shown = table(&job, Paint::plain());
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[1], "rank 1 hangs");
        assert!(lines[3].contains("forward > attention") && lines[3].ends_with("0.250 s"), "{shown}");
        assert!(lines[4].ends_with("suspect"), "{shown}");
    }
}
