//! Floor 6. How people ask. One file per command; exit statuses stand in `docs/reference/cli.md`.

mod guardian;
mod run;
mod torchrun;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::Args),
    #[command(name = crate::act::guardian::SUBCOMMAND, hide = true)]
    Guardian(guardian::Args),
}

/// Runs the program with the arguments of this process.
pub fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Guardian(args) => guardian::run(&args),
        Command::Run(args) => {
            let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
                return ExitCode::from(70);
            };
            let result = runtime.block_on(run::run(args));
            runtime.shutdown_background();
            result.unwrap_or_else(|error| {
                eprintln!("mainstay: {error:#}");
                ExitCode::from(70)
            })
        }
    }
}
