//! The books of jobs for people and scripts.

use std::collections::BTreeMap;
use std::fmt::Write;

use mainstay_model::escape::clean;
use mainstay_model::time::Wall;
use mainstay_progress::goodput::TimeCategory;
use mainstay_proto::v1::{Books, TimeCause, TimeInState};
use serde_json::{Value, json};

use crate::convert;

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;

/// The width of a bar of 100 %.
const BAR: usize = 30;

/// The books of one job, and whose they are.
#[derive(Clone, Debug, Default)]
pub struct JobAccount {
    /// The job: the run of its checkpoints without its id, or its name.
    pub job: String,
    /// Its user.
    pub user: String,
    /// Its hosts, if it has several.
    pub hosts: Vec<String>,
    /// The number of its ranks.
    pub ranks: u32,
    /// Its books.
    pub books: Books,
}

/// What lost time is grouped by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupBy {
    /// The job.
    Job,
    /// The host at fault.
    Host,
    /// The user of the job.
    User,
    /// The kind of the cause.
    Cause,
}

/// How the books are shown.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The grouping of a table of lost time; none for a block for each job.
    pub by: Option<GroupBy>,
    /// The price of a device for an hour, in any currency.
    pub price: Option<f64>,
    /// The time that the books take in, if it is limited.
    pub window: (Option<Wall>, Option<Wall>),
}

/// The figures of one job, or of several together.
#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    wall: f64,
    training: f64,
    /// Time in which the job made new steps, also slowly, or saved.
    effective: f64,
    /// Time in which its ranks ran.
    up: f64,
    rank_seconds: f64,
    trained_rank_seconds: f64,
    failures: u32,
    recovered: (u32, f64),
    steps: u64,
    lost_steps: u64,
    is_measured: bool,
}

impl Figures {
    fn of(books: &Books) -> Figures {
        let mut figures = Figures { steps: books.steps, is_measured: books.measured, ..Figures::default() };
        for time in &books.times {
            let seconds = seconds(time);
            figures.wall += seconds;
            figures.rank_seconds += time.rank_seconds;
            let state = category(&time.state);
            if state == Some(TimeCategory::Training) {
                figures.training += seconds;
                figures.trained_rank_seconds += time.rank_seconds;
            }
            use TimeCategory::{Checkpointing, LostWork, Slowdown, Training, Unmeasured};
            if matches!(state, Some(Training | Slowdown | Checkpointing)) {
                figures.effective += seconds;
            }
            if matches!(state, Some(Training | Slowdown | Checkpointing | LostWork | Unmeasured)) {
                figures.up += seconds;
            }
        }
        for cause in &books.causes {
            figures.lost_steps += cause.lost_steps;
            if cause.incident.is_some() {
                figures.failures += 1;
                if let Some(after) = &cause.recovered_after {
                    figures.recovered.0 += 1;
                    figures.recovered.1 += convert::span(after).as_seconds();
                }
            }
        }
        figures
    }

    fn add(&mut self, other: Figures) {
        self.wall += other.wall;
        self.training += other.training;
        self.effective += other.effective;
        self.up += other.up;
        self.rank_seconds += other.rank_seconds;
        self.trained_rank_seconds += other.trained_rank_seconds;
        self.failures += other.failures;
        self.recovered.0 += other.recovered.0;
        self.recovered.1 += other.recovered.1;
        self.steps += other.steps;
        self.lost_steps += other.lost_steps;
        self.is_measured |= other.is_measured;
    }

    /// None if it is unknown which time was training.
    fn goodput(&self) -> Option<f64> {
        (self.is_measured && self.wall > 0.0).then(|| self.training / self.wall)
    }

    fn ettr(&self) -> Option<f64> {
        (self.is_measured && self.wall > 0.0).then(|| self.effective / self.wall)
    }

    /// Seconds that the ranks ran for each failure.
    fn mttf(&self) -> Option<f64> {
        (self.failures > 0).then(|| self.up / f64::from(self.failures))
    }

