//! Ranks that are alive and make no progress: each kind of hang with eight real processes that wait for each other
//! at every step. The culprit is named, and the job is restarted. `MAINSTAY_HANG_REPEATS` sets how often each is
//! done, and `MAINSTAY_HANG_RANKS` with how many processes.

#[path = "../../../agent/tests/it/support/ras.rs"]
mod ras;

use mainstay_hang::HangKind;
use mainstay_model::entry::Fact;
use mainstay_model::id::Rank;
use mainstay_model::verdict::Cause;
use mainstay_tests::{End, Stage, has_client, has_torch, journal};
use ras::{Answerer, Ras};

const RANKS: u32 = 8;
const CULPRIT: u32 = 5;

/// Eighty fast steps in lockstep, by a barrier over a socket; `hang()` is called in the culprit's 61st step of the
/// first attempt.
const LOCKSTEP: &str = r#"
import ctypes, queue, socket, threading
HANGS = os.environ["CULPRIT"] in (str(RANK), "all")
if "before_import" in globals() and HANGS and ATTEMPT == 0:
    before_import()
import mainstay
SIZE, PLACE = int(os.environ["WORLD_SIZE"]), f"{MARKS}/barrier.{ATTEMPT}"
if RANK == 0:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(PLACE + ".new")
    listener.listen(SIZE)
    os.rename(PLACE + ".new", PLACE)
    peers = [listener.accept()[0] for _ in range(SIZE - 1)]
else:
    wait_for(f"barrier.{ATTEMPT}")
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(PLACE)
def barrier():
    if RANK == 0:
        for peer in peers:
            peer.recv(1)
        for peer in peers:
            peer.sendall(b"x")
    else:
        globals()["peer"].sendall(b"x")
        globals()["peer"].recv(1)
for step in range(80):
    with mainstay.section("data"):
        time.sleep(0.002)
        if step == 60 and HANGS and ATTEMPT == 0 and "in_data" in globals():
            in_data()
    with mainstay.section("forward"):
        time.sleep(0.005)
        if step == 60 and HANGS and ATTEMPT == 0 and "hang" in globals():
            hang()
    with mainstay.section("all_reduce"):
        barrier()
    mainstay.step(step)
"#;

fn repeats() -> u32 {
    asked_for("MAINSTAY_HANG_REPEATS").unwrap_or(1)
}

fn ranks() -> u32 {
    asked_for("MAINSTAY_HANG_RANKS").unwrap_or(RANKS)
}

fn asked_for(variable: &str) -> Option<u32> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Runs a job with this hang, as often as requested, and checks each verdict.
fn hangs(how: &str, culprit: &str, options: &str, kind: HangKind) {
    hangs_among(ranks(), how, culprit, options, kind);
}

fn hangs_among(ranks: u32, how: &str, culprit: &str, options: &str, kind: HangKind) {
    if !has_client() {
        return;
    }
    for _ in 0..repeats() {
        let stage = Stage::new();
        let script = format!("{how}\n{LOCKSTEP}");
        let job = stage.python(&script).ranks(ranks).options(options).variable("CULPRIT", culprit).start();
        let end = job.end();
        end.assert_status(0);
        assert_verdict(&end, ranks, culprit.parse().ok().map(Rank), kind);
    }
}

fn assert_verdict(end: &End, ranks: u32, culprit: Option<Rank>, kind: HangKind) {
    let verdict = end.verdict();
    assert_eq!(verdict.culprit, culprit, "{end}");
    assert!(matches!(verdict.cause, Cause::Hang { hang, .. } if hang == kind), "{kind:?}\n{end}");
    let expected = ranks as usize - usize::from(culprit.is_some());
    assert_eq!(verdict.victims.len(), expected, "{end}");
    let outcomes = journal::outcomes(&end.journal);
    assert_eq!(outcomes.len(), 1, "it trains again\n{end}");
}

