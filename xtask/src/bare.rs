//! A Python without PyTorch: Mainstay's client serves programs that have none.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result};

use crate::command;
use crate::paths;
use crate::progress::Progress;
use crate::venv::Venv;
use crate::wheel;

/// Packages of the tests.
const PACKAGES: &[&str] = &["mypy", "numpy", "pytest"];

const WORKS: &str = "import importlib.util, numpy, pytest; assert importlib.util.find_spec('torch') is None";

/// An environment with the wheel; its packages are installed once and kept in the user's cache.
///
/// # Errors
/// The package index cannot be reached.
pub fn ensure(progress: &Progress, heavy: &Venv) -> Result<Venv> {
    let base = paths::cache()?.join("bare-venv");
    let stamp = base.join("bare-stamp");
    let recipe = PACKAGES.join("\n");
    if fs::read_to_string(&stamp).ok().as_ref() != Some(&recipe) {
        progress.step("Making a Python environment without PyTorch (40 MB, once)", || {
            if base.exists() {
                fs::remove_dir_all(&base).with_context(|| format!("removing {}", base.display()))?;
            }
            command::output(Command::new(heavy.tool("python")).args(["-m", "venv"]).arg(&base))?;
            let python = base.join("bin/python");
            let mut pip = Command::new(&python);
            pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]);
            command::run_logged(pip.args(PACKAGES), &base.join("pip.log"))?;
            command::output(Command::new(&python).args(["-c", WORKS]))?;
            fs::write(&stamp, &recipe).with_context(|| format!("writing {}", stamp.display()))
        })?;
    }
    let venv = Venv::over(base, paths::target().join("bare-venv"))?;
    // Only the heavy environment has the tools to build it.
    wheel::build(progress, heavy)?;
    wheel::install(progress, &venv)?;
    Ok(venv)
}
