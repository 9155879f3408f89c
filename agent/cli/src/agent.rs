//! `mainstay agent`: the daemon of the host.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::{exit, output};
use mainstay_app::logging::{self, Format};
use mainstay_app::{self as app};
use mainstay_node::config::{Config, ConfigError, Environment};

const EXAMPLES: &str = "\
Examples:
  mainstay agent
  mainstay agent --config /etc/mainstay/agent.toml --http 127.0.0.1:9464
  MAINSTAY_AGENT_STATE_DIR=/tmp/state mainstay agent --socket /tmp/agent.sock

Configuration: the file, then MAINSTAY_AGENT_* in the environment, then these options, each overriding the
one before; `mainstay config` prints it. See docs/reference/configuration.md.";

/// Run the agent of this host
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Configuration file; /etc/mainstay/agent.toml if it is there
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The Unix socket to serve on
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Where the journal is kept
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Serve gRPC on this TCP address too, to a network you trust
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<String>,
    /// Serve /metrics, /healthz and /readyz on this TCP address
    #[arg(long, value_name = "ADDRESS:PORT")]
    http: Option<String>,
    /// error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL")]
    log: Option<String>,
    /// Text, or one JSON object per line on standard error
    #[arg(long, value_name = "FORMAT", value_parser = ["text", "json"], default_value = "text")]
    log_format: String,
}

/// Runs until asked to stop.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let started = match config(&args) {
        Ok(config) => {
            let format = if args.log_format == "json" { Format::Json } else { Format::Text };
            logging::start(tracing::Level::from(config.log).into(), format);
            app::run_agent(config).await
        }
        Err(error) => {
            output::note(&format!("error: {error}"));
            return Ok(ExitCode::from(exit::USAGE));
        }
    };
    logging::flush(logging::FLUSH_TIMEOUT);
    match started {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            output::note(&format!("error: {}", output::in_full(&error)));
            Ok(ExitCode::from(exit::SOFTWARE))
        }
    }
}

/// The configuration from file, environment and options.
fn config(args: &Args) -> Result<Config, ConfigError> {
    let environment = Environment::new(app::default_paths::variables(), nix::unistd::geteuid().as_raw());
    let options = [
        ("socket", args.socket.as_ref().map(|path| path.display().to_string())),
        ("state_dir", args.state_dir.as_ref().map(|path| path.display().to_string())),
        ("listen", args.listen.clone()),
        ("http", args.http.clone()),
        ("log", args.log.clone()),
    ];
    let overrides: Vec<(String, String)> =
        options.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
    Config::load(args.config.as_deref(), &environment, &overrides)
}
