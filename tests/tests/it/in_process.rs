//! Ranks with a restartable function stay in their processes when one of them fails: real ranks, PyTorch and gloo.

use std::collections::BTreeMap;

use mainstay_model::entry::{Entry, Fact};
use mainstay_model::id::Rank;
use mainstay_model::verdict::{Action, Cause, Decision, Rule};
use mainstay_tests::{End, Job, Stage, has_client, has_torch, journal, processes};

/// On a machine that is busy with other tests a healthy rank may take long to leave.
const PATIENT: &str = "--fault-timeout 100s";

/// A training function whose ranks meet in an all-reduce at each step; `fault(step, round)` is the scenario's.
const TRAINING: &str = r#"
import torch, torch.distributed as dist
import mainstay
torch.set_num_threads(1)
def fault(step, round):
    pass
def before(round):
    pass
def cleanup():
    pass
def train():
    round = int(os.environ["MAINSTAY_ATTEMPT"])
    before(round)
    dist.init_process_group("gloo")
    mark(f"in.{round}.{RANK}", os.getpid())
    tensor = torch.ones(4)
    for step in range(STEPS):
        fault(step, round)
        dist.all_reduce(tensor)
        mainstay.step(step)
    dist.destroy_process_group()
    return round
"#;

/// The script of a scenario: its own functions after the common ones, then the call.
fn script(steps: u32, functions: &str) -> String {
    format!(
        "STEPS = {steps}\n{TRAINING}\n{functions}\n\
         mark(f'end.{{RANK}}', mainstay.restartable(train, cleanup=lambda: cleanup())())\n"
    )
}

/// Follows a job through its rounds to its end. Torch may take long to import in each: every wait has its own deadline.
fn over(job: Job, last: u32) -> End {
    over_rounds(job, &(0..=last).collect::<Vec<u32>>())
}

fn over_rounds(job: Job, rounds: &[u32]) -> End {
    for round in rounds {
        job.mark(&format!("in.{round}.0"));
    }
    job.mark("end.0");
    job.end()
}

fn actions(end: &End) -> Vec<&'static str> {
    journal::decisions(&end.journal).iter().map(|decision: &&Decision| decision.action.as_str()).collect()
}

/// The processes of the ranks, by attempt.
fn pids(journal: &[Entry]) -> Vec<BTreeMap<Rank, i32>> {
    journal::facts(journal)
        .filter_map(|fact| match fact {
            Fact::AttemptStarted { ranks, .. } => {
                Some(ranks.iter().map(|started| (started.rank, started.pid.0)).collect())
            }
            _ => None,
        })
        .collect()
}

#[test]
fn a_rank_that_raises_takes_its_peers_out_of_a_collective_and_all_go_on_in_process() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let functions = r#"
def fault(step, round):
    if round == 0 and step == 5 and RANK == 1:
        raise RuntimeError("injected")
"#;
    let job = stage.python(&script(10, functions)).ranks(3).options(PATIENT).start();
    let ends = [0, 1, 2].map(|rank| job.mark(&format!("end.{rank}")));
    let end = job.end();
    end.assert_status(0);
    assert_eq!(ends, ["1", "1", "1"]);
    assert_eq!(actions(&end), ["restart_in_process"], "{end}");
    let pids = pids(&end.journal);
    assert_eq!(pids[0], pids[1], "no process was replaced");
    let verdict = journal::verdicts(&end.journal)[0];
    assert_eq!(verdict.culprit, Some(Rank(1)));
    assert_eq!(verdict.step, Some(4));
    let outcome = journal::outcomes(&end.journal)[0];
    // Its peers had left the collective of step 4, but may not have reported yet that they are done with it.
    assert!(matches!((outcome.reached_before, outcome.step), (3 | 4, 0)), "{end}");
    assert!(end.output(0, 1, "stderr").contains("RuntimeError: injected"));
}

