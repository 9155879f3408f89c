//! The steps of the suite that run tests.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use super::Environments;
use super::leftovers::Snapshot;
use super::programs::{TestProgram, TestPrograms, at_once};
use crate::check::{Checks, Verdict};
use crate::python::{self, Venv};
use crate::{command, dist, fuzz, paths};

/// The number of simulated jobs of several hosts without a separate step.
const FEW_SEEDS: &str = "2000";

/// Makes tests write their snapshots (`tests/testing/src/snapshot.rs`).
const ACCEPT: &str = "MAINSTAY_TEST_ACCEPT";

/// The folder of the scenarios' package, and its test program that reads only sources.
const SCENARIOS: &str = "tests";
const SOURCES: &str = "sources";

/// Whether its tests mostly wait for processes and disks.
pub fn waits(program: &TestProgram) -> bool {
    ["agent", "agent/tier"].iter().any(|folder| program.is_of(folder))
}

pub struct Suite<'a> {
    /// The places of this run, in which nothing may be left.
    pub own: &'a Snapshot,
    /// The test programs.
    pub programs: &'a TestPrograms,
    /// Whether the scenarios run at the same time.
    pub beside_scenarios: bool,
    pub(super) environments: &'a Environments,
    /// Whether snapshots are written and not compared.
    pub(super) accept: bool,
}

