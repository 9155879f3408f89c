//! The Python package: built by maturin into `target/wheels`, installed into an environment of this checkout
//! when its sources have changed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use fs_err as fs;

use super::{TORCH, Venv};
use crate::command::{self, cmd};
use crate::progress::Progress;
use crate::{fingerprint, paths};

/// Builds the wheel if its sources changed, and returns its path. Only the heavy environment has the tools for
/// it.
pub fn build(progress: &Progress) -> Result<PathBuf> {
    let wheels = paths::target().join("wheels");
    let (stamp, sources) = (wheels.join("sources"), sources()?);
    if fs::read_to_string(&stamp).is_ok_and(|made_of| made_of == sources)
        && let Some(wheel) = newest(&wheels)
    {
        return Ok(wheel);
    }
    let base = TORCH.ensure(progress)?;
    progress.step("Building the Python package (maturin, one wheel for Python 3.9 and later)", || {
        let mut maturin = maturin(&base);
        maturin.arg("--out").arg(paths::fresh(wheels.clone())?);
        command::run_logged(&mut maturin, &paths::target().join("logs/maturin.log"))?;
        fs::write(&stamp, &sources)?;
        newest(&wheels).with_context(|| format!("maturin left no wheel in {}", wheels.display()))
    })
}

/// Maturin of an environment, for its Python.
pub fn maturin(base: &Path) -> Command {
    let (maturin, python) = (base.join("bin/maturin"), base.join("bin/python"));
    of_package(cmd!("{maturin} build --release --interpreter {python}"))
}

pub fn of_package(mut maturin: Command) -> Command {
    maturin.arg("--manifest-path").arg(paths::root().join("client/python/Cargo.toml"));
    // A separate folder: with the interpreter in the environment, PyO3 would be built again each time cargo and
    // maturin take turns.
    maturin.arg("--target-dir").arg(paths::target().join("python")).current_dir(paths::root());
    maturin
}

/// Builds and installs it if necessary.
pub fn install(progress: &Progress, venv: &Venv) -> Result<()> {
    let wheel = build(progress)?;
    let (stamp, sources) = (venv.dir.join("mainstay-wheel"), sources()?);
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == sources) {
        return Ok(());
    }
    progress.step("Installing the Python package", || {
        let python = venv.python();
        let options = ["--disable-pip-version-check", "--force-reinstall", "--no-deps", "--quiet"];
        let mut pip = cmd!("{python} -m pip install {options...} {wheel}");
        command::run_logged(&mut pip, &paths::target().join("logs/pip.log"))?;
        Ok(fs::write(&stamp, &sources)?)
    })
}

fn sources() -> Result<String> {
    let all = ["Cargo.toml", "Cargo.lock", "client", "proto/checkpoint", "proto/heartbeat"];
    fingerprint::of(&all.map(|source| paths::root().join(source)))
}

pub fn newest(wheels: &Path) -> Option<PathBuf> {
    let wheels = fs::read_dir(wheels).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    wheels.filter(|path| path.extension().is_some_and(|extension| extension == "whl")).max()
}
