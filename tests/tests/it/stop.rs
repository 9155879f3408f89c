//! A launcher that is asked to stop stops its ranks in order, and by force if they ignore it.

use mainstay_model::entry::{ExitStatus, Fact};
use mainstay_tests::{Stage, journal, processes};
use nix::sys::signal::Signal;

/// Saves in its handler, and ends with its own exit status.
const SAVES: &str = r#"
    save() { mark "saved.$RANK" "$1"; exit "$2"; }
    trap 'save TERM 0' TERM
    trap 'save INT 3' INT
    trap 'save HUP 4' HUP
    mark "ready.$RANK"
    work"#;

#[test]
fn ranks_get_the_launchers_signal_and_may_save_before_they_end() {
    for (signal, name, status) in
        [(Signal::SIGTERM, "TERM", 143), (Signal::SIGINT, "INT", 130), (Signal::SIGHUP, "HUP", 129)]
    {
        let stage = Stage::new();
        let job = stage.sh(SAVES).ranks(2).start();
        job.mark("ready.0");
        job.mark("ready.1");
        job.signal(signal);
        let marks = stage.marks();
        let end = job.end();
        end.assert_status(status);
        for rank in 0..2 {
            let saved = std::fs::read_to_string(marks.join(format!("saved.{rank}")));
            assert_eq!(saved.expect("it saved"), name, "rank {rank}\n{end}");
        }
        assert!(journal::verdicts(&end.journal).is_empty(), "a stop is no fault\n{end}");
        assert_eq!((end.summary().exit, end.summary().attempts), (status, 1));
        end.assert_printed("asked to stop");
    }
}

#[test]
fn a_rank_that_does_not_heed_the_stop_is_killed_after_its_grace() {
    let stage = Stage::new();
    let script = r#"trap '' TERM; mark "ready.$RANK"; work"#;
    let job = stage.sh(script).ranks(2).options("--shutdown-timeout 0.3s").start();
    job.mark("ready.0");
    job.mark("ready.1");
    job.signal(Signal::SIGTERM);
    let end = job.end();
    end.assert_status(143);
    assert_eq!(journal::exits(&end.journal, 0), [ExitStatus::Signal(9)], "{end}");
    assert!(journal::verdicts(&end.journal).is_empty(), "{end}");
}

#[test]
fn a_second_signal_forces_at_once() {
    let stage = Stage::new();
    let script = r#"trap 'mark "asked.$RANK"' TERM; mark "ready.$RANK"; work"#;
    let job = stage.sh(script).ranks(2).options("--shutdown-timeout 10h").start();
    job.mark("ready.0");
    job.mark("ready.1");
    job.signal(Signal::SIGTERM);
    job.mark("asked.0");
    job.mark("asked.1");
    job.signal(Signal::SIGINT);
    let end = job.end();
    end.assert_status(143);
    assert_eq!(journal::exits(&end.journal, 1), [ExitStatus::Signal(9)], "{end}");
}

#[test]
fn a_rank_that_is_held_by_sigstop_is_stopped_in_order_too() {
    let stage = Stage::new();
    let script = r#"trap 'mark "saved.$RANK"; exit 0' TERM; mark "ready.$RANK"; kill -STOP $$; work"#;
    let job = stage.sh(script).ranks(2).options("--shutdown-timeout 10h").start();
    let started = job.attempt(0);
    for rank in 0..2 {
        job.mark(&format!("ready.{rank}"));
        processes::wait_until("the rank is stopped", || processes::state(started.pids[&rank]) == Some('T'));
    }
    job.signal(Signal::SIGTERM);
    let end = job.end();
    end.assert_status(143);
    assert_eq!(journal::exits(&end.journal, 0), [ExitStatus::Code(0)], "it could save\n{end}");
}

#[test]
fn a_stop_in_the_middle_of_a_recovery_ends_the_job_without_another_start() {
    let stage = Stage::new();
    // The survivor takes long to go, so that the stop arrives while the fault is dealt with.
    let script = r#"trap 'mark "stopping"' TERM; mark "ready.$RANK"; work"#;
    let job = stage.sh(script).ranks(2).options("--fault-timeout 10h --shutdown-timeout 0.2s").start();
    job.mark("ready.0");
    job.mark("ready.1");
    job.kill_rank(0, 1);
    job.mark("stopping");
    job.signal(Signal::SIGTERM);
    let end = job.end();
    end.assert_status(143);
    assert_eq!(end.summary().attempts, 1, "{end}");
    assert!(journal::facts(&end.journal).any(|fact| matches!(fact, Fact::StopRequested { .. })), "{end}");
}

#[test]
fn a_second_signal_forces_in_the_middle_of_a_recovery_too() {
    let stage = Stage::new();
    let script = r#"trap 'mark "stopping"' TERM; mark "ready.$RANK"; work"#;
    let job = stage.sh(script).ranks(2).options("--fault-timeout 10h --shutdown-timeout 10h").start();
    job.mark("ready.0");
    job.mark("ready.1");
    job.kill_rank(0, 1);
    job.mark("stopping");
    job.signal(Signal::SIGTERM);
    job.wait_for_fact("the request", |fact| matches!(fact, Fact::StopRequested { .. }));
    job.signal(Signal::SIGINT);
    job.end().assert_status(143);
}
