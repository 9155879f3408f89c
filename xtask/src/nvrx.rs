//! NVRx's own client of the node health service, for a scenario: the package without PyTorch and what else it wants.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::command;
use crate::paths;
use crate::progress::Progress;
use crate::venv::Venv;

/// The newest release with the client. Its wheel is for Python 3.12, but the parts that are used are plain Python.
const NVRX: &str = "nvidia-resiliency-ext==0.7.0";

/// The last release that treats a node as unhealthy when it does not understand the answer (NVRx#420). It is in a
/// separate folder, `older` next to `bin`, for PYTHONPATH.
const OLDER: &str = "nvidia-resiliency-ext==0.6.0";

/// What the client imports.
const NEEDS: &[&str] = &["grpcio>=1.76", "protobuf>=6.31.1,<7", "httpx", "defusedxml"];

const WORKS: &str = "from nvidia_resiliency_ext.shared_utils.health_check import NodeHealthCheck";

/// A Python in which NVRx's client can be imported, made once and kept in the user's cache.
pub fn ensure(progress: &Progress, venv: &Venv) -> Result<PathBuf> {
    let dir = paths::cache()?.join("nvrx-venv");
    let (python, stamp) = (dir.join("bin/python"), dir.join("nvrx-stamp"));
    let recipe = format!("{NVRX}\n{OLDER}\n{}\n", NEEDS.join("\n"));
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == recipe) {
        return Ok(python);
    }
    progress.step(
        &format!("Installing {NVRX} and {OLDER} without PyTorch, and what their clients need (25 MB, once)"),
        || {
            if dir.exists() {
                fs::remove_dir_all(&dir).with_context(|| format!("removing {}", dir.display()))?;
            }
            command::output(Command::new(venv.tool("python")).args(["-m", "venv"]).arg(&dir))?;
            let pip = |arguments: &[&str]| {
                let mut pip = Command::new(&python);
                pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]);
                command::run_logged(pip.args(arguments), &dir.join("pip.log"))
            };
            pip(NEEDS)?;
            let ask = "import sysconfig; print(sysconfig.get_path('purelib'))";
            let site = command::output(Command::new(&python).args(["-I", "-c", ask]))?;
            let older = dir.join("older").display().to_string();
            for (release, folder) in [(NVRX, site.trim()), (OLDER, &older)] {
                pip(&[
                    "--no-deps",
                    "--target",
                    folder,
                    "--python-version",
                    "3.12",
                    "--implementation",
                    "cp",
                    "--platform",
                    "manylinux_2_39_x86_64",
                    "--only-binary=:all:",
                    release,
                ])?;
            }
            command::output(Command::new(&python).args(["-c", WORKS]))?;
            fs::write(&stamp, &recipe).with_context(|| format!("writing {}", stamp.display()))
        },
    )?;
    Ok(python)
}
