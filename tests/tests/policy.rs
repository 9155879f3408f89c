//! A policy of one's own decides; one that is broken, or wants what is not allowed, gives way to the built-in one and it is
//! said.
#![allow(clippy::expect_used, clippy::panic, reason = "in a test, a panic is the report")]

use std::path::PathBuf;

use mainstay_core::entry::{Body, Fact};
use mainstay_tests::{End, Stage};

/// The job's first failure under this policy: a rank exits with 9, and with 0 after a restart.
fn under(text: &str, options: &str) -> End {
    let folder = tempfile::tempdir().expect("a folder");
    let file: PathBuf = folder.path().join("mine.star");
    std::fs::write(&file, text).expect("the policy is written");
    let stage = Stage::new();
    let script = r#"[ "$ATTEMPT" = 1 ] && exit 0; exit 9"#;
    stage.sh(script).options(options).variable("MAINSTAY_POLICY", &file).start().end()
}

fn troubles(end: &End) -> Vec<String> {
    let of = |body: &Body| match body {
        Body::Fact(Fact::Observed(seen)) if seen.component == "policy" => Some(seen.event.clone()),
        _ => None,
    };
    end.story.iter().filter_map(|entry| of(&entry.body)).collect()
}

#[test]
fn what_it_says_is_done_and_nothing_is_said_of_trouble() {
    let text =
        "def decide(case):\n    return decision('hand_back', 0, 'exit {}'.format(case.verdict.cause.code))\n";
    let end = under(text, "");
    end.assert_status(75);
    end.assert_said("exit 9 (mine.star)");
    assert!(troubles(&end).is_empty(), "{end}");
}

#[test]
fn a_broken_one_gives_way_and_it_is_said_with_its_line() {
    let end = under("def decide(case):\n    return case.verdct\n", "");
    end.assert_status(0);
    end.assert_said("mine.star:2:16: there is no field verdct");
    assert_eq!(troubles(&end), ["policy_failed"], "{end}");

    let end = under("def decide(case)\n", "");
    end.assert_status(0);
    end.assert_said("mine.star:1:17");
    assert_eq!(troubles(&end), ["policy_failed", "policy_failed"], "at the start and at the failure: {end}");
}

#[test]
fn one_that_does_not_end_gives_way() {
    let loops = "for a in range(999):\n        for b in range(999):\n            for c in range(999):\n                pass";
    let end = under(&format!("def decide(case):\n    {loops}\n"), "");
    end.assert_status(0);
    assert_eq!(troubles(&end), ["policy_failed"], "{end}");
}

#[test]
fn no_policy_restarts_beyond_the_budget() {
    let end =
        under("def decide(case):\n    return decision('restart_in_job', 0, 'again')\n", "--max-restarts 0");
    end.assert_status(9);
    end.assert_said("restarting all ranks is not allowed: the budget of 0 restart(s) is used up");
    assert_eq!(troubles(&end), ["policy_overruled"], "{end}");
}
