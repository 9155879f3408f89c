//! Processes that a rank starts end with it: workers, helpers that left its process group, grandchildren. All of
//! them end with the launcher, however that ends.

#![allow(clippy::expect_used, reason = "in a test, a panic is the report")]

use std::collections::BTreeMap;

use mainstay_model::entry::Fact;
use mainstay_tests::{Job, Plan, Stage, is_root, journal, processes, skipped};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Each rank of the first attempt has a worker, a helper in a separate session and a grandchild whose parent is
/// gone; all of them ignore SIGTERM.
const WITH_CHILDREN: &str = r#"
    [ "$ATTEMPT" = 1 ] && exit 0
    deaf() { trap '' TERM HUP INT; mark "$1.$RANK" "$(exec sh -c 'echo $PPID')"; work; }
    deaf worker &
    setsid sh -c 'trap "" TERM HUP INT; echo $$ > "$MARKS/.h$RANK"; mv "$MARKS/.h$RANK" "$MARKS/helper.$RANK"
                  while :; do sleep 0.02; done' &
    ( deaf grandchild & )
    mark "ready.$RANK"
    work"#;

const NAMES: [&str; 3] = ["worker", "helper", "grandchild"];

#[test]
fn what_a_killed_rank_started_is_gone_before_the_ranks_start_again() {
    let stage = Stage::new();
    gone_before_the_restart(stage.sh(WITH_CHILDREN));
}

#[test]
fn the_same_without_control_groups() {
    let Some(without) = without_control_groups() else { return };
    let stage = Stage::new();
    gone_before_the_restart(stage.sh(WITH_CHILDREN).under(&without));
    let stage = Stage::new();
    gone_with_the_launcher(stage.sh(WITH_CHILDREN).under(&without));
}

