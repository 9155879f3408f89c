//! Packages of the distribution that some tests need and not every machine has.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::check::Verdict;
use crate::command;

/// Where distributions put the program that writes systemd's journals.
const JOURNAL_REMOTE: [&str; 2] =
    ["/lib/systemd/systemd-journal-remote", "/usr/lib/systemd/systemd-journal-remote"];

/// Installs systemd-journal-remote, which the tests of systemd's own journal need. Without it they are skipped.
///
/// # Errors
/// apt-get cannot be run.
pub fn journal_remote() -> Result<Verdict> {
    let is_there = || JOURNAL_REMOTE.iter().any(|path| Path::new(path).exists());
    install(&["systemd-journal-remote"], is_there, "the tests of systemd's own journal")
}

/// Installs etcd and its command-line client, which the coordination store is compared with. Without them these
/// tests run against the built-in store only.
///
/// # Errors
/// apt-get cannot be run.
pub fn etcd() -> Result<Verdict> {
    let is_there = || command::exists("etcd", "--version") && command::exists("etcdctl", "version");
    install(&["etcd-server", "etcd-client"], is_there, "the tests of coordination by etcd")
}

/// Installs Slurm and Open MPI, which start jobs of several hosts in scenarios. Without them these are skipped.
///
/// # Errors
/// apt-get cannot be run.
pub fn schedulers() -> Result<Verdict> {
    let is_there = || {
        let versions = [
            ("slurmctld", "-V"),
            ("slurmd", "-V"),
            // It prints no version without a configuration.
            ("which", "srun"),
            ("munged", "-V"),
            ("mpirun", "--version"),
        ];
        versions.iter().all(|(program, version)| command::exists(program, version))
    };
    let packages = ["slurmctld", "slurmd", "slurm-client", "munge", "openmpi-bin"];
    install(&packages, is_there, "the tests of srun and mpirun")
}

/// Installs systemd and systemd-nspawn, which boot the shipped unit in a scenario. Without them it is skipped.
///
/// # Errors
/// apt-get cannot be run.
pub fn nspawn() -> Result<Verdict> {
    let is_there =
        || command::exists("systemd-nspawn", "--version") && Path::new("/lib/systemd/systemd").exists();
    install(&["systemd", "systemd-container"], is_there, "the test that boots the shipped unit")
}

/// Installs packages for some tests, or reports why these are skipped.
fn install(packages: &[&str], is_there: impl Fn() -> bool, tests: &str) -> Result<Verdict> {
    if is_there() {
        return Ok(Verdict::of(true));
    }
    let names = packages.join(" and ");
    if !nix::unistd::geteuid().is_root() || !command::exists("apt-get", "--version") {
        return Ok(Verdict::skipped(&format!("{tests} need it: install {names} (as root, by apt-get)")));
    }
    let mut install = Command::new("apt-get");
    install.args(["install", "--yes", "--no-install-recommends"]).args(packages);
    install.env("DEBIAN_FRONTEND", "noninteractive");
    let (status, _) = command::run_watched(&mut install)?;
    Ok(if status.success() && is_there() {
        Verdict::of(true)
    } else {
        Verdict::skipped(&format!("apt-get could not install {names}: {tests} are skipped"))
    })
}
