//! The node and its jobs over the wire.

use mainstay_model::entry::Fact;
use mainstay_model::health::HealthState;
use mainstay_model::id::{Attempt, JobId, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_proto::v1;
use mainstay_proto::v1::health_service_client::HealthServiceClient;
use mainstay_proto::v1::{
    GetJobRequest, GetNodeRequest, JobPhase, ListJobsRequest, RankPhase, WatchNodeRequest,
};
use mainstay_view::node::BeatView;
use tonic::Code;

use super::server::{EPOCH, SECOND, Server};

fn beat(second: u64, step: u64) -> BeatView {
    BeatView {
        step: Some(step),
        sections: vec!["train".into(), "backward".into()],
        at: Mono(second * SECOND),
        loss: Some(0.5),
        median_step: None,
        pace: mainstay_progress::monitor::Pace {
            self_time: Some(mainstay_model::time::Span::millis(80)),
            against_peers: Some(1.25),
            wait_share: Some(0.2),
        },
        stage: None,
    }
}

#[tokio::test]
async fn the_node_has_its_state_with_reason_and_evidence() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.health("host.cpu", HealthState::Healthy);
    server.health("host.memory", HealthState::Degraded);
    server.health("host.disk", HealthState::Unhealthy);
    let mut client = HealthServiceClient::new(server.unix().await);
    let answer = client.get_node(GetNodeRequest {}).await.unwrap().into_inner();
    let (node, about) = (answer.node.unwrap(), answer.server.unwrap());
    assert_eq!(node.state(), v1::HealthState::Unhealthy);
    assert_eq!(
        node.reason,
        "host.disk is UNHEALTHY: host.disk as read; host.memory is DEGRADED: host.memory as read"
    );
    assert_eq!(node.recommended_action(), v1::RecommendedAction::RebootNode);
    let memory = &node.components[2];
    assert_eq!((memory.name.as_str(), memory.state()), ("host.memory", v1::HealthState::Degraded));
    assert_eq!(memory.evidence[0].limit.as_deref(), Some("10 %"));
    // Read at second 90, in this state since second 40, queried at second 100.
    assert_eq!(memory.read_age.unwrap().seconds, 10);
    assert_eq!(memory.since.unwrap().seconds, EPOCH / SECOND as i64 + 40);
    assert_eq!((about.mode(), about.hostname.as_str(), about.pid), (v1::ServerMode::Agent, "node-17", 812));
    server.stop().await;
}

#[tokio::test]
async fn a_reading_of_an_earlier_boot_has_no_age() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.health("host.cpu", HealthState::Healthy);
    // The clock of this boot is before the reading.
    server.at(30);
    let mut client = HealthServiceClient::new(server.unix().await);
    let node = client.get_node(GetNodeRequest {}).await.unwrap().into_inner().node.unwrap();
    assert_eq!(node.components[0].read_age, None);
    assert_eq!(node.components[0].since, None);
    server.stop().await;
}

#[tokio::test]
async fn jobs_contain_their_ranks() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.job("demo");
    server.job("other");
    let demo = JobId("demo".into());
    server.snapshots.sample(&demo, Attempt(0), Rank(0), beat(97, 8));
    server.snapshots.sample(&demo, Attempt(0), Rank(1), beat(98, 7));
    let refusal = Fact::RankRefused { attempt: Attempt(0), rank: Rank(1), reason: "page too new".into() };
    server.fact(20, "demo", refusal);
    let mut client = HealthServiceClient::new(server.unix().await);
    let jobs = client.list_jobs(ListJobsRequest {}).await.unwrap().into_inner().jobs;
    let ids: Vec<&str> = jobs.iter().map(|job| job.id.as_str()).collect();
    assert_eq!(ids, ["demo", "other"]);

    let job = client.get_job(GetJobRequest { id: "demo".into() }).await.unwrap().into_inner().job.unwrap();
    assert_eq!((job.phase(), job.step, job.max_restarts), (JobPhase::Running, Some(7), 3));
    let rank = &job.ranks[1];
    assert_eq!(
        (rank.pid, rank.phase(), rank.step, rank.loss),
        (4001, RankPhase::Started, Some(7), Some(0.5))
    );
    assert_eq!(rank.sections, ["train", "backward"]);
    assert_eq!(rank.heartbeat_age.unwrap().seconds, 2);
    assert_eq!(rank.self_time.as_ref().unwrap().nanos, 80_000_000);
    assert_eq!((rank.against_peers, rank.wait_share), (Some(1.25), Some(0.2)));
    assert_eq!(rank.refusal.as_deref(), Some("page too new"));

    let missing = client.get_job(GetJobRequest { id: "none".into() }).await.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound);
    assert!(missing.message().contains("demo"), "{}", missing.message());
    server.stop().await;
}

#[tokio::test]
async fn a_watch_sends_the_state_at_once_and_then_the_newest_after_each_change() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.job("demo");
    let mut client = HealthServiceClient::new(server.tcp().await);
    let min_interval = Some(prost_types::Duration { seconds: 0, nanos: 1 });
    let request = WatchNodeRequest { min_interval };
    let mut watch = client.watch_node(request).await.unwrap().into_inner();
    let first = watch.message().await.unwrap().unwrap();
    assert_eq!(first.jobs[0].step, Some(1));

    for step in 2..=1000 {
        server.fact(
            20,
            "demo",
            Fact::Progress { attempt: Attempt(0), step, loss: None, saving: Span::default(), saves: 0 },
        );
    }
    // However the messages were coalesced, the last one is the newest state.
    let mut messages = 0;
    loop {
        let message = watch.message().await.unwrap().unwrap();
        messages += 1;
        if message.jobs[0].step == Some(1000) {
            break;
        }
    }
    assert!(messages < 999, "changes were not coalesced: {messages}");
    server.stop().await;
}

#[tokio::test]
async fn the_pace_of_a_job_comes_from_its_steps() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    let mut client = HealthServiceClient::new(server.unix().await);
    let request = WatchNodeRequest { min_interval: Some(prost_types::Duration { seconds: 0, nanos: 1 }) };
    let mut watch = client.watch_node(request).await.unwrap().into_inner();
    server.job("demo");
    // The pace is computed next to the stream, so each state is awaited before the clock advances.
    let mut wait_for = async |step: u64, paced: bool| loop {
        let message = watch.message().await.unwrap().unwrap();
        let job = message.jobs.first().filter(|job| job.step == Some(step));
        match job.map(|job| job.steps_per_second) {
            Some(pace) if pace.is_some() == paced => return pace,
            _ => {}
        }
    };
    assert_eq!(wait_for(1, false).await, None);
    server.at(22);
    server.fact(
        22,
        "demo",
        Fact::Progress { attempt: Attempt(0), step: 21, loss: None, saving: Span::default(), saves: 0 },
    );
    assert_eq!(wait_for(21, true).await, Some(2.0));
    server.stop().await;
}
