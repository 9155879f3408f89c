//! Roles of one job: each has a world and restarts of its own, and no failure of one reaches another.

use std::fs;
use std::path::{Path, PathBuf};

use mainstay_model::entry::{Entry, Fact};
use mainstay_model::verdict::Cause;
use mainstay_tests::{Job, Stage, Waiting, has_client, journal, processes};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// Each rank leaves its process id and counts its steps until the test ends it.
const STEPS: &str = r#"
mark "$ROLE_NAME.$RANK.$ATTEMPT" $$
mark "world.$ROLE_NAME" "$WORLD_SIZE $MASTER_PORT"
mark "launcher.$ROLE_NAME" $PPID
step=0
while [ ! -e "$MARKS/end" ]; do
    step=$((step + 1))
    mark "step.$ROLE_NAME.$RANK" $step
    sleep 0.02
done"#;

fn id_of(job: &Job, role: &str) -> String {
    format!("{}.{role}", job.id())
}

fn journal_of(stage: &Stage, job: &Job, role: &str) -> Vec<Entry> {
    journal::read(&stage.logs().join(id_of(job, role)).join("journal"))
}

/// The port and process ids of each attempt.
fn attempts(journal: &[Entry]) -> Vec<(u16, Vec<i32>)> {
    let started = journal::facts(journal).filter_map(|fact| match fact {
        Fact::AttemptStarted { master_port, ranks, .. } => {
            Some((*master_port, ranks.iter().map(|rank| rank.pid.0).collect()))
        }
        _ => None,
    });
    started.collect()
}

/// Waits for a state of a role, as other roles see it, and returns it.
fn wait_for_state(stage: &Stage, job: &Job, role: &str, is: impl Fn(&Value) -> bool) -> Value {
    let directory: PathBuf = stage.tmpfs().join(job.id());
    let file = directory.join(format!("{role}.json"));
    let waiting = Waiting { directories: vec![stage.tmpfs(), directory], process: None };
    let read = || serde_json::from_slice::<Value>(&fs::read(&file).ok()?).ok().filter(|state| is(state));
    waiting.until(read).unwrap_or_else(|failed| panic!("{role}: {failed:?}\n{}", job.printed()))
}

/// Waits until a rank has done more steps than now.
fn wait_for_a_step(stage: &Stage, job: &Job, rank: &str) {
    let steps = || -> Option<u64> {
        fs::read_to_string(stage.marks().join(format!("step.{rank}"))).ok()?.parse().ok()
    };
    let before = steps();
    let waiting = Waiting { directories: vec![stage.marks()], process: None };
    let goes_on = || steps().filter(|now| Some(*now) > before);
    waiting.until(goes_on).unwrap_or_else(|failed| panic!("{rank}: {failed:?}\n{}", job.printed()));
}

fn pid_of(job: &Job, mark: &str) -> Pid {
    Pid::from_raw(job.marked_pid(mark))
}

#[test]
fn a_killed_rank_of_a_role_restarts_that_role_and_disturbs_no_other() {
    let stage = Stage::new();
    let job = stage.sh(STEPS).roles(&["trainer=2", "rollout=2"]).start();
    for role in ["trainer", "rollout"] {
        (0..2).for_each(|rank| drop(job.mark(&format!("{role}.{rank}.0"))));
    }
    kill(pid_of(&job, "rollout.1.0"), Signal::SIGKILL).expect("the rank lives");
    job.mark("rollout.0.1");
    job.mark("rollout.1.1");
    wait_for_a_step(&stage, &job, "trainer.0");
    wait_for_a_step(&stage, &job, "trainer.1");
    assert_eq!(attempts(&journal_of(&stage, &job, "trainer")).len(), 1);
    kill(pid_of(&job, "trainer.0.0"), Signal::SIGKILL).expect("the rank lives");
    job.mark("trainer.0.1");
    job.mark("trainer.1.1");
    wait_for_a_step(&stage, &job, "rollout.0");
    let state = wait_for_state(&stage, &job, "trainer", |state| state["incarnation"] == 2);
    assert_eq!(state["exit"], Value::Null, "{state}");
    stage.mark("end");
    assert!(job.has_ended());

    let journals = ["trainer", "rollout"].map(|role| journal_of(&stage, &job, role));
    let mut ports = Vec::new();
    for journal in &journals {
        let started = attempts(journal);
        assert_eq!(started.len(), 2, "{}", journal::reported(journal));
        ports.extend(started.into_iter().map(|(port, _)| port));
        let verdicts = journal::verdicts(journal);
        assert!(
            verdicts.iter().all(|of| of.cause == Cause::Signal { signal: 9 }),
            "{}",
            journal::reported(journal)
        );
        assert_eq!(journal::restarts(journal), 1, "{}", journal::reported(journal));
    }
    ports.sort_unstable();
    ports.dedup();
    assert_eq!(ports.len(), 4, "each role has its own port in each attempt");
    assert!(job.mark("world.rollout").starts_with("2 "));
    assert_eq!(job.end().status, 0);
}

