//! Jobs of several hosts on this machine: a killed rank, a lost leader, a host that loses power and is replaced by
//! a spare, a host that is lost and comes back, and a round of many launchers.

mod kill;
mod leader;
mod lost;
pub mod network;
mod resize;
mod round;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use super::Args;
use super::figure::Report;
use super::launchers::Bed;
use super::process::Running;
use crate::journal;
use crate::packages;
use crate::paths;
use crate::progress::Progress;

/// A job that needs longer than this has hung. torchrun considers a host lost after 15 s.
const LIMIT: Duration = Duration::from_secs(150);

/// Measures all five.
pub fn measure(progress: &Progress, bed: &Bed, args: &Args, report: &mut Report) {
    kill::measure(progress, bed, args.samples(5, 2), args.quick, report);
    if report.wants(&leader::IDS) {
        // Without it, the part reports why it is left out.
        let _ = progress.step("etcd-server and etcd-client (apt-get)", packages::etcd);
    }
    leader::measure(progress, bed, args.at_most(5, 2), report);
    lost::measure(progress, bed, args.at_most(5, 2), report);
    resize::measure(progress, bed, args.at_most(5, 2), report);
    round::measure(progress, args.samples(9, 3), report);
}

/// When a peer reacts to a lost host: it writes no verdict, so the end of a rank on a remaining host counts.
fn end_of_one(launcher: &mut Running, left: &[i32]) -> Result<u64> {
    launcher.wait_for("the end of a rank that is left", LIMIT, || {
        left.iter().any(|pid| !Path::new(&format!("/proc/{pid}")).exists()).then(journal::now)
    })
}

/// Waits until this launcher has printed this text.
fn wait_until_printed(launcher: &mut Running, what: &str) -> Result<()> {
    let log = launcher.log.clone();
    let printed = || fs::read_to_string(&log).is_ok_and(|text| text.contains(what)).then_some(());
    launcher.wait_for(what, LIMIT, printed)
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
