//! The log directory is on a file system that is served by a process, which may stop answering: FUSE, and in the same
//! way a network file system.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use mainstay_model::entry::{Body, Fact};
use mainstay_tests::processes::{self, wait_until};
use mainstay_tests::{Stage, is_root, journal, mainstay, skipped};
use nix::sys::signal::Signal;
use serde_json::Value;
use testing::served::ServedMount;

use crate::words::terminal;

fn served(stage: &Stage) -> Option<ServedMount> {
    let mount = if is_root() { ServedMount::over(&stage.logs()) } else { None };
    if mount.is_none() {
        skipped("no FUSE mount can be made here (root and /dev/fuse)");
    }
    mount
}

/// The local directories of mirrors that have not ended.
fn local(stage: &Stage) -> Vec<PathBuf> {
    let entries = fs::read_dir(stage.tmpfs()).into_iter().flatten().flatten();
    let is_local =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("logs-"));
    entries.map(|entry| entry.path()).filter(is_local).collect()
}

/// What a command prints about a run.
fn asked(stage: &Stage, arguments: &[&str]) -> String {
    let mut command = Command::new(mainstay());
    let answered = command.args(arguments).env("HOME", stage.home()).output().expect("it runs");
    String::from_utf8_lossy(&answered.stdout).into_owned()
}

#[test]
fn a_job_that_ended_has_all_its_logs_in_the_log_directory() {
    let stage = Stage::new();
    let Some(mount) = served(&stage) else { return };
    let script = r#"
echo rank $RANK of attempt $ATTEMPT
mark "printed.$RANK.$ATTEMPT"
if [ $ATTEMPT = 0 ]; then wait_for printed.0.0; wait_for printed.1.0; exit 3; fi
"#;
    let end = stage.sh(script).ranks(2).start().end();
    end.assert_status(0);
    assert_eq!(local(&stage), Vec::<PathBuf>::new(), "{end}");
    for (attempt, rank) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        assert_eq!(
            end.output(attempt, rank, "stdout"),
            format!("rank {rank} of attempt {attempt}\n"),
            "{end}"
        );
    }
    assert!(end.journal.iter().any(|entry| matches!(entry.body, Body::Fact(Fact::JobEnded { .. }))), "{end}");
    assert_eq!(end.summary().attempts, 2, "{end}");
    let log = fs::read_to_string(end.run_dir.join("launcher.log")).expect("it is copied");
    assert!(log.contains(terminal::ENDED_WELL), "{log}");
    let run = end.run_dir.display().to_string();
    let of_run = |arguments: &[&str]| -> Value {
        serde_json::from_str(&asked(&stage, arguments)).expect("JSON, and no error")
    };
    assert_eq!(of_run(&["explain", &run, "--json"])["run"], run.as_str());
    assert_eq!(of_run(&["attribute", "--logs", &run, "--json"])["class"], "unknown");
    drop(mount);
}

/// Two ranks that work forever in the first attempt, and in the next print and end when they may.
const WORKS: &str = r#"
mark "pid.$RANK.$ATTEMPT" $$
if [ $ATTEMPT = 0 ]; then work; fi
echo here
wait_for end
"#;

#[test]
fn ranks_and_launcher_end_while_the_log_directory_does_not_answer_and_the_logs_are_whole_later() {
    let stage = Stage::new();
    let Some(mount) = served(&stage) else { return };
    let checkpoints = format!("--checkpoint-dir {}", stage.home().join("checkpoints").display());
    let job = stage.sh(WORKS).ranks(2).options(&checkpoints).start();
    job.mark("pid.0.0");
    let pid = job.marked_pid("pid.1.0");
    let started = job.attempt(0);
    mount.stop_answering();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL).expect("the rank lives");
    job.mark("pid.0.1");
    job.mark("pid.1.1");
    job.wait_until_printed(terminal::LOGS_ARE_KEPT);
    stage.mark("end");
    job.wait_until_printed(terminal::LOGS_NOT_COMPLETE);
    assert!(job.has_ended(), "it waits for the log directory");
    for pid in started.pids.values() {
        assert!(!processes::is_alive(*pid), "{}", processes::reported(*pid));
    }
    assert_eq!(local(&stage).len(), 1);
    mount.answer_again();
    wait_until("all is copied", || local(&stage).is_empty());
    let end = job.end();
    end.assert_status(0);
    assert_eq!(journal::restarts(&end.journal), 1, "{end}");
    assert!(end.journal.windows(2).all(|pair| pair[1].seq == pair[0].seq + 1), "{end}");
    for rank in [0, 1] {
        assert_eq!(end.output(1, rank, "stdout"), "here\n", "{end}");
    }
    assert!(end.summary.is_some(), "{end}");
}

#[test]
fn a_launcher_ends_when_asked_to_while_the_log_directory_does_not_answer() {
    let stage = Stage::new();
    let Some(mount) = served(&stage) else { return };
    let checkpoints = format!("--checkpoint-dir {}", stage.home().join("checkpoints").display());
    let job = stage.sh(WORKS).ranks(2).options(&checkpoints).start();
    job.attempt(0);
    mount.stop_answering();
    job.signal(Signal::SIGTERM);
    job.wait_until_printed(terminal::LOGS_NOT_COMPLETE);
    assert!(job.has_ended(), "it waits for the log directory");
    mount.answer_again();
    wait_until("all is copied", || local(&stage).is_empty());
    job.end().assert_status(143);
}

#[test]
fn the_logs_of_a_launcher_that_was_killed_are_copied() {
    let stage = Stage::new();
    let Some(mount) = served(&stage) else { return };
    let job = stage.sh("echo here\nmark \"there.$RANK\"\nwork\n").start();
    let (logs, id) = (stage.logs(), job.id().to_owned());
    job.mark("there.0");
    mount.stop_answering();
    job.kill_launcher();
    mount.answer_again();
    wait_until("all is copied", || local(&stage).is_empty());
    let output = fs::read_to_string(logs.join(id).join("attempt_0/0/stdout.log")).expect("it is copied");
    assert_eq!(output, "here\n");
}