impl Suite<'_> {
    /// Tests of these programs that start no ranks. The scenarios' package has its own step, and so have most
    /// simulated jobs of several hosts.
    pub fn unit(&self, checks: &mut Checks, name: &str, is_wanted: impl Fn(&TestProgram) -> bool) {
        checks.run(name, || {
            let is_unit = |program: &TestProgram| !program.is_of(SCENARIOS) && is_wanted(program);
            self.programs.run(self.own, is_unit, None, |test| {
                // The checkpoint tier is tested with files of each library.
                test.envs(self.environments.variables());
                test.envs(self.accept.then_some((ACCEPT, "1")));
                let each = if self.beside_scenarios { 2 } else { 4 };
                at_once(test.env("MAINSTAY_SEEDS", FEW_SEEDS), each, 1);
            })
        });
    }

    /// Examples, fuzz targets and the rules of the sources.
    pub fn sources(&self, checks: &mut Checks) {
        checks.run("examples in documentation (cargo test --doc)", || {
            let mut test = command::cargo("test --workspace --doc --no-fail-fast");
            self.own.give(&mut test);
            let (status, printed) = command::run_watched(&mut test)?;
            Ok(Verdict::cargo(status.success(), &printed))
        });
        checks.run("fuzz targets, each seed once", fuzz::seeds);
        checks.run("sources and documents (cargo test)", || {
            let sources = |program: &TestProgram| program.is_of(SCENARIOS) && program.target == SOURCES;
            self.programs.run(self.own, sources, None, |_| {})
        });
    }

    /// `MAINSTAY_SEEDS` sets another number: a million by hand.
    pub fn simulation(&self, checks: &mut Checks) {
        checks.run("a job of several hosts, simulated 30,000 times (cargo test)", || {
            let seeds = std::env::var("MAINSTAY_SEEDS").unwrap_or_else(|_| "30000".to_owned());
            let group = |program: &TestProgram| program.is_of("agent/group") && program.target == "it";
            self.programs
                .run(self.own, group, Some("job_of_hosts"), |test| _ = test.env("MAINSTAY_SEEDS", &seeds))
        });
    }

    /// The built wheel under pytest, with and without PyTorch, and its hooks for frameworks.
    pub fn python(&self, checks: &mut Checks) {
        let Environments { python, frameworks, bare, .. } = self.environments;
        checks.run("Python client (pytest on the wheel)", || {
            self.pytest(python.as_ref(), Some("frameworks"), "")
        });
        if bare.is_some() {
            checks.run("Python client without PyTorch (pytest)", || {
                self.pytest(bare.as_ref(), Some("frameworks"), "")
            });
        }
        checks.run("wheel with the program, in an empty environment (pip, mainstay demo)", || {
            let venv = python.as_ref().context("there is no environment to build in")?;
            let folder = paths::target().join("wheel-trial");
            let (maturin, wheel) = (&mut python::maturin(venv.base()), folder.join("wheel"));
            let built = dist::wheel::with_program(maturin, &paths::mainstay("debug"), &wheel)?;
            dist::wheel::try_out(&venv.tool("python"), &built, &folder, |command| self.own.give(command))?;
            Ok(Verdict::of(true))
        });
        if frameworks.is_some() {
            checks.run("hooks for frameworks (pytest)", || {
                self.pytest(frameworks.as_ref(), None, "frameworks")
            });
        }
    }

    /// The end-to-end scenarios on the program as cargo builds it, with ranks in a Python that has the wheel.
    pub fn scenarios(&self, checks: &mut Checks) {
        let (program, arch) = (paths::mainstay("debug"), std::env::consts::ARCH);
        let client = paths::target().join("debug/deps/libmainstay_client.so");
        let (runs_here, quick) = (&program, true);
        let system = dist::system::System { program: &program, runs_here, client: &client, arch, quick };
        let out = paths::target().join("dist-root");
        let mut built: Vec<(&str, PathBuf)> = Vec::new();
        checks.run("image of the program as cargo builds it (buildah)", || {
            if let Some(why) = dist::image::obstacle() {
                return Ok(Verdict::skipped(why));
            }
            let base = match dist::image::base() {
                Ok(base) => base,
                Err(error) => return Ok(Verdict::skipped(&format!("{error:#}"))),
            };
            let image = dist::image::build(&base, &system.stage()?, arch, &out)?;
            built.push(("MAINSTAY_TEST_IMAGE", image.archive));
            Ok(Verdict::of(true))
        });
        checks.run("package of the program as cargo builds it (dpkg-deb)", || {
            if !command::exists("dpkg-deb", "--version") {
                return Ok(Verdict::skipped("there is no dpkg-deb: the package is not installed in a test"));
            }
            built.push(("MAINSTAY_TEST_DEB", system.deb(&system.stage()?, &out)?));
            Ok(Verdict::of(true))
        });
        checks.run("end-to-end scenarios (cargo test)", || {
            let is_scenario = |program: &TestProgram| program.is_of(SCENARIOS) && program.target != SOURCES;
            self.programs.run(self.own, is_scenario, None, |test| {
                test.env("MAINSTAY_BIN", paths::mainstay("debug")).envs(self.environments.variables());
                test.envs(built.iter().map(|(name, file)| (name, file)));
                test.envs(self.accept.then_some((ACCEPT, "1")));
                // Half of the time of most scenarios is spent waiting, but a few compute.
                at_once(test, 3, 2);
            })
        });
    }

    /// Both demos of the README, on the program as cargo builds it for tests.
    pub fn demos(&self, checks: &mut Checks) {
        for hosts in ["1", "3"] {
            checks.run(&format!("cargo xtask demo --hosts {hosts}"), || {
                let us = std::env::current_exe().context("finding this program")?;
                let mut demo = Command::new(us);
                demo.args(["demo", "--hosts", hosts]);
                self.own.give(&mut demo);
                let (status, _) = command::run_watched(demo.env("MAINSTAY_BIN", paths::mainstay("debug")))?;
                Ok(Verdict::of(status.success()))
            });
        }
    }

    /// Runs the Python package's tests in a folder, except for one of its folders.
    fn pytest(&self, python: Option<&Venv>, except: Option<&str>, folder: &str) -> Result<Verdict> {
        let venv = python.context("there is no environment to test in")?;
        let all = paths::root().join("client/python/tests");
        let mut pytest = Command::new(venv.python());
        // From a folder without sources, so that the installed wheel is imported.
        pytest
            .args(["-m", "pytest", "-p", "no:cacheprovider", "-rfEs"])
            .arg(all.join(folder))
            .args(except.map(|except| format!("--ignore={}", all.join(except).display())))
            .current_dir(paths::target())
            .env("MAINSTAY_BIN", paths::mainstay("debug"))
            .envs(self.accept.then_some((ACCEPT, "1")));
        self.own.give(&mut pytest);
        let (status, printed) = command::run_watched(&mut pytest)?;
        Ok(Verdict::pytest(status.success(), &printed))
    }
}
