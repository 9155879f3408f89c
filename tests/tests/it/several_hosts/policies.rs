//! Users' policies in jobs of several hosts: that of the launcher that leads decides.

use std::path::PathBuf;

use mainstay_model::entry::{Body, Fact};
use mainstay_tests::{End, has_client, journal};

use super::TRAINER;
use super::cluster::Cluster;
use super::etcd::{Etcd, has_etcd};
use crate::words::terminal;

/// A policy of a host, which hands back what is not the loss of a host.
fn policy(cluster: &Cluster, host: usize) -> String {
    let text = format!(
        r#"
import os, pathlib
from mainstay.policy import Decision
def decide(case):
    if case.verdict.cause.kind == "host_lost":
        return None
    return Decision("hand_back", why="of host {host}")
pathlib.Path(os.environ["MARKS"], "loaded").touch()
"#
    );
    let file: PathBuf = cluster.stage(host).work().join("mine.py");
    std::fs::write(&file, text).expect("the policy is written");
    file.display().to_string()
}

/// The reason of the last decision, in each launcher's journal.
fn reasons(ends: &[End]) -> Vec<&str> {
    let last = |end| journal::decisions(end).last().map_or("", |decision| decision.why.as_str());
    ends.iter().map(|end| last(&end.journal)).collect()
}

#[test]
fn the_policy_of_the_leader_decides_and_all_hosts_record_its_decision() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2);
    let mut jobs = Vec::new();
    for host in [1, 0] {
        let variables = [("WAITS", "0"), ("MAINSTAY_POLICY", &policy(&cluster, host))];
        jobs.push(cluster.start_host(host, TRAINER, "", &variables));
    }
    jobs[1].mark("waits.0.0");
    jobs[0].mark("waits.0.1");
    jobs[1].mark("loaded");
    jobs[0].kill_rank(0, 1);
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(75);
    }
    assert_eq!(reasons(&ends), ["of host 0 (mine.py)"; 2], "{}", ends[0]);
    assert!(!cluster.stage(1).marks().join("loaded").exists(), "a follower has no use for its policy");
}

#[test]
fn a_broken_policy_of_the_leader_is_in_all_journals() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2);
    let jobs = cluster.start(TRAINER, "", &[("WAITS", "0"), ("MAINSTAY_POLICY", "/no/such/policy.py")]);
    for (host, job) in jobs.iter().enumerate() {
        job.mark(&format!("waits.0.{host}"));
        job.wait_for("the policy is reported", |entry| match &entry.body {
            Body::Fact(Fact::Observed(seen)) if seen.event == "policy_failed" => Some(()),
            _ => None,
        });
        cluster.stage(host).mark("go.0");
    }
    for end in cluster.ends(jobs) {
        end.assert_status(0);
    }
}

#[test]
fn the_policy_of_a_new_leader_decides_once_it_leads() {
    if !has_client() || !has_etcd() {
        return;
    }
    let etcd = Etcd::start();
    let cluster =
        Cluster::meeting_at(3, &format!("--rdzv-backend etcd --rdzv-endpoint 127.0.0.1:{}", etcd.port));
    let mut jobs = Vec::new();
    for host in 0..3 {
        let variables = [("WAITS", "0,1"), ("MAINSTAY_POLICY", &policy(&cluster, host))];
        jobs.push(cluster.start_host_as(host, TRAINER, "--nnodes 2 --rdzv-conf lease=4", &variables));
        let printed = [terminal::LEADS, terminal::JOINS, terminal::IS_SPARE];
        jobs[host].wait_until_printed(printed[host]);
        if host == 1 {
            jobs[0].mark("waits.0.0");
            jobs[1].mark("waits.0.1");
        }
    }
    jobs.remove(0).lose_launcher();
    assert_eq!(jobs[0].wait_for_event("leader_replaced").values["epoch"], "2");
    jobs[0].mark("loaded");
    let host = cluster.host_with("waits.1.1");
    cluster.host_with("waits.1.0");
    jobs[host - 1].kill_rank(1, 1);
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(75);
    }
    assert_eq!(reasons(&ends), ["of host 1 (mine.py)"; 2], "{}", ends[0]);
}
