//! The wheel of the distribution `mainstay-train`: the Python package and the program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{GLIBC, needs, with_path};
use crate::command;
use crate::paths;
use crate::progress::Progress;
use crate::wheel::{newest, of_package};

/// Builds the wheel for one processor and checks what it needs.
pub fn release(
    progress: &Progress,
    tools: &Path,
    target: &str,
    program: &Path,
    out: &Path,
) -> Result<PathBuf> {
    progress.step("Building the wheel (maturin)", || {
        let mut maturin = with_path(Command::new(tools.join("maturin")), tools);
        maturin.args(["build", "--release", "--locked", "--zig", "--target", target]);
        of_package(&mut maturin);
        maturin.args(["--compatibility", &format!("manylinux_{}_{}", GLIBC.0, GLIBC.1)]);
        let built = paths::target().join("python").join(target);
        if built.join("wheel").exists() {
            fs::remove_dir_all(built.join("wheel"))
                .with_context(|| format!("emptying {}", built.display()))?;
        }
        let wheel = with_program(&mut maturin, program, &built.join("wheel"))?;
        let module = built.join("release/lib_native.so");
        needs::check(&module, GLIBC)?;
        let name = wheel.file_name().context("a wheel has a name")?;
        fs::copy(&wheel, out.join(name)).with_context(|| format!("copying to {}", out.display()))?;
        Ok(out.join(name))
    })
}

/// Builds a wheel that has this program too.
pub fn with_program(maturin: &mut Command, program: &Path, out: &Path) -> Result<PathBuf> {
    // Maturin installs what is in this folder beside `python`.
    let scripts = paths::root().join("client/python/data/scripts");
    let _removed = RemovedAtEnd(&scripts);
    fs::create_dir_all(&scripts).with_context(|| format!("creating {}", scripts.display()))?;
    fs::copy(program, scripts.join("mainstay")).with_context(|| format!("copying {}", program.display()))?;
    command::run_logged(maturin.arg("--out").arg(out), &paths::target().join("logs/maturin-dist.log"))?;
    let wheel = newest(out).with_context(|| format!("maturin left no wheel in {}", out.display()))?;
    let listed = command::output(Command::new("python3").args(["-m", "zipfile", "--list"]).arg(&wheel))?;
    ensure!(listed.contains(".data/scripts/mainstay"), "{}: the program is not in it", wheel.display());
    Ok(wheel)
}

/// Installs a wheel into an empty environment in `folder`, as a user would, and trains with what is in it.
pub fn try_out(python: &Path, wheel: &Path, folder: &Path, give: impl Fn(&mut Command)) -> Result<()> {
    let (venv, trained) = (folder.join("venv"), folder.join("demo"));
    if trained.exists() {
        fs::remove_dir_all(&trained).with_context(|| format!("emptying {}", trained.display()))?;
    }
    command::output(Command::new(python).args(["-m", "venv", "--clear"]).arg(&venv))?;
    let mut pip = Command::new(venv.join("bin/python"));
    pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-index", "--quiet"]);
    command::run_logged(pip.arg(wheel), &folder.join("pip.log"))?;
    let mut demo = Command::new(venv.join("bin/mainstay"));
    demo.args(["demo", "--steps", "60", "--dir"]).arg(&trained).env_remove("PYTHON_EXEC");
    give(&mut demo);
    command::run(&mut demo)?;
    let mut list = Command::new(venv.join("bin/python"));
    let installed = command::output(list.args(["-m", "pip", "list", "--format=freeze"]))?;
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
