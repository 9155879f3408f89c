//! `cargo xtask demo`: `mainstay demo` with the program and the Python of this checkout.

use std::ffi::OsString;
use std::fs;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::build;
use crate::paths;
use crate::progress::Progress;
use crate::venv;
use crate::wheel;

/// What can be chosen.
#[derive(clap::Args)]
pub struct Args {
    /// Options of `mainstay demo`, such as --hosts 3.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    options: Vec<OsString>,
}

/// Builds everything that training needs, and runs the demo.
///
/// # Errors
/// Something cannot be built.
pub fn run(args: &Args) -> Result<ExitCode> {
    let progress = Progress::begin();
    if !paths::release_mainstay().exists() {
        println!(
            "A first run builds the program (some minutes) and may fetch PyTorch (about 3 GB); later runs do not."
        );
    }
    build::release(&progress)?;
    let venv = venv::ensure(&progress)?;
    wheel::install(&progress, &venv)?;
    println!();

    let folder = paths::target().join("demo");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("emptying {}", folder.display()))?;
    }
    let mut demo = Command::new(paths::release_mainstay());
    venv::activate(&mut demo, &venv);
    demo.args(["demo", "--dir"]).arg(&folder).args(&args.options);
    let status = demo.status().context("starting mainstay demo")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
