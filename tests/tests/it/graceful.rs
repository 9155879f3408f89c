//! A job that must end soon: its ranks save their state, all after the same step, and end by themselves.

use mainstay_model::entry::{Body, ExitStatus, Fact};
use mainstay_recovery::job::{ORDERS, SAVE_ORDERED};
use mainstay_tests::{End, Stage, has_client, journal};
use nix::sys::signal::Signal;

/// Trains until it is asked to save, and then leaves the step as a mark. SIGTERM would end it before.
const SAVES: &str = r#"
import mainstay
for step in range(1, 1_000_000):
    time.sleep(0.002 if RANK else 0.001)
    mainstay.step(step)
    if step == 20:
        mark(f"trains.{RANK}")
    if mainstay.save_requested():
        left = mainstay.save_within()
        assert 0 < left <= 25, left
        mark(f"saved.{RANK}", step)
        break
"#;

#[test]
fn ranks_that_ask_save_after_the_same_step_and_end_by_themselves() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let job = stage.python(SAVES).ranks(2).start();
    job.mark("trains.0");
    job.mark("trains.1");
    job.signal(Signal::SIGTERM);
    let end = job.end();
    end.assert_status(143);
    let saved = [0, 1].map(|rank| std::fs::read_to_string(stage.marks().join(format!("saved.{rank}"))));
    let saved = saved.map(|step| step.expect("the rank saved"));
    assert_eq!(saved[0], saved[1], "{end}");
    for rank in [0, 1] {
        assert_eq!(journal::exits(&end.journal, rank), [ExitStatus::Code(0)], "{end}");
    }
    assert!(!journal::facts(&end.journal).any(|fact| matches!(fact, Fact::RankRaised { .. })));
}

/// Trains until a save is due. Saves that cost almost nothing are soon due again.
const DUE: &str = r#"
import mainstay
for step in range(1, 1_000_000):
    time.sleep(0.01)
    mainstay.step(step)
    if step <= 5:
        with mainstay.section("checkpoint"):
            pass
    if mainstay.checkpoint.due():
        mark(f"due.{RANK}", step)
        break
"#;

#[test]
fn ranks_learn_that_a_save_is_due_by_the_costs_of_saves_and_failures() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let end = stage.python(DUE).ranks(2).start().end();
    end.assert_status(0);
    for rank in [0, 1] {
        assert!(stage.marks().join(format!("due.{rank}")).exists(), "{end}");
    }
    let advised = journal::facts(&end.journal)
        .any(|fact| matches!(fact, Fact::Observed(seen) if seen.event == "interval_advised"));
    assert!(advised, "{end}");
}

#[test]
fn a_function_that_was_registered_is_called_once_within_a_step() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
def save():
    mark("called", mainstay.save_requested())
    raise SystemExit(7)
mainstay.on_save_request(save)
mark("up")
for step in range(1, 1_000_000):
    time.sleep(0.001)
    mainstay.step(step)
"#;
    let job = stage.python(script).start();
    job.mark("up");
    job.signal(Signal::SIGTERM);
    let end = job.end();
    end.assert_status(143);
    assert_eq!(std::fs::read_to_string(stage.marks().join("called")).expect("a mark"), "True");
    assert_eq!(journal::exits(&end.journal, 0), [ExitStatus::Code(7)], "{end}");
}

#[test]
fn a_rank_that_asks_and_does_not_end_in_time_is_terminated() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
mainstay.save_requested()
mainstay.step(1)
mark("up")
signal.pause()
"#;
    let job = stage.python(script).options("--shutdown-timeout 1s").start();
    job.mark("up");
    job.signal(Signal::SIGTERM);
    let end = job.end();
    end.assert_status(143);
    assert_eq!(journal::exits(&end.journal, 0), [ExitStatus::Signal(15)], "{end}");
}

#[test]
fn ranks_that_never_ask_get_the_signal_at_once() {
    let stage = Stage::new();
    let job =
        stage.sh(r#"trap 'mark told; exit 3' TERM; mark up; work"#).options("--shutdown-timeout 1h").start();
    job.mark("up");
    job.signal(Signal::SIGTERM);
    let end = job.end();
    end.assert_status(143);
    assert!(stage.marks().join("told").exists());
    assert_eq!(journal::exits(&end.journal, 0), [ExitStatus::Code(3)], "{end}");
}

#[test]
fn the_signal_that_the_user_named_comes_with_the_request() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
def save(number, frame):
    mark("told", mainstay.save_requested())
    sys.exit(0)
signal.signal(signal.SIGUSR1, save)
mainstay.save_requested()
mark("up")
while True:
    time.sleep(0.01)
"#;
    let job = stage.python(script).options("--save-signal SIGUSR1").start();
    job.mark("up");
    job.signal(Signal::SIGTERM);
    let end = job.end();
    end.assert_status(143);
    assert_eq!(std::fs::read_to_string(stage.marks().join("told")).expect("a mark"), "True");
}

