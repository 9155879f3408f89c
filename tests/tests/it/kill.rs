//! A killed rank is named, all ranks are restarted, and the job runs to its end.

use mainstay_model::entry::{Body, ExitStatus, Fact};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::verdict::{Action, Cause, DecidedBy};
use mainstay_tests::{Stage, has_client, journal, processes};
use nix::sys::signal::Signal;

/// Twenty steps with a checkpoint at every fifth; the first attempt waits before step 7 until the test kills it.
const TRAINER: &str = r#"
import mainstay
saved = mainstay.checkpoint.load()
for step in range(0 if saved is None else saved + 1, 20):
    if ATTEMPT == 0 and step == 7:
        mark(f"waits.{RANK}")
        wait_for("never")
    mainstay.step(step, loss=1.0)
    if step % 5 == 0:
        mainstay.checkpoint.save(step, step)
"#;

#[test]
fn a_killed_rank_is_named_and_the_job_goes_on_from_its_checkpoint() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let job = stage.python(TRAINER).ranks(2).start();
    job.mark("waits.0");
    job.mark("waits.1");
    job.kill_rank(0, 1);
    let end = job.end();
    end.assert_status(0);

    let verdict = end.verdict();
    assert_eq!((verdict.culprit, &verdict.cause), (Some(Rank(1)), &Cause::Signal { signal: 9 }), "{end}");
    assert_eq!((&verdict.victims[..], verdict.step), (&[Rank(0)][..], Some(6)), "{end}");

    let [decision] = journal::decisions(&end.journal)[..] else { panic!("one decision\n{end}") };
    assert_eq!(decision.action, Action::RestartInJob { attempt: Attempt(1) });
    assert_eq!(decision.by, DecidedBy::Launcher);
    let [outcome] = journal::outcomes(&end.journal)[..] else { panic!("one outcome\n{end}") };
    assert_eq!((outcome.step, outcome.reached_before, outcome.steps_lost), (6, 6, 1), "{end}");
    assert!(outcome.to_ranks_started < outcome.to_first_step, "{end}");

    let summary = end.summary();
    assert_eq!((summary.exit, summary.attempts, summary.incidents.len()), (0, 2, 1));
    assert_eq!((summary.accounting.steps, summary.accounting.steps_lost), (20, 1), "{end}");
    assert!(!summary.accounting.counted, "{end}");
    end.assert_printed(&verdict.headline).assert_printed(&decision.why);
}

/// The same without numbers of its own: the hook for optimizers counts its steps, and it resumes from a file of its own.
const RESUMES_BY_ITSELF: &str = r#"
import os
import mainstay
from mainstay import _native
own = f"{MARKS}/own.{RANK}"
start = int(open(own).read()) if os.path.exists(own) else 0
for n, step in enumerate(range(start, 20)):
    if ATTEMPT == 0 and step == 12:
        mark(f"waits.{RANK}")
        wait_for("never")
    _native.hook_step(n)
    if step == 10:
        open(own, "w").write("10")
"#;

#[test]
fn where_the_program_does_not_number_its_steps_their_repetitions_are_unknown() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let job = stage.python(RESUMES_BY_ITSELF).ranks(2).start();
    job.mark("waits.0");
    job.mark("waits.1");
    job.kill_rank(0, 1);
    let end = job.end();
    end.assert_status(0);
    let accounting = &end.summary().accounting;
    // 22 steps were done, two of them again; the numbers alone would show ten.
    assert!(accounting.counted, "{end}");
    assert_eq!((accounting.steps, accounting.steps_lost), (12, 10), "{end}");
}

/// The first thread of rank 1 ends as if killed while another one of its threads continues: to the kernel this is a
/// process that is ending and has not ended, for as long as the test needs.
const LINGERER: &str = r#"
import ctypes, platform, threading
import mainstay
mainstay.step(1)
mark(f"stepped.{ATTEMPT}.{RANK}")
if ATTEMPT == 0:
    wait_for("go")
    if RANK == 1:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        exit_thread = {"x86_64": 60, "aarch64": 93}[platform.machine()]
        ctypes.CDLL(None).syscall(exit_thread, 7)
    wait_for("never")
"#;

