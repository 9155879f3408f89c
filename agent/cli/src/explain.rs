//! `mainstay explain`: a failure with its evidence, from the job's own journal, also long after the job ended; or a
//! component of the host, or an event.

mod runs;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap_complete::ArgValueCompleter;
use mainstay_app::default_paths;
use mainstay_journal::store::journal::JournalReader;
use mainstay_model::entry::Entry;
use mainstay_model::id::Incident;
use mainstay_proto::v1::explain_request::Target;
use mainstay_proto::v1::explain_response::Report;
use mainstay_proto::v1::{FailureTarget, FaultCode, fault_code::Code};
use mainstay_view::convert::failure::report_in;
use mainstay_view::explain;
use mainstay_view::incident_report::{self, IncidentReport, Options};
use serde_json::{Value, json};

use super::client::Client;
use super::completions;
use super::find::{Server, find};
use super::output::Form;
use super::secrets::Secrets;
use super::{exit, output};

const EXAMPLES: &str = "\
Examples:
  mainstay explain                         the last failure of the newest run that was started in this directory, or of all
  mainstay explain exp-7 --incident 2      the second failure of a run
  mainstay explain exp-7 --all             with all evidence, and with what would change the judgement
  mainstay explain /logs/exp-7 --markdown  for a ticket
  mainstay explain exp-9                   a job whose directory is not here: its launcher or the agent is asked
  mainstay explain gpu.0000:3b:00          a component: what was seen, what it means, what to do
  mainstay explain 4711                    an event, by its cursor (mainstay events)
  mainstay explain 'XID 79'                a code of a driver, whether it was seen or not

Exit status: 0 explained, 3 there is nothing of that name, 64 the command line was not understood.";

/// Explain a failure, a component, an event or a code: what was seen, what it means, what was done or is to be done
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// A run directory, the name of a run in the usual place or of a job that a launcher or the agent knows, a component
    /// or a GPU of the host, the cursor of an event, or a code; the newest run that failed or is running if not given
    #[arg(value_name = "RUN|COMPONENT|CURSOR|CODE", add = ArgValueCompleter::new(completions::explained))]
    what: Option<PathBuf>,
    /// The job or its run, as an option
    #[arg(long, value_name = "JOB", conflicts_with = "what")]
    job: Option<PathBuf>,
    /// Which failure of the job, from 1; the last one if not given
    #[arg(long, value_name = "N")]
    incident: Option<u64>,
    /// Show all evidence, what speaks against the judgement and what would change it
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    form: Form,
    /// Print Markdown
    #[arg(long, conflicts_with_all = ["json", "output"])]
    markdown: bool,
    #[command(flatten)]
    server: Server,
    #[command(flatten)]
    secrets: Secrets,
}

pub(super) async fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    args.what = args.what.or(args.job.take());
    let named = args.what.as_deref().and_then(Path::to_str);
    if let Some(what) = named.filter(|what| args.server.named().is_some() || !is_run(what)) {
        if let Some(text) = reported(&args, what).await? {
            output::print(&text)?;
            return Ok(ExitCode::SUCCESS);
        }
        if let Some(run_dir) = run_dir_of(&args, what).await {
            // An empty path is unknown, not the working directory.
            if run_dir.is_absolute() && run_dir.join("journal").is_dir() {
                return explain_run(&args, Chosen { run_dir, notes: Vec::new() });
            }
            output::note(&format!("{what}: {} in this run", no_failure(args.incident)));
            return Ok(ExitCode::from(exit::UNKNOWN));
        }
    }
    let chosen = match args.what.as_deref() {
        Some(named) => Chosen { run_dir: find_run(Some(named))?, notes: Vec::new() },
        None => runs::to_explain(&runs_dir())?,
    };
    explain_run(&args, chosen)
}

/// What the servers of this host report on a component, an event, a code or the last failure of a job, as text. `None`
/// if they do not know it.
pub(super) async fn text(server: Server, what: &str) -> anyhow::Result<Option<String>> {
    let args = Args {
        what: None,
        job: None,
        incident: None,
        all: false,
        form: Form::default(),
        markdown: false,
        server,
        secrets: Secrets::default(),
    };
    reported(&args, what).await
}

