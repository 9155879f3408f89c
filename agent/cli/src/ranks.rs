//! `mainstay ranks`: the ranks of a job as a table, once or repeatedly.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::ExitCode;
use std::time::Duration;

use mainstay_proto::json::{ApiEnum, seconds};
use mainstay_proto::v1::{Job, Rank, RankPhase};
use serde_json::json;

use super::answer::is_over;
use super::exit;
use super::find::{AskAny, JobName, find};
use super::output::{self, Paint, aligned, clean, shortened, spoken};
use super::status::{ask_all, nothing_answers, reported_once};

/// How often the table is refreshed.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

/// Beyond this many ranks, ranks without anything remarkable are shown in groups.
pub(super) const MAX_UNGROUPED_RANKS: usize = 32;

/// A rank whose own time exceeds its peers' by this factor is remarkable.
const SLOW_FACTOR: f64 = 1.05;

/// Maximum number of remarkable ranks that are shown.
const MAX_SHOWN_RANKS: usize = 24;

/// Show the ranks of a job: step, section, last heartbeat, own time compared with peers, waiting
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay ranks                 the ranks of all jobs that run here
  mainstay ranks demo --watch    one job, again every second
  mainstay ranks demo --json | jq '.jobs[0].ranks[] | select(.against_peers > 1.05)'

Exit status: 0 shown, 3 nothing answers or there is no such job, 64 the command line was not understood.")]
pub(super) struct Args {
    #[command(flatten)]
    job: JobName,
    #[command(flatten)]
    ask: AskAny,
    /// Show it again every second until interrupted
    #[arg(long, visible_alias = "follow", conflicts_with_all = ["json", "output"])]
    watch: bool,
    /// Show each rank, however many there are
    #[arg(long)]
    all: bool,
}

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    loop {
        let found = find(args.ask.server.named());
        let mut answers = ask_all(found.places.clone()).await;
        reported_once(&mut answers);
        let jobs: Vec<Job> = answers
            .into_iter()
            .filter_map(|answer| answer.result.ok())
            .flat_map(|snapshot| snapshot.jobs)
            .filter(|job| args.job.get().map_or(!is_over(job), |id| job.id == *id))
            .collect();
        if let Some(form) = args.ask.form.structured() {
            output::print(&form.document(json!({ "jobs": jobs })))?;
        } else if jobs.is_empty() {
            output::note(&match args.job.get() {
                Some(job) => format!("no job {job:?} is known here; `mainstay status` shows those that are"),
                None => nothing_answers(&found),
            });
        } else {
            // Starts at the top left and clears the last table below.
            let home = if args.watch { "\x1b[H\x1b[J" } else { "" };
            let paint = Paint::for_stdout();
            let tables: Vec<String> = jobs.iter().map(|job| table(job, paint, args.all)).collect();
            output::print_after(home, &tables.join("\n"))?;
        }
        if !args.watch {
            return Ok(ExitCode::from(if jobs.is_empty() { exit::UNKNOWN } else { exit::OK }));
        }
        tokio::time::sleep(REFRESH_INTERVAL).await;
    }
}

pub(super) const COLUMNS: [&str; 11] =
    ["RANK", "HOST", "PID", "PHASE", "STEP", "SECTION", "AGE", "SELF", "VS PEERS", "WAIT", "MEDIAN STEP"];

/// The column that only jobs of several hosts have.
pub(super) const HOST_COLUMN: usize = 1;

/// Columns of words, which are left-aligned; numbers are right-aligned.
pub(super) const TEXT_COLUMNS: [usize; 3] = [HOST_COLUMN, 3, 5];

fn table(job: &Job, paint: Paint, all: bool) -> String {
    let (shown, grouped) = folded(job, if all { usize::MAX } else { MAX_UNGROUPED_RANKS });
    let rows: Vec<[String; 11]> =
        std::iter::once(COLUMNS.map(str::to_owned)).chain(shown.iter().map(|rank| cells(rank))).collect();
    let has_hosts = job.ranks.iter().any(|rank| rank.host.is_some());
    let mut lines =
        aligned(&rows, |column| TEXT_COLUMNS.contains(&column), (!has_hosts).then_some(HOST_COLUMN))
            .into_iter();
    let header = lines.next().unwrap_or_default();
    let run = match job.restarts {
        0 => "not restarted".to_owned(),
        restarts => format!("restart {restarts} of {}", job.max_restarts),
    };
    let mut text = format!("job {}  {run}\n", paint.bold(&clean(&job.id)));
    if !job.incomplete.is_empty() {
        let _ = writeln!(text, "{}", paint.warning(&clean(&job.incomplete)));
    }
    if let Some(hang) = &job.hang {
        let _ = writeln!(text, "{}", paint.bad(&clean(&hang.headline)));
    }
    for finding in &job.findings {
        let _ = writeln!(text, "{}", paint.warning(&clean(&finding.headline)));
    }
    if !shown.is_empty() {
        let _ = writeln!(text, "{}", paint.dim(&format!(" {header}")));
    }
    for (line, rank) in lines.zip(&shown) {
        let row = format!(" {line}");
        let row = match remark(job, rank) {
            Some(remark) => format!("{row}  {remark}"),
            None => row,
        };
        let _ = match (is_suspect(job, rank), is_slow(job, rank)) {
            (true, _) => writeln!(text, "{}", paint.bad(&row)),
            (_, true) => writeln!(text, "{}", paint.warning(&row)),
            _ => writeln!(text, "{row}"),
        };
    }
    groups(&grouped).iter().for_each(|group| {
        let _ = writeln!(text, " {group}");
    });
    text
}