#[test]
fn the_others_are_stopped_while_a_failed_rank_is_still_ending() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let job = stage.python(LINGERER).ranks(2).start();
    job.mark("stepped.0.0");
    job.mark("stepped.0.1");
    stage.mark("go");
    let end = job.end();
    end.assert_status(0);
    let at = |what: &str, is: fn(&Fact) -> bool| {
        let place = end.journal.iter().position(|entry| matches!(&entry.body, Body::Fact(fact) if is(fact)));
        place.unwrap_or_else(|| panic!("no {what}\n{end}"))
    };
    let ending = at("rank that is ending", |fact| {
        matches!(fact, Fact::RankEnding { rank: Rank(1), status: ExitStatus::Code(7), .. })
    });
    let survivor =
        at("end of rank 0", |fact| matches!(fact, Fact::RankExited { rank: Rank(0), after_stop: true, .. }));
    let exited = at("end of rank 1", |fact| {
        matches!(fact, Fact::RankExited { rank: Rank(1), status: ExitStatus::Code(7), after_stop: false, .. })
    });
    assert!(ending < survivor && ending < exited, "{end}");
    let verdict = end.verdict();
    assert_eq!((verdict.culprit, &verdict.victims[..]), (Some(Rank(1)), &[Rank(0)][..]), "{end}");
    assert_eq!(end.summary().attempts, 2, "{end}");
}

#[test]
fn a_program_that_replaces_itself_is_not_ending() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let replaced = r#"
import os, sys
import mainstay
mainstay.step(1)
mark(f"stepped.{RANK}")
wait_for("go")
os.execv(sys.executable, [sys.executable, "-c", "print('another program')"])
"#;
    let job = stage.python(replaced).ranks(2).start();
    job.mark("stepped.0");
    job.mark("stepped.1");
    stage.mark("go");
    let end = job.end();
    end.assert_status(0);
    assert_eq!(end.summary().attempts, 1, "{end}");
    assert!(
        !end.journal.iter().any(|entry| matches!(entry.body, Body::Fact(Fact::RankEnding { .. }))),
        "{end}"
    );
}

#[test]
fn each_attempt_has_a_separate_store_and_knows_its_number() {
    let stage = Stage::new();
    let job = stage
        .sh(r#"mark "env.$RANK.$ATTEMPT" "$MASTER_PORT $TORCHELASTIC_RESTART_COUNT $MAINSTAY_ATTEMPT"
               [ "$ATTEMPT" = 2 ] || work"#)
        .ranks(2)
        .start();
    let mut ports = Vec::new();
    for attempt in 0..3 {
        let started = job.attempt(attempt);
        ports.push(started.port);
        for rank in 0..2 {
            let seen = job.mark(&format!("env.{rank}.{attempt}"));
            assert_eq!(seen, format!("{} {attempt} {attempt}", started.port), "rank {rank}");
        }
        if attempt < 2 {
            job.kill_rank(attempt, attempt);
        }
    }
    let end = job.end();
    end.assert_status(0);
    ports.sort_unstable();
    ports.dedup();
    assert_eq!(ports.len(), 3, "each attempt has its own port\n{end}");
    let culprits: Vec<Option<Rank>> = journal::verdicts(&end.journal).iter().map(|of| of.culprit).collect();
    assert_eq!(culprits, [Some(Rank(0)), Some(Rank(1))]);
    assert_eq!(end.summary().attempts, 3);
}

#[test]
fn the_survivors_of_a_kill_are_victims_even_if_they_die_of_it_first_and_of_every_kind_of_end() {
    let stage = Stage::new();
    // Rank 0 dies of the stop with its own exit status, rank 2 ignores it, rank 3 is done already.
    let job = stage
        .sh(r#"[ "$ATTEMPT" = 1 ] && exit 0
               case $RANK in
                 0) trap 'exit 5' TERM;;
                 2) trap '' TERM;;
                 3) exit 0;;
               esac
               mark "ready.$RANK"
               work"#)
        .ranks(4)
        .options("--fault-timeout 0.3s")
        .start();
    for rank in [0, 1, 2] {
        job.mark(&format!("ready.{rank}"));
    }
    job.kill_rank(0, 1);
    let end = job.end();
    end.assert_status(0);
    let verdict = end.verdict();
    assert_eq!(verdict.culprit, Some(Rank(1)), "{end}");
    assert_eq!(journal::exits(&end.journal, 0)[0], ExitStatus::Code(5), "{end}");
    assert_eq!(journal::exits(&end.journal, 2)[0], ExitStatus::Signal(9), "{end}");
    assert_eq!(journal::exits(&end.journal, 3)[0], ExitStatus::Code(0), "{end}");
}

