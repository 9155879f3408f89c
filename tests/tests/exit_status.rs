//! The launcher's exit status is the truth about the rank that failed first; the budget bounds the restarts.

use mainstay_core::id::Rank;
use mainstay_core::verdict::Cause;
use mainstay_tests::{Stage, story};

#[test]
fn all_ranks_done_is_status_0() {
    let stage = Stage::new();
    let end = stage.sh("exit 0").ranks(3).start().end();
    end.assert_status(0);
    end.assert_said("all ranks are done");
}

#[test]
fn an_exit_code_is_passed_on() {
    let stage = Stage::new();
    let end =
        stage.sh(r#"[ "$RANK" = 1 ] && exit 7; work"#).ranks(2).options("--max-restarts 0").start().end();
    end.assert_status(7);
    let [verdict] = story::verdicts(&end.story)[..] else { panic!("one verdict\n{end}") };
    assert_eq!((verdict.culprit, &verdict.cause), (Some(Rank(1)), &Cause::ExitCode { code: 7 }));
    end.assert_said("the budget of 0 restart(s) is used up");
}

#[test]
fn a_signal_stays_recognisable() {
    let stage = Stage::new();
    for (signal, status) in [("SEGV", 139), ("KILL", 137), ("ABRT", 134), ("TERM", 143)] {
        let script = format!(r#"[ "$RANK" = 1 ] && kill -{signal} $$; work"#);
        let end = stage.sh(&script).ranks(2).options("--max-restarts 0").start().end();
        end.assert_status(status);
        end.assert_said(&format!("rank 1 was ended by SIG{signal}"));
    }
}

#[test]
fn the_budget_ends_a_job_that_fails_again_and_again() {
    let stage = Stage::new();
    let end = stage.sh("exit 9").options("--max-restarts 2").start().end();
    end.assert_status(9);
    assert_eq!(end.summary().attempts, 3, "{end}");
    end.assert_said("the budget of 2 restart(s) is used up");
}

#[test]
fn restarts_that_lie_before_the_window_do_not_count() {
    let stage = Stage::new();
    // Each attempt lives longer than the window: one restart in a window is enough for any number of them.
    let script = r#"[ "$ATTEMPT" = 4 ] && exit 0; sleep 0.1; exit 9"#;
    let end = stage.sh(script).options("--max-restarts 1 --restart-window 50ms").start().end();
    end.assert_status(0);
    assert_eq!(story::restarts(&end.story), 4, "{end}");

    let end = stage.sh(script).options("--max-restarts 1 --restart-window 1h").start().end();
    end.assert_status(9);
    assert_eq!(story::restarts(&end.story), 1, "{end}");
}

#[test]
fn a_program_that_cannot_be_started_is_named_and_not_tried_again() {
    let stage = Stage::new();
    let broken = stage.script("broken", "#!/no/such/interpreter\n");
    let end = stage.command(&[&broken]).ranks(2).start().end();
    end.assert_status(1);
    end.assert_said(&broken);
    assert_eq!(end.summary().attempts, 1, "{end}");
}

#[test]
fn a_script_can_read_how_the_job_went_from_the_last_line() {
    let stage = Stage::new();
    let end = stage.sh("echo of a rank; exit 9").options("--json --max-restarts 1").start().end();
    end.assert_status(9);
    let last = end.stdout.lines().next_back().unwrap_or_default();
    let told: serde_json::Value = serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}\n{end}"));
    assert_eq!((told["exit"].as_i64(), told["attempts"].as_i64()), (Some(9), Some(2)), "{end}");
}
