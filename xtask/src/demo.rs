//! `cargo xtask demo`: `mainstay demo` with the program and the Python of this checkout.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::command::{self, cmd};
use crate::progress::Progress;
use crate::{build, paths, python};

/// What can be chosen.
#[derive(clap::Args)]
pub struct Args {
    /// Options of `mainstay demo`, such as --hosts 3.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    options: Vec<OsString>,
}

/// Builds everything that training needs, and runs the demo.
pub fn run(args: &Args) -> Result<ExitCode> {
    let progress = Progress::begin();
    let program = paths::release_mainstay();
    if !program.exists() {
        println!(
            "A first run builds the program (some minutes) and may fetch PyTorch (about 3 GB); later runs do not."
        );
    }
    build::release(&progress)?;
    let venv = python::TORCH.with_wheel(&progress)?;
    println!();
    let folder = paths::fresh(paths::target().join("demo"))?;
    let options = &args.options;
    let mut demo = cmd!("{program} demo --dir {folder} {options...}");
    python::activate(&mut demo, &venv);
    Ok(command::exit_code(demo.status().context("starting mainstay demo")?.success()))
}
