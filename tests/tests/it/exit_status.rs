//! The launcher's exit status reflects the rank that failed first; the budget bounds the restarts.

use mainstay_model::id::Rank;
use mainstay_model::verdict::{Cause, Rule};
use mainstay_tests::{End, Stage, journal, python};

/// The rule of the last decision.
fn last_rule(end: &End) -> Rule {
    journal::decisions(&end.journal).last().expect("a decision").rule
}

#[test]
fn all_ranks_done_is_status_0() {
    let stage = Stage::new();
    let end = stage.sh("exit 0").ranks(3).start().end();
    end.assert_status(0);
    assert_eq!(end.summary().incidents.len(), 0, "{end}");
}

#[test]
fn an_exit_code_is_passed_on() {
    let stage = Stage::new();
    let end =
        stage.sh(r#"[ "$RANK" = 1 ] && exit 7; work"#).ranks(2).options("--max-restarts 0").start().end();
    end.assert_status(7);
    let verdict = end.verdict();
    assert_eq!((verdict.culprit, &verdict.cause), (Some(Rank(1)), &Cause::ExitCode { code: 7 }));
    assert_eq!(last_rule(&end), Rule::Budget, "{end}");
}

#[test]
fn a_signal_stays_recognisable() {
    let stage = Stage::new();
    for (name, signal) in [("SEGV", 11), ("KILL", 9), ("ABRT", 6), ("TERM", 15)] {
        let script = format!(r#"[ "$RANK" = 1 ] && kill -{name} $$; work"#);
        let end = stage.sh(&script).ranks(2).options("--max-restarts 0").start().end();
        end.assert_status(128 + signal);
        let verdict = end.verdict();
        assert_eq!((verdict.culprit, &verdict.cause), (Some(Rank(1)), &Cause::Signal { signal }), "{end}");
        end.assert_printed(&format!("SIG{name}"));
    }
}

#[test]
fn the_budget_ends_a_job_that_fails_again_and_again() {
    let stage = Stage::new();
    let end = stage.sh("exit 9").options("--max-restarts 2").start().end();
    end.assert_status(9);
    assert_eq!(end.summary().attempts, 3, "{end}");
    assert_eq!(last_rule(&end), Rule::Budget, "{end}");
}

#[test]
fn restarts_before_the_window_do_not_count() {
    let stage = Stage::new();
    // Each attempt lives longer than the window: one restart in a window is enough for any number of them.
    let script = r#"[ "$ATTEMPT" = 4 ] && exit 0; sleep 0.1; exit 9"#;
    let end = stage.sh(script).options("--max-restarts 1 --restart-window 50ms").start().end();
    end.assert_status(0);
    assert_eq!(journal::restarts(&end.journal), 4, "{end}");

    let end = stage.sh(script).options("--max-restarts 1 --restart-window 1h").start().end();
    end.assert_status(9);
    assert_eq!(journal::restarts(&end.journal), 1, "{end}");
}

#[test]
fn a_program_that_cannot_be_started_is_named_and_not_tried_again() {
    let stage = Stage::new();
    let broken = stage.script("broken", "#!/no/such/interpreter\n");
    let end = stage.command(&[&broken]).ranks(2).start().end();
    end.assert_status(70);
    end.assert_printed(&broken);
    assert_eq!(end.summary().attempts, 1, "{end}");
}

#[test]
fn a_script_can_read_how_the_job_went_from_the_last_line() {
    let stage = Stage::new();
    let end = stage.sh("echo of a rank; exit 9").options("--json --max-restarts 1").start().end();
    end.assert_status(9);
    let last = end.stdout.lines().next_back().unwrap_or_default();
    let reported: serde_json::Value =
        serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}\n{end}"));
    assert_eq!((reported["exit"].as_i64(), reported["attempts"].as_i64()), (Some(9), Some(2)), "{end}");
}

/// Programs that cannot run, before anything of ours or of PyTorch is imported, with the status of each.
#[test]
fn a_program_that_cannot_run_is_not_restarted() {
    let stage = Stage::new();
    let python = mainstay_tests::python().display().to_string();
    let script = |name: &str, text: &str| stage.script(name, text);
    let syntax = script("syntax.py", "import sys\ndef broken(:\n    pass\n");
    let indent = script("indent.py", "import sys\n  x = 1\n");
    let import = script("import.py", "import no_such_module_of_anyone\n");
    let arguments = script(
        "arguments.py",
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\nparser.parse_args()\n",
    );
    let shell = script("shell.sh", "#!/bin/sh\nno_such_command_of_anyone --lr 1\n");
    let missing = stage.work().join("missing.py").display().to_string();
    let cases: [(&[&str], i32, &str); 7] = [
        (&[&python, &syntax], 1, "SyntaxError"),
        (&[&python, &indent], 1, "IndentationError"),
        (&[&python, &import], 1, "no_such_module_of_anyone"),
        (&[&python, "-m", "no_such_package.train"], 1, "no_such_package"),
        (&[&python, &arguments, "--nosuch", "1"], 2, "unrecognized arguments"),
        (&[&python, &missing], 2, "No such file or directory"),
        (&[&shell], 127, "not found"),
    ];
    for (command, status, printed) in cases {
        let end = stage.command(command).options("--no-python").ranks(2).start().end();
        end.assert_status(status);
        assert_eq!(end.summary().attempts, 1, "{command:?}\n{end}");
        assert!(end.verdict().cannot_run, "{command:?}\n{end}");
        assert!(end.stderr.contains(printed), "{command:?}\n{end}");
        assert_eq!(journal::verdicts(&end.journal).len(), 1, "one explanation\n{end}");
    }
}

#[test]
fn one_rank_that_cannot_import_what_the_other_can_is_restarted() {
    let stage = Stage::new();
    let script = r#"
if RANK == 1 and ATTEMPT == 0:
    import no_such_module_of_anyone
if ATTEMPT == 0:
    time.sleep(36000)
"#;
    let end = stage.python(script).ranks(2).start().end();
    end.assert_status(0);
    assert_eq!(journal::restarts(&end.journal), 1, "{end}");
}

#[test]
fn a_usage_error_after_steps_is_no_reason_to_stop() {
    let stage = Stage::new();
    let script = r#"
        [ "$ATTEMPT" = 1 ] && exit 0
        echo "step 1 loss 2.0"; echo "usage: tool [-h]" >&2; echo "tool: error: the store is gone" >&2; exit 2"#;
    let end = stage.sh(script).ranks(2).start().end();
    end.assert_status(0);
    assert_eq!(journal::restarts(&end.journal), 1, "{end}");
}

#[test]
fn a_seccomp_profile_that_forbids_to_watch_ranks_is_named() {
    let stage = Stage::new();
    let profile = concat!(env!("CARGO_MANIFEST_DIR"), "/python/without_pidfd.py");
    let python = python().display().to_string();
    let end = stage.sh("exit 0").under(&[&python, profile]).start().end();
    end.assert_status(70);
    end.assert_printed("seccomp");
}