/// A launcher that finds no control groups, as in most containers and for most users.
fn without_control_groups() -> Option<[&'static str; 5]> {
    let without = ["unshare", "-m", "sh", "-c", r#"umount -a -t cgroup2 && exec "$0" "$@""#];
    let tried = std::process::Command::new(without[0]).args(&without[1..]).arg("true").output();
    if !is_root() || !tried.is_ok_and(|tried| tried.status.success()) {
        skipped("only root can hide the control groups in a namespace of its own");
        return None;
    }
    Some(without)
}

fn gone_before_the_restart(plan: Plan<'_>) {
    let job = plan.ranks(2).options("--fault-timeout 0.3s").start();
    let pids = children(&job);
    job.kill_rank(0, 1);
    job.attempt(1);
    for pid in pids {
        assert!(!processes::is_alive(pid), "left at the restart: {}", processes::reported(pid));
    }
    let end = job.end();
    end.assert_status(0);
    let killed: u32 = journal::facts(&end.journal)
        .filter_map(|fact| match fact {
            Fact::AttemptEnded { orphans_killed, .. } => Some(*orphans_killed),
            _ => None,
        })
        .sum();
    assert!(killed > 0, "the journal tells of the orphans\n{end}");
}

#[test]
fn what_ranks_leave_behind_at_the_end_is_given_its_time_and_then_ended() {
    let stage = Stage::new();
    let script = r#"
        ( trap 'mark "wrote.$RANK"; exit 0' TERM; mark "child.$RANK"; work ) &
        wait_for "child.$RANK"
        exit 0"#;
    let job = stage.sh(script).ranks(2).start();
    let marks = stage.marks();
    job.end().assert_status(0);
    for rank in 0..2 {
        assert!(marks.join(format!("wrote.{rank}")).exists(), "the child of rank {rank} was asked to end");
    }
}

#[test]
fn nothing_outlives_a_launcher_that_is_stopped() {
    let stage = Stage::new();
    let job = stage.sh(WITH_CHILDREN).ranks(2).options("--shutdown-timeout 0.3s").start();
    children(&job);
    job.signal(Signal::SIGTERM);
    job.end().assert_status(143);
}

#[test]
fn nothing_outlives_a_launcher_that_is_killed_not_even_the_guardian() {
    let stage = Stage::new();
    gone_with_the_launcher(stage.sh(WITH_CHILDREN));
}

fn gone_with_the_launcher(plan: Plan<'_>) {
    let job = plan.ranks(2).start();
    let mut pids = children(&job);
    pids.extend(job.attempt(0).pids.values());
    let guardian = processes::of_job(job.id()).into_iter().find(|pid| !pids.contains(pid));
    pids.extend(guardian);
    let id = job.kill_launcher();
    for pid in pids {
        processes::wait_until_gone(pid);
    }
    // The kernel may hold a control group for a moment after its last process is gone.
    processes::wait_until("the guardian to remove the job's control group", || {
        processes::cgroups_of(&id).is_empty()
    });
}

#[test]
fn ranks_die_with_the_launcher_even_without_the_guardian() {
    let stage = Stage::new();
    let job = stage.sh("mark ready.$RANK; trap '' TERM HUP; exec sleep 36000").ranks(2).start();
    job.mark("ready.0");
    job.mark("ready.1");
    let ranks = job.attempt(0).pids;
    kill_guardian(&job, &ranks);
    let id = job.kill_launcher();
    for pid in ranks.values() {
        processes::wait_until_gone(*pid);
    }
    // No process is left that could remove them.
    for cgroup in processes::cgroups_of(&id) {
        std::fs::remove_dir(cgroup).expect("it is empty");
    }
}

#[test]
fn a_job_whose_guardian_was_killed_recovers_like_any_other_and_leaves_no_zombies() {
    let stage = Stage::new();
    let script = r#"mark "up.$RANK.$ATTEMPT"
        ( exec sh -c 'sleep 0.01' & )
        wait_for "end.$ATTEMPT""#;
    let job = stage.sh(script).ranks(2).start();
    job.mark("up.1.0");
    kill_guardian(&job, &job.attempt(0).pids);
    processes::wait_until("the launcher has no children but the ranks", || {
        processes::children(job.launcher()).len() == 2
    });
    job.kill_rank(0, 1);
    job.mark("up.0.1");
    stage.mark("end.1");
    let end = job.end();
    end.assert_status(0);
    assert_eq!(end.summary().attempts, 2, "{end}");
}

#[test]
fn other_jobs_and_processes_beside_them_are_left_alone() {
    let stage = Stage::new();
    let bystander = stage.sh("mark bystander; wait_for end").start();
    bystander.mark("bystander");
    let job = stage.sh(WITH_CHILDREN).ranks(2).options("--fault-timeout 0.3s").start();
    children(&job);
    job.kill_rank(0, 0);
    job.end().assert_status(0);
    let other = stage.sh("mark other.$RANK; work").ranks(2).start();
    other.mark("other.1");
    other.kill_launcher();
    stage.mark("end");
    let end = bystander.end();
    end.assert_status(0);
    assert_eq!(end.summary().attempts, 1, "{end}");
}

fn children(job: &Job) -> Vec<i32> {
    let ready = (0..2).flat_map(|rank| NAMES.map(|name| format!("{name}.{rank}")));
    ready.map(|name| job.marked_pid(&name)).collect()
}

/// The guardian is the one process of a job that is no rank and was not started by one.
fn kill_guardian(job: &Job, ranks: &BTreeMap<u32, i32>) {
    let children = processes::children(job.launcher());
    // Its argument is the launch, whose name starts with the run id.
    let mark = format!("MAINSTAY_LAUNCH={}~", job.id());
    let is_guardian =
        |pid: &i32| !ranks.values().any(|rank| rank == pid) && processes::reported(*pid).contains(&mark);
    let guardian = children.into_iter().find(is_guardian).expect("a guardian");
    kill(Pid::from_raw(guardian), Signal::SIGKILL).expect("it lives");
    processes::wait_until_gone(guardian);
}
