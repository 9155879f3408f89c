//! Checks of the repository itself: formatting, lints, licences, the systemd files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use fs_err as fs;

use crate::cargo_tools::{self, Tool};
use crate::check::{Checks, Verdict};
use crate::command::{self, cmd};
use crate::progress::Progress;
use crate::{paths, python};

/// `systemd-analyze security` rates the exposure of a service from 0 to 10. `docs/internals/security.md` has what each
/// remaining exposure is for.
const EXPOSURE_AT_MOST: f64 = 2.6;

/// Dependencies that are built with more features in the tests than in the program: a wider API, and nothing that the
/// program does in another way.
const WIDER_IN_TESTS: [&str; 5] = ["nix", "regex-automata", "tokio", "winnow", "zerocopy"];

pub fn source(checks: &mut Checks) {
    checks.run("formatting (cargo fmt)", || plain(command::cargo("fmt --all --check")));
    checks.run("lints (cargo clippy)", || {
        plain(command::cargo("clippy --workspace --all-targets --quiet -- --deny warnings"))
    });
    let deny = "--log-level error check --hide-inclusion-graph";
    checks.run("licences, bans, sources (cargo deny)", || {
        tool(&cargo_tools::DENY, &format!("{deny} bans licenses sources"))
    });
    checks.run("advisories (cargo deny)", || tool(&cargo_tools::DENY, &format!("{deny} advisories")));
    // The fuzz targets have a separate lock file, which cargo-deny does not read.
    checks.run("advisories (cargo audit)", || {
        tool(&cargo_tools::AUDIT, "audit --deny warnings --file fuzz/Cargo.lock")
    });
    checks.run("features of dependencies in tests and in the program (cargo tree)", features);
    checks.run("documentation as a site (mdbook build)", || tool(&cargo_tools::MDBOOK, "build docs"));
    checks.run("Kubernetes manifests, the Helm chart and dashboards (schemas)", manifests);
}

/// The features of each dependency, by its name and version.
fn features_in(arguments: &str) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let mut tree = command::cargo(&format!("tree --locked --prefix none {arguments}"));
    tree.args(["--format", "{p}|{f}"]);
    let mut found = BTreeMap::<String, BTreeSet<String>>::new();
    for line in command::output(&mut tree)?.lines() {
        if let Some((package, features)) = line.split_once('|') {
            let features =
                features.trim_end_matches(" (*)").split(',').filter(|name| !["", "default"].contains(name));
            found.entry(package.to_owned()).or_default().extend(features.map(str::to_owned));
        }
    }
    Ok(found)
}

/// Cargo builds the program alone with fewer features than beside the tests: what the tests see must be what users get.
fn features() -> Result<Verdict> {
    let program = features_in("--package mainstay-agent --edges normal,no-proc-macro")?;
    let tests = features_in("--workspace --edges all")?;
    let mut same = true;
    for (package, has) in &program {
        let name = package.split(' ').next().unwrap_or_default();
        let missing: Vec<&String> =
            tests.get(package).into_iter().flatten().filter(|of| !has.contains(*of)).collect();
        if !missing.is_empty() && !package.contains(" (/") && !WIDER_IN_TESTS.contains(&name) {
            println!(
                "{package} has these features in the tests only, so give them to the program: {missing:?}"
            );
            same = false;
        }
    }
    Ok(Verdict::of(same))
}

/// The unit, the user and the folders.
pub fn systemd(checks: &mut Checks) {
    checks.run("unit (systemd-analyze verify)", verify_unit);
    checks.run("sandbox (systemd-analyze security)", rate_sandbox);
    checks.run("user and folders (systemd-sysusers, -tmpfiles)", make_user_and_folders);
}

/// The examples for Kubernetes, what the chart makes and the dashboards, against their schemas.
fn manifests() -> Result<Verdict> {
    match python::MANIFESTS.ensure(&Progress::begin()) {
        Ok(environment) => {
            let (python, script) = (environment.join("bin/python"), paths::root().join("deploy/validate.py"));
            plain(cmd!("{python} {script}"))
        }
        Err(error) => Ok(Verdict::skipped(&format!("{error:#}"))),
    }
}

/// A command whose exit status is the verdict.
fn plain(mut command: Command) -> Result<Verdict> {
    Ok(Verdict::of(command::run_watched(&mut command)?.0.success()))
}

