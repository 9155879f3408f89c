//! `mainstay policy`: a policy to start from, and tests of user policies.

mod incidents;
mod script;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use mainstay_launcher::policy::{DECISION_TIMEOUT, Reply};
use mainstay_recovery::policy::{Choice, PolicyAnswer, PolicyProblem, decide, decide_with, question};
use mainstay_view::replay::{UserPolicy, replay, replay_with};

use super::{exit, explain, output, replay as recorded};
use incidents::Incident;
pub(crate) use script::Script;

const EXAMPLES: &str = "\
Examples:
  mainstay policy show > mine.py
  mainstay policy check mine.py
  mainstay policy test mine.py --incidents cases.toml
  mainstay policy test mine.py --run exp-7
  mainstay policy explain mine.py --incidents cases.toml --name \"a kill\"

Exit status: 0 valid and as expected, 1 a decision differs, 2 invalid, 3 no incident to test.
See docs/reference/policy-file.md.";

/// Show the policy for failures, and try out your own
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Print a policy to start your own from, with the rules of the built-in one as comments
    Show,
    /// Check that a policy is valid and decides a set of common failures
    Check {
        /// The policy
        file: PathBuf,
    },
    /// Have a policy decide on invented incidents or on a recorded run, and compare
    Test {
        /// The policy
        file: PathBuf,
        #[command(flatten)]
        on: On,
    },
    /// Show the lines on which a policy decides, and the decision of the built-in one
    Explain {
        /// The policy
        file: PathBuf,
        /// A table of invented incidents
        #[arg(long, value_name = "FILE")]
        incidents: PathBuf,
        /// Only the incident of this name
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
    },
}

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct On {
    /// A table of invented incidents, with the decisions that are expected
    #[arg(long, value_name = "FILE")]
    incidents: Option<PathBuf>,
    /// A bundle, a run directory, or the name of a run in the usual place
    #[arg(long, value_name = "RUN")]
    run: Option<PathBuf>,
}

/// Failures of all kinds, with which `check` tests a policy.
const SAMPLE_INCIDENTS: &str = include_str!("policy/usual.toml");

/// What `show` prints.
const TEMPLATE: &str = include_str!("policy/template.py");

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let ended = match &args.what {
        What::Show => output::print(TEMPLATE).map(|()| exit::OK),
        What::Check { file } => check(file),
        What::Test { file, on: On { incidents: Some(incidents), .. } } => test(file, &read(incidents)?),
        What::Test { file, on: On { run: Some(run), .. } } => test_on_run(file, run),
        What::Test { .. } => bail!("name --incidents or --run"),
        What::Explain { file, incidents, name } => {
            let chosen = |incident: &Incident| name.as_ref().is_none_or(|name| *name == incident.name);
            explain(file, &read(incidents)?.into_iter().filter(chosen).collect::<Vec<_>>())
        }
    };
    ended.map(ExitCode::from)
}

fn read(file: &Path) -> anyhow::Result<Vec<Incident>> {
    let text = std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    incidents::read(&text).map_err(|what| anyhow!("{}: {what}", file.display()))
}

/// The policy; prints what is wrong with it if it is invalid.
fn policy(file: &Path) -> anyhow::Result<Option<Script>> {
    match Script::load(file)? {
        Ok(policy) => Ok(Some(policy)),
        Err(message) => output::print(&format!("{message}\n")).map(|()| None),
    }
}

/// What the job would do with this answer of the policy, and what is wrong with the policy.
fn decided(policy: &Script, incident: &Incident, reply: Reply) -> (Choice, Option<PolicyProblem>) {
    let answer = PolicyAnswer { policy: policy.name(), advice: reply.advice };
    decide_with(Some(answer), &incident.settings, incident.case())
}

fn ask(policy: &Script, incident: &Incident, trace: bool) -> Reply {
    policy.ask(question(&incident.settings, incident.case()), trace)
}

fn check(file: &Path) -> anyhow::Result<u8> {
    let Some(policy) = policy(file)? else { return Ok(exit::UNHEALTHY) };
    let usual = incidents::read(SAMPLE_INCIDENTS).map_err(|what| anyhow!("the usual incidents: {what}"))?;
    let mut text = String::new();
    let mut status = exit::OK;
    for incident in &usual {
        let (_, problem) = decided(&policy, incident, ask(&policy, incident, false));
        let Some(problem) = problem else { continue };
        text.push_str(&format!("{}\n  when deciding on: {}\n", problem.message(), incident.name));
        status = status.max(match problem {
            PolicyProblem::Failed(_) => exit::UNHEALTHY,
            PolicyProblem::Overruled(_) => exit::DEGRADED,
        });
    }
    let (name, limit, slowest) = (policy.name(), DECISION_TIMEOUT.as_millis(), policy.slowest().as_millis());
    if slowest > limit {
        text.push_str(&format!("{name}: a decision took {slowest} ms; a job waits {limit} ms\n"));
        status = status.max(exit::DEGRADED);
    } else if status == exit::OK {
        let count = usual.len();
        text = format!("{name}: sound; {count} usual failures decided in at most {slowest} of {limit} ms\n");
    }
    output::print(&text)?;
    Ok(status)
}