#[test]
fn a_killed_rank_alone_is_started_again_and_meets_the_others_in_one_round() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let functions = r#"
def fault(step, round):
    if round == 0 and step == 5 and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"#;
    let job = stage.python(&script(10, functions)).ranks(3).options(PATIENT).start();
    let end = over(job, 1);
    end.assert_status(0);
    assert_eq!(actions(&end), ["respawn_ranks"], "{end}");
    let pids = pids(&end.journal);
    assert_eq!(pids.len(), 2);
    // The others leave when it is gone, not while it ends: until then its end of their connections is open.
    assert!(!journal::facts(&end.journal).any(|fact| matches!(fact, Fact::RankEnding { .. })), "{end}");
    assert_ne!(pids[0][&Rank(1)], pids[1][&Rank(1)]);
    for rank in [Rank(0), Rank(2)] {
        assert_eq!(pids[0][&rank], pids[1][&rank], "{rank} was not started again\n{end}");
    }
}

#[test]
fn the_same_exception_at_the_same_step_ends_the_job() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let functions = r#"
def fault(step, round):
    if step == 3 and RANK == 0:
        raise KeyError("a bug")
"#;
    let job = stage.python(&script(10, functions)).ranks(2).options(PATIENT).start();
    let id = job.id().to_owned();
    let end = job.end();
    end.assert_status(1);
    assert_eq!(actions(&end), ["restart_in_process", "stop"], "{end}");
    let last = journal::decisions(&end.journal).pop().expect("a decision");
    assert_eq!(last.rule, Rule::Recurred, "{end}");
    processes::wait_until_none_of(&id);
}

#[test]
fn twice_in_a_row_at_other_steps_and_in_several_groups_with_loader_workers() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let functions = r#"
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, at): return float(at)
def train():
    round = int(os.environ["MAINSTAY_ATTEMPT"])
    dist.init_process_group("gloo")
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    everyone = dist.new_group([0, 1, 2, 3])
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2)
    for step, batch in zip(range(12), loader):
        if (step, RANK) == {0: (4, 3), 1: (7, 0)}.get(round):
            raise RuntimeError(f"injected in round {round}")
        dist.all_reduce(batch, group=halves[RANK // 2])
        dist.all_reduce(batch, group=everyone)
        mainstay.step(step)
    return round
"#;
    let job = stage.python(&script(12, functions)).ranks(4).options(PATIENT).start();
    let ends = [0, 3].map(|rank| job.mark(&format!("end.{rank}")));
    let end = job.end();
    end.assert_status(0);
    assert_eq!(ends, ["2", "2"]);
    assert_eq!(actions(&end), ["restart_in_process", "restart_in_process"], "{end}");
}

#[test]
fn a_rank_whose_cleanup_raises_gets_a_new_process_and_the_others_stay() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let functions = r#"
def fault(step, round):
    if round == 0 and step == 5 and RANK == 1:
        raise RuntimeError("injected")
def cleanup():
    if RANK == 1:
        raise OSError("cannot be cleaned up")
"#;
    let job = stage.python(&script(10, functions)).ranks(2).options(PATIENT).start();
    let end = over(job, 1);
    end.assert_status(0);
    let pids = pids(&end.journal);
    assert_eq!(pids[0][&Rank(0)], pids[1][&Rank(0)], "{end}");
    assert_ne!(pids[0][&Rank(1)], pids[1][&Rank(1)]);
    let first = journal::verdicts(&end.journal)[0];
    assert_eq!((first.culprit, first.step), (Some(Rank(1)), Some(4)), "{end}");
    let runtime_error = "RuntimeError";
    assert!(
        matches!(&first.cause, Cause::Exception { exception, .. } if exception == runtime_error),
        "{end}"
    );
}

#[test]
fn a_rank_that_fails_again_before_a_step_gets_a_new_process_and_the_others_stay() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let functions = r#"
def fault(step, round):
    if (round, step) == (1, 0):
        # A peer that is still making its connections when one leaves can be stuck in gloo, and is then replaced.
        dist.barrier()
    if RANK == 1 and (round, step) in ((0, 5), (1, 0)):
        raise RuntimeError(f"injected in the {['first', 'second'][round]} round")