/// The ranks that others wait for, as a source reports.
fn waits_for(end: &End, source: &str) -> Vec<Rank> {
    let waits = journal::facts(&end.journal).filter_map(|fact| match fact {
        Fact::EvidenceTaken { waits, .. } => Some(waits),
        _ => None,
    });
    let of_source = waits.flatten().find(|waits| waits.reported.contains(source));
    of_source.map(|waits| waits.culprits.clone()).unwrap_or_default()
}

#[test]
fn a_stopped_rank() {
    let how = "def hang(): os.kill(os.getpid(), signal.SIGSTOP)";
    hangs(how, &CULPRIT.to_string(), "", HangKind::Stopped);
}

#[test]
fn all_ranks_stopped() {
    let how = "def hang(): os.kill(os.getpid(), signal.SIGSTOP)";
    if !has_client() {
        return;
    }
    for _ in 0..repeats() {
        let stage = Stage::new();
        let job =
            stage.python(&format!("{how}\n{LOCKSTEP}")).ranks(ranks()).variable("CULPRIT", "all").start();
        let end = job.end();
        end.assert_status(0);
        let verdict = end.verdict();
        assert!(matches!(verdict.cause, Cause::Hang { hang: HangKind::Stopped, .. }), "{end}");
        let hang = journal::facts(&end.journal).find_map(|fact| match fact {
            Fact::RanksHung { hang, .. } => Some(hang.headline()),
            _ => None,
        });
        let hang = hang.unwrap_or_else(|| panic!("a hang\n{end}"));
        for part in [format!("ranks 0-{}", ranks() - 1), "step 59".to_owned(), "section forward".to_owned()] {
            assert!(hang.contains(&part), "{part}: {hang}\n{end}");
        }
    }
}

#[test]
fn a_deadlock() {
    let how = "def hang():\n    lock = threading.Lock()\n    lock.acquire()\n    lock.acquire()";
    hangs(how, &CULPRIT.to_string(), "", HangKind::UserCode);
}

/// Only the stacks show the place: no sections, all at the same step, all asleep.
#[test]
fn the_stacks_of_all_ranks_are_recorded_and_show_the_culprit() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script =
        format!("def hang(): queue.Queue().get()\n{LOCKSTEP}").replace("with mainstay.section", "if ");
    let end = stage.python(&script).ranks(RANKS).variable("CULPRIT", "6").start().end();
    end.assert_status(0);
    let verdict = end.verdict();
    assert_eq!(verdict.culprit, Some(Rank(6)), "{end}");
    let reported =
        |what: &str| assert!(verdict.evidence.iter().any(|line| line.contains(what)), "{what}\n{end}");
    reported("rank 6 in wait (threading.py:");
    reported("6 ranks (1-5, 7) in barrier (ranks.py:");
    let file = end.run_dir.join("attempt_0/hang.json");
    reported(&file.display().to_string());
    let written = std::fs::read_to_string(&file).unwrap_or_default();
    for what in ["in hang", "wait_channel", "\"step\": 59"] {
        assert!(written.contains(what), "{what}: {written}");
    }
}

