//! Hosts with agents: a job of several hosts needs none of them.

use mainstay_model::entry::Fact;
use mainstay_tests::{Agent, Job, has_client};

use super::TRAINER;
use super::cluster::Cluster;

#[test]
fn agents_that_are_killed_and_come_back_cost_the_job_nothing() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2);
    let agents: Vec<Agent> = (0..2).map(|host| cluster.stage(host).agent()).collect();
    let jobs: Vec<Job> = (0..2)
        .map(|host| {
            let options = format!("--nnodes 2 --node-rank {host} --nproc-per-node 2");
            cluster.plan(host, TRAINER, &options, &[("WAITS", "0,1")]).with(&agents[host]).start()
        })
        .collect();
    let all_wait = |attempt: u32| {
        for rank in 0..4 {
            jobs[rank / 2].mark(&format!("waits.{attempt}.{rank}"));
        }
    };
    all_wait(0);
    for (job, agent) in jobs.iter().zip(agents) {
        agent.wait_for_fact(job.id(), "the ranks", |fact| matches!(fact, Fact::RanksStepping { .. }));
        agent.kill();
    }
    jobs[1].kill_rank(0, 3);
    all_wait(1);
    let agents: Vec<Agent> = (0..2).map(|host| cluster.stage(host).agent()).collect();
    for (job, agent) in jobs.iter().zip(&agents) {
        agent.wait_for_fact(
            job.id(),
            "the second attempt",
            |fact| matches!(fact, Fact::AttemptStarted { attempt, .. } if attempt.0 == 1),
        );
    }
    jobs[0].kill_rank(1, 0);
    let ids: Vec<String> = jobs.iter().map(|job| job.id().to_owned()).collect();
    for end in cluster.ends(jobs) {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 3, "{end}");
    }
    for (id, agent) in ids.iter().zip(&agents) {
        agent.wait_for_fact(id, "the end", |fact| matches!(fact, Fact::JobEnded { exit: 0, .. }));
    }
}
