//! The test programs of all packages. They are built together, for one set of features: if packages are selected
//! one by one, each selection has different features, and most of the tree is compiled again for each.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::leftovers::Snapshot;
use crate::check::{self, Verdict};
use crate::{command, output, paths};

/// The number of tests that a test program runs at once.
const THREADS: &str = "RUST_TEST_THREADS";

/// At most this many failed tests are run again, alone: tests with deadlines may fail beside others on a loaded
/// machine, and the summary lists them.
const MAX_AGAIN: usize = 5;

pub struct TestProgram {
    /// The folder of its package, in which it runs.
    pub folder: PathBuf,
    /// The name of its target: a library's, or that of a file of tests.
    pub target: String,
    file: PathBuf,
}

impl TestProgram {
    /// From a line of cargo's output.
    fn of(line: &str) -> Option<TestProgram> {
        let artifact: Value = serde_json::from_str(line).ok()?;
        let path = |field: &str| artifact[field].as_str().map(PathBuf::from);
        let file = path("executable").filter(|_| artifact["profile"]["test"] == true)?;
        let folder = path("manifest_path")?.parent()?.to_owned();
        Some(TestProgram { folder, target: artifact["target"]["name"].as_str()?.to_owned(), file })
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

pub struct TestPrograms(Vec<TestProgram>);

impl TestPrograms {
    /// Builds them, and the programs that they start.
    pub fn build() -> Result<TestPrograms> {
        let mut build = command::cargo("test --workspace --no-run --message-format json-render-diagnostics");
        let mut child =
            build.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("starting cargo")?;
        let lines = BufReader::new(child.stdout.take().context("cargo has no output")?).lines();
        let mut programs: Vec<TestProgram> =
            lines.map_while(Result::ok).filter_map(|line| TestProgram::of(&line)).collect();
        let status = child.wait().context("waiting for cargo")?;
        ensure!(status.success(), "the tests do not compile: {status}");
        programs.sort_by(|one, other| (&one.folder, &one.target).cmp(&(&other.folder, &other.target)));
        Ok(TestPrograms(programs))
    }

    /// Runs the selected ones in sequence, and what failed once more, alone. `filter`: only tests whose names
    /// contain it. `prepare` sets variables.
    pub fn run(
        &self,
        own: &Snapshot,
        is_wanted: impl Fn(&TestProgram) -> bool,
        filter: Option<&str>,
        prepare: impl Fn(&mut Command),
    ) -> Result<Verdict> {
        let (mut all_passed, mut printed) = (true, String::new());
        let mut failed = Vec::new();
        let wanted: Vec<&TestProgram> = self.0.iter().filter(|program| is_wanted(program)).collect();
        ensure!(!wanted.is_empty(), "there is no such test program");
        for program in wanted {
            output::line(&format!("\n     Running {} ({})", program.target, program.folder.display()));
            let (success, reported) = program.run(own, filter, &prepare)?;
            all_passed &= success;
            printed.push_str(&reported);
            failed.extend((!success).then(|| (program, check::cargo_failures(&reported))));
        }
        let count: usize = failed.iter().map(|(_, names)| names.len()).sum();
        // A failure without a name, or many: running them again would only hide the reason for longer.
        if all_passed || count > MAX_AGAIN || failed.iter().any(|(_, names)| names.is_empty()) {
            return Ok(Verdict::cargo(all_passed, &printed));
        }
        let (mut all_passed, mut again) = (true, String::new());
        for (program, names) in failed {
            output::line(&format!("\n     Running {} again, alone: {}", program.target, names.join(" ")));
            let exact = names.iter().map(String::as_str).chain(["--exact", "--test-threads=1"]);
            let (success, reported) = program.run(own, exact, &prepare)?;
            all_passed &= success;
            again.push_str(&reported);
        }
        Ok(Verdict::cargo_twice(&printed, all_passed, &again))
    }
}

/// Makes a test program run this many tests at once on so many processors: more than one on each for those that
/// mostly wait for processes, disks and timers.
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
