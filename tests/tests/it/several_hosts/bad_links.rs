//! Links that get slow or lose packets while ranks train: no host is lost, and the job ends as without.

use mainstay_model::verdict::Cause;
use mainstay_tests::{Job, has_client, has_torch};

use super::assert_undisturbed;
use super::cluster::Cluster;
use super::links::Quality;
use super::lost::{STEPS, has_namespaces};
use crate::ddp::DDP;

/// A link over half the world, with a twentieth of its packets lost.
const VERY_BAD: Quality = Quality { delay: 150.0, jitter: 50.0, loss: 5.0, rate: 5e3 };

/// A thousand steps of three hosts, of which the link of one gets bad after a hundred.
fn assert_not_lost(quality: Quality) {
    if !has_namespaces() {
        return;
    }
    let cluster = Cluster::elastic_with_links(3);
    let script = STEPS.replace("step == 100", "step in (100, 1000)").replace("runs.", "runs.{step}.");
    let start = |host| cluster.start_host_as(host, &script, "--nnodes 3", &[]);
    let jobs: Vec<Job> = (0..3).map(start).collect();
    let at: Vec<usize> = (0..3).map(|rank| cluster.host_with(&format!("runs.100.0.{rank}"))).collect();
    cluster.network().set_link(at[1], quality, quality);
    for rank in 0..3 {
        cluster.host_with(&format!("runs.1000.0.{rank}"));
    }
    (0..3).for_each(|host| cluster.stage(host).mark("end"));
    for end in cluster.ends(jobs) {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 1, "{end}");
    }
}

#[test]
fn a_host_whose_link_loses_packets_is_not_lost() {
    assert_not_lost(Quality { loss: 5.0, ..Quality::GOOD });
}

#[test]
fn a_host_whose_link_is_ten_times_slower_is_not_lost() {
    assert_not_lost(Quality::GOOD.slower(10.0));
}

#[test]
fn a_host_at_the_end_of_a_very_bad_link_is_not_lost() {
    assert_not_lost(VERY_BAD);
}

#[test]
fn ddp_over_a_slow_link_that_loses_packets_and_a_rank_ends_with_the_parameters_of_an_undisturbed_run() {
    if !has_torch() || !has_namespaces() {
        return;
    }
    let slow = Quality { loss: 5.0, ..Quality::GOOD.slower(10.0) };
    let cluster = Cluster::with_links(2);
    cluster.network().set_link(1, slow, slow);
    let jobs = cluster.start(DDP, "--nproc-per-node 1", &[("WAITS", "0")]);
    jobs.iter().enumerate().for_each(|(rank, job)| drop(job.mark(&format!("waits.0.{rank}"))));
    jobs[1].kill_rank(0, 1);
    for end in cluster.ends(jobs) {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 2, "{end}");
    }
    assert_undisturbed(&cluster, &[0, 1]);
}

/// Steps in lockstep: rank 2 waits for a byte of each other rank, and answers.
const LOCKSTEP: &str = r#"
import socket
import mainstay
if ATTEMPT > 0:
    sys.exit(0)
if RANK == 2:
    listener = socket.create_server(("", 29777))
    mark("listens")
    peers = [listener.accept()[0] for _ in range(2)]
else:
    while True:
        try:
            peer = socket.create_connection((os.environ["SERVER"], 29777), timeout=5)
            break
        except OSError:
            time.sleep(0.05)
    peer.settimeout(None)
for step in range(1_000_000):
    if RANK == 2:
        for peer in peers:
            peer.recv(1)
        for peer in peers:
            peer.sendall(b"x")
    else:
        peer.sendall(b"x")
        peer.recv(1)
    mainstay.step(step)
    if step == 100:
        mark(f"trains.{RANK}")
    time.sleep(0.005)
"#;

#[test]
fn a_link_that_is_cut_in_one_direction_is_named_with_both_hosts() {
    if !has_client() || !has_namespaces() {
        return;
    }
    let cluster = Cluster::in_namespaces(3);
    let (from, to) = (cluster.network().address(1), cluster.network().address(2));
    let jobs = cluster.start(LOCKSTEP, "--hang-limit step=8s", &[("SERVER", &to)]);
    cluster.host_with("trains.1");
    cluster.network().cut(1, 2);
    for end in cluster.ends(jobs) {
        end.assert_status(0);
        let verdict = end.verdict();
        assert!(matches!(verdict.cause, Cause::Hang { .. }), "{end}");
        let ends = [(from.as_str(), 1), (to.as_str(), 2)]
            .map(|(at, host)| format!("{at} (host {})", cluster.host_name(host)));
        let names_both = |line: &String| ends.iter().all(|end| line.contains(end.as_str()));
        assert!(verdict.evidence.iter().any(names_both), "{end}");
    }
}