/// Saves for as long as it takes the launcher to get the signals.
const SAVES_SLOWLY: &str = r#"
import mainstay
for step in range(1, 1_000_000):
    time.sleep(0.002)
    mainstay.step(step)
    if step == 20:
        mark(f"trains.{RANK}")
    if mainstay.save_requested():
        mark(f"saves.{RANK}")
        wait_for("signalled")
        mark(f"saved.{RANK}", step)
        break
"#;

#[test]
fn ranks_save_at_a_time_limit_of_slurm_which_sends_sigterm_twice() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let job = stage.python(SAVES_SLOWLY).ranks(2).start();
    job.mark("trains.0");
    job.mark("trains.1");
    job.signal(Signal::SIGTERM);
    // slurmstepd waits 3 ms, in which a busy launcher has not read the first: both would be one.
    job.wait_for("the request", |entry| match &entry.body {
        Body::Fact(Fact::StopRequested { .. }) => Some(()),
        _ => None,
    });
    job.signal(Signal::SIGCONT);
    job.signal(Signal::SIGTERM);
    job.mark("saves.0");
    job.wait_until_printed("SIGTERM again");
    stage.mark("signalled");
    let end = job.end();
    end.assert_status(143);
    for rank in [0, 1] {
        assert_eq!(journal::exits(&end.journal, rank), [ExitStatus::Code(0)], "{end}");
        assert!(stage.marks().join(format!("saved.{rank}")).exists(), "{end}");
    }
}

fn save_orders(end: &End) -> usize {
    let is_one = |fact: &&Fact| match fact {
        Fact::Observed(seen) => seen.component == ORDERS && seen.event == SAVE_ORDERED,
        _ => false,
    };
    journal::facts(&end.journal).filter(is_one).count()
}

#[test]
fn a_signal_to_save_stops_no_rank_that_does_not_check_for_requests() {
    for signal in [Signal::SIGUSR1, Signal::SIGUSR2] {
        let stage = Stage::new();
        let job = stage.sh(r#"mark up; wait_for end"#).start();
        job.mark("up");
        job.signal(signal);
        job.wait_until_printed("mainstay.save_requested()");
        stage.mark("end");
        let end = job.end();
        end.assert_status(0);
        assert_eq!(save_orders(&end), 0, "{end}");
    }
}

#[test]
fn a_signal_to_save_reaches_ranks_as_a_request_and_the_job_ends_when_they_do() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let job = stage.python(SAVES_SLOWLY).ranks(2).start();
    job.mark("trains.0");
    job.mark("trains.1");
    job.signal(Signal::SIGUSR1);
    job.mark("saves.0");
    job.mark("saves.1");
    job.signal(Signal::SIGUSR1);
    stage.mark("signalled");
    let end = job.end();
    end.assert_status(128 + Signal::SIGUSR1 as i32);
    let saved = [0, 1].map(|rank| std::fs::read_to_string(stage.marks().join(format!("saved.{rank}"))));
    let saved = saved.map(|step| step.expect("the rank saved"));
    assert_eq!(saved[0], saved[1], "{end}");
    assert_eq!(save_orders(&end), 1, "{end}");
    assert!(!journal::facts(&end.journal).any(|fact| matches!(fact, Fact::StopRequested { .. })), "{end}");
}

#[test]
fn ranks_that_are_restarted_after_a_signal_to_save_are_asked_again() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
for step in range(1, 1_000_000):
    time.sleep(0.002)
    mainstay.step(step)
    if step == 20:
        mark(f"trains.{ATTEMPT}")
    if mainstay.save_requested():
        if ATTEMPT == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        mark("saved")
        break
"#;
    let job = stage.python(script).start();
    job.mark("trains.0");
    job.signal(Signal::SIGUSR1);
    let end = job.end();
    end.assert_status(128 + Signal::SIGUSR1 as i32);
    assert_eq!((journal::restarts(&end.journal), save_orders(&end)), (1, 2), "{end}");
    assert!(stage.marks().join("saved").exists(), "{end}");
}
