//! The hidden subcommand that a launcher starts beside itself.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::act::guardian;

/// Stands guard for a launcher
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What all processes of the job carry in their environment: NAME=VALUE
    mark: String,
    /// The job's cgroup
    cgroup: Option<PathBuf>,
}

/// Stands guard until the launcher, at the other end of standard input, is gone.
pub fn run(args: &Args) -> ExitCode {
    guardian::stand_guard(std::io::stdin().lock(), &args.mark, args.cgroup.as_deref());
    ExitCode::SUCCESS
}
