//! The test programs of all packages. They are built together, for one set of features: if packages are selected
//! one by one, each selection has different features, and most of the tree is compiled again for each.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::check::Verdict;
use crate::command;
use crate::leftovers::Snapshot;
use crate::lint::cargo;
use crate::output;
use crate::paths;

/// The number of tests that a test program runs at once.
const THREADS: &str = "RUST_TEST_THREADS";

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

    /// Runs the selected ones in sequence. `filter`: only tests whose names contain it. `prepare` sets variables.
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
        let mut count = 0;
        for program in self.0.iter().filter(|program| is_wanted(program)) {
            count += 1;
            output::line(&format!("\n     Running {} ({})", program.target, program.folder.display()));
            let mut test = Command::new(&program.file);
            test.args(filter).current_dir(&program.folder).env("CARGO_MANIFEST_DIR", &program.folder);
            prepare(&mut test);
            own.give(&mut test);
            let (status, reported) = command::run_watched(&mut test)?;
            all_passed &= status.success();
            printed.push_str(&reported);
        }
        ensure!(count > 0, "there is no such test program");
        Ok(Verdict::cargo(all_passed, &printed))
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
