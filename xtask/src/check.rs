//! Checks, in sequence or in two parallel rows: each is named and timed, none ends the others, and a summary comes
//! last.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

use crate::output;
use crate::skips::Skips;

/// How a check ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// The numbers of passed and failed tests; a check without a count is one test.
    Counted {
        /// Tests that passed.
        passed: usize,
        /// Tests that failed.
        failed: usize,
        /// Tests that cannot run here; they did not pass.
        skips: Skips,
        /// What failed, in lines: the summary repeats it, because a log may keep only its end.
        failures: Vec<String>,
        /// Tests that failed beside others and passed alone, in lines.
        unsteady: Vec<String>,
    },
    /// It cannot run here.
    Skipped {
        /// The reason, and what would make it possible.
        why: String,
    },
}

impl Verdict {
    /// A check that counts nothing.
    pub fn of(holds: bool) -> Self {
        Self::counted(true, usize::from(holds), usize::from(!holds))
    }

    /// A check that fails for these reasons, and passes without any.
    pub fn without(failures: Vec<String>) -> Self {
        Self::of(failures.is_empty()).naming(failures)
    }

    /// The same verdict with the names of what failed.
    pub fn naming(mut self, names: Vec<String>) -> Self {
        if let Self::Counted { failures, .. } = &mut self {
            *failures = names;
        }
        self
    }

    /// A check that cannot run here.
    pub fn skipped(why: &str) -> Self {
        Self::Skipped { why: why.into() }
    }

    /// A program that counts its tests. One that fails without counting a failure, because something did not even
    /// compile, is a failure too.
    pub fn counted(success: bool, passed: usize, failed: usize) -> Self {
        let failed = if success { failed } else { failed.max(1) };
        Self::Counted { passed, failed, skips: Skips::default(), failures: Vec::new(), unsteady: Vec::new() }
    }

    /// The result of `cargo test`, which reports skipped tests as passed.
    pub fn cargo(success: bool, printed: &str) -> Self {
        let (passed, failed) = cargo_counts(printed);
        let skips = Skips::of(printed);
        match Self::counted(success, passed.saturating_sub(skips.count()), failed) {
            Self::Counted { passed, failed, unsteady, .. } => {
                let names = cargo_failures(printed);
                let failures = names.iter().flat_map(|name| with_panic(name, printed)).collect();
                Self::Counted { passed, failed, skips, failures, unsteady }
            }
            other => other,
        }
    }

    /// The same verdict after the failed tests ran once more, alone: what passes then is listed, and does not fail the
    /// check.
    pub fn after_another_run(self, printed: &str, success: bool, again: &str) -> Self {
        let Self::Counted { passed, skips, mut unsteady, .. } = self else { return self };
        let still = cargo_failures(again);
        let steady = |name: &String| !still.contains(name);
        let passed_alone: Vec<String> = cargo_failures(printed).into_iter().filter(steady).collect();
        unsteady.extend(passed_alone.iter().flat_map(|name| with_panic(name, printed)));
        match Self::counted(success, passed + passed_alone.len(), still.len()) {
            Self::Counted { passed, failed, .. } => {
                let failures = still.iter().flat_map(|name| with_panic(name, again)).collect();
                Self::Counted { passed, failed, skips, failures, unsteady }
            }
            other => other,
        }
    }
}

struct Done {
    name: String,
    verdict: Verdict,
    took: Duration,
    /// None if another check ran at the same time.
    processor: Option<Duration>,
}

/// Processor time of the programs that have run and ended. Processes that a test leaves to init are not included.
fn processor_time() -> Duration {
    let Ok(used) = getrusage(UsageWho::RUSAGE_CHILDREN) else { return Duration::ZERO };
    let microseconds = used.user_time().num_microseconds() + used.system_time().num_microseconds();
    Duration::from_micros(u64::try_from(microseconds).unwrap_or(0))
}

/// The name of checks that run in sequence, and what runs them.
pub type Row<'a> = (&'static str, Box<dyn FnOnce(&mut Checks) + Send + 'a>);

