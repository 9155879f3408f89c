//! Whether a program cannot run at all: a syntax error, wrong arguments, a missing script or module. A restart would only fail again.
//! Detected also if ranks die before their first heartbeat.
//!
//! All ranks must end this way. If one rank cannot import what the others can, its host may have a broken disk, and the job is
//! restarted.

use std::collections::BTreeMap;

use crate::attribution::progress::is_progress;
use crate::diagnose::CLIENT_FAILED;
use crate::root_rank::RankEnd;
use mainstay_model::entry::{ExitStatus, Note};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::verdict::{Cause, FaultDomain, Verdict};

/// Exceptions that show it, as notes name them.
const EXCEPTIONS: [&str; 5] =
    ["SyntaxError", "IndentationError", "TabError", "ModuleNotFoundError", "ImportError"];

/// The two of them that may be caused by one host.
const OF_IMPORTS: [&str; 2] = ["ModuleNotFoundError", "ImportError"];

/// The number of last lines in which a shell or an interpreter gives its reason.
const LAST_LINES: usize = 3;

/// Completes a verdict from the ends of all ranks.
pub fn complete(verdict: &mut Verdict, ends: &BTreeMap<Rank, RankEnd>) {
    // After a first attempt that ran, something that existed is missing: that may be transient.
    if verdict.attempt != Attempt(0) || verdict.class.as_deref() == Some(CLIENT_FAILED) {
        return;
    }
    if !ends.is_empty() && ends.values().all(cannot_run) {
        (verdict.cannot_run, verdict.deterministic) = (true, true);
        if verdict.domain == FaultDomain::Unknown {
            (verdict.domain, verdict.class) = (FaultDomain::User, Some("user_config".to_owned()));
        }
    } else if ends.len() > 1 && verdict.step.is_none() && is_of_imports(&verdict.cause) {
        verdict.deterministic = false;
    }
}

/// Whether a rank's end alone shows that the program cannot run. If so, it is worth waiting briefly for the ends of the other ranks.
pub fn may_not_run(note: Option<&Note>, status: Option<ExitStatus>, stderr: &[String]) -> bool {
    match (note, status) {
        (Some(note), _) => EXCEPTIONS.contains(&name(&note.exception)),
        (None, Some(ExitStatus::Code(code))) => matches_stderr(code, stderr),
        (None, _) => false,
    }
}

fn cannot_run(end: &RankEnd) -> bool {
    let status = end.exit.map(|(status, _)| status).filter(|_| !end.after_stop);
    let stepped =
        end.step.is_some() || end.stdout_tail.iter().chain(&end.stderr_tail).any(|line| is_progress(line));
    !stepped && may_not_run(end.note.as_ref(), status, &end.stderr_tail)
}

fn is_of_imports(cause: &Cause) -> bool {
    matches!(cause, Cause::Exception { exception, .. } if OF_IMPORTS.contains(&name(exception)))
}

fn name(exception: &str) -> &str {
    exception.strip_prefix("builtins.").unwrap_or(exception)
}

