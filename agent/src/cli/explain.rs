//! `mainstay explain`: a failure with its evidence, from the job's own journal, also when the job is long over; or a
//! component of the host, or an event.

mod host;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use mainstay_core::catalog::Catalog;
use mainstay_core::entry::{Body, Entry};
use mainstay_core::finding::Finding;
use mainstay_core::id::Incident;
use mainstay_core::policy::Rung;
use mainstay_core::verdict::{Action, Decision, FaultDomain, Outcome, Verdict};
use mainstay_proto::v1::EventFilter;
use serde_json::json;

use super::client::Client;
use super::find::{Ask, find};
use super::{exit, output};
use crate::app::{catalog, usual};
use crate::config::{Config, Environment};
use crate::store::journal::JournalReader;

const EXAMPLES: &str = "\
Examples:
  mainstay explain                         the last failure of the newest run
  mainstay explain exp-7 --incident 2      the second failure of a run
  mainstay explain /logs/exp-7 --markdown  for a ticket
  mainstay explain gpu.0000:3b:00          a component: what was seen, what it means, what to do
  mainstay explain 4711                    an event, by its cursor (mainstay events)

Exit status: 0 explained, 3 there is nothing of that name, 64 the command line was not understood.";

/// Explain a failure, a component or an event: what was seen, what it means, what was done or is to be done
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// A run directory, the name of a run in the usual place, a component of the host, or the cursor of an event of the
    /// agent; the newest run if not given
    #[arg(value_name = "RUN|COMPONENT|CURSOR")]
    what: Option<PathBuf>,
    /// Which failure of the job, from 1; the last one if not given
    #[arg(long, value_name = "N")]
    incident: Option<u64>,
    /// Print JSON
    #[arg(long, conflicts_with = "markdown")]
    json: bool,
    /// Print Markdown
    #[arg(long)]
    markdown: bool,
    /// Ask the agent on this socket for components and events
    #[arg(long, value_name = "PATH", env = "MAINSTAY_SOCKET")]
    socket: Option<PathBuf>,
    /// The agent's configuration file, which may name catalogues
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// What the journal tells of one failure.
struct Story {
    verdict: Verdict,
    decision: Option<Decision>,
    outcome: Option<Outcome>,
}

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let Some(what) = args.what.as_deref().and_then(Path::to_str).filter(|what| !is_run(what))
        && let Some((text, value)) = of_host(&args, what).await?
    {
        output::print(&if args.json { format!("{value}\n") } else { text })?;
        return Ok(ExitCode::SUCCESS);
    }
    of_run(&args)
}

fn is_run(name: &str) -> bool {
    [PathBuf::from(name), usual::log_dir(&usual::environment).join(name)]
        .iter()
        .any(|path| path.join("journal").is_dir())
}

/// Asks the agent: a component by its name, an event by its cursor. None if it knows of neither.
async fn of_host(args: &Args, what: &str) -> anyhow::Result<Option<(String, serde_json::Value)>> {
    let cursor: Option<u64> = what.parse().ok().filter(|cursor| *cursor > 0);
    let found = find(&Ask { socket: args.socket.clone(), json: false });
    for place in found.places.iter().filter(|place| place.job.is_none()) {
        let Ok(client) = Client::connect(&place.socket).await else { continue };
        if let Some(cursor) = cursor {
            let events = client.list_events(cursor - 1, EventFilter::default()).await?.events;
            if let Some(event) = events.first().filter(|event| event.cursor == cursor) {
                return Ok(Some(host::event(event, &catalog(args)?)));
            }
        } else {
            let node = client.snapshot().await?.node;
            if let Some(component) = node.components.iter().find(|component| component.name == what) {
                return Ok(Some(host::component(component, &catalog(args)?)));
            }
        }
    }
    Ok(None)
}

/// The catalogue of the agent's configuration.
fn catalog(args: &Args) -> anyhow::Result<Catalog> {
    let environment = Environment::new(usual::variables(), nix::unistd::geteuid().as_raw());
    catalog::load(&Config::load(args.config.as_deref(), &environment, &[])?.catalog.files)
}

