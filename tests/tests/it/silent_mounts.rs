//! The user's file systems stop answering, one path after the other: the launcher sees deaths and hangs, restarts
//! what can be restarted, and ends when it is asked to.

use mainstay_model::entry::{Body, Fact};
use mainstay_model::finding::FindingKind;
use mainstay_tests::{Stage, has_client, is_root, journal, skipped};
use nix::sys::signal::Signal;
use std::path::Path;
use testing::served::ServedMount;
use testing::silent::{FreezableDisk, SilentMount};

use crate::words::terminal;

fn silent(at: &Path) -> Option<SilentMount> {
    let mount = if is_root() { SilentMount::over(at) } else { None };
    if mount.is_none() {
        skipped("no FUSE mount can be made here (root and /dev/fuse)");
    }
    mount
}

/// Two ranks that work forever in the first attempt and end at once in the next.
const WORKS: &str = r#"
mark "pid.$RANK.$ATTEMPT" $$
if [ $ATTEMPT = 0 ]; then work; fi
"#;

fn kill(pid: i32) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL).expect("the rank lives");
}

#[test]
fn a_rank_is_restarted_while_the_checkpoint_directory_does_not_answer() {
    let stage = Stage::new();
    let checkpoints = stage.home().join("checkpoints");
    std::fs::create_dir(&checkpoints).expect("a directory");
    let options = format!("--checkpoint-dir {}", checkpoints.display());
    let job = stage.sh(WORKS).ranks(2).options(&options).start();
    job.mark("pid.0.0");
    let pid = job.marked_pid("pid.1.0");
    let Some(mount) = silent(&checkpoints) else { return };
    kill(pid);
    job.mark("pid.0.1");
    job.mark("pid.1.1");
    let end = job.end();
    drop(mount);
    end.assert_status(0);
    assert_eq!(journal::restarts(&end.journal), 1, "{end}");
}

#[test]
fn a_rank_is_restarted_while_the_log_directory_does_not_answer_and_writes_elsewhere() {
    let stage = Stage::new();
    let job = stage.sh(&format!("{WORKS}\necho here\n")).ranks(2).start();
    job.mark("pid.0.0");
    let pid = job.marked_pid("pid.1.0");
    let Some(mount) = silent(&job.run_dir()) else { return };
    kill(pid);
    job.wait_until_printed(terminal::LOGS_SILENT);
    job.mark("pid.0.1");
    job.mark("pid.1.1");
    job.wait_until_printed(terminal::ENDED_WELL);
    drop(mount);
    let end = job.end();
    end.assert_status(0);
    assert_eq!(journal::restarts(&end.journal), 1, "{end}");
    let aside = stage.tmpfs();
    let written =
        std::process::Command::new("grep").args(["-rl", "here"]).arg(&aside).output().expect("grep");
    assert!(String::from_utf8_lossy(&written.stdout).contains("attempt_1/"), "{written:?}\n{end}");
}

#[test]
fn a_rank_is_restarted_while_the_journal_cannot_be_written_and_no_entry_is_lost() {
    let stage = Stage::new();
    let disk = if is_root() { FreezableDisk::over(&stage.logs()) } else { None };
    let Some(disk) = disk else {
        return skipped("no disk can be made and frozen here (root, mkfs.ext4, a loop device)");
    };
    let job = stage.sh(WORKS).ranks(2).start();
    job.mark("pid.0.0");
    let pid = job.marked_pid("pid.1.0");
    job.attempt(0);
    disk.freeze();
    kill(pid);
    job.mark("pid.0.1");
    job.mark("pid.1.1");
    disk.thaw();
    let end = job.end();
    end.assert_status(0);
    assert_eq!(journal::restarts(&end.journal), 1, "{end}");
    let numbers: Vec<u64> = end.journal.iter().map(|entry| entry.seq).collect();
    assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}\n{end}");
}

#[test]
fn a_hang_is_named_while_the_log_directory_does_not_answer() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
for step in range(80 if ATTEMPT == 0 else 5):
    time.sleep(0.005)
    if step == 60 and ATTEMPT == 0:
        mark("at")
        wait_for("hang")
        os.kill(os.getpid(), signal.SIGSTOP)
    mainstay.step(step)
"#;
    let job = stage.python(script).start();
    job.mark("at");
    let Some(mount) = silent(&job.run_dir()) else { return };
    stage.mark("hang");
    job.wait_until_printed("rank 0 hangs");
    job.wait_until_printed(terminal::ENDED_WELL);
    drop(mount);
    let end = job.end();
    end.assert_status(0);
    assert_eq!(journal::restarts(&end.journal), 1, "{end}");
}

#[test]
fn a_program_whose_directory_does_not_answer_is_not_waited_for() {
    let stage = Stage::new();
    let job = stage.sh(WORKS).ranks(2).start();
    job.mark("pid.0.0");
    let pid = job.marked_pid("pid.1.0");
    let Some(mount) = silent(&stage.work()) else { return };
    kill(pid);
    let error = job.wait_for("a start that fails", |entry| match &entry.body {
        Body::Fact(Fact::StartFailed { error, .. }) => Some(error.clone()),
        _ => None,
    });
    testing::snapshot!("silent_mounts", "the program's directory", stage.masked(&error));
    let end = job.end();
    drop(mount);
    end.assert_status(70);
}

#[test]
fn a_launcher_whose_log_directory_does_not_answer_ends_when_asked_to() {
    let stage = Stage::new();
    let Some(mount) = silent(&stage.logs()) else { return };
    let job = stage.sh(WORKS).start();
    let waits = || {
        let processes = mainstay_tests::processes::descendants(job.launcher());
        let channels =
            processes.iter().filter_map(|pid| std::fs::read_to_string(format!("/proc/{pid}/wchan")).ok());
        channels.into_iter().any(|channel| channel.contains("fuse"))
    };
    mainstay_tests::processes::wait_until("a process that waits for the directory", waits);
    job.signal(Signal::SIGTERM);
    assert!(job.has_ended(), "it waits for the directory");
    drop(mount);
    job.end().assert_status(143);
}