/// The exit status is the verdict, unless the database of advisories is not available. mdBook ends with success
/// when it cannot find or parse a page: a warning is a failure.
fn tool(tool: &Tool, arguments: &str) -> Result<Verdict> {
    let mut command = match cargo_tools::find(tool)? {
        Ok(program) => Command::new(program),
        Err(why) => return Ok(Verdict::skipped(&why)),
    };
    command.args(arguments.split_whitespace()).current_dir(paths::root());
    let (status, printed) = command::run_watched(&mut command)?;
    let unreachable = ["failed to fetch advisory database", "couldn't fetch advisory database"];
    if !status.success() && unreachable.iter().any(|words| printed.contains(words)) {
        return Ok(Verdict::skipped("the advisory database cannot be fetched from here"));
    }
    Ok(Verdict::of(status.success() && !printed.contains("WARN") && !printed.contains("ERROR")))
}

/// The unit with a program that exists on this machine: verify checks whether it can be executed.
fn verify_unit() -> Result<Verdict> {
    if !command::exists("systemd-analyze", "--version") {
        return Ok(Verdict::skipped("systemd-analyze is not installed here"));
    }
    let text = fs::read_to_string(file("mainstay.service"))?;
    let installed = text.lines().find_map(|line| line.strip_prefix("ExecStart="));
    let program = installed.and_then(|line| line.split_whitespace().next());
    let program = program.context("systemd/mainstay.service has no ExecStart")?;
    let unit = paths::fresh(paths::target().join("systemd"))?.join("mainstay.service");
    fs::write(&unit, text.replace(program, "/bin/true"))?;
    let (status, printed) = command::run_watched(&mut cmd!("systemd-analyze verify --man=no {unit}"))?;
    // It only warns about unknown keys; here they are errors.
    Ok(Verdict::of(status.success() && !printed.contains("mainstay.service:")))
}

fn rate_sandbox() -> Result<Verdict> {
    match exposure() {
        Ok(exposure) => {
            println!("exposure of mainstay.service: {exposure}, at most {EXPOSURE_AT_MOST}");
            Ok(Verdict::of(exposure <= EXPOSURE_AT_MOST))
        }
        Err(error) => {
            let text = format!("{error:#}");
            // systemd-analyze is missing, or older than systemd 250.
            let cannot = ["starting systemd-analyze", "unrecognized option"];
            if cannot.iter().any(|words| text.contains(words)) {
                Ok(Verdict::skipped(&text))
            } else {
                Err(error)
            }
        }
    }
}

/// The exposure of the unit, from 0 to 10.
pub fn exposure() -> Result<f64> {
    let unit = file("mainstay.service");
    let mut rate = cmd!("systemd-analyze security --no-pager --offline=true {unit}");
    let printed = command::output(&mut rate)?;
    let found = printed.split_once("exposure level for mainstay.service: ").map(|(_, rest)| rest);
    let number = found.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    number.context("systemd-analyze printed no exposure")
}

/// Applies both files below an empty root and checks what they made.
fn make_user_and_folders() -> Result<Verdict> {
    if !["systemd-sysusers", "systemd-tmpfiles"].iter().all(|program| command::exists(program, "--version")) {
        return Ok(Verdict::skipped("systemd-sysusers or systemd-tmpfiles is not installed here"));
    }
    if !nix::unistd::geteuid().is_root() {
        return Ok(Verdict::skipped("making users and folders, even below another root, needs root"));
    }
    let root = paths::fresh(paths::target().join("systemd-root"))?;
    fs::create_dir_all(root.join("etc"))?;
    let (users, folders) = (file("mainstay.sysusers"), file("mainstay.tmpfiles"));
    command::run(&mut cmd!("systemd-sysusers --root={root} {users}"))?;
    command::run(&mut cmd!("systemd-tmpfiles --root={root} --create {folders}"))?;
    let user = fs::read_to_string(root.join("etc/passwd"))?.contains("mainstay:");
    Ok(Verdict::of(user && root.join("run/mainstay").is_dir() && root.join("var/lib/mainstay").is_dir()))
}

fn file(name: &str) -> PathBuf {
    paths::root().join("systemd").join(name)
}