/// As many jobs are started: a shell script prepares the environment, and waits for the program that trains.
#[test]
fn a_stopped_rank_behind_a_script_of_a_shell() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let how = "def hang(): os.kill(os.getpid(), signal.SIGSTOP)";
    // It is next to the script, which continues after it, so that the shell stays.
    drop(stage.python(&format!("{how}\n{LOCKSTEP}")));
    let plan =
        stage.sh("\"$PYTHON_EXEC\" \"${0%/*}/ranks.py\"\nexit $?").ranks(4).options("--max-restarts 0");
    let end = plan.variable("CULPRIT", "2").start().end();
    end.assert_status(1);
    let verdict = end.verdict();
    assert_eq!(verdict.culprit, Some(Rank(2)), "{end}");
    assert!(matches!(verdict.cause, Cause::Hang { hang: HangKind::Stopped, .. }), "{end}");
    let reported =
        |what: &str| assert!(verdict.evidence.iter().any(|line| line.contains(what)), "{what}\n{end}");
    reported("2 ranks (1, 3) in barrier (ranks.py:");
    let written = std::fs::read_to_string(end.run_dir.join("attempt_0/hang.json")).unwrap_or_default();
    let written: serde_json::Value = serde_json::from_str(&written).unwrap_or_default();
    let (victim, culprit) = (&written["ranks"][1], &written["ranks"][2]);
    assert_ne!(victim["pid"], victim["training_pid"], "{written}");
    assert_eq!(victim["sections"], serde_json::json!(["all_reduce"]), "{written}");
    assert_eq!(victim["last_steps_ns"].as_array().map(Vec::len), Some(16), "{written}");
    assert_eq!(culprit["sections"], serde_json::json!(["forward"]), "{written}");
    assert_eq!(culprit["native"]["main"]["state"], "T", "{written}");
    assert!(culprit["native"]["main"]["wait_channel"].is_string(), "{written}");
    // If the kernel shows it at all.
    if std::fs::read_to_string("/proc/self/syscall").is_ok() {
        assert_eq!(victim["native"]["main"]["system_call_name"], "recvfrom", "{written}");
    }
    if std::fs::read_to_string("/proc/self/stack").is_ok() {
        let stack = victim["native"]["main"]["kernel_stack"].as_str();
        assert!(stack.is_some_and(|stack| !stack.is_empty()), "{written}");
    }
}

#[test]
fn a_read_from_a_pipe_without_a_writer() {
    hangs("def hang(): os.read(os.pipe()[0], 1)", &CULPRIT.to_string(), "", HangKind::UserCode);
}

#[test]
fn a_fifo_that_no_process_opens_for_writing() {
    let how = "def hang():\n    os.mkfifo(f'{MARKS}/fifo')\n    open(f'{MARKS}/fifo')";
    hangs(how, &CULPRIT.to_string(), "", HangKind::UserCode);
}

/// As in a deadlock of all ranks at once: nothing distinguishes them, not even their stacks.
#[test]
fn all_ranks_frozen() {
    let how = "def hang():\n    lock = threading.Lock()\n    lock.acquire()\n    lock.acquire()";
    hangs(how, "all", "", HangKind::AllStill);
}

#[test]
fn one_of_sixteen_and_one_of_thirty_two() {
    hangs_among(16, "def hang(): os.kill(os.getpid(), signal.SIGSTOP)", "11", "", HangKind::Stopped);
    hangs_among(32, "def hang(): queue.Queue().get()", "23", "", HangKind::UserCode);
}

#[test]
fn a_data_loader_that_gets_nothing() {
    let how = "def in_data(): queue.Queue().get()";
    hangs(how, &CULPRIT.to_string(), "", HangKind::DataInput);
}

#[test]
fn a_native_call_that_holds_the_interpreter() {
    let how = "def hang(): ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)";
    hangs(how, &CULPRIT.to_string(), "", HangKind::UserCode);
}

#[test]
fn a_loop_without_beats() {
    let how = "def hang():\n    while True: pass";
    hangs(how, &CULPRIT.to_string(), "--hang-limit spinning=3s", HangKind::UserCode);
}

#[test]
fn a_loop_with_beats() {
    let how = "def hang():\n    while True:\n        mainstay.beat()\n        time.sleep(0.01)";
    hangs(how, &CULPRIT.to_string(), "--hang-limit livelock=3s", HangKind::Livelock);
}

#[test]
fn a_rank_in_uninterruptible_sleep() {
    // The parent of a vfork sleeps so until its child executes a program or ends.
    let how = "def hang():\n    libc = ctypes.PyDLL(None)\n    if libc.vfork() == 0: libc.pause()";
    hangs(how, &CULPRIT.to_string(), "--hang-limit passing=3s", HangKind::BlockedIo);
}

#[test]
fn a_rank_that_never_registers() {
    let how = "def before_import(): time.sleep(1000)";
    hangs(how, &CULPRIT.to_string(), "--hang-limit first_step=8s", HangKind::NeverRegistered);
}

#[test]
fn a_rank_that_is_done_early() {
    // Its child holds its end of the connection open, as a switch would.
    let how = "def hang():\n    if os.fork(): os._exit(0)\n    time.sleep(1000)";
    hangs(how, &CULPRIT.to_string(), "", HangKind::FinishedEarly);
}