"#;
    let job = stage.python(&script(10, functions)).ranks(3).options(PATIENT).start();
    let end = over_rounds(job, &[0, 2]);
    end.assert_status(0);
    assert_eq!(actions(&end), ["restart_in_process", "respawn_ranks"], "{end}");
    let pids = pids(&end.journal);
    assert_eq!(pids[0], pids[1], "{end}");
    assert_ne!(pids[1][&Rank(1)], pids[2][&Rank(1)], "{end}");
    for rank in [Rank(0), Rank(2)] {
        assert_eq!(pids[1][&rank], pids[2][&rank], "{rank} was not started again\n{end}");
    }
}

#[test]
fn a_rank_that_is_killed_in_the_middle_of_its_cleanup_is_started_again_and_the_others_stay() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let functions = r#"
def fault(step, round):
    if round == 0 and step == 5 and RANK == 1:
        raise RuntimeError("injected")
def cleanup():
    if RANK == 0:
        os.kill(os.getpid(), signal.SIGKILL)
"#;
    let job = stage.python(&script(10, functions)).ranks(3).options(PATIENT).start();
    let end = over(job, 1);
    end.assert_status(0);
    assert_eq!(actions(&end), ["respawn_ranks"], "{end}");
    let pids = pids(&end.journal);
    assert_ne!(pids[0][&Rank(0)], pids[1][&Rank(0)], "{end}");
    for rank in [Rank(1), Rank(2)] {
        assert_eq!(pids[0][&rank], pids[1][&rank], "{rank} was not started again\n{end}");
    }
    assert_eq!(
        journal::verdicts(&end.journal)[0].culprit,
        Some(Rank(1)),
        "the second fault is not the first"
    );
}

#[test]
fn a_fault_in_the_middle_of_a_save_leaves_the_step_before_and_the_step_is_saved_again() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    // Rank 1 has saved step 5 when rank 0 is still at it.
    let functions = r#"
class Slow:
    def __reduce__(self):
        if os.environ["MAINSTAY_ATTEMPT"] == "0" and RANK == 0:
            mark("saving")
            time.sleep(100000)
        return (int, (5,))
def fault(step, round):
    if step == 0:
        saved = mainstay.checkpoint.load()
        mark(f"loaded.{round}.{RANK}", saved and saved["step"])
    if step in (3, 5):
        mainstay.checkpoint.save(step, {"step": step, "slow": Slow() if step == 5 else None})
    if round == 0 and step == 5 and RANK == 1:
        wait_for("saving")
        raise RuntimeError("injected")
    if round == 1 and step == 8:
        while mainstay.checkpoint.latest() != 5:
            time.sleep(0.01)
"#;
    let job = stage.python(&script(10, functions)).ranks(2).options(PATIENT).start();
    let loaded = ["0.0", "0.1", "1.0", "1.1"].map(|of| job.mark(&format!("loaded.{of}")));
    let end = over(job, 1);
    end.assert_status(0);
    assert_eq!(loaded, ["None", "None", "3", "3"], "{end}");
    assert_eq!(actions(&end), ["restart_in_process"], "{end}");
}

#[test]
fn messages_of_a_second_process_that_claims_to_be_the_rank_are_ignored() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    // One runs the function as the rank does; the other sends what the rank would send if it failed.
    let script = r#"
import json, mainstay, subprocess, sys
DOUBLE = "import mainstay; print(mainstay.restartable(lambda: 5)())"
LIAR = """
import json, os, socket
with socket.socket(socket.AF_UNIX) as liar:
    liar.connect(os.environ["MAINSTAY_ROUNDS"])
    word = dict(say="raised", epoch=0, at=1, exception="E", message="m", traceback="")
    liar.sendall(json.dumps(word).encode() + b"\\n")
    print(liar.recv(1))
"""
@mainstay.restartable
def work():
    mainstay.step(1)
    if RANK == 0:
        printed = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for code in (DOUBLE, LIAR)]
        mark("said", " ".join(f"{of.stdout.strip()}{of.stderr}" for of in printed))
        mark("rank.1")
    else:
        wait_for("rank.1")
    return RANK