#[test]
fn a_job_restarts_and_ends_while_the_state_directory_of_the_agent_does_not_answer() {
    let stage = Stage::new();
    let state = stage.work().join("agent-state");
    std::fs::create_dir(&state).expect("a directory");
    let Some(mount) = (if is_root() { ServedMount::over(&state) } else { None }) else {
        return skipped("no FUSE mount can be made here (root and /dev/fuse)");
    };
    let agent = stage.agent();
    let job = stage.sh(WORKS).ranks(2).with(&agent).start();
    job.mark("pid.0.0");
    let pid = job.marked_pid("pid.1.0");
    job.wait_for_fact("the agent", |fact| matches!(fact, Fact::AgentFound { .. }));
    mount.stop_answering();
    kill(pid);
    job.mark("pid.0.1");
    job.mark("pid.1.1");
    let end = job.end();
    mount.answer_again();
    end.assert_status(0);
    assert_eq!(journal::restarts(&end.journal), 1, "{end}");
}

#[test]
fn a_launcher_ends_when_asked_to_while_a_watched_directory_does_not_answer() {
    let stage = Stage::new();
    let watched = stage.home().join("watched");
    std::fs::create_dir(&watched).expect("a directory");
    let options = format!("--checkpoint-watch {}", watched.display());
    let job = stage.sh(WORKS).ranks(2).options(&options).start();
    job.mark("pid.0.0");
    let pid = job.marked_pid("pid.1.0");
    job.attempt(0);
    let Some(mount) = silent(&watched) else { return };
    kill(pid);
    job.wait_for("the decision to restart", |entry| match &entry.body {
        Body::Decision(_) => Some(()),
        _ => None,
    });
    job.signal(Signal::SIGTERM);
    assert!(job.has_ended(), "it waits for the directory");
    drop(mount);
    job.end().assert_status(143);
}

/// Two ranks that save in each step into the launcher's memory.
const SAVES: &str = r#"
import mainstay
saved = mainstay.checkpoint.load()
first = 1 if saved is None else saved["step"] + 1
mark(f"from.{ATTEMPT}.{RANK}", first)
for step in range(first, 1_000_000):
    time.sleep(0.01)
    mainstay.step(step)
    if not mainstay.checkpoint.save(step, {"step": step, "x": bytes(100_000)}):
        mark(f"unsaved.{ATTEMPT}.{RANK}", step)
    if step == 10:
        mark(f"trains.{RANK}")
        wait_for("silent")
    if step == 40:
        mark(f"trained.{RANK}")
    if ATTEMPT > 0 and step >= first + 20:
        mark(f"trained-again.{RANK}")
"#;

#[test]
fn a_job_saves_and_restarts_from_memory_while_the_checkpoint_directory_does_not_answer() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let checkpoints = stage.home().join("checkpoints");
    std::fs::create_dir(&checkpoints).expect("a directory");
    let options = format!("--checkpoint-dir {}", checkpoints.display());
    let job = stage.python(SAVES).ranks(2).options(&options).start();
    job.mark("trains.0");
    job.mark("trains.1");
    let Some(mount) = silent(&checkpoints) else { return };
    stage.mark("silent");
    job.mark("trained.0");
    job.mark("trained.1");
    job.kill_rank(0, 1);
    for rank in [0, 1] {
        let from: u64 = job.mark(&format!("from.1.{rank}")).parse().expect("a step");
        assert!(from > 40, "rank {rank} goes on from the newest step in memory, not from {from}");
    }
    job.mark("trained-again.0");
    job.mark("trained-again.1");
    job.wait_for("what does not answer", |entry| match &entry.body {
        Body::Finding(finding) if finding.what == FindingKind::SilentFileSystem => Some(()),
        _ => None,
    });
    job.signal(Signal::SIGTERM);
    assert!(job.has_ended(), "it waits for the directory");
    let unsaved = stage.marks().join("unsaved.0.0");
    assert!(!unsaved.exists(), "memory served");
    drop(mount);
    // The launcher could not remove the group of ranks that nothing could kill.
    let is_removed = || {
        let groups = mainstay_tests::processes::cgroups_of(job.id());
        groups.iter().filter(|group| std::fs::remove_dir(group).is_err()).count() == 0
    };
    mainstay_tests::processes::wait_until("the control group is empty", is_removed);
    job.end().assert_status(143);
}

#[test]
fn ranks_are_started_while_a_write_into_the_checkpoint_directory_is_not_answered() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let checkpoints = stage.home().join("checkpoints");
    std::fs::create_dir(&checkpoints).expect("a directory");
    let Some(mount) = (if is_root() { ServedMount::over(&checkpoints) } else { None }) else {
        return skipped("no FUSE mount can be made here (root and /dev/fuse)");
    };
    mount.stop_answering_at_a_write();
    // Without a template, the launcher itself starts the ranks, and they get its descriptors.
    let options = format!("--no-warm --checkpoint-dir {}", checkpoints.display());
    let job = stage.python(SAVES).ranks(2).options(&options).start();
    job.mark("trains.0");
    job.mark("trains.1");
    assert!(mount.has_stopped(), "nothing was written");
    stage.mark("silent");
    job.mark("trained.0");
    job.mark("trained.1");
    job.kill_rank(0, 1);
    job.mark("trained-again.0");
    job.mark("trained-again.1");
    mount.answer_again();
    job.signal(Signal::SIGTERM);
    job.end().assert_status(143);
}
