//! `mainstay config`: the configuration that the agent would use.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::{exit, output};
use mainstay_app::default_paths;
use mainstay_node::config::{Config, Environment};

const EXAMPLES: &str = "\
Examples:
  mainstay config --default > agent.toml
  mainstay config --check --config agent.toml
  mainstay config";

/// Print the agent's configuration, or check it
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Configuration file; /etc/mainstay/agent.toml if it is there
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the default configuration with every key explained
    #[arg(long, conflicts_with = "check")]
    default: bool,
    /// Check file and environment without printing the configuration
    #[arg(long)]
    check: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints the configuration or the result of the check.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.default {
        output::print(&Config::commented_default())?;
        return Ok(ExitCode::SUCCESS);
    }
    let environment = Environment::new(default_paths::variables(), nix::unistd::geteuid().as_raw());
    match Config::load(args.config.as_deref(), &environment, &[]) {
        Ok(config) if args.check => output::print(&checked(args, &environment, &config))?,
        Ok(config) if args.json => output::print(&format!("{}\n", serde_json::to_string_pretty(&config)?))?,
        Ok(config) => output::print(&toml::to_string(&config)?)?,
        Err(error) => {
            output::note(&format!("error: {error}"));
            return Ok(ExitCode::from(exit::USAGE));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What the agent of the shipped unit would use, and what one that this user starts would, if it differs: both have
/// their default paths from their environment.
fn checked(args: &Args, environment: &Environment, here: &Config) -> String {
    let file = environment.config_file(args.config.as_deref()).ok().flatten();
    let file = file.map_or("no file, all defaults".to_owned(), |(path, _)| path.display().to_string());
    let paths = |config: &Config| {
        format!("socket {}, state in {}", config.socket.display(), config.state_dir.display())
    };
    let of_unit = Config::load(args.config.as_deref(), &environment.of_shipped_unit(), &[]);
    let mut text = format!("the configuration is valid: {file}\n");
    if let Ok(of_unit) = &of_unit {
        text.push_str(&format!("the agent of the shipped systemd unit: {}\n", paths(of_unit)));
    }
    if of_unit.is_ok_and(|of_unit| paths(&of_unit) != paths(here)) {
        text.push_str(&format!("an agent that user {} starts here: {}\n", environment.uid, paths(here)));
    }
    text
}
