//! Packages of the distribution that some tests need and not every machine has.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::check::Verdict;
use crate::command;

/// Where distributions put the program that writes systemd's journals.
const JOURNAL_REMOTE: [&str; 2] =
    ["/lib/systemd/systemd-journal-remote", "/usr/lib/systemd/systemd-journal-remote"];

/// Installs systemd-journal-remote, which the tests of systemd's own journal stand on. Without it they are skipped.
///
/// # Errors
/// apt-get cannot be run.
pub fn journal_remote() -> Result<Verdict> {
    let is_there = || JOURNAL_REMOTE.iter().any(|path| Path::new(path).exists());
    if is_there() {
        return Ok(Verdict::of(true));
    }
    if !nix::unistd::geteuid().is_root() || !command::exists("apt-get", "--version") {
        return Ok(Verdict::skipped(
            "the tests of systemd's own journal need it: install systemd-journal-remote (as root, by apt-get)",
        ));
    }
    let mut install = Command::new("apt-get");
    install.args(["install", "--yes", "--no-install-recommends", "systemd-journal-remote"]);
    install.env("DEBIAN_FRONTEND", "noninteractive");
    let (status, _) = command::run_watched(&mut install)?;
    Ok(if status.success() && is_there() {
        Verdict::of(true)
    } else {
        Verdict::skipped(
            "apt-get could not install systemd-journal-remote: the tests of systemd's own journal are skipped",
        )
    })
}
