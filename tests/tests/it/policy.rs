//! A user's own policy decides. If it is broken, or wants a forbidden action, the built-in policy replaces it and
//! the launcher reports it.
#![allow(clippy::expect_used, clippy::panic, reason = "in a test, a panic is the report")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;

use mainstay_model::entry::{Body, Fact};
use mainstay_tests::{End, Job, Stage, has_client, journal, mainstay, processes};

/// What the policies here begin with. `mark("loaded.N")` is left for the N-th process that has loaded its policy.
const BEGINS: &str = r#"
import os, pathlib, threading, time
from mainstay.policy import Case, Decision
MARKS = pathlib.Path(os.environ["MARKS"])
def mark(name, text=""):
    aside = MARKS / f".{name}.{os.getpid()}"
    aside.write_text(str(text))
    aside.rename(MARKS / name)
NUMBER = len(list(MARKS.glob("loaded.*")))
mark(f"loaded.{NUMBER}", os.getpid())
"#;

/// The ranks of a job under a policy: they exit with 9, or with 0 after a restart.
const FAILS_ONCE: &str = r#"[ "$ATTEMPT" = 1 ] && exit 0; wait_for loaded.0; exit 9"#;

/// A job of one rank that runs this sh script, under this policy.
fn under(stage: &Stage, policy: &str, ranks: &str, options: &str) -> End {
    let file = stage.work().join("mine.py");
    std::fs::write(&file, format!("{BEGINS}{policy}")).expect("the policy is written");
    stage.sh(ranks).options(options).variable("MAINSTAY_POLICY", &file).start().end()
}

fn troubles(end: &End) -> Vec<String> {
    let of = |body: &Body| match body {
        Body::Fact(Fact::Observed(seen)) if seen.component == "policy" => Some(seen.event.clone()),
        _ => None,
    };
    end.journal.iter().filter_map(|entry| of(&entry.body)).collect()
}

/// The reasons of the decisions.
fn reasons(end: &End) -> Vec<&str> {
    journal::decisions(&end.journal).into_iter().map(|decision| decision.why.as_str()).collect()
}

#[test]
fn its_decision_is_carried_out_without_a_report_of_trouble() {
    let policy = r#"
def decide(case: Case) -> Decision:
    print("asked about", case.verdict.cause.kind)
    return Decision("hand_back", why=f"exit {case.verdict.cause.code}")
"#;
    let end = under(&Stage::new(), policy, FAILS_ONCE, "");
    end.assert_status(75);
    assert_eq!(reasons(&end), ["exit 9 (mine.py)"], "{end}");
    end.assert_printed("policy: asked about exit_code");
    assert!(troubles(&end).is_empty(), "{end}");
}

/// The built-in policy restarts a job whose policy does this when it is asked.
fn is_replaced(does: &str) {
    let end = under(&Stage::new(), &format!("def decide(case):\n{does}"), FAILS_ONCE, "");
    end.assert_status(0);
    assert_eq!(troubles(&end), ["policy_failed"], "{does}: {end}");
    assert_eq!(journal::restarts(&end.journal), 1, "{does}: {end}");
}

#[test]
fn a_policy_that_raises_or_answers_nonsense_is_replaced() {
    is_replaced("    return case.verdct\n");
    is_replaced("    raise SystemExit(0)\n");
    is_replaced("    return 42\n");
    is_replaced("    return Decision('reboot', why='so')\n");
    is_replaced("    return Decision('stop', after=float('nan'), why='so')\n");
    is_replaced("    return Decision('stop', why=case)\n");
}

#[test]
fn a_policy_that_ends_its_process_is_replaced() {
    is_replaced("    os.kill(os.getpid(), 9)\n");
    is_replaced("    os._exit(0)\n");
    is_replaced("    os.closerange(0, 100)\n    return Decision('stop', why='so')\n");
}

#[test]
fn a_policy_that_does_not_end_is_replaced() {
    is_replaced("    time.sleep(36000)\n");
    is_replaced("    all = []\n    while True:\n        all.append(bytearray(1 << 26))\n");
    is_replaced("    while True:\n        os.fork()\n        time.sleep(0.01)\n");
}

#[test]
fn a_policy_that_writes_into_all_its_descriptors_is_replaced() {
    let does = "    for fd in range(100):\n        try:\n            os.write(fd, b'nonsense\\n')\n        except OSError:\n            pass\n    time.sleep(36000)\n";
    is_replaced(does);
}

