//! The peers that we are compared with, in a separate environment over the one with PyTorch.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::command;
use crate::paths;
use crate::progress::Progress;
use crate::venv;

/// The newest NVRx whose wheel installs on a system with glibc 2.36; named beside each of its figures.
const NVRX: &str = "nvidia-resiliency-ext==0.4.1";

/// DLRover, whose flash checkpoints need gRPC even without any call.
const DLROVER: [&str; 2] = ["dlrover==0.6.1", "grpcio"];

/// The name of DLRover in the figures.
pub const DLROVER_NAME: &str = "DLRover 0.6.1";

/// The name of NVRx in the figures.
pub const NVRX_NAME: &str = "NVRx 0.4.1";

/// The peers' environment, or none and the reason on standard error.
pub fn ensure(progress: &Progress) -> Option<PathBuf> {
    match try_ensure(progress) {
        Ok(dir) => Some(dir),
        Err(error) => {
            eprintln!("peers: left out: {error:#}");
            None
        }
    }
}

fn try_ensure(progress: &Progress) -> Result<PathBuf> {
    let base = venv::ensure_base(progress)?;
    let dir = paths::cache()?.join("peers-venv");
    venv::overlay(&base, &dir)?;
    let stamp = dir.join("peers-stamp");
    let wanted = format!("{NVRX} {}", DLROVER.join(" "));
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(dir);
    }
    progress.step(
        &format!("Installing the peers {wanted} (small: they use the PyTorch that is there; once)"),
        || {
            let mut pip = Command::new(dir.join("bin/python"));
            pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", NVRX]);
            pip.args(DLROVER);
            command::run_logged(&mut pip, &dir.join("pip.log"))?;
            fs::write(&stamp, &wanted).with_context(|| format!("writing {}", stamp.display()))
        },
    )?;
    Ok(dir)
}
