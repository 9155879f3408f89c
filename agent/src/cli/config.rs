//! `mainstay config`: the configuration that the agent would use.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::app::default_paths;
use crate::cli::{exit, output};
use crate::config::{Config, Environment};

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
        Ok(_) if args.check => output::print("the configuration is valid\n")?,
        Ok(config) if args.json => output::print(&format!("{}\n", serde_json::to_string_pretty(&config)?))?,
        Ok(config) => output::print(&toml::to_string(&config)?)?,
        Err(error) => {
            output::note(&format!("error: {error}"));
            return Ok(ExitCode::from(exit::USAGE));
        }
    }
    Ok(ExitCode::SUCCESS)
}
