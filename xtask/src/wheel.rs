//! The Python package: built by maturin into `target/wheels`, installed into this checkout's environment when its
//! sources have changed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::command;
use crate::fingerprint;
use crate::paths;
use crate::progress::Progress;
use crate::venv::Venv;

/// Builds the wheel if its sources changed, and returns its path.
pub fn build(progress: &Progress, venv: &Venv) -> Result<PathBuf> {
    let wheels = paths::target().join("wheels");
    let stamp = wheels.join("sources");
    let sources = sources()?;
    if fs::read_to_string(&stamp).is_ok_and(|made_of| made_of == sources)
        && let Some(wheel) = newest(&wheels)
    {
        return Ok(wheel);
    }
    progress.step("Building the Python package (maturin, one wheel for Python 3.9 and later)", || {
        if wheels.exists() {
            fs::remove_dir_all(&wheels).with_context(|| format!("emptying {}", wheels.display()))?;
        }
        let mut maturin = maturin(venv);
        maturin.arg("--out").arg(&wheels);
        command::run_logged(&mut maturin, &paths::target().join("logs/maturin.log"))?;
        fs::write(&stamp, &sources).with_context(|| format!("writing {}", stamp.display()))?;
        newest(&wheels).with_context(|| format!("maturin left no wheel in {}", wheels.display()))
    })
}

/// Maturin of an environment, for its Python.
pub fn maturin(venv: &Venv) -> Command {
    let mut maturin = Command::new(venv.tool("maturin"));
    maturin.args(["build", "--release", "--interpreter"]).arg(venv.python());
    of_package(&mut maturin);
    maturin
}

/// Options that name the package.
pub fn of_package(maturin: &mut Command) {
    maturin
        .arg("--manifest-path")
        .arg(paths::root().join("client/python/Cargo.toml"))
        // A separate folder: with the interpreter in the environment, PyO3 would be built again each time cargo
        // and maturin take turns.
        .arg("--target-dir")
        .arg(paths::target().join("python"))
        .current_dir(paths::root());
}

/// Builds and installs it if necessary.
pub fn install(progress: &Progress, venv: &Venv) -> Result<()> {
    let wheel = build(progress, venv)?;
    let stamp = venv.file("mainstay-wheel");
    let sources = sources()?;
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == sources) {
        return Ok(());
    }
    progress.step("Installing the Python package", || {
        let mut pip = Command::new(venv.python());
        pip.args([
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--force-reinstall",
            "--no-deps",
            "--quiet",
        ])
        .arg(&wheel);
        command::run_logged(&mut pip, &paths::target().join("logs/pip.log"))?;
        fs::write(&stamp, &sources).with_context(|| format!("writing {}", stamp.display()))
    })
}

fn sources() -> Result<String> {
    let root = paths::root();
    fingerprint::of(&[
        root.join("Cargo.toml"),
        root.join("Cargo.lock"),
        root.join("client"),
        root.join("proto/checkpoint"),
        root.join("proto/heartbeat"),
    ])
}

/// The wheel in a folder.
pub fn newest(wheels: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(wheels).ok()?;
    let wheels = entries.filter_map(|entry| Some(entry.ok()?.path()));
    wheels.filter(|path| path.extension().is_some_and(|e| e == "whl")).max()
}
