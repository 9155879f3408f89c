//! The hidden subcommand that a launcher starts to copy its logs to a file system that may stop answering.

use std::path::PathBuf;
use std::process::ExitCode;

use mainstay_launcher::log_mirror;

/// Copies the logs of a launcher
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Where the run gets its directory
    log_dir: PathBuf,
    /// Where the launcher and its ranks write
    runtime_root: PathBuf,
    /// The id of the run
    run_id: String,
}

/// Copies until the launcher, at the other end of standard input, is gone and all is copied.
pub fn run(args: &Args) -> ExitCode {
    log_mirror::mirror(&args.log_dir, &args.runtime_root, &args.run_id);
    ExitCode::SUCCESS
}
