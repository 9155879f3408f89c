//! Leaders of jobs that meet in etcd: elected, lost, only slow; and a store that is gone or wiped.

use std::process::Command;

use mainstay_model::id::Rank;
use mainstay_model::verdict::Cause;
use mainstay_tests::{End, Job, Stage, has_client, journal, mainstay};
use nix::sys::signal::Signal;

use super::TRAINER;
use super::cluster::Cluster;
use super::etcd::{Etcd, has_etcd};
use crate::words::terminal;

/// Starts the hosts in sequence: the first leads, and has the first ranks.
fn start(cluster: &Cluster, hosts: usize, options: &str) -> Vec<Job> {
    start_with(cluster, hosts, options, &[("WAITS", "0")])
}

fn start_with(cluster: &Cluster, hosts: usize, options: &str, variables: &[(&str, &str)]) -> Vec<Job> {
    let mut jobs: Vec<Job> = Vec::new();
    for host in 0..hosts {
        jobs.push(cluster.start_host_as(host, TRAINER, options, variables));
        match host {
            0 => jobs[0].wait_until_printed(terminal::LEADS),
            _ => jobs[host].wait_until_printed(terminal::JOINS),
        }
    }
    jobs
}

fn ends(jobs: Vec<Job>) -> Vec<End> {
    let ended: Vec<bool> = jobs.iter().map(Job::has_ended).collect();
    let ends: Vec<End> = jobs.into_iter().map(Job::end).collect();
    for (end, ended) in ends.iter().zip(ended) {
        assert!(ended, "{end}");
    }
    ends
}

#[test]
fn hosts_that_meet_in_etcd_are_one_job_and_leave_nothing_there() {
    if !has_client() || !has_etcd() {
        return;
    }
    let etcd = Etcd::start();
    let cluster =
        Cluster::meeting_at(3, &format!("--rdzv-backend etcd --rdzv-endpoint 127.0.0.1:{}", etcd.port));
    let jobs = start(&cluster, 3, "--nnodes 3");
    for rank in 0..3 {
        cluster.host_with(&format!("waits.0.{rank}"));
    }
    assert!(etcd.all_keys().contains("\"kvs\""), "{}", etcd.all_keys());
    jobs[0].kill_rank(0, 1);
    for end in ends(jobs) {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 2, "{end}");
        let verdict = end.verdict();
        assert_eq!((verdict.culprit, &verdict.cause), (Some(Rank(1)), &Cause::Signal { signal: 9 }), "{end}");
    }
    let left = etcd.all_keys();
    // The note of the end, which is kept for some minutes.
    assert!(left.contains("\"count\":\"1\""), "{left}");
}

#[test]
fn a_lost_leader_is_replaced_and_the_budget_goes_on() {
    if !has_client() || !has_etcd() {
        return;
    }
    let etcd = Etcd::start();
    let cluster =
        Cluster::meeting_at(3, &format!("--rdzv-backend etcd --rdzv-endpoint 127.0.0.1:{}", etcd.port));
    // The third is a spare.
    let mut jobs = start_with(&cluster, 2, "--nnodes 2 --rdzv-conf lease=4", &[("WAITS", "0,1")]);
    jobs[0].mark("waits.0.0");
    jobs[1].mark("waits.0.1");
    jobs.push(cluster.start_host_as(2, TRAINER, "--nnodes 2 --rdzv-conf lease=4", &[("WAITS", "0,1")]));
    jobs[2].wait_for_event("spare_ready");
    // A restart that the first leader counts.
    jobs[1].kill_rank(0, 1);
    jobs[0].mark("waits.1.0");
    jobs[1].mark("waits.1.1");
    // Whether the store knows yet that all ranks have started makes no difference.
    jobs.remove(0).lose_launcher();
    assert_eq!(jobs[0].wait_for_event("leader_replaced").values["epoch"], "2");
    let ends = ends(jobs);
    for end in &ends {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 3, "{end}");
    }
    ends[0].assert_printed("restart 2 of 3");
    ends[0].assert_printed("was lost");
    let incidents = journal::verdicts(&ends[0].journal);
    assert_eq!(incidents.last().expect("a verdict").incident.0, 2, "{}", ends[0]);
}

