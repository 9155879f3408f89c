//! The interface for people. One file per command; exit statuses are in `docs/reference/cli.md`.

mod agent;
mod answer;
mod attribute;
mod bundle;
mod certs;
mod check;
mod ckpt;
mod client;
mod completions;
mod config;
mod demo;
mod doctor;
mod events;
mod explain;
mod find;
mod goodput;
mod gpus;
mod guardian;
mod hooks;
mod job;
mod log_mirror;
mod man;
mod operator;
mod order;
mod output;
mod policy;
mod probe;
mod ranks;
mod replay;
mod report;
mod run;
mod screen;
mod secrets;
mod slurm;
mod stacks;
mod status;
mod stragglers;
mod top;
mod torchrun;
mod version;
mod when;

use std::ffi::{OsStr, OsString};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// Exit statuses of the reading commands. Those of `status` are what Nagios-style monitoring expects.
pub mod exit {
    /// Everything is healthy; the question was answered.
    pub const OK: u8 = 0;
    /// The node is degraded, or a job is recovering.
    pub const DEGRADED: u8 = 1;
    /// The node is unhealthy, or the requested job failed.
    pub const UNHEALTHY: u8 = 2;
    /// It is unknown: nothing answers.
    pub const UNKNOWN: u8 = 3;
    /// The command line was not understood (EX_USAGE of sysexits.h).
    pub const USAGE: u8 = 64;
    /// A job or the agent could not be started (EX_SOFTWARE of sysexits.h).
    pub const SOFTWARE: u8 = 70;
}

/// Keeps training jobs running: monitors a host and its ranks, diagnoses failures, and restarts jobs.
#[derive(Debug, Parser)]
#[command(name = "mainstay", version, max_term_width = 110, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<run::Args>),
    Agent(agent::Args),
    Demo(demo::Args),
    Config(config::Args),
    Certs(certs::Args),
    Hooks(hooks::Hooks),
    /// Show the node, its components, its jobs and their ranks on one screen
    Status(status::Args),
    /// Show the host's GPUs, one line each
    Gpus(gpus::Args),
    Top(top::Args),
    Ranks(ranks::Args),
    Stacks(stacks::Args),
    /// Show what happened: facts, verdicts, decisions and outcomes
    Events(events::Args),
    /// Find the fault domain of a failure from logs alone
    Attribute(attribute::Args),
    Explain(explain::Args),
    Goodput(goodput::Args),
    Ack(operator::Ack),
    Silence(operator::Silence),
    Unsilence(operator::Unsilence),
    Bundle(bundle::Args),
    Report(report::Args),
    Replay(replay::Args),
    Policy(policy::Args),
    Job(job::Job),
    Inject(job::Inject),
    Stragglers(stragglers::Args),
    Check(Box<check::Args>),
    Slurm(slurm::Args),
    Doctor(doctor::Args),
    Ckpt(ckpt::Args),
    /// Print the version
    Version(version::Args),
    /// Print a script that completes commands in a shell
    Completions(completions::Args),
    #[command(hide = true)]
    Man(man::Args),
    #[command(name = mainstay_launcher::ranks::guardian::SUBCOMMAND, hide = true)]
    Guardian(guardian::Args),
    #[command(name = mainstay_launcher::log_mirror::SUBCOMMAND, hide = true)]
    LogMirror(log_mirror::Args),
    #[command(name = mainstay_sensors::probe::SUBCOMMAND, hide = true)]
    Probe(probe::Args),
}

/// Runs the program with the arguments of this process.
pub fn main() -> ExitCode {
    completions::answer_the_shell();
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(error) => {
            output::note(&format!("error: {error}; see `mainstay run --help`"));
            return ExitCode::from(exit::USAGE);
        }
    };
    let command = match parsed(arguments) {
        Ok(cli) => cli.command,
        Err(answer) => return answer_of_clap(&answer),
    };
    if let Command::Guardian(args) = &command {
        // There is one for each job of the host: no runtime, no threads, almost no memory.
        return guardian::run(args);
    }
    if let Command::LogMirror(args) = &command {
        return log_mirror::run(args);
    }
    if let Command::Probe(args) = &command {
        return probe::run(args);
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&anyhow::Error::new(error).context("starting the runtime")),
    };
    let result = runtime.block_on(run(command));
    // Work that may still be blocked, such as a read from a dead disk, must not delay the exit.
    runtime.shutdown_background();
    result.unwrap_or_else(|error| failed(&error))
}

async fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(args) => run::run(*args).await,
        Command::Agent(args) => agent::run(args).await,
        Command::Config(args) => config::run(&args),
        Command::Certs(args) => certs::run(&args),
        Command::Hooks(args) => hooks::run(&args),
        Command::Demo(args) => demo::run(args).await,
        Command::Guardian(args) => Ok(guardian::run(&args)),
        Command::LogMirror(args) => Ok(log_mirror::run(&args)),
        Command::Probe(args) => Ok(probe::run(&args)),
        Command::Status(args) => status::run(args).await,
        Command::Gpus(args) => gpus::run(args).await,
        Command::Top(args) => top::run(args).await,
        Command::Ranks(args) => ranks::run(args).await,
        Command::Stacks(args) => stacks::run(args).await,
        Command::Events(args) => events::run(args).await,
        Command::Attribute(args) => attribute::run(&args),
        Command::Explain(args) => explain::run(args).await,
        Command::Goodput(args) => goodput::run(args).await,
        Command::Bundle(args) => bundle::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Policy(args) => policy::run(&args),
        Command::Man(args) => man::run(&args),
        Command::Job(args) => job::job(args).await,
        Command::Inject(args) => job::inject(args).await,
        Command::Stragglers(args) => stragglers::run(&args),
        Command::Check(args) => check::run(*args).await,
        Command::Slurm(args) => slurm::run(args).await,
        Command::Doctor(args) => doctor::run(&args),
        Command::Ckpt(args) => ckpt::run(args).await,
        Command::Ack(args) => operator::ack(args).await,
        Command::Silence(args) => operator::silence(args).await,
        Command::Unsilence(args) => operator::unsilence(args).await,
        Command::Version(args) => version::run(args).await,
        Command::Completions(args) => completions::run(args).await,
    }
}

/// The arguments of this process; options of `run` may be abbreviated as in torchrun.
fn arguments() -> Result<Vec<OsString>, String> {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    if arguments.get(1).is_none_or(|command| command != "run") {
        return Ok(arguments);
    }
    let of_run = arguments.split_off(2);
    arguments.extend(run::abbreviations::in_full(of_run, &options_of_run())?);
    Ok(arguments)
}

/// The options of `run`, each with whether it takes the next argument as its value.
fn options_of_run() -> Vec<(String, bool)> {
    let line = command_line();
    let options = line.find_subcommand("run").into_iter().flat_map(clap::Command::get_arguments);
    let takes_next = |option: &clap::Arg| {
        let at_least = option.get_num_args().map_or(1, |values| values.min_values());
        option.get_action().takes_values() && at_least > 0
    };
    let mut options: Vec<(String, bool)> =
        options.filter_map(|option| Some((option.get_long()?.to_owned(), takes_next(option)))).collect();
    options.push(("help".to_owned(), false));
    options
}

/// The whole command line, for completions, manual pages and checks.
pub fn command_line() -> clap::Command {
    Cli::command()
}

/// Whether an option with a value is on the command line.
fn is_given(option: &str) -> bool {
    let with_value = |argument: &str| argument.strip_prefix(option).is_some_and(|rest| rest.starts_with('='));
    std::env::args_os()
        .filter_map(|argument| argument.into_string().ok())
        .any(|one| one == option || with_value(&one))
}

fn parsed(arguments: Vec<OsString>) -> Result<Cli, clap::Error> {
    let line = without_variables(command_line(), does_not_count);
    let matches = line.try_get_matches_from(arguments.clone()).map_err(|error| match error.kind() {
        // The usage names the options that were given as if they were required, also those of variables.
        ErrorKind::MissingRequiredArgument => {
            let again = without_variables(command_line(), |_, _| true).try_get_matches_from(arguments);
            again.err().unwrap_or(error)
        }
        _ => error,
    })?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command_line()))
}

/// An empty environment variable counts as unset: templates of containers and units set variables without a value.
/// Where a server can be named in two ways, an option counts more than the variable of the other, and a host more than a
/// socket, which is set for `mainstay run` too.
fn does_not_count(command: &clap::Command, option: &clap::Arg) -> bool {
    let value = |variable: &OsStr| std::env::var_os(variable);
    let takes_host =
        command.get_arguments().any(|option| option.get_id() == "host" && option.get_env().is_some());
    let names_host = is_given("--host")
        || (!is_given("--socket") && value("MAINSTAY_HOST".as_ref()).is_some_and(|value| !value.is_empty()));
    let is_second = takes_host
        && match option.get_id().as_str() {
            "socket" => names_host,
            "host" => is_given("--socket"),
            _ => false,
        };
    is_second || option.get_env().and_then(value).is_some_and(|value| value.is_empty())
}

fn without_variables(
    command: clap::Command,
    ignored: fn(&clap::Command, &clap::Arg) -> bool,
) -> clap::Command {
    let given = command.clone();
    command
        .mut_args(|option| if ignored(&given, &option) { option.env(None::<&str>) } else { option })
        .mut_subcommands(|command| without_variables(command, ignored))
}

fn answer_of_clap(answer: &clap::Error) -> ExitCode {
    // The terminal may be gone; then nothing can be done.
    let _ = output::print_answer(answer);
    match answer.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::from(exit::OK),
        _ => ExitCode::from(exit::USAGE),
    }
}

fn failed(error: &anyhow::Error) -> ExitCode {
    if output::is_closed(error) {
        return ExitCode::from(exit::OK);
    }
    output::note(&format!("error: {}", output::in_full(error)));
    ExitCode::from(exit::UNKNOWN)
}
