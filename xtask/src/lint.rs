//! Checks of the repository itself: formatting, lints, licences, the systemd files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cargo_tools;
use crate::check::{Checks, Verdict};
use crate::command;
use crate::paths;
use crate::progress::Progress;
use crate::venv;

/// `systemd-analyze security` rates the exposure of a service from 0 to 100. The unit explains each remaining
/// exposure.
const EXPOSURE_AT_MOST: &str = "35";

/// Formatting, clippy and licences.
pub fn source(checks: &mut Checks) {
    checks.run("formatting (cargo fmt)", || plain(cargo(&["fmt", "--all", "--check"])));
    checks.run("lints (cargo clippy)", || {
        plain(cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "--deny", "warnings"]))
    });
    checks.run("licences, bans, sources (cargo deny)", || deny(&["bans", "licenses", "sources"]));
    checks.run("advisories (cargo deny)", || deny(&["advisories"]));
    checks.run("advisories (cargo audit)", audit);
    checks.run("documentation as a site (mdbook build)", site);
    checks.run("Kubernetes manifests (kubernetes-validate)", manifests);
}

/// The unit, the user and the folders.
pub fn systemd(checks: &mut Checks) {
    checks.run("unit (systemd-analyze verify)", verify_unit);
    checks.run("sandbox (systemd-analyze security)", rate_sandbox);
    checks.run("user and folders (systemd-sysusers, -tmpfiles)", make_user_and_folders);
}

/// The examples for Kubernetes, against its schemas.
fn manifests() -> Result<Verdict> {
    let tools = venv::of_tools(&Progress::begin(), "manifests-venv", &["kubernetes-validate==1.37.0"]);
    match tools {
        Ok(tools) => {
            let mut validate = Command::new(tools.join("python"));
            validate.arg(paths::root().join("deploy/validate.py"));
            plain(validate)
        }
        Err(error) => Ok(Verdict::skipped(&format!("{error:#}"))),
    }
}

/// A cargo command in the repository.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut cargo = command::cargo();
    cargo.args(arguments).current_dir(paths::root());
    cargo
}

/// A command whose exit status is the verdict.
fn plain(mut command: Command) -> Result<Verdict> {
    let (status, _) = command::run_watched(&mut command)?;
    Ok(Verdict::of(status.success()))
}

fn deny(what: &[&str]) -> Result<Verdict> {
    let program = match cargo_tools::find(&cargo_tools::DENY)? {
        Ok(program) => program,
        Err(why) => return Ok(Verdict::skipped(&why)),
    };
    let mut deny = Command::new(program);
    deny.args(["--log-level", "error", "check", "--hide-inclusion-graph"]).args(what);
    advisories(deny.current_dir(paths::root()))
}

/// The fuzz targets have a separate lock file, which cargo-deny does not read.
fn audit() -> Result<Verdict> {
    let program = match cargo_tools::find(&cargo_tools::AUDIT)? {
        Ok(program) => program,
        Err(why) => return Ok(Verdict::skipped(&why)),
    };
    let mut audit = Command::new(program);
    audit.args(["audit", "--deny", "warnings", "--file"]).arg(paths::root().join("fuzz/Cargo.lock"));
    advisories(audit.current_dir(paths::root()))
}

/// The pages as a site, in the folder that `docs/book.toml` names. A warning is a failure: mdBook reports pages that it
/// cannot find or parse so, and ends with success.
fn site() -> Result<Verdict> {
    let program = match cargo_tools::find(&cargo_tools::MDBOOK)? {
        Ok(program) => program,
        Err(why) => return Ok(Verdict::skipped(&why)),
    };
    let (status, printed) =
        command::run_watched(Command::new(program).args(["build", "docs"]).current_dir(paths::root()))?;
    let has_warned = printed.contains("WARN") || printed.contains("ERROR");
    let start = paths::target().join("book/index.html");
    Ok(Verdict::of(status.success() && !has_warned && start.is_file()))
}

/// The exit status is the verdict, unless the database of advisories is not available.
fn advisories(command: &mut Command) -> Result<Verdict> {
    let (status, printed) = command::run_watched(command)?;
    let unreachable = ["failed to fetch advisory database", "couldn't fetch advisory database"];
    if !status.success() && unreachable.iter().any(|words| printed.contains(words)) {
        return Ok(Verdict::skipped("the advisory database cannot be fetched from here"));
    }
    Ok(Verdict::of(status.success()))
}

/// The unit with a program that exists on this machine: verify checks whether it can be executed.
fn unit_with_program() -> Result<PathBuf> {
    let text = read(&file("mainstay.service"))?;
    let Some(installed) = text.lines().find_map(|line| line.strip_prefix("ExecStart=")) else {
        bail!("systemd/mainstay.service has no ExecStart");
    };
    let program = installed.split_whitespace().next().unwrap_or_default();
    let folder = paths::target().join("systemd");
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let unit = folder.join("mainstay.service");
    fs::write(&unit, text.replace(program, "/bin/true"))
        .with_context(|| format!("writing {}", unit.display()))?;
    Ok(unit)
}

fn verify_unit() -> Result<Verdict> {
    if !command::exists("systemd-analyze", "--version") {
        return Ok(Verdict::skipped("systemd-analyze is not installed here"));
    }
    let mut verify = Command::new("systemd-analyze");
    verify.args(["verify", "--man=no"]).arg(unit_with_program()?);
    let (status, printed) = command::run_watched(&mut verify)?;
    // It only warns about unknown keys; here they are errors.
    Ok(Verdict::of(status.success() && !printed.contains("mainstay.service:")))
}

fn rate_sandbox() -> Result<Verdict> {
    if !command::exists("systemd-analyze", "--version") {
        return Ok(Verdict::skipped("systemd-analyze is not installed here"));
    }
    let mut rate = Command::new("systemd-analyze");
    rate.args(["security", "--no-pager", "--offline=true", "--threshold", EXPOSURE_AT_MOST])
        .arg(file("mainstay.service"));
    let output = rate.output().context("starting systemd-analyze security")?;
    let printed =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    if printed.contains("unrecognized option") {
        return Ok(Verdict::skipped("systemd-analyze security cannot rate a file before systemd 250"));
    }
    println!("{}", command::tail(printed.trim_end(), 1));
    Ok(Verdict::of(output.status.success()))
}

/// Applies both files below an empty root and checks what they made.
fn make_user_and_folders() -> Result<Verdict> {
    if !command::exists("systemd-sysusers", "--version") || !command::exists("systemd-tmpfiles", "--version")
    {
        return Ok(Verdict::skipped("systemd-sysusers or systemd-tmpfiles is not installed here"));
    }
    if !nix::unistd::geteuid().is_root() {
        return Ok(Verdict::skipped("making users and folders, even below another root, needs root"));
    }
    let root = paths::target().join("systemd/root");
    if root.exists() {
        fs::remove_dir_all(&root).with_context(|| format!("emptying {}", root.display()))?;
    }
    fs::create_dir_all(root.join("etc")).with_context(|| format!("creating {}", root.display()))?;
    let at_root = format!("--root={}", root.display());
    command::run(Command::new("systemd-sysusers").arg(&at_root).arg(file("mainstay.sysusers")))?;
    command::run(
        Command::new("systemd-tmpfiles").args([&at_root, "--create"]).arg(file("mainstay.tmpfiles")),
    )?;
    let user = read(&root.join("etc/passwd"))?.contains("mainstay:");
    Ok(Verdict::of(user && root.join("run/mainstay").is_dir() && root.join("var/lib/mainstay").is_dir()))
}

fn file(name: &str) -> PathBuf {
    paths::root().join("systemd").join(name)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}
