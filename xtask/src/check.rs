//! Checks, in sequence or in two parallel rows: each is named and timed, none ends the others, and a summary
//! comes last.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

use crate::output;
pub use skips::Skips;

mod skips;

#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// It counted its tests; a check without a count is one test.
    Counted(Counts),
    /// It cannot run here: the reason, and what would make it possible.
    Skipped(String),
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    passed: usize,
    failed: usize,
    /// Tests that cannot run here; they did not pass.
    skips: Skips,
    /// What failed, in lines: the summary repeats it, because a log may keep only its end.
    failures: Vec<String>,
    /// Tests that failed beside others and passed alone, in lines.
    unsteady: Vec<String>,
}

impl Counts {
    /// A program that counts its tests. One that fails without counting a failure, because something did not
    /// even compile, is a failure too.
    fn of(success: bool, passed: usize, failed: usize) -> Counts {
        let failed = if success { failed } else { failed.max(1) };
        Counts { passed, failed, ..Counts::default() }
    }

    /// The result of `cargo test`, which reports skipped tests as passed.
    fn cargo(success: bool, printed: &str) -> Counts {
        let (passed, failed) = cargo_counts(printed);
        let skips = Skips::of(printed);
        let counts = Counts::of(success, passed.saturating_sub(skips.count()), failed);
        Counts { skips, failures: with_panics(&cargo_failures(printed), printed), ..counts }
    }
}

impl Verdict {
    pub fn of(holds: bool) -> Self {
        Self::counted(true, usize::from(holds), usize::from(!holds))
    }

    /// A check that fails for these reasons, and passes without any.
    pub fn without(failures: Vec<String>) -> Self {
        Self::of(failures.is_empty()).naming(failures)
    }

    /// The same verdict with the names of what failed.
    pub fn naming(mut self, names: Vec<String>) -> Self {
        if let Self::Counted(counts) = &mut self {
            counts.failures = names;
        }
        self
    }

    /// A check that cannot run here.
    pub fn skipped(why: &str) -> Self {
        Self::Skipped(why.into())
    }

    /// A program that counts its tests.
    pub fn counted(success: bool, passed: usize, failed: usize) -> Self {
        Self::Counted(Counts::of(success, passed, failed))
    }

    /// The result of `cargo test`.
    pub fn cargo(success: bool, printed: &str) -> Self {
        Self::Counted(Counts::cargo(success, printed))
    }

    /// The result of pytest: its closing line, in which an error in a fixture or an import is a failure, and the
    /// names in its short summary: `FAILED test_a.py::test_b - assert 1 == 2`.
    pub fn pytest(success: bool, printed: &str) -> Self {
        let counts = ["passed", "failed", "error"];
        let is_closing =
            |line: &&str| line.contains(" in ") && counts.iter().any(|count| line.contains(count));
        let closing = printed.lines().rev().find(is_closing).unwrap_or_default();
        let errors = before(closing, "error").max(before(closing, "errors"));
        let is_failure = |line: &&str| line.starts_with("FAILED ") || line.starts_with("ERROR ");
        let failures = printed.lines().filter(is_failure).map(str::to_owned).collect();
        Self::counted(success, before(closing, "passed"), before(closing, "failed") + errors).naming(failures)
    }

    /// The result of `cargo test` after the failed tests ran once more, alone: what passes then is listed, and
    /// does not fail the check.
    pub fn cargo_twice(printed: &str, success: bool, again: &str) -> Self {
        let before = Counts::cargo(false, printed);
        let still = cargo_failures(again);
        let mut alone = cargo_failures(printed);
        alone.retain(|name| !still.contains(name));
        Self::Counted(Counts {
            skips: before.skips,
            failures: with_panics(&still, again),
            unsteady: with_panics(&alone, printed),
            ..Counts::of(success, before.passed + alone.len(), still.len())
        })
    }
}

struct Done {
    name: String,
    verdict: Verdict,
    took: Duration,
    /// None if another check ran at the same time.
    processor: Option<Duration>,
}

/// Processor time of the programs that have run and ended. Processes that a test leaves to init are not
/// included.
fn processor_time() -> Duration {
    let Ok(used) = getrusage(UsageWho::RUSAGE_CHILDREN) else { return Duration::ZERO };
    let microseconds = used.user_time().num_microseconds() + used.system_time().num_microseconds();
    Duration::from_micros(u64::try_from(microseconds).unwrap_or(0))
}