/// Messages of interpreters, shells and argument parsers, by exit code.
fn matches_stderr(code: i32, stderr: &[String]) -> bool {
    let mut last = stderr.iter().rev().filter(|line| !line.trim().is_empty()).take(LAST_LINES);
    let mut any = |what: &[&str]| last.any(|line| what.iter().any(|what| line.contains(what)));
    match code {
        // Python prints no traceback for syntax errors in the script itself, nor for `-m` with a missing module.
        1 => {
            let of_text = |line: &&String| {
                let named = line.split_once(": ").is_some_and(|(name, _)| EXCEPTIONS.contains(&name));
                named
                    || line.contains(": No module named ")
                    || line.contains("Error while finding module specification for")
            };
            last.next().as_ref().is_some_and(of_text)
        }
        2 => {
            let usage = stderr.iter().any(|line| line.starts_with("usage:") || line.starts_with("Usage:"));
            let cannot_open = stderr.iter().any(|line| line.contains("can't open file"));
            cannot_open && any(&["[Errno 2]", "[Errno 13]"]) || usage && any(&["error:", "Error:"])
        }
        126 | 127 => any(&["not found", "No such file", "Permission denied", "cannot execute"]),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root_rank::judge;
    use mainstay_model::id::Incident;
    use mainstay_model::time::Mono;

    fn exited(code: i32, stderr: &str) -> RankEnd {
        RankEnd {
            exit: Some((ExitStatus::Code(code), Mono(5))),
            stderr_tail: stderr.lines().map(str::to_owned).collect(),
            ..RankEnd::default()
        }
        .with_last_words()
    }

    fn verdict(attempt: u32, ends: &[RankEnd]) -> Verdict {
        let ends = (0..).map(Rank).zip(ends.iter().cloned()).collect();
        let mut verdict = judge(Incident(1), Attempt(attempt), &ends, 0);
        verdict.deterministic = true;
        complete(&mut verdict, &ends);
        verdict
    }

    const CANNOT: &[(i32, &str)] = &[
        (1, "  File \"/w/train.py\", line 3\n    def (\n        ^\nSyntaxError: invalid syntax"),
        (1, "  File \"/w/train.py\", line 3\n    x\nIndentationError: unexpected indent"),
        (1, "/usr/bin/python3: No module named nosuch"),
        (
            1,
            "/usr/bin/python3: Error while finding module specification for 'nosuch.module' (ModuleNotFoundError: No module named 'nosuch')",
        ),
        (
            1,
            "Traceback (most recent call last):\n  File \"/w/train.py\", line 1, in <module>\n    import nosuch\nModuleNotFoundError: No module named 'nosuch'",
        ),
        (2, "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --nosuch 1"),
        (2, "Usage: train.py [OPTIONS]\nTry 'train.py --help' for help.\n\nError: No such option: --nosuch"),
        (2, "python3: can't open file '/w/train.py': [Errno 2] No such file or directory"),
        (127, "/w/ranks.sh: 4: nosuch: not found"),
        (126, "/w/ranks.sh: line 4: ./data: Permission denied"),
    ];

    #[test]
    fn a_program_that_all_ranks_cannot_run_is_known_without_heartbeats() {
        for (code, stderr) in CANNOT {
            let end = exited(*code, stderr);
            let one = verdict(0, std::slice::from_ref(&end));
            assert!(one.cannot_run && one.domain == FaultDomain::User, "{stderr}");
            assert!(verdict(0, &[end.clone(), end.clone()]).cannot_run, "{stderr}");
            // Only one of two ranks, and a program that ran before.
            assert!(!verdict(0, &[end.clone(), RankEnd::default()]).cannot_run, "{stderr}");
            assert!(!verdict(1, &[end]).cannot_run, "{stderr}");
        }
    }

    #[test]
    fn a_program_that_ran_or_chose_its_exit_code_is_not_unrunnable() {
        for (code, stderr) in [
            (1, ""),
            (1, "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nValueError: x"),
            (1, "the loader failed: No data"),
            (2, "train.py: error: the store is gone"),
            (2, "something else"),
            (3, "SyntaxError: invalid syntax"),
            (127, "killed"),
            (127, ""),
        ] {
            assert!(!verdict(0, &[exited(code, stderr)]).cannot_run, "{code}: {stderr}");
        }
        let imports = exited(1, CANNOT[4].1);
        let stepped = RankEnd { step: Some(1), ..imports.clone() };
        assert!(!verdict(0, &[stepped]).cannot_run);
        let printed = RankEnd { stdout_tail: vec!["step 1 loss 2.0".into()], ..imports };
        assert!(!verdict(0, &[printed]).cannot_run);
    }

    #[test]
    fn one_rank_alone_that_cannot_import_may_be_its_hosts() {
        let missing = exited(1, CANNOT[4].1);
        assert!(!verdict(0, &[missing.clone(), RankEnd::default()]).deterministic);
        assert!(verdict(0, &[missing]).deterministic);
    }
}
