//! Packages of the distribution that some tests need and not every machine has.

use std::path::Path;

use anyhow::Result;

use crate::check::Verdict;
use crate::command::{self, cmd};

/// Installs systemd-journal-remote, which the tests of systemd's own journal need. Without it they are skipped.
pub fn journal_remote() -> Result<Verdict> {
    let places = ["/lib/systemd/systemd-journal-remote", "/usr/lib/systemd/systemd-journal-remote"];
    let is_there = || places.iter().any(|path| Path::new(path).exists());
    install(&["systemd-journal-remote"], is_there, "the tests of systemd's own journal")
}

/// Installs etcd and its command-line client, which the coordination store is compared with. Without them these
/// tests run against the built-in store only.
pub fn etcd() -> Result<Verdict> {
    let programs = [("etcd", "--version"), ("etcdctl", "version")];
    install(&["etcd-server", "etcd-client"], || all_exist(&programs), "the tests of coordination by etcd")
}

/// Installs Slurm and Open MPI, which start jobs of several hosts in scenarios. Without them these are skipped.
pub fn schedulers() -> Result<Verdict> {
    // srun prints no version without a configuration.
    let programs =
        [("slurmctld", "-V"), ("slurmd", "-V"), ("which", "srun"), ("munged", "-V"), ("mpirun", "--version")];
    let packages = ["slurmctld", "slurmd", "slurm-client", "munge", "openmpi-bin"];
    install(&packages, || all_exist(&programs), "the tests of srun and mpirun")
}

/// Installs systemd and systemd-nspawn, which boot the shipped unit in a scenario. Without them it is skipped.
pub fn nspawn() -> Result<Verdict> {
    let is_there =
        || command::exists("systemd-nspawn", "--version") && Path::new("/lib/systemd/systemd").exists();
    install(&["systemd", "systemd-container"], is_there, "the test that boots the shipped unit")
}

fn all_exist(programs: &[(&str, &str)]) -> bool {
    programs.iter().all(|(program, harmless)| command::exists(program, harmless))
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
    let mut install = cmd!("apt-get install --yes --no-install-recommends {packages...}");
    let (status, _) = command::run_watched(install.env("DEBIAN_FRONTEND", "noninteractive"))?;
    Ok(match status.success() && is_there() {
        true => Verdict::of(true),
        false => Verdict::skipped(&format!("apt-get could not install {names}: {tests} are skipped")),
    })
}
