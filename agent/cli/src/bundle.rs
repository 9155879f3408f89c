//! `mainstay bundle`: everything that the verdicts of a run are based on, in one file that may be passed on.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use serde_json::json;

use super::find::RunName;
use super::secrets::Secrets;
use super::{explain, output};

/// The format version of the bundles that this version writes.
pub(super) const FORMAT_VERSION: u64 = 1;

const EXAMPLES: &str = "\
Examples:
  mainstay bundle -o incident.jsonl         the newest run
  mainstay bundle exp-7 | gzip > exp-7.gz   a run, compressed
  mainstay replay incident.jsonl            judge it again, on any machine

Exit status: 0 written, 3 there is no such run or the file cannot be written.";

/// Write the facts and verdicts of a run into one file, with secrets masked, to be replayed elsewhere
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    run: RunName,
    /// The file to write; standard output if not given
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    secrets: Secrets,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let run_dir = explain::find_run(args.run.get())?;
    let mut lines = vec![json!({ "mainstay_bundle": FORMAT_VERSION, "version": env!("CARGO_PKG_VERSION") })];
    for entry in args.secrets.read(&run_dir)? {
        lines.push(serde_json::to_value(&entry).context("an entry of the journal")?);
    }
    let mut text = String::new();
    for line in lines {
        text.push_str(&line.to_string());
        text.push('\n');
    }
    match &args.output {
        None => output::print(&text)?,
        Some(path) => {
            let mut file =
                std::fs::File::create(path).with_context(|| format!("making {}", path.display()))?;
            file.write_all(text.as_bytes()).with_context(|| format!("writing {}", path.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
