//! `mainstay check`: whether a job may start on this host. Asks the agent, or checks the host itself if there is
//! none.

mod active;
mod ask;
mod history;
mod retest;
mod show;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use mainstay_health::host::preflight::{CheckVerdict, Group, Requirement, conclude};
use mainstay_model::time::Span;
use mainstay_model::units::Period;

use super::find::Ask;
use super::output::Structured;
use super::{exit, output};
use mainstay_sensors::probe::deep::serve_echo;
use show::Report;

/// Check whether a job may start on this host
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay check                                  all groups, of the agent or without one
  mainstay check --require gpu=8 --fail-on fail   in a Slurm prolog: only what is broken drains the node
  mainstay check --group storage,host --json
  mainstay check --deep --path /scratch           probe memory, CPUs, loopback, /scratch and free GPUs too
  mainstay check --history                        which failures of jobs implicated this host
  mainstay check --listen 10.0.0.7:7199           on one host, and on another: mainstay check --peer 10.0.0.7:7199

Exit status: 0 all checks pass or do not apply, 1 degraded, 2 not fit for training, 3 unknown,
64 the command line was not understood. What is not in --fail-on does not count.")]
pub(super) struct Args {
    #[command(flatten)]
    ask: Ask,
    /// Only these groups: gpu, fabric, storage, host, tpu, network
    #[arg(long, value_name = "GROUP", value_delimiter = ',', value_parser = group)]
    group: Vec<Group>,
    /// Minimum number of devices, such as gpu=8 or fabric=8; tpu alone means one
    #[arg(long, value_name = "GROUP=COUNT", value_delimiter = ',', value_parser = requirement)]
    require: Vec<Requirement>,
    /// How long one check may take until it is UNKNOWN; 10s, and 30s for what --deep probes
    #[arg(long, value_name = "TIME", value_parser = Period::parse)]
    deadline: Option<Period>,
    /// Also probe memory, CPUs, loopback, storage and free GPUs: takes seconds and loads the host
    #[arg(long)]
    deep: bool,
    /// A directory for --deep to write to and read back; may be repeated
    #[arg(long, value_name = "DIR")]
    path: Vec<PathBuf>,
    /// Host that runs `mainstay check --listen`; measures the path to it; may be repeated
    #[arg(long, value_name = "HOST:PORT")]
    peer: Vec<String>,
    /// Answer probes of peers on this address until interrupted; for a trusted network only; runs no checks
    #[arg(long, value_name = "ADDRESS:PORT", exclusive = true)]
    listen: Option<String>,
    /// Every GPU must be free: no process on it, no memory held
    #[arg(long)]
    exclusive: bool,
    /// Let --deep probe GPUs that are in use
    #[arg(long, requires = "deep")]
    force: bool,
    /// CUDA's driver library for --deep; libcuda.so.1 if none is named
    #[arg(long, value_name = "PATH")]
    cuda: Option<PathBuf>,
    /// The verdicts for which the exit status is not 0: fail, unknown, warn
    #[arg(long, value_name = "VERDICT", value_delimiter = ',', default_value = "fail,warn,unknown")]
    fail_on: Vec<FailOn>,
    /// Exit with 2 for each of fail, warn and unknown
    #[arg(long, conflicts_with = "fail_on")]
    strict: bool,
    /// Run the checks without an agent
    #[arg(long, conflicts_with = "socket")]
    alone: bool,
    /// Configuration file of the agent, for checks without an agent
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the result for another program
    #[arg(long, value_enum, conflicts_with_all = ["json", "output", "verbose"])]
    format: Option<Format>,
    /// Show when failures of jobs implicated this host, in place of checks
    #[arg(long, conflicts_with_all = ["alone", "deep", "group", "require", "format"])]
    history: bool,
    /// Show every check, not only the summary (as on a terminal)
    #[arg(long, short)]
    verbose: bool,
}

/// A program that reads the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// node-problem-detector's custom plugins: a line of at most 80 characters; exit status 0 good, 1 a problem, 2 unknown
    Npd,
    /// Nagios' plugins: a line with performance data, then each check that is not well
    Nagios,
    /// As --json
    Json,
    /// JUnit's XML, for CI
    Junit,
}

/// A verdict that can fail a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum FailOn {
    /// Not fit for training.
    Fail,
    /// It works, but something is wrong.
    Warn,
    /// It is unknown.
    Unknown,
}

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let Some(address) = &args.listen {
        return listen(address).await;
    }
    if args.history {
        return history::show(&args).await;
    }
    let began = Instant::now();
    let mut groups = if args.group.is_empty() { Group::ALL.to_vec() } else { args.group.clone() };
    // Required groups are checked even if they were not named.
    groups.extend(args.require.iter().map(|required| required.group));
    let config = match ask::configuration(args.config.as_deref()) {
        Ok(config) => config,
        Err(error) => {
            output::note(&format!("error: {error}"));
            return Ok(ExitCode::from(exit::USAGE));
        }
    };
    let mut answers = ask::watched(&args, &groups).await;
    // After the monitored checks: the load of active probes would affect them.
    let probed = active::checks(&args, &config, &groups);
    retest::report(&args, &mut answers.checks, &probed).await;
    answers.checks.extend(probed);
    let checks = conclude(answers.checks, &groups, &[], &Group::ALL);
    let took = Span(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
    let status = status(checks.iter().map(|check| check.verdict), &args.fail_on, args.strict);
    let report = Report { checks, took, status, by: answers.by };
    let (text, status) = match args.format {
        Some(Format::Npd) => (report.for_npd(), npd_status(status)),
        Some(Format::Nagios) => (report.for_nagios(), status),
        Some(Format::Junit) => (report.as_junit(), status),
        Some(Format::Json) => (Structured::Json.document(report.as_json()), status),
        None => match args.ask.form.structured() {
            Some(form) => (form.document(report.as_json()), status),
            None => (report.as_text(args.verbose), status),
        },
    };
    output::print(&text)?;
    Ok(ExitCode::from(status))
}