#[test]
fn ranks_that_die_together_are_one_failure() {
    let stage = Stage::new();
    let job = stage.sh(r#"[ "$ATTEMPT" = 1 ] && exit 0; mark "ready.$RANK"; work"#).ranks(3).start();
    (0..3).for_each(|rank| drop(job.mark(&format!("ready.{rank}"))));
    // The launcher sees all three at once when it continues.
    job.signal(Signal::SIGSTOP);
    (0..3).for_each(|rank| job.kill_rank(0, rank));
    job.signal(Signal::SIGCONT);
    let end = job.end();
    end.assert_status(0);
    let verdict = end.verdict();
    assert_eq!(verdict.victims.len(), 2, "{end}");
    assert_eq!(end.summary().attempts, 2, "{end}");
}

#[test]
fn a_launcher_that_was_held_during_a_fault_and_the_whole_recovery_sees_it_all_when_it_goes_on() {
    let stage = Stage::new();
    // Rank 1 finishes while the launcher is stopped, rank 0 is killed.
    let script =
        r#"[ "$ATTEMPT" = 1 ] && exit 0; mark "ready.$RANK"; [ "$RANK" = 0 ] && work; wait_for held; exit 0"#;
    let job = stage.sh(script).ranks(2).start();
    job.mark("ready.0");
    job.mark("ready.1");
    let ranks = job.attempt(0).pids;
    job.signal(Signal::SIGSTOP);
    stage.mark("held");
    processes::wait_until("rank 1 is done", || !processes::is_alive(ranks[&1]));
    job.kill_rank(0, 0);
    processes::wait_until("rank 0 is dead", || !processes::is_alive(ranks[&0]));
    job.signal(Signal::SIGCONT);
    let end = job.end();
    end.assert_status(0);
    let verdict = end.verdict();
    assert_eq!(verdict.culprit, Some(Rank(0)), "{end}");
}

#[test]
fn a_job_without_a_fault_has_no_verdict_and_no_incident() {
    let stage = Stage::new();
    let end = stage.sh("echo done").ranks(2).start().end();
    end.assert_status(0);
    assert!(
        journal::verdicts(&end.journal).is_empty() && journal::decisions(&end.journal).is_empty(),
        "{end}"
    );
    assert!(end.summary().incidents.is_empty());
    assert_eq!(end.summary().attempts, 1);
}

#[test]
fn many_quick_kills_are_all_accounted_for_and_the_launcher_does_not_grow() {
    const KILLS: u32 = 30;
    let stage = Stage::new();
    let script = format!(r#"[ "$ATTEMPT" = {KILLS} ] && wait_for end && exit 0; work"#);
    let job = stage.sh(&script).ranks(2).options("--max-restarts 100").start();
    let mut open_at_first = 0;
    for attempt in 0..KILLS {
        job.attempt(attempt);
        if attempt == 2 {
            open_at_first = processes::open_files(job.launcher());
        }
        job.kill_rank(attempt, attempt % 2);
    }
    let last = job.attempt(KILLS);
    // A file that the launcher is reading is open for a moment.
    processes::wait_until("the launcher has no more files open than after the second kill", || {
        processes::open_files(job.launcher()) <= open_at_first
    });
    processes::wait_until("the launcher has no children but the ranks and the guardian", || {
        processes::children(job.launcher()).len() == last.pids.len() + 1
    });
    stage.mark("end");
    let end = job.end();
    end.assert_status(0);
    assert_eq!(journal::restarts(&end.journal), KILLS as usize, "{end}");
    assert_eq!(journal::verdicts(&end.journal).len(), KILLS as usize);
    assert_eq!((end.summary().attempts, end.summary().incidents.len()), (KILLS + 1, KILLS as usize));
}
