//! `mainstay explain`: a failure with its evidence, from the job's own journal, also long after the job ended; or a
//! component of the host, or an event.

mod host;
mod known;
mod runs;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use mainstay_health::hardware::catalog::Catalog;
use mainstay_model::entry::Entry;
use mainstay_model::id::Incident;
use mainstay_proto::v1::EventFilter;
use mainstay_view::incident_report::{self, Options};
use serde_json::json;

use super::client::Client;
use super::find::{Ask, find};
use super::{exit, output};
use mainstay_app::{catalog, default_paths};
use mainstay_journal::store::journal::JournalReader;
use mainstay_node::config::{Config, Environment};

const EXAMPLES: &str = "\
Examples:
  mainstay explain                         the last failure of the newest run that was started in this directory, or of all
  mainstay explain exp-7 --incident 2      the second failure of a run
  mainstay explain exp-7 --all             with all evidence, and with what would change the judgement
  mainstay explain /logs/exp-7 --markdown  for a ticket
  mainstay explain exp-9                   a job whose directory is not here: its launcher or the agent is asked
  mainstay explain gpu.0000:3b:00          a component: what was seen, what it means, what to do
  mainstay explain 4711                    an event, by its cursor (mainstay events)

Exit status: 0 explained, 3 there is nothing of that name, 64 the command line was not understood.";

/// Explain a failure, a component or an event: what was seen, what it means, what was done or is to be done
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// A run directory, the name of a run in the usual place or of a job that a launcher or the agent knows, a component
    /// of the host, or the cursor of an event of the agent; the newest run that failed or is running if not given
    #[arg(value_name = "RUN|COMPONENT|CURSOR")]
    what: Option<PathBuf>,
    /// Which failure of the job, from 1; the last one if not given
    #[arg(long, value_name = "N")]
    incident: Option<u64>,
    /// Show all evidence, what speaks against the judgement and what would change it
    #[arg(long)]
    all: bool,
    /// Print JSON
    #[arg(long, conflicts_with = "markdown")]
    json: bool,
    /// Print Markdown
    #[arg(long)]
    markdown: bool,
    /// Ask the server on this socket: for components and events the agent, for a job also its launcher
    #[arg(long, value_name = "PATH", env = "MAINSTAY_SOCKET")]
    socket: Option<PathBuf>,
    /// The agent's configuration file, which may name catalogs
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let named = args.what.as_deref().and_then(Path::to_str);
    if let Some(what) = named.filter(|what| args.socket.is_some() || !is_run(what)) {
        if let Some((text, value)) = of_host(&args, what).await? {
            output::print(&if args.json { format!("{value}\n") } else { text })?;
            return Ok(ExitCode::SUCCESS);
        }
        if let Some(text) = of_job(&args, what).await? {
            output::print(&text)?;
            return Ok(ExitCode::SUCCESS);
        }
        if let Some(run_dir) = run_dir_of(&args, what).await {
            // An empty path is unknown, not the working directory.
            if run_dir.is_absolute() && run_dir.join("journal").is_dir() {
                return of_run(&args, Chosen { run_dir, notes: Vec::new() });
            }
            output::note(&format!("{what}: {} in this run", no_failure(args.incident)));
            return Ok(ExitCode::from(exit::UNKNOWN));
        }
    }
    let chosen = match args.what.as_deref() {
        Some(named) => Chosen { run_dir: find_run(Some(named))?, notes: Vec::new() },
        None => runs::to_explain(&runs_dir())?,
    };
    of_run(&args, chosen)
}

/// The directory of a job that a server knows but of which it knows no failure; empty if the caller may not read
/// it.
async fn run_dir_of(args: &Args, job: &str) -> Option<PathBuf> {
    let found = find(&Ask { socket: args.socket.clone(), json: false });
    for place in found.places {
        let Ok(client) = Client::connect(&place.socket).await else { continue };
        let Ok(snapshot) = client.snapshot().await else { continue };
        if let Some(job) = snapshot.jobs.into_iter().find(|of| of.id == job) {
            return Some(job.run_dir.into());
        }
    }
    None
}