fn test(file: &Path, incidents: &[Incident]) -> anyhow::Result<u8> {
    let Some(policy) = policy(file)? else { return Ok(exit::UNHEALTHY) };
    let mut text = String::new();
    let mut status = if incidents.is_empty() { exit::UNKNOWN } else { exit::OK };
    for incident in incidents {
        let (choice, problem) = decided(&policy, incident, ask(&policy, incident, false));
        let got = choice.action.as_str();
        let other = incident.expect.as_deref().filter(|expected| *expected != got);
        let after = choice.after.as_seconds();
        let later = incident.expect_after.filter(|expected| (expected - after).abs() > 1e-6);
        let mark = if other.is_some() || later.is_some() || problem.is_some() { "FAILED" } else { "ok" };
        text.push_str(&format!("{mark:6} {}: {}\n", incident.name, describe(&choice)));
        if let Some(expected) = other {
            text.push_str(&format!("       expected: {expected}\n"));
        }
        if let Some(expected) = later {
            text.push_str(&format!("       expected a delay of {expected} s, got {after} s\n"));
        }
        if let Some(problem) = &problem {
            text.push_str(&format!("       {}\n", problem.message()));
        }
        status = match problem {
            Some(PolicyProblem::Failed(_)) => exit::UNHEALTHY,
            _ if mark != "ok" => status.max(exit::DEGRADED),
            _ => status,
        };
    }
    output::print(&text)?;
    Ok(status)
}

fn test_on_run(file: &Path, run: &Path) -> anyhow::Result<u8> {
    let Some(policy) = policy(file)? else { return Ok(exit::UNHEALTHY) };
    let entries = if run.is_file() {
        recorded::read_bundle(run)?
    } else {
        explain::read(&explain::find_run(Some(run))?)?
    };
    let (own, built_in) = (replay_with(&entries, Some(&policy)), replay(&entries));
    let mut text = String::new();
    let mut status = if own.is_empty() { exit::UNKNOWN } else { exit::OK };
    for one in &own {
        let decided = |decision: &mainstay_model::verdict::Decision| {
            format!("{}: {}", decision.action.as_str(), decision.why)
        };
        text.push_str(&format!("failure {} of {}: {}\n", one.incident.0, one.job, one.now.verdict.headline));
        text.push_str(&format!("  then      {}\n", decided(&one.then.decision)));
        let same = |other: &&mainstay_view::replay::Replayed| {
            (&other.job, other.incident) == (&one.job, one.incident)
        };
        if let Some(other) = built_in.iter().find(same) {
            text.push_str(&format!("  built in  {}\n", decided(&other.now.decision)));
        }
        text.push_str(&format!("  policy    {}\n", decided(&one.now.decision)));
        if one.now.decision.action.as_str() != one.then.decision.action.as_str() {
            status = status.max(exit::DEGRADED);
        }
    }
    if own.is_empty() {
        text.push_str("no failure is recorded there\n");
    }
    output::print(&text)?;
    Ok(status)
}

fn explain(file: &Path, incidents: &[Incident]) -> anyhow::Result<u8> {
    let Some(policy) = policy(file)? else { return Ok(exit::UNHEALTHY) };
    let source = std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    let lines: Vec<&str> = source.lines().collect();
    let line = |number: usize| lines.get(number.wrapping_sub(1)).map_or("", |line| line.trim());
    let mut text = String::new();
    let mut status = if incidents.is_empty() { exit::UNKNOWN } else { exit::OK };
    for incident in incidents {
        text.push_str(&format!("{}\n", incident.name));
        let reply = ask(&policy, incident, true);
        reply.lines.iter().for_each(|number| text.push_str(&format!("  {number:4}  {}\n", line(*number))));
        let (choice, problem) = decided(&policy, incident, reply);
        if let Some(problem) = &problem {
            text.push_str(&format!("  {}\n", problem.message()));
        }
        if matches!(problem, Some(PolicyProblem::Failed(_))) {
            status = exit::UNHEALTHY;
        }
        text.push_str(&format!("  decision  {}\n", describe(&choice)));
        text.push_str(&format!("  built in  {}\n", describe(&decide(&incident.settings, incident.case()))));
    }
    if incidents.is_empty() {
        text.push_str("there is no such incident in the table\n");
    }
    output::print(&text)?;
    Ok(status)
}

fn describe(choice: &Choice) -> String {
    let later = if choice.after.0 > 0 { format!(" in {}", choice.after) } else { String::new() };
    format!("{}{later}: {}", choice.action.as_str(), choice.why)
}