#[test]
fn a_policy_that_prints_without_end_is_replaced_and_fills_no_terminal() {
    let policy = "def decide(case):\n    while True:\n        print('x' * 99)\n";
    let end = under(&Stage::new(), policy, FAILS_ONCE, "");
    end.assert_status(0);
    assert_eq!(troubles(&end), ["policy_failed"], "{end}");
    let lines = end.stderr.lines().filter(|line| line.contains("policy: x")).count();
    assert!(lines > 0 && lines < 1000, "{lines} lines");
}

#[test]
fn forks_of_a_policy_do_not_answer() {
    let policy = r#"
def decide(case):
    if os.fork() == 0:
        return Decision("stop", why="the fork")
    os.wait()
    return Decision("hand_back", why="the policy")
"#;
    let end = under(&Stage::new(), policy, FAILS_ONCE, "");
    end.assert_status(75);
    assert_eq!(reasons(&end), ["the policy (mine.py)"], "{end}");
}

#[test]
fn a_policy_that_was_late_is_started_again_for_the_next_failure() {
    let policy = r#"
def decide(case):
    if NUMBER == 0:
        time.sleep(36000)
    return Decision("hand_back", why="in time")
"#;
    let end = under(&Stage::new(), policy, "wait_for loaded.$ATTEMPT; exit 9", "");
    end.assert_status(75);
    assert_eq!(troubles(&end), ["policy_failed"], "{end}");
    assert_eq!(reasons(&end)[1], "in time (mine.py)", "{end}");
}

