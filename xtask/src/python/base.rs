//! The heavy environment, with PyTorch and the tools of builds and tests, and the interpreter of all
//! environments.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use fs_err as fs;
use serde::Deserialize;

use super::pip;
use crate::command::{self, cmd};
use crate::paths;
use crate::progress::Progress;

/// Python packages that the builds and the tests need in addition to PyTorch; small.
const TOOLS: &str = "numpy pytest maturin>=1.9,<2";

/// Written into an environment as the last thing.
pub const STAMP: &str = "mainstay-stamp";

/// Fails unless everything that the environment is for can really be imported.
const WORKS: &str = "import torch, torch.distributed, numpy, pytest, maturin, pip";

#[derive(Deserialize)]
struct Interpreter {
    version: (u32, u32, u32),
    prefix: String,
    torch: bool,
    venv: bool,
}

/// The heavy environment, in the user's cache.
pub fn ensure(progress: &Progress) -> Result<PathBuf> {
    let _lock = lock(progress)?;
    let dir = paths::cache()?.join("venv");
    let python = dir.join("bin/python");
    let host = who(&interpreter())?;
    let (major, minor, patch) = host.version;
    let torch = if host.torch { "the system's torch" } else { torch_for(minor)? };
    let recipe = format!("python {major}.{minor}.{patch} of {}\n{torch}\n{TOOLS}\n", host.prefix);
    let stamp = dir.join(STAMP);
    let is_stamped = fs::read_to_string(&stamp).is_ok_and(|stamped| stamped == recipe);
    if is_stamped && python.exists() {
        return Ok(dir);
    }
    if dir.exists() {
        let examine = format!("Looking at {}, which has no stamp or an old one", dir.display());
        if progress.step(&examine, || Ok(works(&dir, &host)))? {
            fs::write(&stamp, &recipe)?;
            return Ok(dir);
        }
        progress.note("It is incomplete (an interrupted install?) or for another Python: making it again");
    }
    progress.step(&format!("Making a Python environment in {} (once)", dir.display()), || {
        new(progress, &dir, if host.torch { &["--system-site-packages"] } else { &[] })
    })?;
    progress
        .step("Installing the build and test tools: numpy, pytest, maturin (about 30 MB, once)", || {
            pip(&dir, TOOLS)
        })?;
    if host.torch {
        progress.note("This machine's python3 has PyTorch already: using it");
    } else {
        let what = format!(
            "Installing {torch} (about 3 GB with the libraries it wants, once; some minutes on a fast line)"
        );
        progress.step(&what, || pip(&dir, torch))?;
    }
    let works = WORKS;
    progress
        .step("Trying the environment: import torch", || command::output(&mut cmd!("{python} -c {works}")))?;
    fs::write(&stamp, &recipe)?;
    Ok(dir)
}

pub fn new(progress: &Progress, dir: &Path, options: &[&str]) -> Result<()> {
    let python = interpreter();
    let host = who(&python)?;
    if !host.venv {
        provide_venv_module(progress, &python, host.version)?;
    }
    command::output(&mut cmd!("{python} -m venv --clear {options...} {dir}")).map(drop)
}

/// The lock is held until the file is dropped; the kernel also releases it when the process dies.
pub fn lock(progress: &Progress) -> Result<std::fs::File> {
    let cache = paths::cache()?;
    fs::create_dir_all(&cache).context("set MAINSTAY_CACHE to a folder that can be written")?;
    let file = fs::File::create(cache.join("venv.lock"))?.into_parts().0;
    if file.try_lock().is_err() {
        progress.note("Another run prepares Python environments: waiting for it");
        file.lock().with_context(|| format!("locking venv.lock in {}", cache.display()))?;
    }
    Ok(file)
}

fn interpreter() -> String {
    std::env::var("MAINSTAY_PYTHON").unwrap_or_else(|_| "python3".into())
}

fn who(python: &str) -> Result<Interpreter> {
    let script = paths::root().join("xtask/src/python/who.py");
    let printed = command::output(&mut cmd!("{python} {script}"))
        .context("python3 is needed (3.9 or later; MAINSTAY_PYTHON names another interpreter)")?;
    serde_json::from_str(&printed).with_context(|| format!("asking {python} for its version: {printed:?}"))
}

/// One fixed release, so that results can be compared; later Pythons need a later one.
fn torch_for(minor: u32) -> Result<&'static str> {
    match minor {
        ..9 => bail!("python3 is 3.{minor}; 3.9 or later is needed (MAINSTAY_PYTHON)"),
        9..14 => Ok("torch==2.8.0"),
        _ => Ok("torch>=2.9,<3"),
    }
}

/// Whether an environment of unknown history can be used: for this interpreter, and complete.
fn works(dir: &Path, host: &Interpreter) -> bool {
    let (python, works) = (dir.join("bin/python").display().to_string(), WORKS);
    let inside = who(&python);
    inside.is_ok_and(|inside| inside.version == host.version && inside.prefix == host.prefix)
        && command::output(&mut cmd!("{python} -c {works}")).is_ok()
}

/// Debian and Ubuntu package `venv` separately from Python.
fn provide_venv_module(progress: &Progress, python: &str, version: (u32, u32, u32)) -> Result<()> {
    let package = format!("python{}.{}-venv", version.0, version.1);
    let by_hand = format!(
        "{python} has no venv module; install it, on Debian and Ubuntu by: apt-get install {package}"
    );
    if !nix::unistd::geteuid().is_root() || !command::exists("apt-get", "--version") {
        bail!("{by_hand}");
    }
    let what = format!("Installing {package}: {python} comes without its venv module here");
    let installed = progress.step(&what, || {
        command::output(&mut cmd!("apt-get update -qq"))?;
        let mut install = cmd!("apt-get install -y -qq {package}");
        command::output(install.env("DEBIAN_FRONTEND", "noninteractive"))
    });
    installed.map(drop).context(by_hand)
}
