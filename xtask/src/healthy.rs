//! The environment of the programs in `tests/healthy`: what they train with beyond the frameworks that the Python package has
//! hooks for.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::build;
use crate::command;
use crate::frameworks;
use crate::paths;
use crate::progress::Progress;
use crate::venv::{self, Venv};
use crate::wheel;

/// Fixed releases, so that results can be compared.
const PACKAGES: &[&str] = &[
    "tensorboard==2.21.0",
    "wandb==0.31.0",
    "flax==0.12.8",
    "optax==0.2.8",
    "deepspeed==0.19.8",
    "ray[train]==2.60.0",
    "ninja==1.13.2",
];

const WORKS: &str = "import flax, optax, wandb, tensorboard, deepspeed, ray.train";

/// An environment with all of them and the wheel, over the frameworks' one; installed once and kept in the user's cache.
///
/// # Errors
/// The package index cannot be reached, or has nothing for this Python.
pub fn ensure(progress: &Progress) -> Result<Venv> {
    let heavy = venv::ensure(progress)?;
    let frameworks = frameworks::ensure(progress, &heavy)?;
    let base = paths::cache()?.join("healthy-venv");
    let stamp = base.join("healthy-stamp");
    let recipe = PACKAGES.join("\n");
    venv::overlay(frameworks.base(), &base)?;
    if fs::read_to_string(&stamp).ok().as_deref() != Some(&recipe) {
        progress.step("Installing TensorBoard, W&B, Flax, DeepSpeed and Ray (500 MB, once)", || {
            let python = base.join("bin/python");
            let mut pip = Command::new(&python);
            pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]);
            command::run_logged(pip.args(PACKAGES), &base.join("pip.log"))?;
            command::output(Command::new(&python).args(["-c", WORKS]).env("DS_ACCELERATOR", "cpu"))?;
            fs::write(&stamp, &recipe).with_context(|| format!("writing {}", stamp.display()))
        })?;
    }
    let venv = Venv::over(base, paths::target().join("healthy-venv"))?;
    wheel::install(progress, &venv)?;
    Ok(venv)
}

/// The interpreter of that environment, or the one that `MAINSTAY_TEST_HEALTHY` names, which has the wheel.
///
/// # Errors
/// The environment cannot be made.
pub fn python(progress: &Progress) -> Result<PathBuf> {
    match std::env::var_os("MAINSTAY_TEST_HEALTHY").filter(|named| !named.is_empty()) {
        Some(named) => Ok(PathBuf::from(named)),
        None => ensure(progress).map(|venv| venv.python()),
    }
}

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
///
/// # Errors
/// There is no program or no environment.
pub fn make(args: &Args) -> Result<ExitCode> {
    let progress = Progress::begin();
    build::release(&progress)?;
    let python = python(&progress)?;
    let mut make = Command::new(&python);
    make.arg(paths::root().join("tests/healthy/make.py")).arg("--python").arg(&python);
    make.arg("--mainstay").arg(paths::release_mainstay()).args(["--only", &args.only]);
    if args.again {
        make.arg("--again");
    }
    let (status, _) = command::run_watched(&mut make)?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
