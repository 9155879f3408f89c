//! The hidden subcommand that the agent starts beside itself: calls into vendors' libraries.

use std::path::PathBuf;
use std::process::ExitCode;

use super::output;
use crate::probe::nvml;

/// Calls a vendor's library for the agent
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    library: Library,
}

#[derive(Debug, clap::Subcommand)]
enum Library {
    /// NVML: one answer for each line on standard input
    Nvml {
        /// The library; the usual one if none is named
        #[arg(long, value_name = "PATH")]
        lib: Option<PathBuf>,
    },
}

/// Answers until the agent, at the other end of standard input, is gone.
pub fn run(args: &Args) -> ExitCode {
    let Library::Nvml { lib } = &args.library;
    let library = lib.as_ref().map(|path| path.clone().into_os_string());
    match nvml::serve(library, std::io::stdin().lock(), std::io::stdout()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::note(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}
