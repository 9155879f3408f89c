//! Tests that cannot run here. The harness has no way for a running test to report that it is skipped. So a line
//! with a fixed prefix goes straight to standard error, past the harness, which hides the output of a passing test.

use std::io::Write;

/// The start of the line of a skipped test; `NAME: REASON` follows.
pub const SKIPPED: &str = "test skipped: ";
/// The same for a test that ran without a part of it.
pub const SKIPPED_IN_PART: &str = "test skipped in part: ";

/// Reports that the calling test cannot run, and why; the caller then returns. The reason names what is missing,
/// and what provides it.
pub fn skip(reason: &str) {
    say(SKIPPED, reason);
}

/// Reports that a part of the calling test cannot run, and why; the rest counts.
pub fn skip_part(reason: &str) {
    say(SKIPPED_IN_PART, reason);
}

fn say(prefix: &str, reason: &str) {
    let thread = std::thread::current();
    let program = std::env::args().next().unwrap_or_default();
    let line = line(prefix, &program, thread.name().unwrap_or("main"), reason);
    // In one write, so that lines of several tests do not mix. A closed standard error must not fail the test.
    let _ = std::io::stderr().lock().write_all(line.as_bytes());
}

/// `target/debug/deps/it-0123456789abcdef` and a test's name become `it-0123456789abcdef::name`: names of tests are
/// unique in their program only.
fn line(prefix: &str, program: &str, test: &str, reason: &str) -> String {
    let program = program.rsplit('/').next().unwrap_or(program);
    let reason = reason.replace('\n', " ");
    // The harness may have written an incomplete line.
    format!("\n{prefix}{program}::{test}: {reason}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_the_program_the_test_and_the_reason() {
        let printed = line(SKIPPED, "target/debug/deps/it-01", "kill::of_one_rank", "no torch\nhere");
        assert_eq!(printed, "\ntest skipped: it-01::kill::of_one_rank: no torch here\n");
    }
}