/// The ranks to show, one line each, and those to show in groups: a job of more ranks than `most` is folded.
pub(super) fn folded(job: &Job, most: usize) -> (Vec<&Rank>, Vec<&Rank>) {
    if job.ranks.len() <= most { (job.ranks.iter().collect(), Vec::new()) } else { standing_out(job) }
}

/// The remarkable ranks among many, and the others: ranks that are suspected, slow or behind, or that do not send
/// heartbeats.
fn standing_out(job: &Job) -> (Vec<&Rank>, Vec<&Rank>) {
    let mut steps: Vec<u64> = job.ranks.iter().filter_map(|rank| rank.step).collect();
    steps.sort_unstable();
    let usual = steps.get(steps.len() / 2).copied();
    let weight = |rank: &Rank| {
        let behind = rank.step.zip(usual).is_some_and(|(step, usual)| step + 2 < usual);
        let absent = !matches!(rank.phase(), RankPhase::Connected);
        let excess = rank.against_peers.filter(|ratio| *ratio >= SLOW_FACTOR).unwrap_or(0.0);
        let deviation =
            f64::from(u8::from(is_suspect(job, rank))) * 4.0 + f64::from(u8::from(is_slow(job, rank))) * 3.0;
        deviation + f64::from(u8::from(absent)) * 2.0 + f64::from(u8::from(behind)) * 2.0 + excess
    };
    let mut out: Vec<(f64, usize)> =
        job.ranks.iter().map(weight).zip(0..).filter(|(weight, _)| *weight > 0.0).collect();
    out.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    out.truncate(MAX_SHOWN_RANKS);
    let mut places: Vec<usize> = out.into_iter().map(|(_, at)| at).collect();
    places.sort_unstable();
    let is_out = |at: &usize| places.binary_search(at).is_ok();
    let ranks = |out: bool| job.ranks.iter().enumerate().filter(move |(at, _)| is_out(at) == out);
    (ranks(true).map(|(_, rank)| rank).collect(), ranks(false).map(|(_, rank)| rank).collect())
}

/// One line for each phase and section that ranks are in, largest group first.
pub(super) fn groups(ranks: &[&Rank]) -> Vec<String> {
    let mut by_place: BTreeMap<(String, String), Vec<&Rank>> = BTreeMap::new();
    for rank in ranks {
        let section =
            rank.sections.last().map_or_else(|| "between sections".to_owned(), |section| clean(section));
        by_place.entry((phase(rank), section)).or_default().push(rank);
    }
    let mut groups: Vec<((String, String), Vec<&Rank>)> = by_place.into_iter().collect();
    groups.sort_by_key(|(_, ranks)| std::cmp::Reverse(ranks.len()));
    let more = groups.len().saturating_sub(MAX_SHOWN_RANKS);
    let mut lines: Vec<String> =
        groups.iter().take(MAX_SHOWN_RANKS).map(|(place, ranks)| group(place, ranks)).collect();
    if more > 0 {
        lines.push(format!("and {more} more groups; --all shows each rank"));
    }
    lines
}

fn group((phase, section): &(String, String), ranks: &[&Rank]) -> String {
    let range = |values: Vec<f64>, written: fn(f64) -> String| {
        let (low, high) =
            values.iter().fold((f64::MAX, f64::MIN), |(low, high), at| (low.min(*at), high.max(*at)));
        if values.is_empty() {
            None
        } else if written(low) == written(high) {
            Some(written(low))
        } else {
            Some(format!("{}-{}", written(low), written(high)))
        }
    };
    let numbers: Vec<u32> = ranks.iter().map(|rank| rank.rank).collect();
    let mut text = format!("{} rank(s) ({}): {phase}, {section}", ranks.len(), ranges(&numbers));
    let steps = ranks.iter().filter_map(|rank| rank.step).map(|step| step as f64).collect();
    let own = ranks.iter().filter_map(|rank| rank.self_time.as_ref()).map(seconds).collect();
    let waits = ranks.iter().filter_map(|rank| rank.wait_share).collect();
    let ages = ranks
        .iter()
        .filter_map(|rank| rank.heartbeat_age.as_ref())
        .map(seconds)
        .fold(None, |most: Option<f64>, age| Some(most.map_or(age, |most| most.max(age))));
    for (name, range) in [
        ("step", range(steps, |step| format!("{step:.0}"))),
        ("self", range(own, |own| format!("{own:.3} s"))),
        ("wait", range(waits, |share| format!("{:.0} %", share * 100.0))),
        ("age up to", ages.map(spoken)),
    ] {
        if let Some(range) = range {
            let _ = write!(text, "; {name} {range}");
        }
    }
    text
}

