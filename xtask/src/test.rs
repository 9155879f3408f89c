//! `cargo xtask test`: everything that is checked before a change goes in, here and in continuous integration.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::Result;
use clap::ValueEnum;

use crate::check::{self, Checks, Verdict};
use crate::command;
use crate::frameworks;
use crate::fuzz;
use crate::lint::{self, cargo};
use crate::nvrx;
use crate::packages;
use crate::places;
use crate::say::Story;
use crate::venv::{self, Venv};
use crate::wheel;

/// What can be chosen.
#[derive(clap::Args)]
pub struct Args {
    /// Only these parts (may be repeated).
    #[arg(long, value_enum)]
    only: Vec<Part>,
    /// Leave out Python and the end-to-end scenarios.
    #[arg(long)]
    quick: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Part {
    /// Formatting, clippy, licences.
    Lint,
    /// Unit and property tests, and the floors.
    Unit,
    /// The built program with real ranks: the scenarios of the crate `tests`.
    Scenarios,
    /// The built wheel under pytest.
    Python,
    /// Unit, user and folders.
    Systemd,
}

impl Args {
    fn wants(&self, part: Part) -> bool {
        let heavy = matches!(part, Part::Scenarios | Part::Python);
        let chosen = self.only.is_empty() || self.only.contains(&part);
        chosen && !(self.quick && heavy)
    }
}

/// Makes all the checks and sums up.
pub fn run(args: &Args) -> ExitCode {
    let mut checks = Checks::default();
    if args.wants(Part::Lint) {
        lint::source(&mut checks);
    }
    if args.wants(Part::Systemd) {
        lint::systemd(&mut checks);
    }
    if args.wants(Part::Unit) {
        checks.run("systemd-journal-remote (apt-get)", packages::journal_remote);
        checks.run("etcd-server and etcd-client (apt-get)", packages::etcd);
        checks.run("unit and property tests (cargo test)", || {
            // The scenarios' crate is left to its own step; its floors need nothing but the sources.
            cargo_test(&["--workspace", "--exclude", "mainstay-tests"], None)
        });
        checks.run("fuzz targets, each seed once", fuzz::seeds);
        checks.run("floors (cargo test)", || {
            cargo_test(&["--package", "mainstay-tests", "--test", "floors"], None)
        });
    }
    if args.wants(Part::Scenarios) || args.wants(Part::Python) {
        let python = prepare_python(&mut checks);
        checks.run("program (cargo build)", || {
            let (status, _) = command::run_watched(&mut cargo(&["build", "--package", "mainstay-agent"]))?;
            Ok(Verdict::of(status.success()))
        });
        let frameworks = prepare_frameworks(&mut checks, python.as_ref());
        if args.wants(Part::Python) {
            checks.run("Python client (pytest on the wheel)", || {
                pytest(python.as_ref(), &["", "--ignore-glob=*/frameworks/*"])
            });
            if frameworks.is_some() {
                checks.run("hooks for frameworks (pytest)", || pytest(frameworks.as_ref(), &["frameworks"]));
            }
        }
        if args.wants(Part::Scenarios) {
            scenarios(&mut checks, python.as_ref(), frameworks.as_ref());
        }
    }
    if checks.conclude() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The environment with the wheel in it; none, and a failure in the books, if it cannot be made.
fn prepare_python(checks: &mut Checks) -> Option<Venv> {
    let mut made = None;
    checks.run("Python environment and wheel", || {
        let story = Story::begin();
        let venv = venv::ensure(&story)?;
        wheel::install(&story, &venv)?;
        made = Some(venv);
        Ok(Verdict::of(true))
    });
    made
}

/// The frameworks with the wheel; their tests are skipped where they cannot be installed.
fn prepare_frameworks(checks: &mut Checks, python: Option<&Venv>) -> Option<Venv> {
    let heavy = python?;
    let mut made = None;
    checks.run("Lightning, Transformers, JAX, Orbax (pip)", || {
        Ok(match frameworks::ensure(&Story::begin(), heavy) {
            Ok(venv) => {
                made = Some(venv);
                Verdict::of(true)
            }
            Err(error) => Verdict::skipped(&format!("{error:#}")),
        })
    });
    made
}

/// The end-to-end scenarios on the program as `cargo build` makes it, with ranks in a Python that has the wheel.
fn scenarios(checks: &mut Checks, python: Option<&Venv>, frameworks: Option<&Venv>) {
    let mut others = Vec::new();
    others.extend(prepare_nvrx(checks, python).map(|python| ("MAINSTAY_TEST_NVRX", python)));
    others.extend(frameworks.map(|venv| ("MAINSTAY_TEST_FRAMEWORKS", venv.python())));
    checks.run("end-to-end scenarios (cargo test)", || {
        cargo_test_beside(&["--package", "mainstay-tests"], python, &others)
    });
}

/// A Python with NVRx's client; the scenarios that need it are skipped without.
fn prepare_nvrx(checks: &mut Checks, python: Option<&Venv>) -> Option<PathBuf> {
    let venv = python?;
    let mut made = None;
    checks.run("NVRx's client (pip)", || {
        Ok(match nvrx::ensure(&Story::begin(), venv) {
            Ok(python) => {
                made = Some(python);
                Verdict::of(true)
            }
            Err(error) => Verdict::skipped(&format!("{error:#}")),
        })
    });
    made
}

fn cargo_test(selection: &[&str], python: Option<&Venv>) -> Result<Verdict> {
    cargo_test_beside(selection, python, &[])
}

/// With a Python that has the wheel, and others by the variables under which tests look for them.
fn cargo_test_beside(
    selection: &[&str],
    python: Option<&Venv>,
    others: &[(&str, PathBuf)],
) -> Result<Verdict> {
    let mut test = cargo(&["test", "--no-fail-fast"]);
    test.args(selection).env("MAINSTAY_BIN", places::mainstay("debug"));
    if let Some(venv) = python {
        test.env("MAINSTAY_TEST_PYTHON", venv.python());
    }
    test.envs(others.iter().map(|(name, python)| (*name, python)));
    let (status, said) = command::run_watched(&mut test)?;
    let (passed, failed) = check::cargo_counts(&said);
    Ok(Verdict::counted(status.success(), passed, failed))
}

/// Runs the tests in a folder of the Python package's, with options after it.
fn pytest(python: Option<&Venv>, of: &[&str]) -> Result<Verdict> {
    let Some(venv) = python else { anyhow::bail!("there is no environment to test in") };
    let tests: PathBuf = places::root().join("client/python/tests").join(of.first().unwrap_or(&""));
    let mut pytest = Command::new(venv.python());
    // From a folder without sources, so that what is imported is the installed wheel.
    pytest
        .args(["-m", "pytest", "-p", "no:cacheprovider"])
        .arg(&tests)
        .args(of.iter().skip(1))
        .current_dir(places::target())
        .env("MAINSTAY_BIN", places::mainstay("debug"));
    let (status, said) = command::run_watched(&mut pytest)?;
    let (passed, failed) = check::pytest_counts(&said);
    Ok(Verdict::counted(status.success(), passed, failed))
}
