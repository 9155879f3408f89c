//! The wheel of the distribution `mainstay-train`: the Python package and the program.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use fs_err as fs;

use super::{GLIBC, needs, reproducible};
use crate::command::{self, cmd};
use crate::progress::Progress;
use crate::{paths, python};

/// Builds the wheel for one processor and checks what it needs.
pub fn release(
    progress: &Progress,
    tools: &Path,
    target: &str,
    program: &Path,
    out: &Path,
) -> Result<PathBuf> {
    progress.step("Building the wheel (maturin)", || {
        let maturin = tools.join("maturin");
        let compatibility = format!("manylinux_{}_{}", GLIBC.0, GLIBC.1);
        let mut maturin = python::of_package(cmd!(
            "{maturin} build --release --locked --zig --target {target} --compatibility {compatibility}"
        ));
        python::path_first(&mut maturin, tools);
        reproducible(&mut maturin)?;
        let built = paths::target().join("python").join(target);
        let wheel = with_program(&mut maturin, program, &paths::fresh(built.join("wheel"))?)?;
        needs::check(&built.join("release/lib_native.so"), GLIBC)?;
        let place = out.join(wheel.file_name().context("a wheel has a name")?);
        fs::copy(&wheel, &place)?;
        Ok(place)
    })
}

/// Builds a wheel that has this program too.
pub fn with_program(maturin: &mut Command, program: &Path, out: &Path) -> Result<PathBuf> {
    // Maturin installs what is in this folder beside `python`.
    let scripts = paths::root().join("client/python/data/scripts");
    let _removed = RemovedAtEnd(&scripts);
    fs::create_dir_all(&scripts)?;
    fs::copy(program, scripts.join("mainstay"))?;
    command::run_logged(maturin.arg("--out").arg(out), &paths::target().join("logs/maturin-dist.log"))?;
    let wheel =
        python::newest_wheel(out).with_context(|| format!("maturin left no wheel in {}", out.display()))?;
    let listed = command::output(&mut cmd!("python3 -m zipfile --list {wheel}"))?;
    ensure!(listed.contains(".data/scripts/mainstay"), "{}: the program is not in it", wheel.display());
    Ok(wheel)
}

/// Installs a wheel into an empty environment in `folder`, as a user would, and trains with what is in it.
pub fn try_out(python: &Path, wheel: &Path, folder: &Path, give: impl Fn(&mut Command)) -> Result<()> {
    let (venv, trained) = (folder.join("venv"), paths::fresh(folder.join("demo"))?);
    command::output(&mut cmd!("{python} -m venv --clear {venv}"))?;
    let (python, mainstay) = (venv.join("bin/python"), venv.join("bin/mainstay"));
    let mut pip = cmd!("{python} -m pip install --disable-pip-version-check --no-index --quiet {wheel}");
    command::run_logged(&mut pip, &folder.join("pip.log"))?;
    let mut demo = cmd!("{mainstay} demo --steps 60 --dir {trained}");
    give(demo.env_remove("PYTHON_EXEC"));
    command::run(&mut demo)?;
    let installed = command::output(&mut cmd!("{python} -m pip list --format=freeze"))?;
    let known = ["mainstay-train", "pip", "setuptools", "wheel"];
    let is_known = |line: &str| known.iter().any(|name| line.starts_with(&format!("{name}==")));
    ensure!(installed.lines().all(is_known), "the wheel brought more than itself:\n{installed}");
    Ok(())
}

struct RemovedAtEnd<'a>(&'a Path);

impl Drop for RemovedAtEnd<'_> {
    fn drop(&mut self) {
        // Git ignores what is left.
        let _ = fs::remove_dir_all(self.0);
    }
}