/// The checks that have run.
#[derive(Default)]
pub struct Checks {
    done: Vec<Done>,
    /// Whether others run at the same time.
    is_beside_others: bool,
    /// What all rows took, and their processor time.
    beside_took: Option<(Duration, Duration)>,
}

impl Checks {
    /// Runs a check. An error is a failure like any other, reported at once.
    pub fn run(&mut self, name: &str, check: impl FnOnce() -> Result<Verdict>) {
        output::line(&format!("\n=== {name}"));
        let (began, spent) = (Instant::now(), processor_time());
        let verdict = check().unwrap_or_else(|error| {
            output::line(&format!("{error:#}"));
            Verdict::without(vec![format!("{error:#}")])
        });
        if let Verdict::Skipped { why } = &verdict {
            output::line(&format!("skipped: {why}"));
        }
        let processor = (!self.is_beside_others).then(|| processor_time().saturating_sub(spent));
        self.done.push(Done { name: name.into(), verdict, took: began.elapsed(), processor });
    }

    /// Runs rows of checks at the same time. Each line of their output starts with the name of the row.
    pub fn beside(&mut self, rows: Vec<Row<'_>>) {
        let (began, spent) = (Instant::now(), processor_time());
        let all: Vec<Checks> = thread::scope(|scope| {
            let running: Vec<_> =
                rows.into_iter().map(|(name, make)| scope.spawn(move || Checks::row(name, make))).collect();
            let ended = running.into_iter().map(thread::ScopedJoinHandle::join);
            ended.map(|row| row.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        });
        self.done.extend(all.into_iter().flat_map(|checks| checks.done));
        let (took, processor) = (began.elapsed(), processor_time().saturating_sub(spent));
        self.beside_took = Some((took, processor));
    }

    fn row(name: &'static str, make: impl FnOnce(&mut Checks)) -> Checks {
        output::named(name);
        let mut checks = Checks { is_beside_others: true, ..Checks::default() };
        make(&mut checks);
        checks
    }

    /// Prints the table and the closing line; true if nothing failed.
    pub fn conclude(&self) -> bool {
        println!("\n=== summary");
        for Done { name, verdict, took, processor } in &self.done {
            let took = took.as_secs_f64();
            let processor =
                processor.map_or(String::new(), |spent| format!(" {:>8.1} s CPU", spent.as_secs_f64()));
            match verdict {
                Verdict::Counted { passed, failed, skips, .. } => {
                    let how = if *failed == 0 { "ok      " } else { "FAILED  " };
                    let fails = if *failed == 0 { String::new() } else { format!(", {failed} failed") };
                    let skips = match skips.count() {
                        0 => String::new(),
                        count => format!(", {count} skipped"),
                    };
                    println!("  {how} {name:<48} {passed:>5} passed {took:>8.1} s{processor}{fails}{skips}");
                }
                Verdict::Skipped { why } => println!("  skipped  {name:<48} {why}"),
            }
        }
        if let Some((took, spent)) = self.beside_took {
            let (took, spent) = (took.as_secs_f64(), spent.as_secs_f64());
            println!(
                "  those without a processor time of their own ran at the same time: {took:.1} s, {spent:.1} s CPU"
            );
        }
        let failures = self.failures();
        if !failures.is_empty() {
            println!("\n=== what failed\n{}", failures.join("\n"));
        }
        let unsteady = self.lines_of(|verdict| match verdict {
            Verdict::Counted { unsteady, .. } => unsteady,
            Verdict::Skipped { .. } => &[],
        });
        if !unsteady.is_empty() {
            println!("\n=== what failed beside other tests, and passed alone\n{}", unsteady.join("\n"));
        }
        let (passed, failed, skips) = self.sum();
        if !skips.lines().is_empty() {
            println!("\n=== tests that cannot run here\n{}", skips.lines().join("\n"));
        }
        println!("\n{passed} passed, {failed} failed, {} skipped", skips.count());
        failed == 0
    }

    /// The failures of all checks, each below the name of its check.
    fn failures(&self) -> Vec<String> {
        self.lines_of(|verdict| match verdict {
            Verdict::Counted { failures, .. } => failures,
            Verdict::Skipped { .. } => &[],
        })
    }

    fn lines_of(&self, of: impl Fn(&Verdict) -> &[String]) -> Vec<String> {
        let mut lines = Vec::new();
        for done in &self.done {
            let found = of(&done.verdict);
            if !found.is_empty() {
                lines.push(format!("  {}", done.name));
                lines.extend(found.iter().map(|line| format!("      {line}")));
            }
        }
        lines
    }

    fn sum(&self) -> (usize, usize, Skips) {
        let mut sum = (0, 0, Skips::default());
        for done in &self.done {
            if let Verdict::Counted { passed, failed, skips, .. } = &done.verdict {
                sum.0 += passed;
                sum.1 += failed;
                sum.2.add(skips);
            }
        }
        sum
    }
}

/// Passed and failed of all `test result:` lines that cargo test prints, one for each test program.
pub fn cargo_counts(printed: &str) -> (usize, usize) {
    let lines = printed.lines().filter_map(|line| line.trim().strip_prefix("test result:"));
    lines
        .map(|line| (before(line, "passed"), before(line, "failed")))
        .fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1))
}

