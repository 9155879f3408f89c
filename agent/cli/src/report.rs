//! `mainstay report`: a run for a post-mortem, from its directory: one page that needs no server, or Markdown.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use mainstay_api::page;
use mainstay_model::entry::Entry;
use mainstay_model::escape::escaped;
use mainstay_model::finding::Finding;
use mainstay_model::id::Incident;
use mainstay_model::time::Stamp;
use mainstay_proto::json::ApiEnum;
use mainstay_proto::v1::{Event, EventKind, Job, ListEventsResponse, Server, ServerMode};
use mainstay_recovery::job::Summary;
use mainstay_view::convert::event::event;
use mainstay_view::convert::health as from_view;
use mainstay_view::convert::timestamp;
use mainstay_view::incident_report::{self, IncidentReport, Options};
use mainstay_view::node::NodeView;
use mainstay_view::summary::Recounted;
use serde_json::{Map, Value, json};

use super::find::RunName;
use super::output::spoken;
use super::secrets::Secrets;
use super::{explain, output, screen};

/// Write the report on a run, for a post-mortem: time, failures with their evidence, findings
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("form").required(true))]
#[command(after_help = "Examples:
  mainstay report exp-7 --html exp-7.html       one page that needs no server
  mainstay report /logs/exp-7 --markdown        for a ticket, on standard output