fn of_run(args: &Args) -> anyhow::Result<ExitCode> {
    let run_dir = find_run(args.what.as_deref())?;
    let entries = read(&run_dir)?;
    let findings = findings(&entries);
    let Some(story) = story(&entries, args.incident.map(Incident)) else {
        if args.incident.is_none() && !findings.is_empty() {
            let text = if args.json {
                format!("{}\n", json!({ "run": run_dir, "findings": findings }))
            } else {
                format!("no failure\n{}", render_findings(&findings, args.markdown))
            };
            output::print(&text)?;
            return Ok(ExitCode::SUCCESS);
        }
        let which =
            args.incident.map_or("no failure".to_owned(), |incident| format!("no failure {incident}"));
        output::note(&format!("{}: {which} in this run", run_dir.display()));
        return Ok(ExitCode::from(exit::UNKNOWN));
    };
    let text = if args.json {
        let Story { verdict, decision, outcome } = &story;
        format!(
            "{}\n",
            json!({
                "run": run_dir, "verdict": verdict, "decision": decision, "outcome": outcome, "findings": findings
            })
        )
    } else {
        render(&run_dir, &story, args.markdown) + &render_findings(&findings, args.markdown)
    };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// What was wrong with the job although nothing failed, each as it was last told.
fn findings(entries: &[Entry]) -> BTreeMap<u64, Finding> {
    let told = entries.iter().filter_map(|entry| match &entry.body {
        Body::Finding(finding) => Some((finding.finding, finding.clone())),
        _ => None,
    });
    told.collect()
}

fn render_findings(findings: &BTreeMap<u64, Finding>, markdown: bool) -> String {
    let (title, bullet) = if markdown { ("## ", "- ") } else { ("", "  ") };
    let mut lines = Vec::new();
    for finding in findings.values() {
        lines.push(String::new());
        lines.push(format!("{title}Finding {}: {}", finding.finding, finding.headline));
        lines.push(format!("{bullet}{}, {:.0} % sure", finding.domain, finding.confidence * 100.0));
        lines.extend(
            finding.evidence.iter().map(|evidence| format!("{bullet}{}", evidence.replace('\n', " "))),
        );
    }
    lines.push(String::new());
    lines.join("\n")
}

pub(super) fn find_run(named: Option<&Path>) -> anyhow::Result<PathBuf> {
    let runs = usual::log_dir(&usual::environment);
    match named {
        Some(path) if path.join("journal").is_dir() => Ok(path.to_owned()),
        Some(name) if runs.join(name).join("journal").is_dir() => Ok(runs.join(name)),
        Some(name) => bail!(
            "{}: neither a run directory nor a run in {}, nor a component or an event that an agent here knows",
            name.display(),
            runs.display()
        ),
        None => newest(&runs).with_context(|| format!("there is no run in {}; name one", runs.display())),
    }
}

fn newest(runs: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(runs).ok()?;
    let runs = entries.flatten().map(|entry| entry.path()).filter(|path| path.join("journal").is_dir());
    runs.max_by_key(|path| std::fs::metadata(path).and_then(|found| found.modified()).ok())
}

pub(super) fn read(run_dir: &Path) -> anyhow::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    JournalReader::new(&run_dir.join("journal")).replay(|entry| entries.push(entry))?;
    Ok(entries)
}

fn story(entries: &[Entry], wanted: Option<Incident>) -> Option<Story> {
    let mut verdicts = entries.iter().filter_map(|entry| match &entry.body {
        Body::Verdict(verdict) => Some(verdict),
        _ => None,
    });
    let verdict = verdicts.rfind(|verdict| wanted.is_none_or(|wanted| verdict.incident == wanted))?.clone();
    let of_it =
        || entries.iter().map(|entry| &entry.body).filter(|body| body.incident() == Some(verdict.incident));
    let decision = of_it().find_map(|body| match body {
        Body::Decision(decision) => Some(decision.clone()),
        _ => None,
    });
    let outcome = of_it().find_map(|body| match body {
        Body::Outcome(outcome) => Some(outcome.clone()),
        _ => None,
    });
    Some(Story { verdict, decision, outcome })
}