    /// Seconds from a failure until training resumed.
    fn mttr(&self) -> Option<f64> {
        (self.recovered.0 > 0).then(|| self.recovered.1 / f64::from(self.recovered.0))
    }

    fn json(&self, price: Option<f64>) -> Value {
        let hours = self.rank_seconds / 3600.0;
        let lost = (self.rank_seconds - self.trained_rank_seconds) / 3600.0;
        json!({
            "wall_seconds": self.wall,
            "goodput": self.goodput(),
            "ettr": self.ettr(),
            "mttf_seconds": self.mttf(),
            "mttr_seconds": self.mttr(),
            "failures": self.failures,
            "steps": self.steps,
            "lost_steps": self.lost_steps,
            "device_hours": hours,
            "device_hours_not_training": lost,
            "cost": price.map(|price| price * hours),
            "cost_not_training": price.map(|price| price * lost),
        })
    }
}

fn category(name: &str) -> Option<TimeCategory> {
    TimeCategory::ALL.into_iter().find(|of| of.as_str() == name)
}

fn seconds(time: &TimeInState) -> f64 {
    time.time.as_ref().map_or(0.0, |time| convert::span(time).as_seconds())
}

fn cause_of<'a>(books: &'a Books, time: &TimeInState) -> Option<&'a TimeCause> {
    books.causes.get(usize::try_from(time.cause?).ok()?)
}

/// The figures of all jobs and of each with its times and causes.
pub fn json(jobs: &[JobAccount], options: Options) -> Value {
    let mut total = Figures::default();
    let mut all = Vec::new();
    for of in jobs {
        let figures = Figures::of(&of.books);
        total.add(figures);
        let times = of.books.times.iter().map(|time| {
            json!({
                "state": time.state,
                "cause": time.cause,
                "seconds": seconds(time),
                "device_hours": time.rank_seconds / 3600.0,
            })
        });
        let causes = of.books.causes.iter().map(|cause| {
            let after = |time: &Option<prost_types::Duration>| {
                time.as_ref().map(|time| convert::span(time).as_seconds())
            };
            json!({
                "kind": cause.kind,
                "headline": cause.headline,
                "host": cause.host,
                "incident": cause.incident,
                "time": cause.time.as_ref().map(|time| convert::wall(time).to_string()),
                "detected_after_seconds": after(&cause.detected_after),
                "recovered_after_seconds": after(&cause.recovered_after),
                "lost_steps": cause.lost_steps,
            })
        });
        let mut shown = figures.json(options.price);
        shown["job"] = json!(of.job);
        shown["user"] = json!(of.user);
        shown["hosts"] = json!(of.hosts);
        shown["ranks"] = json!(of.ranks);
        shown["launches"] = json!(of.books.launches);
        shown["measured"] = json!(of.books.measured);
        shown["lost_steps_are_the_most"] = json!(of.books.counted);
        shown["times"] = times.collect();
        shown["causes"] = causes.collect();
        all.push(shown);
    }
    let (since, until) = options.window;
    let time = |of: Option<Wall>| of.map(|of| of.to_string());
    json!({
        "since": time(since),
        "until": time(until),
        "total": total.json(options.price),
        "jobs": all,
    })
}

/// A row for each state and cause of each job.
pub fn csv(jobs: &[JobAccount], options: Options) -> String {
    let mut text = "job,user,state,cause,host,incident,seconds,device_hours,lost_steps,cost\n".to_owned();
    for of in jobs {
        for time in &of.books.times {
            let cause = cause_of(&of.books, time);
            let hours = time.rank_seconds / 3600.0;
            let lost = cause.filter(|_| time.state == TimeCategory::LostWork.as_str());
            let row = [
                field(&of.job),
                field(&of.user),
                field(&time.state),
                field(cause.map_or("", |cause| &cause.kind)),
                field(cause.and_then(|cause| cause.host.as_deref()).unwrap_or_default()),
                cause.and_then(|cause| cause.incident).map(|of| of.to_string()).unwrap_or_default(),
                format!("{:.3}", seconds(time)),
                format!("{hours:.6}"),
                lost.map(|cause| cause.lost_steps.to_string()).unwrap_or_default(),
                options.price.map(|price| format!("{:.2}", price * hours)).unwrap_or_default(),
            ];
            text.push_str(&row.join(","));
            text.push('\n');
        }
    }
    text
}

