//! Packages of the distribution that some tests need and not every machine has.

use std::path::Path;

use anyhow::Result;

use crate::check::Verdict;
use crate::command::{self, cmd};

/// Packages for some tests, which are skipped without them.
pub struct Packages {
    names: &'static [&'static str],
    /// Programs of them, with an argument that makes them end at once.
    programs: &'static [(&'static str, &'static str)],
    /// Their files, of which one must exist; each distribution has its own place.
    files: &'static [&'static str],
    tests: &'static str,
}

pub const JOURNAL_REMOTE: Packages = Packages {
    names: &["systemd-journal-remote"],
    programs: &[],
    files: &["/lib/systemd/systemd-journal-remote", "/usr/lib/systemd/systemd-journal-remote"],
    tests: "the tests of systemd's own journal",
};

/// The coordination store is compared with etcd. Without it the built-in store alone is tested.
pub const ETCD: Packages = Packages {
    names: &["etcd-server", "etcd-client"],
    programs: &[("etcd", "--version"), ("etcdctl", "version")],
    files: &[],
    tests: "the tests of coordination by etcd",
};

/// They start jobs of several hosts. srun prints no version without a configuration.
pub const SCHEDULERS: Packages = Packages {
    names: &["slurmctld", "slurmd", "slurm-client", "munge", "openmpi-bin"],
    programs: &[
        ("slurmctld", "-V"),
        ("slurmd", "-V"),
        ("which", "srun"),
        ("munged", "-V"),
        ("mpirun", "--version"),
    ],
    files: &[],
    tests: "the tests of srun and mpirun",
};

/// They boot the shipped unit.
pub const NSPAWN: Packages = Packages {
    names: &["systemd", "systemd-container"],
    programs: &[("systemd-nspawn", "--version")],
    files: &["/lib/systemd/systemd"],
    tests: "the test that boots the shipped unit",
};

/// They build the image of the agent and run it. Its base is made of packages, which apt-get downloads.
pub const CONTAINERS: Packages = Packages {
    names: &["buildah", "podman", "crun"],
    programs: &[("buildah", "--version"), ("podman", "--version"), ("crun", "--version")],
    files: &[],
    tests: "the tests of the agent's image",
};

impl Packages {
    fn are_there(&self) -> bool {
        let has_file = self.files.is_empty() || self.files.iter().any(|path| Path::new(path).exists());
        has_file && self.programs.iter().all(|(program, harmless)| command::exists(program, harmless))
    }

    /// Installs them, or reports why the tests are skipped.
    pub fn install(&self) -> Result<Verdict> {
        if self.are_there() {
            return Ok(Verdict::of(true));
        }
        let (packages, tests, names) = (self.names, self.tests, self.names.join(" and "));
        if !nix::unistd::geteuid().is_root() || !command::exists("apt-get", "--version") {
            return Ok(Verdict::skipped(&format!("{tests} need it: install {names} (as root, by apt-get)")));
        }
        let mut install = cmd!("apt-get install --yes --no-install-recommends {packages...}");
        let (status, _) = command::run_watched(install.env("DEBIAN_FRONTEND", "noninteractive"))?;
        Ok(match status.success() && self.are_there() {
            true => Verdict::of(true),
            false => Verdict::skipped(&format!("apt-get could not install {names}: {tests} are skipped")),
        })
    }
}