fn no_failure(incident: Option<u64>) -> String {
    incident.map_or("no failure".to_owned(), |incident| format!("no failure {incident}"))
}

/// Asks the job's launcher and the agent for a failure of a job whose run directory is not available. None if no
/// server knows it.
async fn of_job(args: &Args, job: &str) -> anyhow::Result<Option<String>> {
    let found = find(&Ask { socket: args.socket.clone(), json: false });
    // The launcher knows most about its job; the agent's copy outlives it.
    let (agents, launchers): (Vec<_>, Vec<_>) = found.places.iter().partition(|place| place.job.is_none());
    for place in launchers.into_iter().chain(agents) {
        let Ok(client) = Client::connect(&place.socket).await else { continue };
        let Some(answer) = client.explain(job, args.incident, args.all).await? else { continue };
        return Ok(Some(match (args.json, args.markdown) {
            (true, _) => {
                let mut reported: serde_json::Value = serde_json::from_str(&answer.json)?;
                reported["run"] = job.into();
                format!("{reported}\n")
            }
            (_, true) => answer.markdown,
            _ => answer.text,
        }));
    }
    Ok(None)
}

fn is_run(name: &str) -> bool {
    [PathBuf::from(name), default_paths::log_dir(&default_paths::environment).join(name)]
        .iter()
        .any(|path| path.join("journal").is_dir())
}

/// Asks the agent for a component by its name, or an event by its cursor. None if it knows neither.
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

/// The catalog from the agent's configuration.
fn catalog(args: &Args) -> anyhow::Result<Catalog> {
    let environment = Environment::new(default_paths::variables(), nix::unistd::geteuid().as_raw());
    catalog::load(&Config::load(args.config.as_deref(), &environment, &[])?.catalog.files)
}

fn of_run(args: &Args, chosen: Chosen) -> anyhow::Result<ExitCode> {
    for note in &chosen.notes {
        output::note(note);
    }
    let run_dir = chosen.run_dir;
    let entries = read(&run_dir)?;
    let findings = incident_report::findings(entries.iter());
    let Some(report) = incident_report::of(entries.iter(), args.incident.map(Incident)) else {
        if args.incident.is_none() && !findings.is_empty() {
            let text = if args.json {
                format!("{}\n", json!({ "run": run_dir, "findings": findings }))
            } else {
                format!("no failure\n{}", incident_report::render_findings(&findings, args.markdown))
            };
            output::print(&text)?;
            return Ok(ExitCode::SUCCESS);
        }
        output::note(&format!("{}: {} in this run", run_dir.display(), no_failure(args.incident)));
        return Ok(ExitCode::from(exit::UNKNOWN));
    };
    let text = if args.json {
        let mut reported = incident_report::json(&report, &findings);
        reported["run"] = json!(run_dir);
        format!("{reported}\n")
    } else {
        let logs = run_dir.join(format!("attempt_{}", report.verdict.attempt.0)).display().to_string();
        let options = Options { logs: Some(&logs), markdown: args.markdown, all: args.all };
        incident_report::render(&report, options)
            + &incident_report::render_findings(&findings, args.markdown)
    };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The run to explain, and notes for the user about the choice.
struct Chosen {
    run_dir: PathBuf,
    notes: Vec<String>,
}

fn runs_dir() -> PathBuf {
    default_paths::log_dir(&default_paths::environment)
}

pub(super) fn find_run(named: Option<&Path>) -> anyhow::Result<PathBuf> {
    let runs = runs_dir();
    match named {
        Some(path) if path.join("journal").is_dir() => Ok(path.to_owned()),
        Some(name) if runs.join(name).join("journal").is_dir() => Ok(runs.join(name)),
        Some(name) => bail!(
            "{}: neither a run directory nor a run in {}, nor a job, a component or an event that an agent here knows",
            name.display(),
            runs.display()
        ),
        None => {
            runs::newest(&runs).with_context(|| format!("there is no run in {}; name one", runs.display()))
        }
    }
}

pub(super) fn read(run_dir: &Path) -> anyhow::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    JournalReader::new(&run_dir.join("journal")).replay(|entry| entries.push(entry))?;
    Ok(entries)
}