/// How much of a panic's message the summary repeats.
const PANIC_LINES: usize = 5;
const PANIC_COLUMNS: usize = 300;

/// The names that each test program lists in front of its result, below a line `failures:`.
pub fn cargo_failures(printed: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut is_list = false;
    for line in printed.lines() {
        is_list = (is_list && !line.is_empty()) || line == "failures:";
        let name = line.strip_prefix("    ").filter(|name| is_list && !name.contains(' '));
        names.extend(name.map(str::to_owned));
    }
    names
}

/// The name of a failed test, and the start of its panic's message.
fn with_panic(name: &str, printed: &str) -> Vec<String> {
    let begin = format!("thread '{name}' ");
    let panic = printed.lines().skip_while(|line| !line.starts_with(&begin));
    let panic = panic.take_while(|line| !line.is_empty()).take(PANIC_LINES);
    let cut = |line: &str| format!("  {}", line.chars().take(PANIC_COLUMNS).collect::<String>());
    std::iter::once(name.to_owned()).chain(panic.map(cut)).collect()
}

/// The names in pytest's short summary: `FAILED test_a.py::test_b - assert 1 == 2`.
pub fn pytest_failures(printed: &str) -> Vec<String> {
    let is_failure = |line: &&str| line.starts_with("FAILED ") || line.starts_with("ERROR ");
    printed.lines().filter(is_failure).map(str::to_owned).collect()
}

/// Passed and failed of pytest's closing line; an error in a fixture or an import is a failure.
pub fn pytest_counts(printed: &str) -> (usize, usize) {
    let is_closing = |line: &&str| {
        line.contains(" in ")
            && (line.contains("passed") || line.contains("failed") || line.contains("error"))
    };
    let closing = printed.lines().rev().find(is_closing).unwrap_or_default();
    let errors = before(closing, "error").max(before(closing, "errors"));
    (before(closing, "passed"), before(closing, "failed") + errors)
}

