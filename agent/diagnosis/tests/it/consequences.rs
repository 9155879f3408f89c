//! More lines of the same failure never make its domain less sure: consequences are one vote.

#![allow(clippy::expect_used, reason = "in a test, a panic is the report")]

use mainstay_diagnosis::attribution::catalog::Catalog;
use mainstay_diagnosis::attribution::scan::{Kind, Scan};
use mainstay_diagnosis::attribution::{Attribution, Evidence, attribute};

/// The most that consequences may take from the confidence in the domain.
const LESS_SURE: f64 = 0.05;

const FAILURES: [(&str, &str); 9] = [
    (
        "a name",
        "[rank2]: Traceback (most recent call last):\n[rank2]:   File \"/home/a/train.py\", line 3, in step\n[rank2]:     x = b\n[rank2]: NameError: name 'b' is not defined\n",
    ),
    (
        "memory of the device",
        "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
    ),
    ("device memory errors", "[rank2]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"),
    (
        "a device off the bus",
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=812, name=python, GPU has fallen off the bus.\n",
    ),
    ("a stale handle", "[rank2]: OSError: [Errno 116] Stale file handle: '/nfs/a'\n"),
    ("a library", "[rank2]: ImportError: /opt/venv/lib/x.so: undefined symbol: _ZN3c104cuda9SetDeviceEa\n"),
    (
        "the first collective",
        "[rank0]:[E0622 03:40:10.118 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.\n",
    ),
    (
        "different collectives",
        "[rank0]:[E0622 03:40:10.118 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=BROADCAST, NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.\n[rank1]:[E0622 03:40:10.118 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.\n",
    ),
    (
        "preemption",
        "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***\n",
    ),
];

/// What the others print after any of these.
fn consequences() -> Vec<(&'static str, String)> {
    let dump = |rank: u32| {
        let head = format!("[rank{rank}]:[E0622 03:50:11.273 ProcessGroupNCCL.cpp");
        format!(
            "{head}:2268] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure detected by watchdog at work sequence id: 1 PG status: last enqueued work: 3, last completed work: -1\n\
             {head}:670] Stack trace of the failed collective not found, potentially because FlightRecorder is disabled.\n\
             {head}:684] [Rank {rank}] Some NCCL operations have failed or timed out. Subsequent GPU operations might run on corrupted/incomplete data.\n\
             {head}:698] [Rank {rank}] To avoid data inconsistency, we are taking the entire process down.\n\
             terminate called after throwing an instance of 'c10::DistBackendError'\n\
             Fatal Python error: Aborted\n"
        )
    };
    let closed = |rank: u32| {
        format!(
            "[rank{rank}]: n1:812:900 [0] NCCL WARN socket.cc:495 Call to recv from 10.0.0.3<4000> failed : Connection closed by remote peer\n[rank{rank}]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error\n"
        )
    };
    let table = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n============\ntrain.py FAILED\n------------\nFailures:\n[1]:\n  time      : 2026-01-01_04:13:44\n  host      : n1\n  rank      : 1 (local_rank: 1)\n  exitcode  : -6 (pid: 11)\n  error_file: <N/A>\n  traceback : Signal 6 (SIGABRT) received by PID 11\n------------\nRoot Cause (first observed failure):\n[0]:\n  time      : 2026-01-01_04:13:40\n  host      : n1\n  rank      : 2 (local_rank: 2)\n  exitcode  : 1 (pid: 12)\n  error_file: <N/A>\n";
    let slurm = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\nsrun: error: n1: tasks 0-3: Terminated\n";
    vec![
        ("one dump", dump(0)),
        ("two dumps", dump(0) + &dump(1)),
        ("closed connections", closed(0) + &closed(1) + &closed(3)),
        ("a table", table.to_owned()),
        ("a cancelled step", slurm.to_owned()),
        ("all of them", dump(0) + &dump(1) + &closed(3) + table + slurm),
    ]
}

fn judged(log: &str) -> Attribution {
    let catalog = Catalog::built_in().expect("the catalog is compiled in");
    let findings = vec![Scan::of_text(catalog, "log", None, Kind::Log, log.as_bytes())];
    attribute(catalog, &Evidence { findings, ..Evidence::default() })
}

#[test]
fn consequences_of_a_failure_leave_its_domain_as_sure() {
    let mut wrong = Vec::new();
    for (what, failure) in FAILURES {
        let alone = judged(failure);
        for (name, after) in consequences() {
            let both = judged(&format!("{failure}{after}"));
            if both.domain != alone.domain || both.confidence < alone.confidence - LESS_SURE {
                let votes = both.evidence.iter().chain(&both.against).chain(&both.consequences);
                let votes: Vec<String> = votes
                    .map(|vote| {
                        format!("{} {} {:.1} {:?}", vote.id, vote.class.name(), vote.weight, vote.also)
                    })
                    .collect();
                wrong.push(format!(
                    "{what}, then {name}: {} {:.2}, not {} {:.2}: {votes:?}",
                    both.domain.name(),
                    both.confidence,
                    alone.domain.name(),
                    alone.confidence
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{} are less sure:\n{}", wrong.len(), wrong.join("\n"));
}
