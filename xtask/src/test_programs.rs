//! The test programs of all packages. They are built together, for one set of features: if packages are selected
//! one by one, each selection has different features, and most of the tree is compiled again for each.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::check::{self, Verdict};
use crate::command;
use crate::leftovers::Snapshot;
use crate::lint::cargo;
use crate::output;
use crate::paths;

/// The number of tests that a test program runs at once.
const THREADS: &str = "RUST_TEST_THREADS";

/// At most this many failed tests are run again, alone: tests with deadlines may fail beside others on a loaded machine,
/// and the summary lists them.
const MAX_AGAIN: usize = 5;

/// A line of cargo's output.
#[derive(Deserialize)]
struct Artifact {
    #[serde(default)]
    manifest_path: PathBuf,
    target: Option<Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// A program with tests.
pub struct TestProgram {
    /// The folder of its package, in which it runs.
    pub folder: PathBuf,
    /// The name of its target: a library's, or that of a file of tests.
    pub target: String,
    file: PathBuf,
}

impl TestProgram {
    fn of(line: &str) -> Option<TestProgram> {
        let Artifact { manifest_path, target, profile, executable } = serde_json::from_str(line).ok()?;
        let file = executable.filter(|_| profile.is_some_and(|profile| profile.test))?;
        Some(TestProgram { folder: manifest_path.parent()?.to_owned(), target: target?.name, file })
    }

    /// Runs it with these arguments: whether it succeeded, and what it printed.
    fn run<'a>(
        &self,
        own: &Snapshot,
        arguments: impl IntoIterator<Item = &'a str>,
        prepare: &impl Fn(&mut Command),
    ) -> Result<(bool, String)> {
        let mut test = Command::new(&self.file);
        test.args(arguments).current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        prepare(&mut test);
        own.give(&mut test);
        let (status, printed) = command::run_watched(&mut test)?;
        Ok((status.success(), printed))
    }

    /// Whether it belongs to the package in this folder of the project.
    pub fn is_of(&self, folder: &str) -> bool {
        self.folder == paths::root().join(folder)
    }
}

/// All of them.
pub struct TestPrograms(Vec<TestProgram>);

impl TestPrograms {
    /// Builds them, and the programs that they start.
    ///
    /// # Errors
    /// Something does not compile.
    pub fn build() -> Result<TestPrograms> {
        let mut build =
            cargo(&["test", "--workspace", "--no-run", "--message-format", "json-render-diagnostics"]);
        let mut child =
            build.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("starting cargo")?;
        let reported = child.stdout.take().context("what cargo tells")?;
        let mut programs = Vec::new();
        for line in BufReader::new(reported).lines() {
            programs.extend(TestProgram::of(&line.context("reading what cargo tells")?));
        }
        let status = child.wait().context("waiting for cargo")?;
        ensure!(status.success(), "the tests do not compile: {status}");
        programs.sort_by(|one, other| (&one.folder, &one.target).cmp(&(&other.folder, &other.target)));
        Ok(TestPrograms(programs))
    }

    /// Runs the selected ones in sequence, and what failed once more, alone. `filter`: only tests whose names contain it. `prepare` sets variables.
    ///
    /// # Errors
    /// None is selected, or one cannot be started.
    pub fn run(
        &self,
        own: &Snapshot,
        is_wanted: impl Fn(&TestProgram) -> bool,
        filter: Option<&str>,
        prepare: impl Fn(&mut Command),
    ) -> Result<Verdict> {
        let (mut all_passed, mut printed) = (true, String::new());
        let (mut count, mut failed) = (0, Vec::new());
        for program in self.0.iter().filter(|program| is_wanted(program)) {
            count += 1;
            output::line(&format!("\n     Running {} ({})", program.target, program.folder.display()));
            let (success, reported) = program.run(own, filter, &prepare)?;
            all_passed &= success;
            printed.push_str(&reported);
            let names = check::cargo_failures(&reported);
            if !success && (1..=MAX_AGAIN).contains(&names.len()) {
                failed.push((program, names));
            }
        }
        ensure!(count > 0, "there is no such test program");
        let verdict = Verdict::cargo(all_passed, &printed);
        let names: usize = failed.iter().map(|(_, names)| names.len()).sum();
        // A failure without a name, or many: running them again would only hide the reason for longer.
        if all_passed || names != check::cargo_failures(&printed).len() || names > MAX_AGAIN {
            return Ok(verdict);
        }
        let (mut all_passed, mut again) = (true, String::new());
        for (program, names) in failed {
            output::line(&format!("\n     Running {} again, alone: {}", program.target, names.join(" ")));
            let exact: Vec<&str> =
                names.iter().map(String::as_str).chain(["--exact", "--test-threads=1"]).collect();
            let (success, reported) = program.run(own, exact, &prepare)?;
            all_passed &= success;
            again.push_str(&reported);
        }
        Ok(verdict.after_another_run(&printed, all_passed, &again))
    }
}

/// Makes a test program run this many tests at once on so many processors: more than one on each for those that mostly
/// wait for processes, disks and timers.
pub fn at_once(test: &mut Command, tests: usize, processors: usize) {
    if std::env::var_os(THREADS).is_none() {
        let all = std::thread::available_parallelism().map_or(2, usize::from);
        test.env(THREADS, (all * tests / processors).max(1).to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_programs_with_tests_are_taken_from_cargos_output() {
        let line = |test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","package_id":"path+file:///p/agent/group#mainstay-group@0.1.0","manifest_path":"/p/agent/group/Cargo.toml","target":{{"kind":["test"],"name":"it","edition":"2024"}},"profile":{{"opt_level":"0","test":{test}}},"executable":{executable},"fresh":true}}"#
            )
        };
        let program = TestProgram::of(&line(true, r#""/t/it-1""#)).expect("a test program");
        assert_eq!((&*program.target, program.file.to_str()), ("it", Some("/t/it-1")));
        assert_eq!(program.folder.to_str(), Some("/p/agent/group"));
        for other in [&line(false, r#""/t/mainstay""#), &line(true, "null"), r#"{"reason":"build-finished"}"#]
        {
            assert!(TestProgram::of(other).is_none(), "{other}");
        }
    }
}