/// The number in front of a word: `12` for `passed` in `ok. 12 passed; 0 failed`.
fn before(line: &str, word: &str) -> usize {
    let words: Vec<&str> =
        line.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).collect();
    words.windows(2).find(|pair| pair[1] == word).and_then(|pair| pair[0].parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargos_lines_are_summed() {
        let printed = "running 3 tests\ntest result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; \
                    finished in 0.00s\nnoise\ntest result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured; 0 \
                    filtered out; finished in 1.00s\n";
        assert_eq!(cargo_counts(printed), (7, 2));
    }

    #[test]
    fn pytests_closing_line_is_read() {
        assert_eq!(pytest_counts("....\n12 passed in 0.31s\n"), (12, 0));
        assert_eq!(pytest_counts("==== 1 failed, 11 passed, 2 skipped, 1 error in 0.31s ====\n"), (11, 2));
        assert_eq!(pytest_counts("=== 2 errors in 0.10s ===\n"), (0, 2));
        assert_eq!(pytest_counts(""), (0, 0));
    }

    #[test]
    fn a_program_that_fails_without_a_count_is_a_failure() {
        let counted = |passed, failed| Verdict::Counted {
            passed,
            failed,
            skips: Skips::default(),
            failures: Vec::new(),
            unsteady: Vec::new(),
        };
        assert_eq!(Verdict::counted(false, 3, 0), counted(3, 1));
        assert_eq!(Verdict::counted(true, 3, 0), counted(3, 0));
    }

    #[test]
    fn a_test_that_was_skipped_did_not_pass() {
        let printed = "test skipped: it-01::a: no torch\ntest result: ok. 3 passed; 0 failed; 0 ignored\n";
        let verdict = Verdict::cargo(true, printed);
        let Verdict::Counted { passed, failed, skips, .. } = verdict else { panic!("it is counted") };
        assert_eq!((passed, failed, skips), (2, 0, Skips::of(printed)));
    }

    #[test]
    fn the_summary_names_what_failed() {
        let printed = "test a::b ... FAILED\n\nfailures:\n\n---- a::b stdout ----\n    assertion failed\n\n\nfailures:\n    \
                    a::b\n    c\n\ntest result: FAILED. 3 passed; 2 failed; 0 ignored\n";
        let mut checks = Checks::default();
        checks.run("unit", || Ok(Verdict::cargo(false, printed)));
        checks.run("tidy", || Ok(Verdict::without(vec!["a file".into()])));
        checks.run("good", || Ok(Verdict::without(Vec::new())));
        let lines = ["  unit", "      a::b", "      c", "  tidy", "      a file"];
        assert_eq!(checks.failures(), lines);
        assert_eq!(checks.sum(), (4, 3, Skips::default()));
        let printed = "=== short test summary info ===\nFAILED a.py::b - assert 0\n1 failed in 0.1s\n";
        assert_eq!(pytest_failures(printed), ["FAILED a.py::b - assert 0"]);
    }

    #[test]
    fn what_passes_alone_is_listed_and_does_not_fail_the_check() {
        let printed = "thread 'a' (7) panicked at x.rs:1:2:\ntoo late\n\nfailures:\n    a\n    b\n\ntest result: FAILED. 3 \
                       passed; 2 failed; 0 ignored\n";
        let again = "\nfailures:\n    b\n\ntest result: FAILED. 1 passed; 1 failed; 0 ignored\n";
        let of = |success, again| Verdict::cargo(false, printed).after_another_run(printed, success, again);
        let Verdict::Counted { passed, failed, failures, unsteady, .. } = of(false, again) else { panic!() };
        assert_eq!((passed, failed, failures), (4, 1, vec!["b".to_owned()]));
        assert_eq!(unsteady, ["a", "  thread 'a' (7) panicked at x.rs:1:2:", "  too late"]);
        let Verdict::Counted { passed, failed, .. } = of(true, "test result: ok. 2 passed") else { panic!() };
        assert_eq!((passed, failed), (5, 0));
        // A program that ends without a list of failures has failed.
        let Verdict::Counted { failed, .. } = of(false, "") else { panic!() };
        assert_eq!(failed, 1);
    }

    #[test]
    fn an_error_in_a_check_does_not_end_the_others() {
        let mut checks = Checks::default();
        checks.run("broken", || anyhow::bail!("no such program"));
        checks.run("good", || Ok(Verdict::counted(true, 5, 0)));
        checks.run("elsewhere", || Ok(Verdict::skipped("not here")));
        assert_eq!(checks.sum(), (5, 1, Skips::default()));
        assert!(!checks.conclude());
    }
}