fn render(run_dir: &Path, story: &Story, markdown: bool) -> String {
    let Story { verdict, decision, outcome } = story;
    let (title, bullet) = if markdown { ("## ", "- ") } else { ("", "  ") };
    let mut lines = vec![format!("{title}{}", verdict.headline), String::new()];
    let sure = verdict.confidence * 100.0;
    lines.push(match (&verdict.class, verdict.domain) {
        (Some(class), domain) => format!("Whose fault: {domain} ({class}), {sure:.0} % sure."),
        (None, FaultDomain::Unknown) => {
            format!("Whose fault: it cannot be told from what was seen; {sure:.0} % sure of where it began.")
        }
        (None, domain) => format!("Whose fault: {domain}, {sure:.0} % sure."),
    });
    let delay = verdict.detected_at.since(verdict.fault_at);
    lines.push(format!(
        "Failure {} of the run, in attempt {}; known {delay} after it happened.",
        verdict.incident.0, verdict.attempt.0
    ));
    lines.push(String::new());
    lines.push("What that rests on:".to_owned());
    lines.extend(verdict.evidence.iter().map(|evidence| format!("{bullet}{}", evidence.replace('\n', " "))));
    lines.push(String::new());
    lines.push("What was done:".to_owned());
    lines.push(match decision.as_ref().map(|decision| (decision.action, &decision.why)) {
        Some((Action::RestartInJob { attempt }, why)) => {
            format!("{bullet}all ranks were started again as attempt {}: {why}", attempt.0)
        }
        Some((Action::Stop { exit }, why)) => format!("{bullet}the job was ended with status {exit}: {why}"),
        Some((Action::HandBack { exit }, why)) => {
            format!("{bullet}the job was handed back to the scheduler with status {exit}: {why}")
        }
        Some((Action::Wait, why)) => format!("{bullet}nothing yet: {why}"),
        Some((action, why)) => {
            let attempt = action.attempt().map_or(String::new(), |attempt| format!(" as {attempt}"));
            let done = action.rung().map_or("waiting", Rung::words);
            format!("{bullet}{done}{attempt}: {why}")
        }
        None => format!("{bullet}nothing was decided yet"),
    });
    if let Some(outcome) = outcome {
        lines.push(format!(
            "{bullet}back at step {} after {}; {} step(s) done again",
            outcome.step, outcome.to_first_step, outcome.steps_lost
        ));
    }
    lines.push(String::new());
    lines.push("What to do:".to_owned());
    lines.push(format!("{bullet}{}", advice(verdict)));
    let logs = run_dir.join(format!("attempt_{}", verdict.attempt.0));
    lines.push(format!("{bullet}the output of all ranks is in {}", logs.display()));
    lines.push(String::new());
    lines.join("\n")
}

/// The next step of the person who reads it.
fn advice(verdict: &Verdict) -> &'static str {
    match (verdict.domain, verdict.deterministic) {
        (FaultDomain::User, true) => {
            "mend the program or its configuration; it would fail again the same way"
        }
        (FaultDomain::User, false) => "look at the program; it may pass when it is run again",
        (FaultDomain::Hardware, _) => {
            "take this host out of the job and have it checked before it comes back"
        }
        (FaultDomain::Infrastructure, true) => "mend what the job runs on; it would fail again the same way",
        (FaultDomain::Infrastructure, false) => {
            "run it again; if it comes back, look at network, storage and host"
        }
        (FaultDomain::Platform, true) => "look at versions and settings of the software below the program",
        (FaultDomain::Platform, false) => {
            "run it again; if it comes back, look at the software below the program"
        }
        (FaultDomain::Unknown, _) => {
            "read the last lines of the rank that began it, and the kernel's log of that time"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_core::id::{Attempt, Rank};
    use mainstay_core::time::{Mono, Span};
    use mainstay_core::verdict::{Cause, DecidedBy};

    fn told(domain: FaultDomain, class: Option<&str>) -> Story {
        let verdict = Verdict {
            incident: Incident(2),
            attempt: Attempt(1),
            headline: "rank 3 raised ValueError: bad".into(),
            cause: Cause::ExitCode { code: 1 },
            domain,
            class: class.map(str::to_owned),
            deterministic: true,
            confidence: 0.8,
            culprit: Some(Rank(3)),
            victims: vec![Rank(0)],
            step: Some(4),
            heartbeats: true,
            fault_at: Mono(0),
            detected_at: Mono(2_000_000),
            evidence: vec!["exit note of rank 3".into()],
        };
        let decision = Decision {
            incident: Incident(2),
            action: Action::Stop { exit: 1 },
            after: Span::default(),
            why: "it came again".into(),
            by: DecidedBy::Launcher,
        };
        Story { verdict, decision: Some(decision), outcome: None }
    }

    #[test]
    fn a_failure_is_explained_with_its_evidence_and_what_to_do() {
        let text = render(Path::new("/runs/x"), &told(FaultDomain::User, Some("user_code")), false);
        for part in [
            "rank 3 raised ValueError: bad",
            "Whose fault: the training program's fault (user_code), 80 % sure.",
            "known 2 ms after it happened",
            "  exit note of rank 3",
            "the job was ended with status 1: it came again",
            "mend the program",
            "/runs/x/attempt_1",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }

    #[test]
    fn what_is_not_known_is_not_said() {
        let text = render(Path::new("/runs/x"), &told(FaultDomain::Unknown, None), true);
        assert!(text.starts_with("## rank 3") && text.contains("cannot be told"), "{text}");
    }
}
