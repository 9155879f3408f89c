//! `mainstay hooks`: whether the agent's hooks reach whom they should.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use mainstay_app::agent::hook_plan;
use mainstay_app::default_paths;
use mainstay_node::config::{Config, Environment};
use mainstay_node::hook::Hooks as AgentHooks;
use nix::unistd::geteuid;

use crate::{exit, output};

/// Send a test notice to the agent's commands and webhooks
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay hooks test
  sudo mainstay hooks test --config agent.toml

Exit status: 0 delivered to all, 1 not to all, 3 there are no hooks, 64 the configuration is not valid.")]
pub(super) struct Hooks {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Send one notice that says it is a test to each hook, in the format of the configuration
    Test {
        /// Configuration file; /etc/mainstay/agent.toml if it is there
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
}

/// Sends the notices and prints what became of each.
pub(super) fn run(args: &Hooks) -> anyhow::Result<ExitCode> {
    let Action::Test { config } = &args.action;
    let environment = Environment::new(default_paths::variables(), geteuid().as_raw());
    let config = match Config::load(config.as_deref(), &environment, &[]) {
        Ok(config) => config,
        Err(error) => {
            output::note(&format!("error: {error}"));
            return Ok(ExitCode::from(exit::USAGE));
        }
    };
    let sent = AgentHooks::test(&hook_plan(&config)).context("preparing the hooks")?;
    if sent.is_empty() {
        output::note("error: the configuration has neither hooks.commands nor hooks.webhooks");
        return Ok(ExitCode::from(exit::UNKNOWN));
    }
    let mut failed = false;
    for (hook, result) in sent {
        failed |= result.is_err();
        output::print(&match result {
            Ok(()) => format!("delivered: {hook}\n"),
            Err(why) => format!("NOT DELIVERED: {hook}: {why}\n"),
        })?;
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
