//! A user's own policy decides. If it is broken, or wants a forbidden action, the built-in policy replaces it and
//! the launcher reports it.
#![allow(clippy::expect_used, clippy::panic, reason = "in a test, a panic is the report")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;

use mainstay_model::entry::{Body, Fact};
use mainstay_tests::{End, Job, Stage, has_client, journal, mainstay};

/// The job's first failure under this policy: a rank exits with 9, and with 0 after a restart.
fn under(text: &str, options: &str) -> End {
    let folder = testing::tempdir().expect("a folder");
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
    end.journal.iter().filter_map(|entry| of(&entry.body)).collect()
}

#[test]
fn its_decision_is_carried_out_without_a_report_of_trouble() {
    let text =
        "def decide(case):\n    return decision('hand_back', 0, 'exit {}'.format(case.verdict.cause.code))\n";
    let end = under(text, "");
    end.assert_status(75);
    end.assert_printed("exit 9 (mine.star)");
    assert!(troubles(&end).is_empty(), "{end}");
}

#[test]
fn a_broken_policy_is_replaced_and_reported_with_its_line() {
    let end = under("def decide(case):\n    return case.verdct\n", "");
    end.assert_status(0);
    end.assert_printed("mine.star:2:16: there is no field verdct");
    assert_eq!(troubles(&end), ["policy_failed"], "{end}");

    let end = under("def decide(case)\n", "");
    end.assert_status(0);
    end.assert_printed("mine.star:1:17");
    assert_eq!(troubles(&end), ["policy_failed", "policy_failed"], "at the start and at the failure: {end}");
}

#[test]
fn a_policy_that_does_not_end_is_replaced() {
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
    end.assert_printed("restarting all ranks is not allowed: the budget of 0 restart(s) is used up");
    assert_eq!(troubles(&end), ["policy_overruled"], "{end}");
}

#[test]
fn trouble_with_a_policy_is_on_the_screen_and_counted_while_the_job_runs() {
    let folder = testing::tempdir().expect("a folder");
    let file = folder.path().join("mine.star");
    std::fs::write(&file, "def decide(case):\n    return case.verdct\n").expect("the policy is written");
    let stage = Stage::new();
    let script = r#"[ "$ATTEMPT" = 0 ] && exit 9; mark again; wait_for enough"#;
    let job = stage.sh(script).variable("MAINSTAY_POLICY", &file).start();
    job.mark("again");
    let screen = screen(&job);
    assert!(screen.contains("there is no field verdct"), "{screen}");
    assert!(screen.contains("the built-in policy decides"), "{screen}");
    let counted = metrics(&job);
    let line = counted.lines().find(|line| line.starts_with("mainstay_job_policy_troubles_total{"));
    assert!(line.is_some_and(|line| line.ends_with(" 1")), "{counted}");
    stage.mark("enough");
    job.end().assert_status(0);
}

