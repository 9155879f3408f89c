//! NCCL's RAS service as the agent queries it, and other programs on its port.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;
use crate::support::ras;

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mainstay_hang::nccl_ras::{RasReply, RasReport};
use mainstay_sensors::source::nccl_ras::{RasError, ask, ask_blocking};
use ras::{Answerer, Ras};
use support::Agent;

const TEXT: &str = "\
NCCL version 2.27.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          4            1          4        4

Communicators... (0.01s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         4         4         4   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (8a5ed2b3ef4c0f3d) MISMATCH
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 812
  Rank 2 has launched up to operation 811 -- GPU 2 managed by process 4713 on node 10.0.0.1

";

fn json(dead: bool) -> String {
    let rank = |rank: u32| {
        format!(
            r#"{{ "rank": {rank}, "host": "10.0.0.1", "pid": {}, "cuda_dev": {rank}, "nvml_dev": {rank},
            "status": {{ "init_state": 0, "async_error": 0, "finalize_called": false, "destroy_flag": false, "abort_flag": false }},
            "collective_counts": {{ "AllGather": 0, "AllReduce": 812 }} }}"#,
            4711 + rank
        )
    };
    let missing = if dead {
        r#"{ "rank": 3, "host": "10.0.0.2", "pid": 99, "cuda_dev": 0, "nvml_dev": 0,
            "status": { "unresponsive": true, "considered_dead": true } }"#
    } else {
        ""
    };
    format!(
        r#"{{ "nccl_version": "2.29.2+cuda13.0", "cuda_runtime_version": 13000, "cuda_driver_version": 13000,
        "timestamp": "2026-11-21 19:00:00", "communicators_count": 1, "communicators": [
        {{ "hash": "0x8a5ed2b3ef4c0f3d", "secondary_hash": "0x1:0x2", "size": 4, "ranks_count": 3, "missing_ranks_count": 1,
        "ranks": [ {}, {}, {} ], "missing_ranks": [ {missing} ] }} ],
        "ras": {{ "collection_time_sec": 0.002, "timeouts_count": 0 }} }}
"#,
        rank(0),
        rank(1),
        rank(2)
    )
}

/// Longer than any test takes, if every wait succeeds.
const AMPLE: Duration = Duration::from_secs(60);

fn asked(answerers: &[Answerer]) -> (Result<RasReport, RasError>, Vec<String>) {
    let ras = Ras::start(answerers);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let reported = runtime.block_on(ask(&ras.address, AMPLE));
    (reported, ras.printed())
}

#[test]
fn an_older_nccl_answers_in_its_text() {
    let (reported, printed) = asked(&[Answerer::Text(TEXT.into())]);
    let report = reported.unwrap();
    let behind = report.communicators[0].behind();
    assert_eq!((behind.len(), behind[0].rank.as_ref().unwrap().rank, behind[0].own), (1, 2, 811));
    assert_eq!(printed, ["CLIENT PROTOCOL 2", "TIMEOUT 6", "SET FORMAT json", "VERBOSE STATUS"]);
}

#[test]
fn a_newer_nccl_answers_in_json() {
    let (reported, _) = asked(&[Answerer::Json(json(true))]);
    let report = reported.unwrap();
    assert_eq!((report.version.as_str(), report.dead.count), ("2.29.2+cuda13.0", 1));
    assert_eq!(report.communicators[0].operations[0].groups[0].ranks, 3);
}

#[test]
fn a_program_that_is_not_nccl_is_reported_as_such() {
    for other in ["HTTP/1.1 400 Bad Request\r\n\r\n", "SSH-2.0-OpenSSH_9.2\r\n", "\u{1}\u{2}\n"] {
        let (reported, _) = asked(&[Answerer::Other(other)]);
        assert!(
            matches!(&reported, Err(RasError::Improper(why)) if why.contains("not NCCL")),
            "{reported:?}"
        );
    }
    let (reported, _) = asked(&[Answerer::Other("")]);
    assert!(matches!(reported, Err(RasError::Connection(_))), "{reported:?}");
}

#[test]
fn a_report_that_breaks_off_is_no_report() {
    let (reported, _) = asked(&[Answerer::BreaksOff(TEXT.into())]);
    assert!(matches!(&reported, Err(RasError::Improper(why)) if why.contains("breaks off")), "{reported:?}");
    let (reported, _) = asked(&[Answerer::Json(json(true)[..200].to_owned())]);
    assert!(
        matches!(&reported, Err(RasError::Improper(why)) if why.contains("not understood")),
        "{reported:?}"
    );
}

#[test]
fn a_process_that_is_stopped_does_not_hide_the_others() {
    let ras = Ras::start(&[Answerer::Stopped, Answerer::Text(TEXT.into())]);
    assert!(matches!(ask_blocking(&ras.address, Duration::from_secs(3)), RasReply::Reported(_)));
    let ras = Ras::start(&[Answerer::Stopped]);
    let asked = ask_blocking(&ras.address, Duration::from_millis(300));
    assert!(matches!(&asked, RasReply::Failed(why) if why.contains("no answer")), "{asked:?}");
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    assert_eq!(ask_blocking(&free, AMPLE), RasReply::Refused);
}

/// A job of one process that does nothing.
struct Job(Child);

impl Job {
    fn start(directory: &Path) -> Job {
        let job = Command::new(env!("CARGO_BIN_EXE_mainstay"))
            .args(["run", "--nproc-per-node", "1", "--no-python", "--socket"])
            .arg(directory.join("agent.sock"))
            .arg("--log-dir")
            .arg(directory.join("logs"))
            .args(["sleep", "1000"])
            .current_dir(directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Job(job.unwrap())
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let launcher = nix::unistd::Pid::from_raw(self.0.id() as i32);
        let _ = nix::sys::signal::kill(launcher, nix::sys::signal::Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

#[test]
fn the_whole_agent_asks_while_a_job_runs_and_shows_nccl_only_when_something_is_wrong() {
    let directory = testing::tempdir().unwrap();
    let ras = Ras::start(&[Answerer::Json(json(false))]);
    let settings: [(&str, &Path); 2] =
        [("NCCL_ADDRESS", Path::new(&ras.address)), ("NCCL_INTERVAL", Path::new("5s"))];
    let agent = Agent::start(directory.path(), &settings);
    agent.wait_for("host.memory");
    assert_eq!(ras.printed(), [""; 0], "no job runs");

    let job = Job::start(directory.path());
    agent.wait_for("NCCL 2.29.2+cuda13.0");
    assert!(!agent.status().contains("nccl"), "nothing is wrong: {}", agent.status());
    ras.change(Answerer::Json(json(true)));
    let reported = agent.wait_for_state("nccl", "DEGRADED");
    assert!(reported.contains("process 99 on 10.0.0.2"), "{reported}");
    drop(job);
    agent.wait_for_change("nccl", "DEGRADED", "HEALTHY");
}