/// A field as RFC 4180 has it. A spreadsheet takes one that begins like a formula for one.
fn field(text: &str) -> String {
    let text = if text.starts_with(['=', '+', '-', '@']) { format!("'{text}") } else { text.to_owned() };
    if text.contains([',', '"', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

/// The books for people.
pub fn text(jobs: &[JobAccount], options: Options) -> String {
    let mut total = Figures::default();
    let mut rows = vec![headings(options.price)];
    for of in jobs {
        let figures = Figures::of(&of.books);
        total.add(figures);
        rows.push(row(&clean(&of.job), &figures, options.price));
    }
    if jobs.len() > 1 {
        rows.push(row("all", &total, options.price));
    }
    let mut text = table(&rows);
    match options.by {
        Some(by) => text.push_str(&grouped(jobs, by, options.price)),
        None => jobs.iter().for_each(|of| text.push_str(&block(of))),
    }
    text
}

fn headings(price: Option<f64>) -> Vec<String> {
    let names = ["JOB", "TIME", "GOODPUT", "ETTR", "FAILURES", "MTTF", "MTTR", "LOST STEPS", "DEVICE HOURS"];
    names.into_iter().chain(price.map(|_| "COST")).map(str::to_owned).collect()
}

fn row(name: &str, figures: &Figures, price: Option<f64>) -> Vec<String> {
    let percent =
        |share: Option<f64>| share.map_or("unknown".to_owned(), |share| format!("{:.1} %", 100.0 * share));
    let hours = figures.rank_seconds / 3600.0;
    let mut row = vec![
        name.to_owned(),
        time(figures.wall),
        percent(figures.goodput()),
        percent(figures.ettr()),
        figures.failures.to_string(),
        figures.mttf().map_or("-".to_owned(), time),
        figures.mttr().map_or("-".to_owned(), time),
        figures.lost_steps.to_string(),
        format!("{hours:.1}"),
    ];
    row.extend(price.map(|price| format!("{:.2}", price * hours)));
    row
}

/// Columns as wide as their widest cell; the first to the left, the others to the right.
fn table(rows: &[Vec<String>]) -> String {
    let mut text = String::new();
    for row in rows {
        for (column, cell) in row.iter().enumerate() {
            let width = rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0);
            let _ = match column {
                0 => write!(text, "{cell:<width$}"),
                _ => write!(text, "  {cell:>width$}"),
            };
        }
        text.push('\n');
    }
    text
}

/// Where the time of a job went, and what the largest causes cost.
fn block(of: &JobAccount) -> String {
    let wall = Figures::of(&of.books).wall;
    let mut text = format!("\n{}", clean(&of.job));
    if of.books.launches > 1 {
        let _ = write!(text, " ({} launches)", of.books.launches);
    }
    text.push('\n');
    if !of.books.measured {
        text.push_str(
            "  no rank sent heartbeats: whether it trained is unknown, and so are goodput and lost steps\n",
        );
    }
    if of.books.counted {
        text.push_str("  the program does not number its steps: goodput is the least and lost steps the most possible\n");
    }
    for state in TimeCategory::ALL {
        let in_state = |time: &&TimeInState| time.state == state.as_str();
        let spent: f64 = of.books.times.iter().filter(in_state).map(seconds).sum();
        if spent > 0.0 {
            text.push_str(&bar(&state.to_string(), spent, wall));
        }
    }
    let mut causes: Vec<(f64, &TimeCause)> = Vec::new();
    for (index, cause) in (0_u32..).zip(&of.books.causes) {
        let charged = |time: &&TimeInState| time.cause == Some(index);
        causes.push((of.books.times.iter().filter(charged).map(seconds).sum(), cause));
    }
    causes.sort_by(|a, b| b.0.total_cmp(&a.0));
    for (spent, cause) in causes.iter().take(MAX_CAUSES) {
        let steps = match cause.lost_steps {
            0 => String::new(),
            steps => format!(", {steps} step(s) done again"),
        };
        let host = cause.host.as_ref().map(|host| format!(" on {}", clean(host))).unwrap_or_default();
        let said = if cause.headline.is_empty() { &cause.kind } else { &cause.headline };
        let _ = writeln!(text, "  {:>9}  {}{host}{steps}: {}", time(*spent), cause.kind, clean(said));
    }
    if let Some(more @ 1..) = causes.len().checked_sub(MAX_CAUSES) {
        let _ = writeln!(text, "  and {more} more: --json has all");
    }
    text
}

/// The most causes of a job that are shown.
const MAX_CAUSES: usize = 8;

/// What was lost, by what it is grouped by. Time that no cause explains is in a group of its own.
fn grouped(jobs: &[JobAccount], by: GroupBy, price: Option<f64>) -> String {
    let mut groups: BTreeMap<String, (f64, f64, u64)> = BTreeMap::new();
    let mut wall = 0.0;
    for of in jobs {
        for time in &of.books.times {
            wall += seconds(time);
            let state = category(&time.state);
            if matches!(state, Some(TimeCategory::Training | TimeCategory::Unmeasured)) {
                continue;
            }
            let cause = cause_of(&of.books, time);
            let none = || time.state.replace('_', " ");
            let group = match by {
                GroupBy::Job => of.job.clone(),
                GroupBy::User => of.user.clone(),
                GroupBy::Host => {
                    cause.and_then(|cause| cause.host.clone()).unwrap_or_else(|| "no host".to_owned())
                }
                GroupBy::Cause => cause.map_or_else(none, |cause| cause.kind.clone()),
            };
            let (spent, of_ranks, steps) = groups.entry(group).or_default();
            *spent += seconds(time);
            *of_ranks += time.rank_seconds;
            if state == Some(TimeCategory::LostWork) {
                *steps += cause.map_or(0, |cause| cause.lost_steps);
            }
        }
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by(|a, b| b.1.0.total_cmp(&a.1.0));
    let title = match by {
        GroupBy::Job => "JOB",
        GroupBy::Host => "HOST",
        GroupBy::User => "USER",
        GroupBy::Cause => "CAUSE",
    };
    let names = [title, "NOT TRAINING", "OF ALL TIME", "LOST STEPS", "DEVICE HOURS"];
    let mut rows: Vec<Vec<String>> =
        vec![names.into_iter().chain(price.map(|_| "COST")).map(str::to_owned).collect()];
    for (name, (spent, of_ranks, steps)) in groups {
        let share = if wall > 0.0 { 100.0 * spent / wall } else { 0.0 };
        let hours = of_ranks / 3600.0;
        let mut row = vec![
            clean(&name),
            time(spent),
            format!("{share:.1} %"),
            steps.to_string(),
            format!("{hours:.1}"),
        ];
        row.extend(price.map(|price| format!("{:.2}", price * hours)));
        rows.push(row);
    }
    format!("\n{}", table(&rows))
}

fn bar(name: &str, spent: f64, wall: f64) -> String {
    let share = if wall > 0.0 { spent / wall } else { 0.0 };
    let filled = (share * BAR as f64).round() as usize;
    let bar = format!("{}{}", "#".repeat(filled.min(BAR)), ".".repeat(BAR.saturating_sub(filled)));
    format!("  {name:<26} {:>9} {:>6.1} %  {bar}\n", time(spent), 100.0 * share)
}

/// "3d 2h", "2h 5m", "4m 10s", "9.1 s".
fn time(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{seconds:.1} s"),
        60..3600 => format!("{}m {:02}s", whole / 60, whole % 60),
        3600..86_400 => format!("{}h {:02}m", whole / 3600, whole / 60 % 60),
        _ => format!("{}d {:02}h", whole / 86_400, whole / 3600 % 24),
    }
}