#[test]
fn a_policy_without_trouble_changes_neither_the_screen_nor_the_count() {
    let stage = Stage::new();
    let job = stage.sh(r#"[ "$ATTEMPT" = 0 ] && exit 9; mark again; wait_for enough"#).start();
    job.mark("again");
    let screen = screen(&job);
    assert!(screen.contains("decision:") && !screen.contains("policy"), "{screen}");
    let counted = metrics(&job);
    let line = counted.lines().find(|line| line.starts_with("mainstay_job_policy_troubles_total{"));
    assert!(line.is_none_or(|line| line.ends_with(" 0")), "{counted}");
    stage.mark("enough");
    job.end().assert_status(0);
}

fn hands_back(words: &str) -> String {
    format!("def decide(case):\n    return decision('hand_back', 0, '{words}')\n")
}

#[test]
fn the_hosts_policy_holds_for_jobs_that_bring_none() {
    let folder = testing::tempdir().expect("a folder");
    let (hosts, own, config) =
        (folder.path().join("hosts.star"), folder.path().join("own.star"), folder.path().join("agent.toml"));
    std::fs::write(&hosts, hands_back("as the site wants it")).expect("the policy is written");
    std::fs::write(&own, hands_back("as I want it")).expect("the policy is written");
    std::fs::write(&config, format!("[policy]\nfile = {:?}\n", hosts.display().to_string())).expect("a file");
    let stage = Stage::new();
    let of_the_host = stage.sh("exit 9").variable("MAINSTAY_AGENT_CONFIG", &config).start().end();
    of_the_host.assert_status(75);
    of_the_host.assert_printed("as the site wants it (hosts.star)");
    let plan =
        stage.sh("exit 9").variable("MAINSTAY_AGENT_CONFIG", &config).variable("MAINSTAY_POLICY", &own);
    let of_the_job = plan.start().end();
    of_the_job.assert_status(75);
    of_the_job.assert_printed("as I want it (own.star)");
}

#[test]
fn a_run_is_replayed_with_the_policy_that_decided_then() {
    let stage = Stage::new();
    let policy = stage.work().join("own.star");
    std::fs::write(&policy, hands_back("as I want it")).expect("the policy is written");
    let job = stage.sh("exit 9").ranks(1).options(&format!("--policy {}", policy.display())).start();
    let run_dir = job.run_dir();
    let end = job.end();
    end.assert_status(75);
    let replay = |options: &[&str]| {
        let reported = Command::new(mainstay()).arg("replay").arg(&run_dir).args(options).output();
        let reported = reported.expect("mainstay can be started");
        let text = [reported.stdout, reported.stderr].concat();
        (reported.status.code(), String::from_utf8_lossy(&text).into_owned())
    };
    let named = policy.display().to_string();
    let (status, reported) = replay(&["--policy", &named]);
    assert!(status == Some(0) && reported.contains("same verdict and decision"), "{reported}{end}");
    let (status, reported) = replay(&[]);
    assert!(status == Some(1) && reported.contains("decision: hand back, now restart"), "{reported}{end}");
    std::fs::write(&policy, "def decide(case):\n    return case.verdct\n").expect("the policy is written");
    let (status, reported) = replay(&["--policy", &named]);
    assert!(status == Some(1) && reported.contains("there is no field verdct"), "{reported}");
    std::fs::write(&policy, "def decide(case\n").expect("the policy is written");
    let (status, reported) = replay(&["--policy", &named]);
    assert!(status != Some(0) && reported.contains("own.star"), "{reported}");
}

/// The output of `mainstay status`, whatever its exit status.
fn screen(job: &Job) -> String {
    let asked = Command::new(mainstay()).args(["status", "--socket"]).arg(job.socket()).output();
    String::from_utf8_lossy(&asked.expect("mainstay can be started").stdout).into_owned()
}

/// The launcher's metrics for Prometheus.
fn metrics(job: &Job) -> String {
    let mut stream = UnixStream::connect(job.socket()).expect("the launcher listens");
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .expect("asked");
    let mut page = String::new();
    stream.read_to_string(&mut page).expect("an answer");
    page
}

/// A rank that is killed at its fifth step, once.
const KILLED_ONCE: &str = r#"
import mainstay
for step in range(1, 10):
    time.sleep(0.01)
    mainstay.step(step)
    if ATTEMPT == 0 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
"#;

#[test]
fn what_helped_in_one_run_is_known_to_the_policy_of_the_next() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    stage.python(KILLED_ONCE).start().end().assert_status(0);
    let policy = stage.script(
        "mine.star",
        r#"
def decide(case):
    known = ["{} {} {}".format(of.cause, of.action, of.helped) for of in case.earlier]
    return decision(action = "stop", why = "known: " + ", ".join(known))
"#,
    );
    let with = format!("--policy {policy}");
    let known = |end: End| {
        end.assert_status(137);
        journal::decisions(&end.journal)[0].why.clone()
    };
    let second = known(stage.python(KILLED_ONCE).options(&with).start().end());
    assert!(second.starts_with("known: signal restart_in_job 1.0 "), "{second}");
    let forgets = known(stage.python(KILLED_ONCE).options(&format!("{with} --forget")).start().end());
    assert!(forgets.starts_with("known:  ("), "{forgets}");
    // The file was damaged.
    for file in std::fs::read_dir(stage.logs().join(".learned")).expect("what was learned") {
        std::fs::write(file.expect("a file").path(), "{\"version\":1,\"rungs\":7}").expect("our own file");
    }
    let end = stage.python(KILLED_ONCE).options(&with).start().end();
    end.assert_printed("the learned values of this job cannot be used and are skipped");
    assert!(known(end).starts_with("known:  ("));
}
