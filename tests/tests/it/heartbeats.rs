//! Failing heartbeats are no failure of training: a client of another version, a forked child, a launcher that does
//! not read.

use mainstay_model::entry::{Body, Fact};
use mainstay_tests::{Stage, has_client, journal};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

#[test]
fn a_client_of_another_version_refuses_its_page_and_trains_on() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    // While the client opens it, the page's major version (docs/reference/heartbeat-page.md) is that of a later
    // launcher. It is set back at once, because it is the real launcher's page too, which reads the refusal from
    // it.
    let script = r#"
def set_major(number):
    with open(os.environ["MAINSTAY_PAGE"], "r+b") as page:
        page.seek(8)
        page.write(number.to_bytes(8, "little"))
set_major(2)
import mainstay
set_major(1)
assert not mainstay.status()["active"]
for step in range(5):
    mainstay.step(step)
mainstay.checkpoint.save(5, "state")
print("trained")
wait_for("end")
"#;
    let job = stage.python(script).start();
    let reason = job.wait_for("the refusal", |entry| match &entry.body {
        Body::Fact(Fact::RankRefused { reason, .. }) => Some(reason.clone()),
        _ => None,
    });
    stage.mark("end");
    let end = job.end();
    end.assert_status(0);
    end.assert_printed(&reason);
    assert_eq!(end.output(0, 0, "stdout"), "trained\n");
    assert!(journal::verdicts(&end.journal).is_empty(), "{end}");
    assert!(!journal::facts(&end.journal).any(|fact| matches!(fact, Fact::RankConnected { .. })), "{end}");
}

#[test]
fn training_goes_on_while_the_launcher_is_held() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    // Many more beats than any buffer holds, while no process reads.
    let script = r#"
import mainstay
mainstay.step(0)
mark("ready")
wait_for("held")
for step in range(1, 200_001):
    mainstay.step(step)
mark("done")
"#;
    let job = stage.python(script).start();
    job.mark("ready");
    job.signal(Signal::SIGSTOP);
    stage.mark("held");
    job.mark("done");
    job.signal(Signal::SIGCONT);
    let end = job.end();
    end.assert_status(0);
    let last = journal::facts(&end.journal).find_map(|fact| match fact {
        Fact::RankExited { step, .. } => *step,
        _ => None,
    });
    assert_eq!(last, Some(200_000), "{end}");
}

#[test]
fn forked_children_do_not_speak_for_their_rank() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay, multiprocessing
def worker(queue):
    mainstay.step(1_000_000)
    queue.put(mainstay.status()["active"])
    raise ValueError("a worker's own trouble")
mainstay.step(1)
for method in ("fork", "spawn") if __name__ == "__main__" else ():
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=worker, args=(queue,))
    process.start()
    assert queue.get() is False, method
    process.join()
mainstay.step(2)
"#;
    let end = stage.python(script).options("--max-restarts 0").start().end();
    end.assert_status(0);
    let last = journal::facts(&end.journal).find_map(|fact| match fact {
        Fact::RankExited { step, .. } => *step,
        _ => None,
    });
    assert_eq!(last, Some(2), "{end}");
    assert!(!journal::facts(&end.journal).any(|fact| matches!(fact, Fact::RankRaised { .. })), "{end}");
}

#[test]
fn a_deleted_page_does_no_harm() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
mainstay.step(1)
mark("ready." + str(ATTEMPT))
wait_for("go")
mainstay.step(2)
if ATTEMPT == 0:
    time.sleep(36000)
"#;
    let job = stage.python(script).start();
    job.mark("ready.0");
    std::fs::remove_dir_all(stage.tmpfs().join(job.id())).expect("the pages' directory");
    stage.mark("go");
    let rank = job.attempt(0).pids[&0];
    kill(Pid::from_raw(rank), Signal::SIGKILL).expect("the rank lives");
    let end = job.end();
    end.assert_status(0);
    end.assert_printed("without heartbeats");
    assert_eq!(end.summary().attempts, 2, "{end}");
}
