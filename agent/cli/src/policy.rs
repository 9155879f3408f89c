//! `mainstay policy`: the built-in policy as a file, and tests of user policies.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use mainstay_policy::incidents::{self, Incident};
use mainstay_policy::{DEFAULT, Policy};
use mainstay_recovery::policy::{Advisor, Choice, Trouble, decide, decide_with};
use mainstay_view::replay::{replay, replay_with};

use super::{exit, explain, output, replay as recorded};
use mainstay_launcher::launch::user_policy;

const EXAMPLES: &str = "\
Examples:
  mainstay policy show > mine.star
  mainstay policy check mine.star
  mainstay policy test mine.star --incidents cases.toml
  mainstay policy test mine.star --run exp-7
  mainstay policy explain mine.star --incidents cases.toml --name \"a kill\"

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
    /// Print the built-in policy with comments, as a template for your own
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
    /// Show the lines on which a policy decides, next to those of the built-in one
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
const USUAL: &str = include_str!("policy_usual.toml");

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let ended = match &args.what {
        What::Show => output::print(DEFAULT).map(|()| exit::OK),
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
fn policy(file: &Path) -> anyhow::Result<Option<Policy>> {
    match user_policy::parse(file) {
        Ok(policy) => Ok(Some(policy)),
        Err(words) => output::print(&format!("{words}\n")).map(|()| None),
    }
}

fn check(file: &Path) -> anyhow::Result<u8> {
    let Some(policy) = policy(file)? else { return Ok(exit::UNHEALTHY) };
    let usual = incidents::read(USUAL).map_err(|what| anyhow!("the usual incidents: {what}"))?;
    let mut text = String::new();
    let mut most = 0;
    let mut status = exit::OK;
    for incident in &usual {
        match policy.decide(&incident.settings, incident.case(), &|| false) {
            Ok(decided) => most = most.max(decided.steps),
            Err(problem) => {
                status = exit::UNHEALTHY;
                text.push_str(&format!("{problem}\n  when deciding on: {}\n", incident.name));
            }
        }
        if let (_, Some(trouble @ Trouble::Overruled(_))) =
            decide_with(Some(&policy), &incident.settings, incident.case())
        {
            text.push_str(&format!("{}\n  when deciding on: {}\n", trouble.words(), incident.name));
            status = status.max(exit::DEGRADED);
        }
    }
    if status == exit::OK {
        let (count, limit) = (usual.len(), mainstay_policy::LIMITS.steps);
        text = policy.warnings().iter().map(|warning| format!("{warning}\n")).collect();
        text.push_str(&format!(
            "{}: sound; {count} usual failures decided in at most {most} of {limit} steps\n",
            policy.name()
        ));
    }
    output::print(&text)?;
    Ok(status)
}

fn test(file: &Path, incidents: &[Incident]) -> anyhow::Result<u8> {
    let Some(policy) = policy(file)? else { return Ok(exit::UNHEALTHY) };
    let mut text = String::new();
    let mut status = if incidents.is_empty() { exit::UNKNOWN } else { exit::OK };
    for incident in incidents {
        let (choice, trouble) = decide_with(Some(&policy), &incident.settings, incident.case());
        let got = choice.action.word();
        let other = incident.expect.as_deref().filter(|expected| *expected != got);
        let after = choice.after.as_seconds();
        let later = incident.expect_after.filter(|expected| (expected - after).abs() > 1e-6);
        let mark = if other.is_some() || later.is_some() || trouble.is_some() { "FAILED" } else { "ok" };
        text.push_str(&format!("{mark:6} {}: {}\n", incident.name, words(&choice)));
        if let Some(expected) = other {
            text.push_str(&format!("       expected: {expected}\n"));
        }
        if let Some(expected) = later {
            text.push_str(&format!("       expected a delay of {expected} s, got {after} s\n"));
        }
        if let Some(trouble) = &trouble {
            text.push_str(&format!("       {}\n", trouble.words()));
        }
        status = match trouble {
            Some(Trouble::Failed(_)) => exit::UNHEALTHY,
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
    let advisor: Arc<dyn Advisor> = Arc::new(policy);
    let (own, built_in) = (replay_with(&entries, Some(&advisor)), replay(&entries));
    let mut text = String::new();
    let mut status = if own.is_empty() { exit::UNKNOWN } else { exit::OK };
    for one in &own {
        let decided = |decision: &mainstay_model::verdict::Decision| {
            format!("{}: {}", decision.action.word(), decision.why)
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
        if one.now.decision.action.word() != one.then.decision.action.word() {
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
    let line = |number: u32| lines.get((number as usize).wrapping_sub(1)).map_or("", |line| line.trim());
    let mut text = String::new();
    let mut status = if incidents.is_empty() { exit::UNKNOWN } else { exit::OK };
    for incident in incidents {
        text.push_str(&format!("{}\n", incident.name));
        match policy.decide(&incident.settings, incident.case(), &|| false) {
            Ok(decided) => {
                for branch in &decided.branches {
                    let met = if branch.met { "yes" } else { "no" };
                    text.push_str(&format!("  {:4} {met:3}  {}\n", branch.line, line(branch.line)));
                }
                let Some(at) = Some(decided.place.line).filter(|_| decided.advice.is_some()) else {
                    text.push_str("  it leaves this to the built-in policy\n");
                    continue;
                };
                text.push_str(&format!("  {at:4}      {}\n", line(at)));
                text.push_str(&format!("  took {} steps and {} bytes\n", decided.steps, decided.bytes));
            }
            Err(problem) => {
                status = exit::UNHEALTHY;
                text.push_str(&format!("  {problem}\n"));
            }
        }
        let (choice, trouble) = decide_with(Some(&policy), &incident.settings, incident.case());
        if let Some(Trouble::Overruled(words)) = &trouble {
            text.push_str(&format!("  {words}\n"));
        }
        text.push_str(&format!("  decision  {}\n", words(&choice)));
        text.push_str(&format!("  built in  {}\n", words(&decide(&incident.settings, incident.case()))));
    }
    if incidents.is_empty() {
        text.push_str("there is no such incident in the table\n");
    }
    output::print(&text)?;
    Ok(status)
}

fn words(choice: &Choice) -> String {
    let later = if choice.after.0 > 0 { format!(" in {}", choice.after) } else { String::new() };
    format!("{}{later}: {}", choice.action.word(), choice.why)
}
