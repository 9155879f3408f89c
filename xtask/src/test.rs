//! `cargo xtask test`: everything that is checked before a change goes in, here and in continuous integration.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::Result;
use clap::ValueEnum;

use crate::check::{self, Checks, Verdict};
use crate::command;
use crate::frameworks;
use crate::fuzz;
use crate::leftovers::Snapshot;
use crate::lint::{self, cargo};
use crate::nvrx;
use crate::packages;
use crate::paths;
use crate::progress::Progress;
use crate::test_programs::{TestProgram, TestPrograms, mostly_waits};
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

/// Simulated jobs of several hosts where they have no step of their own.
const FEW_SEEDS: &str = "2000";

/// The folder of the scenarios' package, and its test program that looks at sources alone.
const SCENARIOS: &str = "tests";
const FLOORS: &str = "floors";

/// Makes all the checks and sums up.
pub fn run(args: &Args) -> ExitCode {
    let mut checks = Checks::default();
    let own = match Snapshot::new() {
        Ok(own) => own,
        Err(error) => {
            eprintln!("{error:#}");
            return ExitCode::FAILURE;
        }
    };
    if args.wants(Part::Lint) {
        lint::source(&mut checks);
    }
    if args.wants(Part::Systemd) {
        lint::systemd(&mut checks);
    }
    if args.wants(Part::Unit) {
        checks.run("systemd-journal-remote (apt-get)", packages::journal_remote);
        checks.run("etcd-server and etcd-client (apt-get)", packages::etcd);
    }
    let programs = [Part::Unit, Part::Scenarios, Part::Python].into_iter().any(|part| args.wants(part));
    let programs = programs.then(|| build(&mut checks)).flatten();
    if let Some(programs) = &programs {
        if args.wants(Part::Unit) {
            unit(&mut checks, &own, programs);
        }
        if args.wants(Part::Scenarios) {
            checks.run("a job of several hosts, simulated 100,000 times (cargo test)", || {
                simulate(&own, programs)
            });
        }
        heavy(args, &mut checks, &own, programs);
    }
    checks.run("nothing is left behind", || own.check());
    if checks.conclude() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The program and all tests; none, and a failure in the books, if something does not compile.
fn build(checks: &mut Checks) -> Option<TestPrograms> {
    let mut made = None;
    checks.run("program and test programs (cargo test --no-run)", || {
        made = Some(TestPrograms::build()?);
        Ok(Verdict::of(true))
    });
    made
}

fn unit(checks: &mut Checks, own: &Snapshot, programs: &TestPrograms) {
    checks.run("unit and property tests (cargo test)", || {
        // The scenarios' package is left to its own step, and so are most simulated jobs of several hosts.
        programs.run(
            own,
            |program| !program.is_of(SCENARIOS),
            None,
            |test| {
                mostly_waits(test.env("MAINSTAY_SEEDS", FEW_SEEDS));
            },
        )
    });
    checks.run("examples in documentation (cargo test --doc)", || {
        let mut test = cargo(&["test", "--workspace", "--doc", "--no-fail-fast"]);
        own.give(&mut test);
        let (status, said) = command::run_watched(&mut test)?;
        Ok(Verdict::cargo(status.success(), &said))
    });
    checks.run("fuzz targets, each seed once", fuzz::seeds);
    checks.run("floors (cargo test)", || {
        let floors = |program: &TestProgram| program.is_of(SCENARIOS) && program.target == FLOORS;
        programs.run(own, floors, None, |_| {})
    });
}

/// What starts real ranks.
fn heavy(args: &Args, checks: &mut Checks, own: &Snapshot, programs: &TestPrograms) {
    if !args.wants(Part::Scenarios) && !args.wants(Part::Python) {
        return;
    }
    let python = prepare_python(checks);
    let frameworks = prepare_frameworks(checks, python.as_ref());
    if args.wants(Part::Python) {
        checks.run("Python client (pytest on the wheel)", || {
            pytest(own, python.as_ref(), &["", "--ignore-glob=*/frameworks/*"])
        });
        if frameworks.is_some() {
            checks.run("hooks for frameworks (pytest)", || pytest(own, frameworks.as_ref(), &["frameworks"]));
        }
    }
    if args.wants(Part::Scenarios) {
        checks.run("Slurm and Open MPI (apt-get)", packages::schedulers);
        scenarios(checks, own, programs, python.as_ref(), frameworks.as_ref());
    }
}

/// The environment with the wheel in it; none, and a failure in the books, if it cannot be made.
fn prepare_python(checks: &mut Checks) -> Option<Venv> {
    let mut made = None;
    checks.run("Python environment and wheel", || {
        let story = Progress::begin();
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
        Ok(match frameworks::ensure(&Progress::begin(), heavy) {
            Ok(venv) => {
                made = Some(venv);
                Verdict::of(true)
            }
            Err(error) => Verdict::skipped(&format!("{error:#}")),
        })
    });
    made
}

/// The end-to-end scenarios on the program as cargo builds it, with ranks in a Python that has the wheel.
fn scenarios(
    checks: &mut Checks,
    own: &Snapshot,
    programs: &TestPrograms,
    python: Option<&Venv>,
    frameworks: Option<&Venv>,
) {
    let mut pythons = Vec::new();
    pythons.extend(python.map(|venv| ("MAINSTAY_TEST_PYTHON", venv.python())));
    pythons.extend(prepare_nvrx(checks, python).map(|python| ("MAINSTAY_TEST_NVRX", python)));
    pythons.extend(frameworks.map(|venv| ("MAINSTAY_TEST_FRAMEWORKS", venv.python())));
    checks.run("end-to-end scenarios (cargo test)", || {
        let is_scenario = |program: &TestProgram| program.is_of(SCENARIOS) && program.target != FLOORS;
        programs.run(own, is_scenario, None, |test| {
            let pythons = pythons.iter().map(|(name, python)| (*name, python));
            test.env("MAINSTAY_BIN", paths::mainstay("debug")).envs(pythons);
        })
    });
}

/// A Python with NVRx's client; the scenarios that need it are skipped without.
fn prepare_nvrx(checks: &mut Checks, python: Option<&Venv>) -> Option<PathBuf> {
    let venv = python?;
    let mut made = None;
    checks.run("NVRx's client (pip)", || {
        Ok(match nvrx::ensure(&Progress::begin(), venv) {
            Ok(python) => {
                made = Some(python);
                Verdict::of(true)
            }
            Err(error) => Verdict::skipped(&format!("{error:#}")),
        })
    });
    made
}

/// A minute and a half on two processors. `MAINSTAY_SEEDS` asks for more: a million by hand.
fn simulate(own: &Snapshot, programs: &TestPrograms) -> Result<Verdict> {
    let seeds = std::env::var("MAINSTAY_SEEDS").unwrap_or_else(|_| "100000".to_owned());
    let core = |program: &TestProgram| program.is_of("agent/core") && program.target == "it";
    programs.run(own, core, Some("job_of_hosts"), |test| _ = test.env("MAINSTAY_SEEDS", &seeds))
}

/// Runs the tests in a folder of the Python package's, with options after it.
fn pytest(own: &Snapshot, python: Option<&Venv>, of: &[&str]) -> Result<Verdict> {
    let Some(venv) = python else { anyhow::bail!("there is no environment to test in") };
    let tests: PathBuf = paths::root().join("client/python/tests").join(of.first().unwrap_or(&""));
    let mut pytest = Command::new(venv.python());
    // From a folder without sources, so that what is imported is the installed wheel.
    pytest
        .args(["-m", "pytest", "-p", "no:cacheprovider", "-rs"])
        .arg(&tests)
        .args(of.iter().skip(1))
        .current_dir(paths::target())
        .env("MAINSTAY_BIN", paths::mainstay("debug"));
    own.give(&mut pytest);
    let (status, said) = command::run_watched(&mut pytest)?;
    let (passed, failed) = check::pytest_counts(&said);
    Ok(Verdict::counted(status.success(), passed, failed))
}
