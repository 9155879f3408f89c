//! `mainstay man`: the manual pages of packages.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;

use super::{command_line, exit};

/// Write a manual page for each command
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The directory for the pages
    dir: PathBuf,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let dir = args.dir.display();
    std::fs::create_dir_all(&args.dir).with_context(|| format!("creating {dir}"))?;
    clap_mangen::generate_to(command_line(), &args.dir).with_context(|| format!("writing into {dir}"))?;
    Ok(ExitCode::from(exit::OK))
}
