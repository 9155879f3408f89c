//! The hidden subcommand that the agent or a check starts for calls that may hang, in a child process.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::output;
use mainstay_app::default_paths;
use mainstay_app::one_check::run_look;
use mainstay_node::config::{Config, Environment};
use mainstay_sensors::probe::dcgm::{self, Engine};
use mainstay_sensors::probe::deep::{self, Means};
use mainstay_sensors::probe::{mount, nvml};
use mainstay_sys::stdout;

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
    /// DCGM: one answer for each line on standard input
    Dcgm {
        /// The library; the usual one if none is named
        #[arg(long, value_name = "PATH")]
        lib: Option<PathBuf>,
        /// The host engine; none to run one in here
        #[arg(long, value_name = "HOST:PORT")]
        address: Option<String>,
        /// Set policies where no one has set any
        #[arg(long)]
        policies: bool,
    },
    /// One active probe, with its result in one line
    Deep {
        /// Which, as JSON
        #[arg(long, value_name = "JSON")]
        probe: String,
        /// CUDA's library
        #[arg(long, value_name = "PATH")]
        cuda: Option<PathBuf>,
    },
    /// One question to a file system: answers `ok` or what is wrong, once it answers
    Mount {
        /// Where it is mounted
        point: PathBuf,
    },
    /// The agent's sensors for one check: answers on a socket in the directory until standard input ends
    Look {
        /// Where the socket is made
        #[arg(long, value_name = "DIR")]
        directory: PathBuf,
        /// The agent's configuration file
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
}

/// Answers until the agent, at the other end of standard input, is gone.
pub fn run(args: &Args) -> ExitCode {
    let ran = match &args.library {
        Library::Nvml { lib } => {
            let library = lib.as_ref().map(|path| path.clone().into_os_string());
            let answers = stdout::apart();
            answers.and_then(|to| nvml::serve(library, std::io::stdin().lock(), to)).map_err(Into::into)
        }
        Library::Mount { point } => {
            let answer = mount::ask(point).map_or_else(|error| error.to_string(), |()| "ok".to_owned());
            writeln!(std::io::stdout().lock(), "{answer}").map_err(Into::into)
        }
        Library::Dcgm { lib, address, policies } => {
            let library = lib.as_ref().map(|path| path.clone().into_os_string());
            let engine = Engine { library, address: address.clone(), policies: *policies };
            let answers = stdout::apart();
            answers.and_then(|to| dcgm::serve(&engine, std::io::stdin().lock(), to)).map_err(Into::into)
        }
        Library::Deep { probe, cuda } => deep(probe, cuda.as_deref()),
        Library::Look { directory, config } => look(directory, config.as_deref()),
    };
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::note(&format!("error: {}", output::in_full(&error)));
            ExitCode::FAILURE
        }
    }
}

/// Probes and prints the result in one line.
fn deep(probe: &str, cuda: Option<&Path>) -> anyhow::Result<()> {
    let probe = serde_json::from_str(probe)?;
    let means = Means { cuda: cuda.map(|path| path.as_os_str().to_owned()) };
    let mut answers = stdout::apart()?;
    let line = serde_json::to_string(&deep::run(&probe, &means))?;
    writeln!(answers, "{line}")?;
    Ok(())
}

fn look(directory: &Path, config: Option<&Path>) -> anyhow::Result<()> {
    let environment = Environment::new(default_paths::variables(), nix::unistd::geteuid().as_raw());
    let config = Config::load(config, &environment, &[])?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let looked = runtime.block_on(run_look(config, directory));
    // Work that may still be blocked in a dead file system must not delay the exit.
    runtime.shutdown_background();
    looked
}