The report quotes the job's command line and its messages, without secrets: whoever gets the file can read them.
Exit status: 0 written, 3 there is no such run or the file cannot be written, 64 the command line was not understood.")]
pub(super) struct Args {
    #[command(flatten)]
    run: RunName,
    /// Write one self-contained page into this file
    #[arg(long, value_name = "FILE", group = "form")]
    html: Option<PathBuf>,
    /// Print Markdown
    #[arg(long, group = "form")]
    markdown: bool,
    #[command(flatten)]
    secrets: Secrets,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let run_dir = explain::find_run(args.run.get())?;
    let report = RunReport::from_directory(&run_dir, args.secrets)?;
    match &args.html {
        Some(file) => {
            let page = page::inlined(&report.answers());
            std::fs::write(file, page).with_context(|| format!("writing {}", file.display()))?;
        }
        None => output::print(&report.markdown())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// All that a run directory has for a report.
struct RunReport {
    job: Job,
    /// The last entry's time: ages count up to here.
    now: Stamp,
    summary: Option<Summary>,
    events: Vec<Event>,
    incidents: Vec<IncidentReport>,
    findings: BTreeMap<u64, Finding>,
}

impl RunReport {
    fn from_directory(run_dir: &Path, secrets: Secrets) -> anyhow::Result<RunReport> {
        let entries = secrets.read(run_dir)?;
        let summary = std::fs::read_to_string(run_dir.join("summary.json")).ok();
        // A run that goes on, or whose launcher was killed, has none.
        let summary = summary.and_then(|text| serde_json::from_str(&text).ok());
        let report = RunReport::from_entries(&entries, summary);
        report.with_context(|| format!("{}: its journal has no start of a job", run_dir.display()))
    }

    fn from_entries(entries: &[Entry], summary: Option<Summary>) -> Option<RunReport> {
        let now = entries.last()?.at;
        let (mut view, mut recounted) = (NodeView::default(), Recounted::default());
        for entry in entries {
            view.apply(entry);
            recounted.entry(entry);
        }
        let job = from_view::job(view.jobs.values().next_back()?, now, None, &[]);
        let numbers: BTreeSet<Incident> = entries.iter().filter_map(|entry| entry.body.incident()).collect();
        let incidents = numbers
            .into_iter()
            .filter_map(|incident| incident_report::from_entries(entries.iter(), Some(incident)));
        let of_incidents = [EventKind::Verdict, EventKind::Decision, EventKind::Outcome, EventKind::Finding];
        let events = entries.iter().map(event).filter(|event| of_incidents.contains(&event.kind()));
        let summary = summary.or_else(|| recounted.summary(now, 0, String::new()));
        let findings = incident_report::findings(entries.iter());
        let (events, incidents) = (events.collect(), incidents.collect());
        Some(RunReport { job, now, summary, events, incidents, findings })
    }

    /// What a launcher's server would answer to the page, by path.
    fn answers(&self) -> Map<String, Value> {
        let id = &self.job.id;
        let server = Server {
            mode: ServerMode::Launcher.into(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            hostname: format!("Run {id}"),
            start_time: self.job.start_time,
            time: Some(timestamp(self.now.wall)),
            ..Server::default()
        };
        let node = mainstay_proto::v1::Node::default();
        let mut job = json!(self.job);
        if let Some(summary) = &self.summary {
            job["goodput"] = goodput(summary);
        }
        let events = ListEventsResponse {
            events: self.events.clone(),
            caught_up: true,
            ..ListEventsResponse::default()
        };
        let mut answers = Map::new();
        let mut add = |path: String, answer| answers.insert(path, answer);
        add("v1/node".to_owned(), json!({ "node": node, "server": server }));
        add("v1/devices".to_owned(), json!({ "devices": [] }));
        add("v1/jobs".to_owned(), json!({ "jobs": [self.job] }));
        add(format!("v1/jobs/{id}"), json!({ "job": job }));
        add(format!("v1/events?job={id}"), json!(events));
        for report in &self.incidents {
            let incident = report.verdict.incident.0;
            add(format!("v1/incidents/{id}/{incident}"), incident_report::with_text(id, report));
        }
        answers
    }

    fn markdown(&self) -> String {
        let Job { id, run_dir, .. } = &self.job;
        let mut text = format!("# Run {}\n\n", escaped(id));
        let mut item = |name: &str, value: &str| {
            if !value.is_empty() {
                let _ = writeln!(text, "- {name}: {}", escaped(value));
            }
        };
        item("Command", &self.job.command.join(" "));
        item("Ranks", &self.job.world_size.to_string());
        let started = self.job.start_time.as_ref().and_then(mainstay_proto::json::point);
        item("Started", &started.map(|at| format!("{at:.0}")).unwrap_or_default());
        let status = self.job.exit_status.map(|status| format!(" ({status})")).unwrap_or_default();
        item("Phase", &format!("{}{status}", self.job.phase().name()));
        item("Ended", self.job.end_reason.as_deref().unwrap_or_default());
        item("Last step", &self.job.step.map(|step| step.to_string()).unwrap_or_default());
        item("Restarts", &screen::restarts(&self.job));
        item("Run directory", run_dir);
        if let Some(Summary { accounting, .. }) = &self.summary {
            let wall = accounting.wall.as_seconds();
            let goodput = accounting.goodput.map(|share| format!("goodput {:.1} %", share * 100.0));
            let goodput = goodput.unwrap_or_else(|| "goodput unknown: no rank sent heartbeats".to_owned());
            let (steps, lost) = (accounting.steps, accounting.steps_lost);
            let _ = write!(text, "\n## Time\n\n{goodput}; {steps} step(s), {lost} of them done twice\n\n");
            text.push_str("| spent on | time | share |\n|---|---:|---:|\n");
            for (part, span) in &accounting.parts {
                let (spent, seconds) = (spoken(span.as_seconds()), span.as_seconds());
                let share = if wall > 0.0 { seconds / wall * 100.0 } else { 0.0 };
                let _ = writeln!(text, "| {part} | {spent} | {share:.1} % |");
            }
        }
        for report in &self.incidents {
            // Each report has the findings of the whole job.
            let report = IncidentReport { findings: BTreeMap::new(), ..report.clone() };
            let options = Options { markdown: true, all: true, ..Options::default() };
            let _ = write!(text, "\n{}", incident_report::render(&report, options).trim_end());
            text.push('\n');
        }
        text.push_str(&incident_report::render_findings(&self.findings, true));
        text
    }
}

/// The time of a job by what it was spent on, in seconds.
fn goodput(summary: &Summary) -> Value {
    let accounting = &summary.accounting;
    let parts: BTreeMap<String, f64> =
        accounting.parts.iter().map(|(part, span)| (part.to_string(), span.as_seconds())).collect();
    let mut goodput = json!({
        "wall_s": accounting.wall.as_seconds(),
        "parts": parts,
        "steps": accounting.steps,
        "steps_lost": accounting.steps_lost,
    });
    if let Some(share) = accounting.goodput {
        goodput["goodput"] = json!(share);
    }
    goodput
}

#[cfg(test)]
mod tests {
    use mainstay_diagnosis::root_rank::start_failed;
    use mainstay_model::entry::{Body, Fact, JobSpec};
    use mainstay_model::id::{Attempt, BootId, JobId};
    use mainstay_model::time::{Mono, Span, Wall};
    use mainstay_model::verdict::{Action, DecidedBy, Decision};

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// A job that could not be started once, and then ended.
    fn entries(message: &str) -> Vec<Entry> {
        let spec = JobSpec {
            command: vec!["python".to_owned(), "train.py".to_owned()],
            world_size: 2,
            local_world_size: 2,
            max_restarts: 3,
            run_dir: "/logs/exp-7".to_owned(),
            ..JobSpec::default()
        };
        let attempt = |attempt| Fact::AttemptStarted {
            attempt: Attempt(attempt),
            master_port: 1,
            ranks: Vec::new(),
            hosts: Vec::new(),
        };
        let decision = Decision {
            incident: Incident(1),
            action: Action::RestartInJob { attempt: Attempt(1) },
            after: Span::default(),
            rule: mainstay_model::verdict::Rule::Restart,
            why: "1 of 3 restarts used".to_owned(),
            by: DecidedBy::Launcher,
            agent_evidence: false,
        };
        let bodies = [
            (0, Body::Fact(Fact::JobStarted(spec))),
            (1, Body::Fact(attempt(0))),
            (5, Body::Verdict(start_failed(Incident(1), Attempt(0), message, Mono(5 * SECOND)))),
            (5, Body::Decision(decision)),
            (6, Body::Fact(attempt(1))),
            (20, Body::Fact(Fact::JobEnded { exit: 0, reason: "all ranks ended".to_owned() })),
        ];
        let entry = |(seq, (second, body)): (usize, (u64, Body))| Entry {
            seq: seq as u64 + 1,
            at: Stamp {
                mono: Mono(second * SECOND),
                wall: Wall((1_767_225_600 + second as i64) * SECOND as i64),
            },
            boot: BootId("b".to_owned()),
            job: Some(JobId("exp-7".to_owned())),
            origin_seq: None,
            body,
        };
        bodies.into_iter().enumerate().map(entry).collect()
    }

    #[test]
    fn a_report_in_markdown_has_the_times_and_each_failure() {
        let report = RunReport::from_entries(&entries("no such file"), None).unwrap();
        testing::snapshot!("report", "a job that was started again", report.markdown());
    }

    #[test]
    fn nothing_that_a_program_wrote_is_markup_of_the_page() {
        let hostile = "</script><script>alert(1)</script><img src=x>";
        let report = RunReport::from_entries(&entries(hostile), None).unwrap();
        let page = page::inlined(&report.answers());
        let (own, plain) = (page.matches("<script").count(), page::inlined(&Map::new()));
        assert_eq!(own, plain.matches("<script").count());
        assert!(!page.contains("alert(1)</") && page.contains("alert(1)") && page.len() < 150_000);
        assert!(report.answers().contains_key("v1/incidents/exp-7/1"));
    }

    #[test]
    fn a_journal_without_a_job_has_no_report() {
        assert!(RunReport::from_entries(&[], None).is_none());
        assert!(RunReport::from_entries(&entries("")[1..], None).is_none());
    }
}