#[test]
fn a_role_that_is_never_restarted_ends_without_the_job_and_the_first_role_ends_it() {
    let stage = Stage::new();
    let script =
        r#"mark "$ROLE_NAME.$ATTEMPT" $$; [ "$ROLE_NAME" = trainer ] && wait_for end && exit 6; work"#;
    let job = stage.sh(script).roles(&["trainer=1", "rollout=1,restart=never", "reward=1"]).start();
    job.mark("reward.0");
    kill(pid_of(&job, "rollout.0"), Signal::SIGKILL).expect("the rank lives");
    let state = wait_for_state(&stage, &job, "rollout", |state| state["state"] == "ENDED");
    assert_eq!((&state["exit"], &state["incarnation"]), (&Value::from(137), &Value::from(1)));
    assert!(
        processes::is_alive(job.marked_pid("trainer.0")) && processes::is_alive(job.marked_pid("reward.0"))
    );
    stage.mark("end");
    assert!(job.has_ended());
    assert_eq!(attempts(&journal_of(&stage, &job, "rollout")).len(), 1);
    assert_eq!(processes::of_job(&id_of(&job, "reward")), Vec::<i32>::new());
    assert_eq!(job.end().status, 6);
}

#[test]
fn a_role_that_is_always_restarted_gives_up_when_its_restarts_are_used_up() {
    let stage = Stage::new();
    let script = r#"case $ROLE_NAME in trainer) wait_for end;; fails) exit 5;; esac"#;
    let always = "restart=always,max=2,backoff=10ms";
    let roles = ["trainer=1".to_owned(), format!("ends=1,{always}"), format!("fails=1,{always}")];
    let job = stage.sh(script).roles(&roles.each_ref().map(String::as_str)).start();
    for (role, exit) in [("ends", 0), ("fails", 5)] {
        let state = wait_for_state(&stage, &job, role, |state| state["state"] == "ENDED");
        assert_eq!((&state["exit"], &state["incarnation"]), (&Value::from(exit), &Value::from(3)), "{role}");
    }
    stage.mark("end");
    assert_eq!(job.end().assert_status(0).lines(&["role", "used up"]).len(), 2);
}

#[test]
fn a_role_whose_launcher_is_killed_is_started_again() {
    let stage = Stage::new();
    let job = stage.sh(STEPS).roles(&["trainer=1", "rollout=1,backoff=10ms"]).start();
    job.mark("trainer.0.0");
    job.mark("rollout.0.0");
    kill(pid_of(&job, "launcher.rollout"), Signal::SIGKILL).expect("the launcher lives");
    wait_for_state(&stage, &job, "rollout", |state| state["incarnation"] == 2);
    wait_for_a_step(&stage, &job, "trainer.0");
    stage.mark("end");
    job.end().assert_status(0);
}