#[test]
fn a_policy_that_cannot_be_loaded_is_reported_at_the_start_and_at_the_failure() {
    let twice = ["policy_failed", "policy_failed"];
    let stage = Stage::new();
    for (name, text) in
        [("a.py", "def decide(case)\n"), ("b.py", "import no_such_module\n"), ("c.py", "x = 1\n")]
    {
        std::fs::write(stage.work().join(name), text).expect("the policy is written");
    }
    for name in ["a.py", "b.py", "c.py", "missing.py"] {
        let job = stage.sh(r#"[ "$ATTEMPT" = 1 ] && exit 0; wait_for reported; exit 9"#);
        let job = job.variable("MAINSTAY_POLICY", stage.work().join(name)).start();
        job.wait_for_fact(
            "its policy is reported",
            |fact| matches!(fact, Fact::Observed(seen) if seen.component == "policy"),
        );
        stage.mark("reported");
        let end = job.end();
        end.assert_status(0);
        assert_eq!(troubles(&end), twice, "{name}: {end}");
        std::fs::remove_file(stage.marks().join("reported")).expect("the mark");
    }
    // One that is never loaded is late.
    let end = under(&stage, "time.sleep(36000)", FAILS_ONCE, "");
    end.assert_status(0);
    assert_eq!(troubles(&end), ["policy_failed"], "{end}");
}

#[test]
fn a_policy_in_starlark_is_refused() {
    let stage = Stage::new();
    let file = stage.work().join("mine.star");
    std::fs::write(&file, "def decide(case):\n    return None\n").expect("the policy is written");
    let end = stage.sh("mark started").variable("MAINSTAY_POLICY", &file).start().end();
    assert!(end.status != 0 && end.journal.is_empty() && !stage.marks().join("started").exists(), "{end}");
    // A job does not fail for the sake of its host's configuration.
    let config = stage.work().join("agent.toml");
    std::fs::write(&config, format!("[policy]\nfile = {:?}\n", file.display().to_string())).expect("a file");
    let end = stage.sh("exit 0").variable("MAINSTAY_AGENT_CONFIG", &config).start().end();
    end.assert_status(0);
    assert_eq!(troubles(&end), ["policy_failed"], "{end}");
}

#[test]
fn a_policy_ends_with_its_launcher() {
    let stage = Stage::new();
    let file = stage.work().join("mine.py");
    // It does not notice by itself that its launcher is gone, and neither does what it has started.
    let policy = "if os.fork() == 0:\n    os.setsid()\n    mark('daemon', os.getpid())\n    time.sleep(36000)\nmark('asleep')\ntime.sleep(36000)\n";
    std::fs::write(&file, format!("{BEGINS}{policy}")).expect("the policy is written");
    let job = stage.sh("work").variable("MAINSTAY_POLICY", &file).start();
    job.mark("asleep");
    let (policy, daemon) = (job.marked_pid("loaded.0"), job.marked_pid("daemon"));
    job.lose_launcher();
    processes::wait_until_gone(policy);
    processes::wait_until_gone(daemon);
}

#[test]
fn what_a_policy_does_in_threads_is_finished_before_the_job_ends() {
    let policy = r#"
def page():
    time.sleep(0.3)
    mark("paged")
def decide(case):
    threading.Thread(target=page).start()
    return Decision("hand_back", why="someone is paged")
"#;
    let stage = Stage::new();
    under(&stage, policy, FAILS_ONCE, "").assert_status(75);
    assert!(stage.marks().join("paged").exists());
}

#[test]
fn no_policy_restarts_beyond_the_budget() {
    let policy = "def decide(case):\n    return Decision('restart_in_job', why='again')\n";
    let end = under(&Stage::new(), policy, FAILS_ONCE, "--max-restarts 0");
    end.assert_status(9);
    assert_eq!(troubles(&end), ["policy_overruled"], "{end}");
}

#[test]
fn trouble_with_a_policy_is_on_the_screen_and_counted_while_the_job_runs() {
    let folder = testing::tempdir().expect("a folder");
    let file = folder.path().join("mine.py");
    std::fs::write(&file, format!("{BEGINS}def decide(case):\n    return case.verdct\n"))
        .expect("the policy is written");
    let stage = Stage::new();
    let script = r#"wait_for loaded.0; [ "$ATTEMPT" = 0 ] && exit 9; mark again; wait_for enough"#;
    let job = stage.sh(script).variable("MAINSTAY_POLICY", &file).start();
    job.mark("again");
    let screen = screen(&job);
    assert!(screen.contains("mine.py:"), "{screen}");
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
    format!("{BEGINS}def decide(case):\n    return Decision('hand_back', why='{words}')\n")
}

#[test]
fn the_hosts_policy_holds_for_jobs_that_bring_none() {
    let folder = testing::tempdir().expect("a folder");
    let (hosts, own, config) =
        (folder.path().join("hosts.py"), folder.path().join("own.py"), folder.path().join("agent.toml"));
    std::fs::write(&hosts, hands_back("as the site wants it")).expect("the policy is written");
    std::fs::write(&own, hands_back("as I want it")).expect("the policy is written");
    std::fs::write(&config, format!("[policy]\nfile = {:?}\n", hosts.display().to_string())).expect("a file");
    let stage = Stage::new();
    let of_the_host =
        stage.sh("wait_for loaded.0; exit 9").variable("MAINSTAY_AGENT_CONFIG", &config).start().end();
    of_the_host.assert_status(75);
    assert_eq!(reasons(&of_the_host), ["as the site wants it (hosts.py)"]);
    std::fs::remove_file(stage.marks().join("loaded.0")).expect("the mark");
    let plan = stage
        .sh("wait_for loaded.0; exit 9")
        .variable("MAINSTAY_AGENT_CONFIG", &config)
        .variable("MAINSTAY_POLICY", &own);
    let of_the_job = plan.start().end();
    of_the_job.assert_status(75);
    assert_eq!(reasons(&of_the_job), ["as I want it (own.py)"]);
}

#[test]
fn a_run_is_replayed_with_the_policy_that_decided_then() {
    let stage = Stage::new();
    let policy = stage.work().join("own.py");
    std::fs::write(&policy, hands_back("as I want it")).expect("the policy is written");
    let job = stage
        .sh("wait_for loaded.0; exit 9")
        .ranks(1)
        .options(&format!("--policy {}", policy.display()))
        .start();
    let run_dir = job.run_dir();
    let end = job.end();
    end.assert_status(75);
    let replay = |options: &[&str]| {
        let reported = Command::new(mainstay())
            .arg("replay")
            .arg(&run_dir)
            .args(options)
            .env("MARKS", stage.marks())
            .output();
        let reported = reported.expect("mainstay can be started");
        let text = [reported.stdout, reported.stderr].concat();
        (reported.status.code(), String::from_utf8_lossy(&text).into_owned())
    };
    let named = policy.display().to_string();
    let (status, reported) = replay(&["--policy", &named]);
    assert_eq!(status, Some(0), "{reported}{end}");
    testing::snapshot!("replay", "the user's policy decides as it did", stage.masked(&reported));
    let (status, reported) = replay(&[]);
    assert_eq!(status, Some(1), "{reported}{end}");
    testing::snapshot!("replay", "the built-in policy decides otherwise", stage.masked(&reported));
    std::fs::write(&policy, "def decide(case):\n    return case.verdct\n").expect("the policy is written");
    let (status, reported) = replay(&["--policy", &named]);
    assert!(status == Some(1) && reported.contains("own.py:2"), "{reported}");
    std::fs::write(&policy, "def decide(case\n").expect("the policy is written");
    let (status, reported) = replay(&["--policy", &named]);
    assert!(status != Some(0) && reported.contains("own.py"), "{reported}");
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

/// A rank that is killed at its fifth step, once, after the policy is loaded.
const KILLED_ONCE: &str = r#"
import mainstay
wait_for(os.environ["LOADED"])
for step in range(1, 10):
    time.sleep(0.01)
    mainstay.step(step)
    if ATTEMPT == 0 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
"#;

/// A policy that reports what it is given.
const KNOWN: &str = r#"
def decide(case):
    known = [f"{of.cause} {of.action} {of.helped}" for of in case.earlier]
    return Decision("stop", why="known: " + ", ".join(known))
"#;

#[test]
fn what_helped_in_one_run_is_known_to_the_policy_of_the_next() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let run = |number: u32, options: &str| {
        let plan = stage.python(KILLED_ONCE).variable("LOADED", format!("loaded.{number}"));
        plan.options(options).start().end()
    };
    stage.mark("loaded.0");
    run(0, "").assert_status(0);
    let policy = stage.script("mine.py", &format!("{BEGINS}{KNOWN}"));
    let with = format!("--policy {policy}");
    let known = |end: End| {
        end.assert_status(137);
        journal::decisions(&end.journal)[0].why.clone()
    };
    let second = known(run(1, &with));
    assert!(second.starts_with("known: signal restart_in_job 1.0 "), "{second}");
    let forgets = known(run(2, &format!("{with} --forget")));
    assert!(forgets.starts_with("known:  ("), "{forgets}");
    // The file was damaged.
    for file in std::fs::read_dir(stage.logs().join(".learned")).expect("what was learned") {
        std::fs::write(file.expect("a file").path(), "{\"version\":1,\"rungs\":7}").expect("our own file");
    }
    let end = run(3, &with);
    assert!(end.stderr.contains(".learned"), "the damaged file is named\n{end}");
    assert!(known(end).starts_with("known:  ("));
}

/// The Python scripts of the guide.
fn examples() -> Vec<String> {
    let mut scripts = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for line in include_str!("../../../docs/howto/policy.md").lines() {
        let text = line.trim_start();
        open = match open {
            None if text == "```python" => Some((line.len() - text.len(), String::new())),
            Some((_, script)) if text == "```" => {
                scripts.push(script);
                None
            }
            Some((indent, script)) => Some((indent, script + line.get(indent..).unwrap_or("") + "\n")),
            None => None,
        };
    }
    scripts
}

/// `mainstay policy` with these arguments, in the stage's working directory: its exit status, and what it printed.
fn policy_command(stage: &Stage, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(mainstay());
    let ended = command.arg("policy").args(arguments).current_dir(stage.work()).env("MARKS", stage.marks());
    let ended = ended.output().expect("mainstay can be started");
    let text = [ended.stdout, ended.stderr].concat();
    (ended.status.code(), String::from_utf8_lossy(&text).into_owned())
}

/// For each script of the guide: a case in which it decides, and one that it leaves to the built-in policy.
const CASES: [&str; 4] = [
    r#"
[[incident]]
name = "a hang of the network"
cause = { kind = "hang", hang = "network", place = "p" }
expect = "restart_in_job"
[[incident]]
name = "ranks that cannot be started"
cause = { kind = "start" }
expect = "stop"
"#,
    r#"
[[incident]]
name = "faulty hardware and a spare"
cause = { kind = "signal", signal = 6 }
domain = "hardware"
spares = 1
job = { actions = ["replace_host"] }
expect = "replace_host"
[[incident]]
name = "faulty hardware and no spare"
cause = { kind = "signal", signal = 6 }
domain = "hardware"
job = { actions = ["replace_host"] }
expect = "restart_in_job"
"#,
    r#"
[[incident]]
name = "a host that is not ready"
cause = { kind = "signal", signal = 9 }
held = ["a port"]
job = { actions = ["shrink"] }
expect = "shrink"
[[incident]]
name = "a host that is ready"
cause = { kind = "signal", signal = 9 }
job = { actions = ["shrink"] }
expect = "restart_in_job"
"#,
    r#"
[[incident]]
name = "faulty hardware"
cause = { kind = "signal", signal = 6 }
domain = "hardware"
expect = "hand_back"
[[incident]]
name = "a kill"
cause = { kind = "signal", signal = 9 }
expect = "restart_in_job"
"#,
];

#[test]
fn the_examples_of_the_guide_decide_as_they_say() {
    let stage = Stage::new();
    let scripts = examples();
    assert_eq!(scripts.len(), CASES.len());
    for (script, cases) in scripts.iter().zip(CASES) {
        std::fs::write(stage.work().join("mine.py"), script).expect("the policy is written");
        std::fs::write(stage.work().join("cases.toml"), cases).expect("its cases are written");
        let (status, printed) = policy_command(&stage, &["test", "mine.py", "--incidents", "cases.toml"]);
        assert_eq!(status, Some(0), "{script}{printed}");
        let (status, printed) = policy_command(&stage, &["check", "mine.py"]);
        assert_eq!(status, Some(0), "{script}{printed}");
    }
}

#[test]
fn the_example_that_pages_someone_does_so() {
    let stage = Stage::new();
    let [.., pages] = &examples()[..] else { panic!("there are examples") };
    // A signal alone shows no faulty hardware.
    let pages = pages.replace("\"hardware\"", "\"unknown\"");
    stage.script("page-on-call", "#!/bin/sh\nprintf %s \"$1\" > \"$MARKS/paged\"\n");
    let path = format!("{}:{}", stage.work().display(), std::env::var("PATH").expect("a search path"));
    let file = stage.work().join("mine.py");
    std::fs::write(&file, format!("{BEGINS}{}", pages.replace("from __future__ import annotations\n", "")))
        .expect("the policy is written");
    let script = "wait_for loaded.0; kill -9 $$";
    let end = stage.sh(script).variable("PATH", path).variable("MAINSTAY_POLICY", &file).start().end();
    end.assert_status(75);
    let paged = std::fs::read_to_string(stage.marks().join("paged")).expect("someone was paged");
    assert_eq!(paged, end.verdict().headline);
}

#[test]
fn the_template_and_sound_policies_are_told_from_broken_and_slow_ones() {
    let stage = Stage::new();
    let (status, template) = policy_command(&stage, &["show"]);
    assert_eq!(status, Some(0), "{template}");
    for (text, expected) in [
        (template.as_str(), 0),
        ("import time\ndef decide(case):\n    time.sleep(0.3)\n", 1),
        (
            "from mainstay.policy import Decision\ndef decide(case):\n    return Decision('wait', after=3601)\n",
            1,
        ),
        ("def decide(case):\n    return case.verdct\n", 2),
        ("def decide(case)\n", 2),
        ("def decide(first, second):\n    return None\n", 2),
    ] {
        std::fs::write(stage.work().join("mine.py"), text).expect("the policy is written");
        let (status, printed) = policy_command(&stage, &["check", "mine.py"]);
        assert_eq!(status, Some(expected), "{text}{printed}");
    }
    assert_eq!(policy_command(&stage, &["check", "missing.py"]).0, Some(2));
    assert_eq!(policy_command(&stage, &["check", "mine.star"]).0, Some(2));
}

#[test]
fn the_lines_on_which_a_policy_decides_are_explained() {
    let stage = Stage::new();
    std::fs::write(stage.work().join("mine.py"), &examples()[0]).expect("the policy is written");
    std::fs::write(stage.work().join("cases.toml"), CASES[0]).expect("its cases are written");
    let explain =
        ["explain", "mine.py", "--incidents", "cases.toml", "--name", "ranks that cannot be started"];
    let (status, printed) = policy_command(&stage, &explain);
    assert_eq!(status, Some(0), "{printed}");
    assert!(printed.contains("return None") && !printed.contains("return Decision"), "{printed}");
}