#[test]
fn a_leader_that_was_only_slow_steps_down() {
    if !has_client() || !has_etcd() {
        return;
    }
    let etcd = Etcd::start();
    let cluster =
        Cluster::meeting_at(3, &format!("--rdzv-backend etcd --rdzv-endpoint 127.0.0.1:{}", etcd.port));
    let mut jobs = start(&cluster, 2, "--nnodes 2 --rdzv-conf lease=4");
    jobs[0].mark("waits.0.0");
    jobs[1].mark("waits.0.1");
    jobs.push(cluster.start_host_as(2, TRAINER, "--nnodes 2 --rdzv-conf lease=4", &[("WAITS", "0")]));
    jobs[2].wait_for_event("spare_ready");
    let slow = jobs.remove(0);
    slow.signal(Signal::SIGSTOP);
    assert_eq!(jobs[0].wait_for_event("leader_replaced").values["epoch"], "2");
    slow.signal(Signal::SIGCONT);
    // It comes back as a spare, or after the end of the job.
    jobs.push(slow);
    let mut ended = ends(jobs);
    let slow = ended.pop().expect("it was started");
    for end in ended {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 2, "{end}");
    }
    slow.assert_status(0).assert_printed("(epoch 2)").assert_printed(terminal::RANKS_STOPPED);
}

#[test]
fn a_task_of_an_array_that_comes_after_the_end_has_nothing_to_do() {
    if !has_etcd() {
        return;
    }
    let etcd = Etcd::start();
    let (endpoint, array) = (format!("127.0.0.1:{}", etcd.port), std::process::id().to_string());
    let stage = Stage::new();
    let task = |program: &str| {
        let program = stage.script("task.sh", &format!("#!/bin/sh\n{program}\n"));
        let mut launcher = Command::new(mainstay());
        launcher.args(["run", "--no-agent", "--no-python", "--nnodes", "1:2", "--rdzv-backend", "etcd"]);
        launcher.args(["--rdzv-endpoint", &endpoint, "--rdzv-conf", "last_call_timeout=1", "--log-dir"]);
        launcher.arg(stage.logs()).arg("--runtime-dir").arg(stage.tmpfs()).arg(program);
        launcher.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        launcher.env("HOME", stage.home()).env("MARKS", stage.marks()).env("SLURM_ARRAY_JOB_ID", &array);
        launcher.output().expect("it is started").status.code()
    };
    assert_eq!(task("exit 3"), Some(3));
    assert_eq!(task("touch $MARKS/runs"), Some(0), "after a failure, a task may start again");
    assert!(stage.marks().join("runs").exists());
    assert_eq!(task("touch $MARKS/again"), Some(0));
    assert!(!stage.marks().join("again").exists());
}

#[test]
fn training_continues_without_the_store_and_lost_keys_are_written_again() {
    if !has_client() || !has_etcd() {
        return;
    }
    let mut etcd = Etcd::start();
    let cluster =
        Cluster::meeting_at(2, &format!("--rdzv-backend etcd --rdzv-endpoint 127.0.0.1:{}", etcd.port));
    let jobs = start(&cluster, 2, "--nnodes 2 --rdzv-conf lease=3");
    jobs[0].mark("waits.0.0");
    jobs[1].mark("waits.0.1");
    etcd.wipe();
    jobs[0].wait_until_printed(terminal::WITHOUT_LEADER);
    // A failure that cannot be decided on.
    jobs[1].kill_rank(0, 1);
    etcd.resume();
    jobs[0].wait_until_printed(terminal::LEADS_AGAIN);
    for end in ends(jobs) {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 2, "{end}");
    }
}

#[test]
fn three_hosts_of_the_job_run_etcd_and_lose_one_with_its_leader() {
    if !has_client() || !has_etcd() {
        return;
    }
    let ports: Vec<u16> = (0..3).map(|_| super::etcd::pair()).collect();
    let endpoints: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    let cluster = Cluster::meeting_at(4, &format!("--rdzv-endpoint {}", endpoints.join(",")));
    let options = "--nnodes 3 --rdzv-conf lease=6";
    let mut jobs: Vec<Job> = Vec::new();
    for host in 0..4 {
        jobs.push(cluster.start_host_as(host, TRAINER, options, &[("WAITS", "0")]));
        if host < 3 {
            // Each takes the first endpoint that is free on this machine.
            jobs[host].wait_until_printed(terminal::RUNS_ETCD);
            super::etcd::wait_for_port(ports[host]);
        }
    }
    let of_rank_0 = cluster.host_with("waits.0.0");
    let leader = jobs.remove(of_rank_0);
    leader.lose_launcher();
    let ends = ends(jobs);
    for end in &ends {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 2, "{end}");
    }
}
