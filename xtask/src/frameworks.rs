//! The training frameworks that the Python package has hooks for, in an environment of their own over the heavy one.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result};

use crate::command;
use crate::paths;
use crate::progress::Progress;
use crate::venv::{self, Venv};
use crate::wheel;

/// Fixed releases, so that results can be compared.
const FRAMEWORKS: &[&str] = &[
    "lightning==2.6.6",
    "transformers==5.23.0",
    "accelerate==1.15.0",
    "jax[cpu]==0.10.2",
    "orbax-checkpoint==0.12.8",
    // Imports of the NVRx 0.4.1 client; the package's own list would install a hundred more.
    "defusedxml",
    "nvidia-ml-py",
];

/// The newest that installs where glibc is older than 2.39.
const NVRX: &str = "nvidia-resiliency-ext==0.4.1";

/// Where Megatron-LM keeps a rank's position in its pipeline; of its dependencies, torch is installed.
const MEGATRON: &str = "megatron-core==0.16.1";

const WORKS: &str = "import lightning.pytorch, transformers, accelerate, jax, orbax.checkpoint, nvidia_resiliency_ext.fault_tolerance, megatron.core.parallel_state";

/// An environment with the frameworks and the wheel; the frameworks are installed once and kept in the user's cache.
///
/// # Errors
/// The package index cannot be reached, or has nothing for this Python.
pub fn ensure(progress: &Progress, heavy: &Venv) -> Result<Venv> {
    let base = paths::cache()?.join("frameworks-venv");
    let stamp = base.join("frameworks-stamp");
    let recipe = format!("{}\n{NVRX}\n{MEGATRON}\n", FRAMEWORKS.join("\n"));
    venv::overlay(heavy.base(), &base)?;
    if fs::read_to_string(&stamp).ok().as_deref() != Some(&recipe) {
        progress.step(
            "Installing Lightning, Transformers, JAX, Orbax, Megatron Core and NVRx's client (800 MB, once)",
            || {
                let python = base.join("bin/python");
                let pip = |arguments: &[&str]| {
                    let mut pip = Command::new(&python);
                    pip.args([
                        "-m",
                        "pip",
                        "install",
                        "--disable-pip-version-check",
                        "--progress-bar",
                        "off",
                    ]);
                    command::run_logged(pip.args(arguments), &base.join("pip.log"))
                };
                pip(FRAMEWORKS)?;
                pip(&["--no-deps", NVRX, MEGATRON])?;
                command::output(Command::new(&python).args(["-c", WORKS]))?;
                fs::write(&stamp, &recipe).with_context(|| format!("writing {}", stamp.display()))
            },
        )?;
    }
    let venv = Venv::over(base, paths::target().join("frameworks-venv"))?;
    // Only the heavy environment has the tools to build it.
    wheel::build(progress, heavy)?;
    wheel::install(progress, &venv)?;
    Ok(venv)
}