/// Echoes until interrupted.
async fn listen(address: &str) -> anyhow::Result<ExitCode> {
    let listener =
        std::net::TcpListener::bind(address).with_context(|| format!("listening on {address} (--listen)"))?;
    output::note(&format!("echoing on {} until interrupted", listener.local_addr()?));
    tokio::task::spawn_blocking(move || serve_echo(&listener)).await??;
    Ok(ExitCode::SUCCESS)
}

/// The worst verdict that counts, as an exit status.
fn status(verdicts: impl Iterator<Item = CheckVerdict>, fail_on: &[FailOn], strict: bool) -> u8 {
    let mut none = true;
    let heaviest = verdicts
        .inspect(|_| none = false)
        .filter_map(|verdict| {
            let kind = match verdict {
                CheckVerdict::Fail => FailOn::Fail,
                CheckVerdict::Warn => FailOn::Warn,
                CheckVerdict::Unknown => FailOn::Unknown,
                CheckVerdict::Pass | CheckVerdict::Skipped => return None,
            };
            (strict || fail_on.contains(&kind)).then_some(kind)
        })
        .max_by_key(|kind| match kind {
            FailOn::Unknown => 1,
            FailOn::Warn => 2,
            FailOn::Fail => 3,
        });
    match heaviest {
        Some(_) if strict => exit::UNHEALTHY,
        Some(FailOn::Fail) => exit::UNHEALTHY,
        Some(FailOn::Warn) => exit::DEGRADED,
        Some(FailOn::Unknown) => exit::UNKNOWN,
        // Nothing was checked, so the result is unknown.
        None if none && (strict || fail_on.contains(&FailOn::Unknown)) => exit::UNKNOWN,
        None => exit::OK,
    }
}

/// The exit status for node-problem-detector: `NonOK` for what is wrong, `Unknown` for what could not be read.
fn npd_status(status: u8) -> u8 {
    match status {
        exit::OK => 0,
        exit::DEGRADED | exit::UNHEALTHY => 1,
        _ => 2,
    }
}

fn group(word: &str) -> Result<Group, String> {
    Group::parse(word).ok_or_else(|| {
        let known: Vec<&str> = Group::ALL.iter().map(|group| group.name()).collect();
        format!("there is no such group; write one of {}", known.join(", "))
    })
}

fn requirement(text: &str) -> Result<Requirement, String> {
    let (word, count) = text.split_once('=').unwrap_or((text, "1"));
    let count = count.parse().map_err(|_| format!("{count:?} is not a count; write it like gpu=8"))?;
    Ok(Requirement { group: group(word)?, count })
}

impl Args {
    /// Time limit of a look.
    fn deadline(&self) -> Period {
        self.deadline.unwrap_or(Period::seconds(10))
    }

    fn longest(&self) -> Duration {
        Duration::from_nanos(self.deadline().0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prolog_can_choose_what_counts() {
        use CheckVerdict::{Fail, Pass, Skipped, Unknown, Warn};
        let all = [FailOn::Fail, FailOn::Warn, FailOn::Unknown];
        let status_of =
            |verdicts: &[CheckVerdict], on: &[FailOn], strict| status(verdicts.iter().copied(), on, strict);
        assert_eq!(status_of(&[Pass, Skipped], &all, false), exit::OK);
        assert_eq!(status_of(&[Pass, Warn], &all, false), exit::DEGRADED);
        assert_eq!(status_of(&[Unknown, Warn], &all, false), exit::DEGRADED);
        assert_eq!(status_of(&[Fail, Warn, Unknown], &all, false), exit::UNHEALTHY);
        assert_eq!(status_of(&[Unknown, Pass], &all, false), exit::UNKNOWN);
        assert_eq!(status_of(&[], &all, false), exit::UNKNOWN);
        assert_eq!(status_of(&[Warn, Unknown], &[FailOn::Fail], false), exit::OK);
        assert_eq!(status_of(&[Warn, Unknown], &[FailOn::Fail, FailOn::Unknown], false), exit::UNKNOWN);
        assert_eq!(status_of(&[Pass, Warn], &all, true), exit::UNHEALTHY);
        assert_eq!(status_of(&[Skipped], &all, true), exit::OK);
    }

    #[test]
    fn requirements_are_read_or_refused_with_the_reason() {
        assert_eq!(requirement("gpu=8"), Ok(Requirement { group: Group::Gpu, count: 8 }));
        assert_eq!(requirement("tpu"), Ok(Requirement { group: Group::Tpu, count: 1 }));
        assert!(requirement("gpu=many").unwrap_err().contains("gpu=8"));
        assert!(requirement("gpus=8").unwrap_err().contains("fabric"));
    }
}