#[test]
fn a_hang_that_is_only_reported_stops_no_rank() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let how = "def hang(): wait_for('goes_on')";
    let script = format!("{how}\n{LOCKSTEP}");
    let plan =
        stage.python(&script).ranks(RANKS).options("--hang report --hang-limit working=1s,spinning=1s");
    let job = plan.variable("CULPRIT", "3").start();
    job.wait_for_fact("the hang", |fact| matches!(fact, Fact::RanksHung { acts: false, .. }));
    // The finding is published with the next sample of the pages.
    let ranks = job.asked(&stage, &["ranks", job.id(), "--json"]);
    let ranks: serde_json::Value = serde_json::from_str(&ranks).unwrap_or_default();
    assert_eq!(ranks["jobs"][0]["hang"]["culprits"], serde_json::json!([3]), "{ranks}");
    assert!(ranks["jobs"][0]["ranks"][3]["median_step"].as_f64() > Some(0.0), "{ranks}");
    let stacks = job.asked(&stage, &["stacks", job.id()]);
    assert!(stacks.contains("rank 3 in wait_for (ranks.py:"), "{stacks}");
    stage.mark("goes_on");
    job.wait_for_fact("its end", |fact| matches!(fact, Fact::HangPassed { .. }));
    let end = job.end();
    end.assert_status(0);
    assert!(journal::verdicts(&end.journal).is_empty(), "{end}");
}

/// Without any section: the stacks, or the collectives that the client counts, show the culprit.
#[test]
fn a_rank_that_never_enters_a_collective_of_torch() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import queue, torch, torch.distributed as dist
import mainstay
dist.init_process_group("gloo")
for step in range(80):
    if step == 60 and RANK == 2 and ATTEMPT == 0:
        queue.Queue().get()
    dist.all_reduce(torch.ones(1))
    mainstay.step(step)
dist.destroy_process_group()
"#;
    for _ in 0..repeats() {
        // One start of torch is slow enough, and this starts four.
        let ranks = asked_for("MAINSTAY_HANG_RANKS").unwrap_or(4);
        let end = stage.python(script).ranks(ranks).options("--max-restarts 0").start().end();
        end.assert_status(1);
        let verdict = end.verdict();
        assert_eq!(verdict.culprit, Some(Rank(2)), "{end}");
        assert!(matches!(verdict.cause, Cause::Hang { hang: HangKind::UserCode, .. }), "{end}");
    }
}

/// Without sections and the client's own counters, only torch's flight recorders know: each writes its record when
/// its pipe is written to. A thread replaces NCCL's listener, because gloo has none; the records are gloo's own.
#[test]
fn the_flight_recorders_show_who_never_entered() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import select, threading, torch, torch.distributed as dist
import mainstay
from torch._C import _distributed_c10d as native
pipe = f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}{RANK}.pipe"
os.mkfifo(pipe)
end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
def listen():
    while not select.select([end], [], [])[0] or not os.read(end, 1):
        time.sleep(0.05)
    record = native._dump_fr_trace(True, False, False)
    with open(f"{os.environ['TORCH_NCCL_DEBUG_INFO_TEMP_FILE']}{RANK}", "wb") as file:
        file.write(record)
threading.Thread(target=listen, daemon=True).start()
dist.init_process_group("gloo")
def wait_for_all():
    # In one function, so that the stacks do not distinguish the ranks.
    if step == 60 and RANK == 2:
        time.sleep(1000)
    dist.all_reduce(torch.ones(1))
for step in range(80):
    wait_for_all()
    mainstay.step(step)
"#;
    let plan = stage.python(script).ranks(4).options("--max-restarts 0 --hang-limit passing=3s");
    let end = plan.variable("MAINSTAY_TORCH", "0").start().end();
    end.assert_status(1);
    let verdict = end.verdict();
    assert_eq!(verdict.culprit, Some(Rank(2)), "{end}");
    assert_eq!(waits_for(&end, "PyTorch's flight recorders"), [Rank(2)], "{end}");
}