/// The name of checks that run in sequence, and what runs them.
pub type Row<'a> = (&'static str, Box<dyn FnOnce(&mut Checks) + Send + 'a>);

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
        if let Verdict::Skipped(why) = &verdict {
            output::line(&format!("skipped: {why}"));
        }
        let processor = (!self.is_beside_others).then(|| processor_time().saturating_sub(spent));
        self.done.push(Done { name: name.into(), verdict, took: began.elapsed(), processor });
    }

    /// Runs a check that makes something. If it cannot be made, that is a failure, or a skip if it is not
    /// needed.
    pub fn make<T>(&mut self, name: &str, is_needed: bool, make: impl FnOnce() -> Result<T>) -> Option<T> {
        let mut made = None;
        self.run(name, || match make() {
            Ok(it) => {
                made = Some(it);
                Ok(Verdict::of(true))
            }
            Err(error) if is_needed => Err(error),
            Err(error) => Ok(Verdict::skipped(&format!("{error:#}"))),
        });
        made
    }

    /// Runs rows of checks at the same time. Each line of their output starts with the name of the row.
    pub fn beside(&mut self, rows: Vec<Row<'_>>) {
        let (began, spent) = (Instant::now(), processor_time());
        let run = |(name, make): Row<'_>| {
            output::named(name);
            let mut checks = Checks { is_beside_others: true, ..Checks::default() };
            make(&mut checks);
            checks.done
        };
        thread::scope(|scope| {
            let running: Vec<_> = rows.into_iter().map(|row| scope.spawn(move || run(row))).collect();
            for row in running.into_iter().map(thread::ScopedJoinHandle::join) {
                self.done.extend(row.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            }
        });
        self.beside_took = Some((began.elapsed(), processor_time().saturating_sub(spent)));
    }

    /// Prints the table and the closing line; true if nothing failed.
    pub fn conclude(&self) -> bool {
        println!("\n=== summary");
        for Done { name, verdict, took, processor } in &self.done {
            let took = took.as_secs_f64();
            let processor =
                processor.map_or(String::new(), |spent| format!(" {:>8.1} s CPU", spent.as_secs_f64()));
            match verdict {
                Verdict::Counted(Counts { passed, failed, skips, .. }) => {
                    let how = if *failed == 0 { "ok      " } else { "FAILED  " };
                    let of = |count, what| match count {
                        0 => String::new(),
                        count => format!(", {count} {what}"),
                    };
                    let rest = of(*failed, "failed") + &of(skips.count(), "skipped");
                    println!("  {how} {name:<48} {passed:>5} passed {took:>8.1} s{processor}{rest}");
                }
                Verdict::Skipped(why) => println!("  skipped  {name:<48} {why}"),
            }
        }
        if let Some((took, spent)) = self.beside_took {
            let (took, spent) = (took.as_secs_f64(), spent.as_secs_f64());
            println!(
                "  those without a processor time of their own ran at the same time: {took:.1} s, {spent:.1} s CPU"
            );
        }
        let (passed, failed, skips) = self.sum();
        for (title, lines) in [
            ("what failed", self.lines_of(|counts| &counts.failures)),
            ("what failed beside other tests, and passed alone", self.lines_of(|counts| &counts.unsteady)),
            ("tests that cannot run here", skips.lines()),
        ] {
            if !lines.is_empty() {
                println!("\n=== {title}\n{}", lines.join("\n"));
            }
        }
        println!("\n{passed} passed, {failed} failed, {} skipped", skips.count());
        failed == 0
    }

    fn counts(&self) -> impl Iterator<Item = (&str, &Counts)> {
        self.done.iter().filter_map(|done| match &done.verdict {
            Verdict::Counted(counts) => Some((done.name.as_str(), counts)),
            Verdict::Skipped(_) => None,
        })
    }

    /// Lines of all checks, each below the name of its check.
    fn lines_of(&self, of: fn(&Counts) -> &[String]) -> Vec<String> {
        let mut lines = Vec::new();
        for (name, counts) in self.counts().filter(|(_, counts)| !of(counts).is_empty()) {
            lines.push(format!("  {name}"));
            lines.extend(of(counts).iter().map(|line| format!("      {line}")));
        }
        lines
    }

    fn sum(&self) -> (usize, usize, Skips) {
        let mut sum = (0, 0, Skips::default());
        for (_, counts) in self.counts() {
            sum.0 += counts.passed;
            sum.1 += counts.failed;
            sum.2.add(&counts.skips);
        }
        sum
    }
}