/// Ranges such as `0-6, 8`; only a few if there are many.
fn ranges(ranks: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for rank in ranks {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == *rank => *last = *rank,
            _ => parts.push((*rank, *rank)),
        }
    }
    let more = parts.len().saturating_sub(6);
    let part = |(first, last): &(u32, u32)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    let shown: Vec<String> = parts.iter().take(6).map(part).collect();
    if more > 0 { format!("{}, ...", shown.join(", ")) } else { shown.join(", ") }
}

pub(super) fn is_suspect(job: &Job, rank: &Rank) -> bool {
    job.hang.as_ref().is_some_and(|hang| hang.culprits.contains(&rank.rank))
}

/// Whether an open finding names the rank.
pub(super) fn is_slow(job: &Job, rank: &Rank) -> bool {
    job.findings.iter().any(|finding| finding.ranks.contains(&rank.rank))
}

/// The remark at the end of the rank's line.
pub(super) fn remark(job: &Job, rank: &Rank) -> Option<String> {
    if is_suspect(job, rank) && matches!(rank.phase(), RankPhase::Connected) {
        return Some("suspect".to_owned());
    }
    let finding = job.findings.iter().find(|finding| finding.ranks.contains(&rank.rank))?;
    Some(finding.what.replace('_', " "))
}

fn phase(rank: &Rank) -> String {
    rank.phase().name().to_lowercase()
}

pub(super) fn cells(rank: &Rank) -> [String; 11] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let sections = rank.sections.iter().map(|section| clean(section)).collect::<Vec<_>>().join(" > ");
    [
        rank.rank.to_string(),
        or_dash(rank.host.as_deref().map(clean)),
        rank.pid.to_string(),
        phase(rank),
        or_dash(rank.step.map(|step| step.to_string())),
        or_dash(Some(shortened(&sections, 32)).filter(|sections| !sections.is_empty())),
        or_dash(rank.heartbeat_age.as_ref().map(|age| spoken(seconds(age)))),
        or_dash(rank.self_time.as_ref().map(|own| format!("{:.3} s", seconds(own)))),
        or_dash(rank.against_peers.map(|ratio| format!("{:+.1} %", (ratio - 1.0) * 100.0))),
        or_dash(rank.wait_share.map(|share| format!("{:.0} %", share * 100.0))),
        or_dash(rank.median_step.as_ref().map(|median| format!("{:.3} s", seconds(median)))),
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
        let shown = table(&job, Paint::plain(), false);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[1], "rank 1 hangs");
        assert!(lines[3].contains("forward > attention") && lines[3].ends_with("0.250 s"), "{shown}");
        assert!(lines[4].ends_with("suspect"), "{shown}");
    }

    fn many(ranks: u32) -> Job {
        let rank = |rank| Rank {
            rank,
            phase: RankPhase::Connected.into(),
            step: Some(812),
            sections: vec![if rank % 2 == 0 { "forward".into() } else { "allreduce".into() }],
            self_time: Some(prost_types::Duration { seconds: 0, nanos: 120_000_000 }),
            against_peers: Some(if rank == 77 { 1.31 } else { 1.0 }),
            wait_share: Some(0.25),
            ..Rank::default()
        };
        let mut ranks: Vec<Rank> = (0..ranks).map(rank).collect();
        if let Some(behind) = ranks.get_mut(300) {
            behind.step = Some(640);
        }
        Job { id: "demo".into(), ranks, ..Job::default() }
    }

    #[test]
    fn among_many_ranks_the_remarkable_ones_are_shown_and_the_others_in_groups() {
        let shown = table(&many(512), Paint::plain(), false);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines.len(), 6, "{shown}");
        assert!(
            lines[2].contains(" 77 ") && lines[2].contains("+31.0 %") && lines[2].contains("25 %"),
            "{shown}"
        );
        assert!(lines[3].contains(" 300 ") && lines[3].contains(" 640 "), "{shown}");
        assert!(
            lines[5].starts_with(" 255 rank(s) (")
                && lines[5].contains("forward; step 812; self 0.120 s; wait 25 %"),
            "{shown}"
        );
        assert_eq!(table(&many(512), Paint::plain(), true).lines().count(), 514);
    }

    #[test]
    fn among_few_ranks_each_is_shown_with_its_own_time_and_waiting() {
        let shown = table(&many(8), Paint::plain(), false);
        assert_eq!(shown.lines().count(), 10, "{shown}");
        assert!(shown.lines().skip(2).all(|line| line.contains("0.120 s    +0.0 %  25 %")), "{shown}");
    }
}
