//! `mainstay version`.

use std::process::ExitCode;

use super::{exit, output};

/// Print the version of this program and of the API it speaks.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  mainstay version\n  mainstay version --json | jq -r .version")]
pub(super) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let version = env!("CARGO_PKG_VERSION");
    if args.json {
        output::print(&format!("{}\n", serde_json::json!({ "version": version, "api": "mainstay.v1" })))?;
    } else {
        output::print(&format!("mainstay {version}\n"))?;
    }
    Ok(ExitCode::from(exit::OK))
}