/// Passed and failed of all `test result:` lines that cargo test prints, one for each test program.
fn cargo_counts(printed: &str) -> (usize, usize) {
    let lines = || printed.lines().filter_map(|line| line.trim().strip_prefix("test result:"));
    let sum = |word| lines().map(|line| before(line, word)).sum();
    (sum("passed"), sum("failed"))
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

/// The names of failed tests, each with the start of its panic's message.
fn with_panics(names: &[String], printed: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for name in names {
        let begin = format!("thread '{name}' ");
        let panic = printed.lines().skip_while(|line| !line.starts_with(&begin));
        let panic = panic.take_while(|line| !line.is_empty()).take(PANIC_LINES);
        lines.push(name.clone());
        lines.extend(panic.map(|line| format!("  {}", line.chars().take(PANIC_COLUMNS).collect::<String>())));
    }
    lines
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

    fn counts(verdict: Verdict) -> Counts {
        if let Verdict::Counted(counts) = verdict { counts } else { Counts::default() }
    }

    #[test]
    fn pytests_closing_line_is_read() {
        let pytest = |printed| {
            let counts = counts(Verdict::pytest(true, printed));
            (counts.passed, counts.failed)
        };
        assert_eq!(pytest("....\n12 passed in 0.31s\n"), (12, 0));
        assert_eq!(pytest("==== 1 failed, 11 passed, 2 skipped, 1 error in 0.31s ====\n"), (11, 2));
        assert_eq!(pytest("=== 2 errors in 0.10s ===\n"), (0, 2));
        assert_eq!(pytest(""), (0, 0));
    }

    #[test]
    fn a_program_that_fails_without_a_count_is_a_failure() {
        assert_eq!(Counts::of(false, 3, 0), Counts { passed: 3, failed: 1, ..Counts::default() });
        assert_eq!(Counts::of(true, 3, 0).failed, 0);
    }

    #[test]
    fn a_test_that_was_skipped_did_not_pass() {
        let printed = "test skipped: it-01::a: no torch\ntest result: ok. 3 passed; 0 failed; 0 ignored\n";
        let expected = Counts { passed: 2, skips: Skips::of(printed), ..Counts::default() };
        assert_eq!(counts(Verdict::cargo(true, printed)), expected);
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
        assert_eq!(checks.lines_of(|counts| &counts.failures), lines);
        assert_eq!(checks.sum(), (4, 3, Skips::default()));
        let printed = "=== short test summary info ===\nFAILED a.py::b - assert 0\n1 failed in 0.1s\n";
        assert_eq!(counts(Verdict::pytest(false, printed)).failures, ["FAILED a.py::b - assert 0"]);
    }

    #[test]
    fn what_passes_alone_is_listed_and_does_not_fail_the_check() {
        let printed = "thread 'a' (7) panicked at x.rs:1:2:\ntoo late\n\nfailures:\n    a\n    b\n\ntest result: FAILED. 3 \
                       passed; 2 failed; 0 ignored\n";
        let again = "\nfailures:\n    b\n\ntest result: FAILED. 1 passed; 1 failed; 0 ignored\n";
        let of = |success, again| counts(Verdict::cargo_twice(printed, success, again));
        let Counts { passed, failed, failures, unsteady, .. } = of(false, again);
        assert_eq!((passed, failed, failures), (4, 1, vec!["b".to_owned()]));
        assert_eq!(unsteady, ["a", "  thread 'a' (7) panicked at x.rs:1:2:", "  too late"]);
        let Counts { passed, failed, .. } = of(true, "test result: ok. 2 passed");
        assert_eq!((passed, failed), (5, 0));
        // A program that ends without a list of failures has failed.
        assert_eq!(of(false, "").failed, 1);
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
