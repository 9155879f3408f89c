//! Jobs of several hosts on this machine: a rank that is killed, a leader that is lost, a host that loses power and that a spare
//! replaces, a host that is lost and comes back, and a round of many launchers.

mod kill;
mod leader;
mod lost;
pub mod network;
mod resize;
mod round;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::Args;
use super::figure::Report;
use super::launchers::Bed;
use crate::paths;
use crate::progress::Progress;

/// Measures all five.
pub fn measure(story: &Progress, bed: &Bed, args: &Args, report: &mut Report) {
    kill::measure(story, bed, args.samples(5, 2), args.quick, report);
    leader::measure(story, bed, args.at_most(5, 2), report);
    lost::measure(story, bed, args.at_most(5, 2), report);
    resize::measure(story, bed, args.at_most(5, 2), report);
    round::measure(story, args.samples(9, 3), report);
}

/// An empty folder for one job.
fn folder(name: &str) -> Result<PathBuf> {
    let folder = paths::target().join("bench/hosts").join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("emptying {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    Ok(folder)
}

/// A folder for the files of one host below it.
fn of_host(folder: &Path, host: usize) -> Result<PathBuf> {
    let logs = folder.join(format!("host-{host}"));
    fs::create_dir_all(&logs).with_context(|| format!("creating {}", logs.display()))?;
    Ok(logs)
}