#[test]
fn a_role_that_was_asked_to_stop_is_not_started_again() {
    let stage = Stage::new();
    let job = stage.sh(STEPS).roles(&["trainer=1", "rollout=1,restart=always,backoff=10ms"]).start();
    job.mark("trainer.0.0");
    job.mark("rollout.0.0");
    kill(pid_of(&job, "launcher.rollout"), Signal::SIGTERM).expect("the launcher lives");
    let state = wait_for_state(&stage, &job, "rollout", |state| !state["exit"].is_null());
    assert_eq!((&state["state"], &state["incarnation"]), (&Value::from("ENDED"), &Value::from(1)));
    wait_for_a_step(&stage, &job, "trainer.0");
    stage.mark("end");
    job.end().assert_status(0);
}

#[test]
fn a_signal_ends_all_roles_with_the_status_of_the_first() {
    let stage = Stage::new();
    let job = stage.sh(STEPS).roles(&["trainer=2", "rollout=1"]).start();
    ["trainer.0.0", "trainer.1.0", "rollout.0.0"].iter().for_each(|mark| drop(job.mark(mark)));
    job.signal(Signal::SIGTERM);
    assert!(job.has_ended());
    for role in ["trainer", "rollout"] {
        assert_eq!(processes::of_job(&id_of(&job, role)), Vec::<i32>::new());
    }
    assert!(!stage.tmpfs().join(job.id()).exists(), "the states of the roles are left");
    job.end().assert_status(143);
}

#[test]
fn no_rank_is_left_of_a_killed_job_of_roles() {
    let stage = Stage::new();
    let job = stage.sh(STEPS).roles(&["trainer=1", "rollout=1"]).start();
    job.mark("trainer.0.0");
    job.mark("rollout.0.0");
    job.signal(Signal::SIGKILL);
    assert!(job.has_ended());
    ["trainer", "rollout"].iter().for_each(|role| processes::wait_until_none_of(&id_of(&job, role)));
}

#[test]
fn the_programs_of_the_documents_go_on_after_a_kill() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/howto/roles.md");
    let page = fs::read_to_string(page).expect("a page");
    let programs = page.split("```python\n").skip(1).filter_map(|block| block.split("```").next());
    for (program, name) in programs.zip(["rollout.py", "train.py"]) {
        fs::write(stage.work().join(name), program).expect("a program");
    }
    let roles = ["--role", "trainer=1:train.py", "--role", "rollout=2,restart=always:rollout.py"];
    let job = stage.command(&roles).start();
    let trainer = stage.logs().join(id_of(&job, "trainer")).join("attempt_0/0");
    let directories = vec![stage.logs(), stage.logs().join(id_of(&job, "trainer")), trainer.clone()];
    let wait_for_incarnation = |number: u32| {
        let waiting = Waiting { directories: directories.clone(), process: None };
        let sent = || {
            let printed = fs::read_to_string(trainer.join("stdout.log")).unwrap_or_default();
            printed.contains(&format!("to incarnation {number}\n")).then_some(())
        };
        waiting.until(sent).unwrap_or_else(|failed| panic!("{failed:?}\n{}", job.printed()));
    };
    wait_for_incarnation(1);
    let rollouts = attempts(&journal_of(&stage, &job, "rollout"));
    let rank = rollouts.first().and_then(|(_, ranks)| ranks.get(1)).expect("a rank");
    kill(Pid::from_raw(*rank), Signal::SIGKILL).expect("the rank lives");
    wait_for_incarnation(2);
    assert_eq!(attempts(&journal_of(&stage, &job, "trainer")).len(), 1);
    job.signal(Signal::SIGTERM);
    job.end().assert_status(143);
}

#[test]
fn what_is_wrong_with_a_role_is_reported_before_any_starts() {
    let stage = Stage::new();
    for (role, named) in
        [("rollout=0", "--nproc-per-node"), ("rollout=1,hang=maybe", "--hang"), ("trainer=1", "twice")]
    {
        let end = stage.sh("exit 0").roles(&["trainer=1", role]).start().end();
        end.assert_status(64).line(&["--role", named]);
    }
}