/// As above, with NCCL's RAS service as the source: it is mocked, because there is no NCCL without a GPU.
#[test]
fn the_ras_service_shows_who_never_entered() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import torch, torch.distributed as dist
import mainstay
dist.init_process_group("gloo")
def wait_for_all():
    if step == 60 and RANK == 2:
        time.sleep(1000)
    dist.all_reduce(torch.ones(1))
for step in range(80):
    wait_for_all()
    mainstay.step(step)
"#;
    let service = Ras::start(&[Answerer::Stopped]);
    let plan = stage.python(script).ranks(4).options("--max-restarts 0 --hang-limit passing=3s");
    let plan = plan.variable("MAINSTAY_TORCH", "0").variable("NCCL_RAS_ADDR", &service.address);
    let job = plan.start();
    let pids = job.attempt(0).pids;
    let ranks = pids.iter().map(|(rank, pid)| {
        let entered = 812 - u32::from(*rank == 2);
        serde_json::json!({
            "rank": rank, "host": "127.0.0.1", "pid": pid, "cuda_dev": rank, "nvml_dev": rank,
            "status": { "init_state": 0, "async_error": 0, "finalize_called": false, "destroy_flag": false, "abort_flag": false },
            "collective_counts": { "AllReduce": entered },
        })
    });
    let report = serde_json::json!({
        "nccl_version": "2.29.2+cuda13.0", "cuda_runtime_version": 13000, "cuda_driver_version": 13000,
        "timestamp": "2026-11-21 19:00:00", "communicators_count": 1,
        "communicators": [{
            "hash": "0x8a5ed2b3ef4c0f3d", "secondary_hash": "0x1:0x2", "size": 4, "ranks_count": 4,
            "missing_ranks_count": 0, "ranks": ranks.collect::<Vec<_>>(), "missing_ranks": [],
        }],
        "ras": { "collection_time_sec": 0.002, "timeouts_count": 0 },
    });
    service.change(Answerer::Json(format!("{report}\n")));
    let end = job.end();
    end.assert_status(1);
    let verdict = end.verdict();
    assert_eq!(verdict.culprit, Some(Rank(2)), "{end}");
    assert_eq!(waits_for(&end, "NCCL's RAS service"), [Rank(2)], "{end}");
    let written = std::fs::read_to_string(end.run_dir.join("attempt_0/hang.json")).unwrap_or_default();
    assert!(written.contains("8a5ed2b3ef4c0f3d"), "its report: {written}");
}

/// Phases of healthy jobs that look like a hang to a timer.
#[test]
fn a_healthy_job_with_long_phases_is_not_judged() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let how = r#"
def hang():
    # Two phases that their names announce, and work without an announcement.
    with mainstay.section("checkpoint"): time.sleep(4)
    with mainstay.section("evaluation"): time.sleep(4)
    end = time.monotonic() + 4
    while time.monotonic() < end: bytearray(1 << 20)
"#;
    let script = format!("time.sleep(3)\n{how}\n{LOCKSTEP}");
    let end = stage.python(&script).ranks(RANKS).variable("CULPRIT", "2").start().end();
    end.assert_status(0);
    assert!(!journal::facts(&end.journal).any(|fact| matches!(fact, Fact::RanksHung { .. })), "{end}");
}

/// A first step that compiles, and a pause in the middle: both are announced, so no hang is reported.
#[test]
fn what_was_announced_is_not_judged() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let how = r#"
def before_import():
    import mainstay
    with mainstay.expect_long("compile"): time.sleep(5)
def hang():
    mainstay.pause()
    time.sleep(5)
    mainstay.resume()
"#;
    let script = format!("{how}\n{LOCKSTEP}");
    let plan = stage.python(&script).ranks(RANKS).variable("CULPRIT", "2");
    let end = plan.options("--hang-limit first_step=2s").start().end();
    end.assert_status(0);
    assert!(!journal::facts(&end.journal).any(|fact| matches!(fact, Fact::RanksHung { .. })), "{end}");
}