async fn reported(args: &Args, what: &str) -> anyhow::Result<Option<String>> {
    Ok(match ask(args, what).await? {
        None => None,
        Some(Report::Failure(failure)) => {
            let job = failure.job.clone();
            Some(rendered(args, &args.secrets.mask(report_in(failure)?)?, job.into(), None))
        }
        Some(report) => Some(match args.form.structured() {
            Some(form) => form.document(args.secrets.mask(explain::json(&report))?),
            None => args.secrets.mask_text(&explain::text(&report)),
        }),
    })
}

/// The directory of a job that a server knows but of which it knows no failure; empty if the caller may not read
/// it.
async fn run_dir_of(args: &Args, job: &str) -> Option<PathBuf> {
    let found = find(args.server.named());
    for place in found.places {
        let Ok(client) = Client::connect(&place.socket).await else { continue };
        let Ok(snapshot) = client.snapshot().await else { continue };
        if let Some(job) = snapshot.jobs.into_iter().find(|candidate| candidate.id == job) {
            return Some(job.run_dir.into());
        }
    }
    None
}

fn no_failure(incident: Option<u64>) -> String {
    incident.map_or("no failure".to_owned(), |incident| format!("no failure {incident}"))
}

/// Asks the servers of this host, until one knows what is meant.
async fn ask(args: &Args, what: &str) -> anyhow::Result<Option<Report>> {
    let failure = FailureTarget { job: what.to_owned(), incident: args.incident };
    let (of_host, of_job) = (target(what), Target::Failure(failure));
    let found = find(args.server.named());
    // The launcher knows most about its job; the agent's copy outlives it.
    let (agents, launchers): (Vec<_>, Vec<_>) = found.places.iter().partition(|place| place.job.is_none());
    let of_host = agents.iter().map(|place| (place, &of_host));
    let all = of_host.chain(launchers.iter().chain(&agents).map(|place| (place, &of_job)));
    for (place, target) in all {
        let Ok(client) = Client::connect(&place.socket).await else { continue };
        if let Some(report) = client.explain(target.clone()).await? {
            return Ok(Some(report));
        }
    }
    Ok(None)
}

/// What is meant if it is no job.
fn target(what: &str) -> Target {
    let number = |kind: &str| what.to_lowercase().strip_prefix(kind)?.trim_start().parse().ok();
    if let Some(code) = number("xid ").map(Code::Xid).or_else(|| number("sxid ").map(Code::Sxid)) {
        return Target::Code(FaultCode { code: Some(code) });
    }
    what.parse().map_or_else(|_| Target::Component(what.to_owned()), Target::Cursor)
}

fn is_run(name: &str) -> bool {
    [PathBuf::from(name), default_paths::log_dir(&default_paths::environment).join(name)]
        .iter()
        .any(|path| path.join("journal").is_dir())
}

fn explain_run(args: &Args, chosen: Chosen) -> anyhow::Result<ExitCode> {
    for note in &chosen.notes {
        output::note(note);
    }
    let run_dir = chosen.run_dir;
    let entries = args.secrets.read(&run_dir)?;
    let Some(report) = incident_report::from_entries(entries.iter(), args.incident.map(Incident)) else {
        let findings = incident_report::findings(entries.iter());
        if args.incident.is_none() && !findings.is_empty() {
            let text = match args.form.structured() {
                Some(form) => form.document(json!({ "run": run_dir, "findings": findings })),
                None => format!("no failure\n{}", incident_report::render_findings(&findings, args.markdown)),
            };
            output::print(&text)?;
            return Ok(ExitCode::SUCCESS);
        }
        output::note(&format!("{}: {} in this run", run_dir.display(), no_failure(args.incident)));
        return Ok(ExitCode::from(exit::UNKNOWN));
    };
    let logs = run_dir.join(format!("attempt_{}", report.verdict.attempt.0)).display().to_string();
    output::print(&rendered(args, &report, json!(run_dir), Some(&logs)))?;
    Ok(ExitCode::SUCCESS)
}

fn rendered(args: &Args, report: &IncidentReport, run: Value, logs: Option<&str>) -> String {
    if let Some(form) = args.form.structured() {
        let mut reported = incident_report::json(report);
        reported["run"] = run;
        return form.document(reported);
    }
    incident_report::render(report, Options { logs, markdown: args.markdown, all: args.all })
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