mark(f"end.{RANK}", work())
"#;
    let job = stage.python(script).ranks(2).options(PATIENT).start();
    assert_eq!(job.mark("said"), "5 b''");
    let ends = [0, 1].map(|rank| job.mark(&format!("end.{rank}")));
    let end = job.end();
    end.assert_status(0);
    assert_eq!(ends, ["0", "1"]);
    assert!(journal::verdicts(&end.journal).is_empty(), "{end}");
}

#[test]
fn a_rank_that_dies_while_the_round_starts_is_restarted() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    // At that time the others are inside `init_process_group`, where they wait for the rank that is gone.
    let functions = r#"
def before(round):
    if round == 1 and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
def fault(step, round):
    if round == 0 and step == 5 and RANK == 0:
        raise RuntimeError("injected")
"#;
    let job = stage.python(&script(10, functions)).ranks(3).options(PATIENT).start();
    let end = over_rounds(job, &[0, 2]);
    end.assert_status(0);
    assert_eq!(actions(&end)[0], "restart_in_process", "{end}");
    assert_eq!(actions(&end).len(), 2, "{end}");
}

#[test]
fn a_rank_that_holds_the_interpreter_in_native_code_is_killed_and_the_others_wait_for_its_successor() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    // A call through PyDLL keeps the interpreter's lock; the peer cannot be interrupted.
    let functions = r#"
def fault(step, round):
    if round == 0 and step == 5 and RANK == 0:
        import ctypes
        mark("holds")
        ctypes.PyDLL(None).sleep(100000)
    if round == 0 and step == 5 and RANK == 1:
        wait_for("holds")
        raise RuntimeError("injected")
"#;
    let job = stage.python(&script(10, functions)).ranks(2).options("--fault-timeout 8s").start();
    let end = over(job, 1);
    end.assert_status(0);
    assert_eq!(actions(&end), ["respawn_ranks"], "{end}");
    let pids = pids(&end.journal);
    assert_eq!(pids[0][&Rank(1)], pids[1][&Rank(1)], "{end}");
    assert_ne!(pids[0][&Rank(0)], pids[1][&Rank(0)]);
}

#[test]
fn python_that_waits_is_interrupted_wherever_it_waits() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay, queue, socket, threading
def forever():
    while True:
        pass
waits = [lambda: time.sleep(100000), lambda: queue.Queue().get(), lambda: threading.Lock().acquire() and threading.Event().wait(),
         lambda: socket.socketpair()[0].recv(1), forever]
@mainstay.restartable
def work():
    round = int(os.environ["MAINSTAY_ATTEMPT"])
    mainstay.step(round)
    if round < len(waits):
        if RANK == 0:
            mark(f"waits.{round}")
            waits[round]()
        wait_for(f"waits.{round}")
        raise RuntimeError(f"injected {round}")
    return os.getpid()
mark(f"end.{RANK}", work() == os.getpid())
"#;
    let job =
        stage.python(script).ranks(2).options("--max-restarts 9 --no-warm --fault-timeout 100s").start();
    let end = job.end();
    end.assert_status(0);
    // The policy decides about the rank that raised: on a slow machine it may learn to restart that process.
    let waited: Vec<i32> = pids(&end.journal).iter().map(|of| of[&Rank(0)]).collect();
    assert_eq!((waited.len(), waited.windows(2).all(|two| two[0] == two[1])), (6, true), "{end}");
}

#[test]
fn nothing_is_left_over_by_twenty_restarts() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let functions = r#"
counted = []
def before(round):
    if round in (2, 20):
        counted.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
def fault(step, round):
    if round < 20 and step == 3 + 3 * round and RANK == round % 2:
        raise RuntimeError(f"injected in round {round}")
"#;
    let script = format!("{}\nmark(f'counted.{{RANK}}', counted)\n", script(80, functions));
    let job = stage.python(&script).ranks(2).options("--max-restarts 100 --fault-timeout 100s").start();
    let counted = [0, 1].map(|rank| job.mark(&format!("counted.{rank}")));
    let end = job.end();
    end.assert_status(0);
    assert_eq!(actions(&end), ["restart_in_process"; 20], "{end}");
    for counted in counted {
        let (early, late) = counted.split_once("), (").expect("two counts");
        assert_eq!(early.trim_start_matches("[("), late.trim_end_matches(")]"), "files and threads");
    }
}

