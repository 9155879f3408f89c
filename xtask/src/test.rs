//! `cargo xtask test`: all checks of a change, here and in continuous integration.

mod leftovers;
mod programs;
mod steps;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::ValueEnum;

use self::leftovers::Snapshot;
use self::programs::TestPrograms;
use self::steps::Suite;
use crate::check::Checks;
use crate::progress::Progress;
use crate::python::{self, Venv};
use crate::{command, lint, packages};

/// What can be chosen.
#[derive(clap::Args)]
pub struct Args {
    /// Only these parts (may be repeated).
    #[arg(long, value_enum)]
    only: Vec<Part>,
    /// Write the snapshots of texts (tests/snapshots of each package) instead of comparing them.
    #[arg(long)]
    accept: bool,
    /// Leave out Python and the end-to-end scenarios.
    #[arg(long)]
    quick: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Part {
    /// Formatting, clippy, licences.
    Lint,
    /// Unit and property tests, sources and documents.
    Unit,
    /// The built program with real ranks: the scenarios of the crate `tests`, and both demos.
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

/// Runs all the checks and prints a summary.
pub fn run(args: &Args) -> Result<ExitCode> {
    let mut checks = Checks::default();
    let own = Snapshot::new()?;
    if args.wants(Part::Lint) {
        lint::source(&mut checks);
    }
    if args.wants(Part::Systemd) {
        lint::systemd(&mut checks);
    }
    if args.wants(Part::Unit) {
        checks.run("systemd-journal-remote (apt-get)", || packages::JOURNAL_REMOTE.install());
        checks.run("etcd-server and etcd-client (apt-get)", || packages::ETCD.install());
    }
    if args.wants(Part::Scenarios) {
        checks.run("Slurm and Open MPI (apt-get)", || packages::SCHEDULERS.install());
        checks.run("systemd-nspawn (apt-get)", || packages::NSPAWN.install());
        checks.run("buildah and podman (apt-get)", || packages::CONTAINERS.install());
    }
    let needs_programs = [Part::Unit, Part::Scenarios, Part::Python].into_iter().any(|part| args.wants(part));
    let build = "program and test programs (cargo test --no-run)";
    if let Some(programs) = needs_programs.then(|| checks.make(build, true, TestPrograms::build)).flatten() {
        let ranks = args.wants(Part::Scenarios) || args.wants(Part::Python);
        let environments = if ranks { Environments::prepare(&mut checks) } else { Environments::default() };
        let beside_scenarios = args.wants(Part::Scenarios);
        let (own, programs, environments) = (&own, &programs, &environments);
        let suite = Suite { own, programs, beside_scenarios, environments, accept: args.accept };
        tests(args, &mut checks, &suite);
    }
    checks.run("nothing is left behind", || own.check());
    Ok(command::exit_code(checks.conclude()))
}

/// The Python environments of ranks that could be made; none if no test needs them.
#[derive(Default)]
struct Environments {
    python: Option<Venv>,
    /// The frameworks that the package has hooks for, too.
    frameworks: Option<Venv>,
    bare: Option<Venv>,
    /// NVRx's client.
    nvrx: Option<PathBuf>,
    /// What reads the page and its JSON.
    browser: Option<PathBuf>,
}

impl Environments {
    fn prepare(checks: &mut Checks) -> Environments {
        let progress = &Progress::begin();
        let torch = || python::TORCH.with_wheel(progress);
        let Some(python) = checks.make("Python environment and wheel", true, torch) else {
            return Environments::default();
        };
        // Tests that need these are skipped where they cannot be installed.
        let frameworks = checks.make("Lightning, Transformers, JAX, Orbax (pip)", false, || {
            python::FRAMEWORKS.with_wheel(progress)
        });
        let bare = checks
            .make("Python environment without PyTorch (pip)", false, || python::BARE.with_wheel(progress));
        let nvrx = checks.make("NVRx's client (pip)", false, || {
            Ok(python::NVRX_CLIENT.ensure(progress)?.join("bin/python"))
        });
        let browser = checks.make("Playwright, axe, Schemathesis (pip)", false, || {
            Ok(python::BROWSER.ensure(progress)?.join("bin/python"))
        });
        Environments { python: Some(python), frameworks, bare, nvrx, browser }
    }

    /// The variables that name the interpreters to tests.
    fn variables(&self) -> Vec<(&'static str, PathBuf)> {
        let named = [
            ("MAINSTAY_TEST_PYTHON", self.python.as_ref().map(Venv::python)),
            ("MAINSTAY_TEST_FRAMEWORKS", self.frameworks.as_ref().map(Venv::python)),
            ("MAINSTAY_TEST_NVRX", self.nvrx.clone()),
            ("MAINSTAY_TEST_BROWSER", self.browser.clone()),
        ];
        named.into_iter().filter_map(|(name, python)| Some((name, python?))).collect()
    }
}

/// Runs the tests in two rows at the same time: one waits for timers and processes half of its time.
fn tests(args: &Args, checks: &mut Checks, suite: &Suite) {
    let (unit, python) = (args.wants(Part::Unit), args.wants(Part::Python));
    let has_scenarios = args.wants(Part::Scenarios);
    let waiting = |row: &mut Checks| {
        if has_scenarios {
            suite.scenarios(row);
            suite.demos(row);
        } else if unit {
            suite.unit(row, "unit tests of agent and checkpoint tier (cargo test)", steps::waits);
        }
    };
    let others = |row: &mut Checks| {
        if unit {
            let name =
                if has_scenarios { "unit and property tests" } else { "other unit and property tests" };
            suite.unit(row, &format!("{name} (cargo test)"), |program| {
                has_scenarios || !steps::waits(program)
            });
            suite.sources(row);
        }
        if python {
            suite.python(row);
        }
        if has_scenarios {
            suite.simulation(row);
        }
    };
    let name = if has_scenarios { "scenarios" } else { "agent" };
    checks.beside(vec![(name, Box::new(waiting)), ("others", Box::new(others))]);
}
