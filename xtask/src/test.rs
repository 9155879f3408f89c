//! `cargo xtask test`: all checks of a change, here and in continuous integration.

mod environments;
mod steps;

use std::process::ExitCode;

use clap::ValueEnum;

use self::environments::Environments;
use self::steps::Suite;
use crate::check::{Checks, Verdict};
use crate::leftovers::Snapshot;
use crate::lint;
use crate::packages;
use crate::test_programs::TestPrograms;

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
    if args.wants(Part::Scenarios) {
        checks.run("Slurm and Open MPI (apt-get)", packages::schedulers);
        checks.run("systemd-nspawn (apt-get)", packages::nspawn);
    }
    let programs = [Part::Unit, Part::Scenarios, Part::Python].into_iter().any(|part| args.wants(part));
    if let Some(programs) = programs.then(|| build(&mut checks)).flatten() {
        let ranks = args.wants(Part::Scenarios) || args.wants(Part::Python);
        let environments = if ranks { Environments::prepare(&mut checks) } else { Environments::default() };
        let beside_scenarios = args.wants(Part::Scenarios);
        let (own, programs, environments) = (&own, &programs, &environments);
        tests(args, &mut checks, &Suite { own, programs, beside_scenarios, environments });
    }
    checks.run("nothing is left behind", || own.check());
    if checks.conclude() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The program and all tests; none, with a recorded failure, if something does not compile.
fn build(checks: &mut Checks) -> Option<TestPrograms> {
    let mut made = None;
    checks.run("program and test programs (cargo test --no-run)", || {
        made = Some(TestPrograms::build()?);
        Ok(Verdict::of(true))
    });
    made
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
            suite.unit_that_wait(row);
        }
    };
    let others = |row: &mut Checks| {
        match (unit, has_scenarios) {
            (true, true) => suite.unit(row),
            (true, false) => suite.unit_that_compute(row),
            (false, _) => {}
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