#[test]
fn the_context_form_goes_round_as_well_and_a_rank_without_one_is_restarted_as_ever() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
for round in mainstay.rounds():
    with round:
        mainstay.step(round.number)
        if round.number < 2 and RANK == 0:
            raise ValueError(f"injected {round.number}")
        mark(f"number.{RANK}", round.number)
"#;
    let end = stage.python(script).ranks(2).options(PATIENT).start().end();
    end.assert_status(0);
    assert_eq!(actions(&end), ["restart_in_process", "restart_in_process"], "{end}");

    let plain =
        "import mainstay\nif ATTEMPT == 0 and RANK == 0:\n    mainstay.step(1)\n    raise OSError('plain')\n";
    let end = stage.python(plain).ranks(2).options(PATIENT).start().end();
    end.assert_status(0);
    assert!(matches!(journal::decisions(&end.journal)[0].action, Action::RestartInJob { .. }), "{end}");
}

#[test]
fn a_job_that_is_asked_to_stop_leaves_no_rank_behind_that_waits() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    // One rank cannot leave and the other waits for the next round meanwhile.
    let script = r#"
import mainstay, ctypes
@mainstay.restartable(cleanup=lambda: mark(f"left.{RANK}"))
def work():
    mainstay.step(1)
    if RANK == 0:
        mark("holds")
        ctypes.PyDLL(None).sleep(100000)
    wait_for("holds")
    raise RuntimeError("injected")
work()
"#;
    let job = stage.python(script).ranks(2).options("--fault-timeout 100s --shutdown-timeout 1s").start();
    let id = job.id().to_owned();
    job.mark("left.1");
    job.signal(nix::sys::signal::Signal::SIGTERM);
    job.end().assert_status(143);
    processes::wait_until_none_of(&id);
}

/// A rank is killed in each of the first two rounds, one raises in the third; the group is that of `mainstay.torch`.
const KEPT_GROUP: &str = r#"
import torch, torch.distributed as dist
import mainstay.torch
torch.set_num_threads(1)

@mainstay.restartable
def train():
    round = int(os.environ["MAINSTAY_ATTEMPT"])
    before = dist.group.WORLD if dist.is_initialized() else None
    group = mainstay.torch.process_group("gloo")
    tensor = torch.full((4,), float(RANK + 1))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [6.0] * 4, tensor
    pair = dist.new_group([0, 1])
    if RANK < 2:
        tensor = torch.full((4,), float(RANK + 1))
        dist.all_reduce(tensor, group=pair)
        assert tensor.tolist() == [3.0] * 4, tensor
    mark(f"kept.{round}.{RANK}", f"{before is group} of {hasattr(dist, '_reconfigure')}")
    for step in range(6):
        if step == 3 and (round, RANK) in ((0, 2), (1, 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3 and (round, RANK) == (2, 1):
            raise RuntimeError("injected")
        dist.all_reduce(tensor)
        mainstay.step(step)

train()
mark(f"end.{RANK}")
"#;

#[test]
fn survivors_keep_their_process_group_where_torch_can_reconfigure_it_and_make_a_new_one_elsewhere() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let job = stage.python(KEPT_GROUP).ranks(3).options(&format!("{PATIENT} --max-restarts 5")).start();
    for rank in 0..3 {
        job.mark(&format!("kept.0.{rank}"));
    }
    let kept = |round: u32| [0, 1, 2].map(|rank| job.mark(&format!("kept.{round}.{rank}")));
    let rounds = [1, 2, 3].map(kept);
    let end = job.end();
    end.assert_status(0);
    let stays = if rounds[0][2].ends_with("of True") { "True of True" } else { "False of False" };
    let new = stays.replace("True of", "False of");
    assert_eq!(rounds[0], [stays, stays, &new], "a new process joins the group\n{end}");
    assert_eq!(rounds[1], [&new, stays, stays], "also one that has the store of the round\n{end}");
    assert_eq!(rounds[2], [stays; 3], "{end}");
    assert_eq!(actions(&end), ["respawn_ranks", "respawn_ranks", "restart_in_process"], "{end}");
}
