//! `cargo xtask healthy`: the output of real training programs that end well, `tests/healthy/runs`.

use std::process::ExitCode;

use anyhow::Result;

use crate::command::{self, cmd};
use crate::progress::Progress;
use crate::{build, paths, python};

/// The options of `cargo xtask healthy`.
#[derive(clap::Args)]
pub struct Args {
    /// Only runs whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Also those that are stored already.
    #[arg(long)]
    again: bool,
}

/// Makes the outputs in `tests/healthy/runs` that are missing.
pub fn make(args: &Args) -> Result<ExitCode> {
    let progress = Progress::begin();
    build::release(&progress)?;
    let (python, program) = (python::healthy(&progress)?, paths::release_mainstay());
    let (script, only) = (paths::root().join("tests/healthy/make.py"), &args.only);
    let again = args.again.then_some("--again");
    let mut make = cmd!("{python} {script} --python {python} --mainstay {program} --only {only} {again...}");
    Ok(command::exit_code(command::run_watched(&mut make)?.0.success()))
}
