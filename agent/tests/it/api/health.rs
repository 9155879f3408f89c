//! The node and its jobs over the wire.

use mainstay_model::entry::Fact;
use mainstay_model::health::HealthState;
use mainstay_model::id::{Attempt, JobId, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_proto::v1;
use mainstay_proto::v1::health_service_client::HealthServiceClient;
use mainstay_proto::v1::operator_service_client::OperatorServiceClient;
use mainstay_proto::v1::{
    AcknowledgeRequest, GetJobRequest, GetNodeRequest, JobPhase, ListJobsRequest, ListRanksRequest,
    RankPhase, WatchNodeRequest,
};
use mainstay_view::node::BeatView;
use tonic::Code;
use tonic_types::StatusExt;

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
        total_steps: None,
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
    let jobs = client.list_jobs(ListJobsRequest::default()).await.unwrap().into_inner().jobs;
    let ids: Vec<&str> = jobs.iter().map(|job| job.id.as_str()).collect();
    assert_eq!(ids, ["demo", "other"]);

    let job = client
        .get_job(GetJobRequest { id: "demo".into(), ..Default::default() })
        .await
        .unwrap()
        .into_inner()
        .job
        .unwrap();
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

    let missing =
        client.get_job(GetJobRequest { id: "none".into(), ..Default::default() }).await.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound);
    let info = missing.get_details_error_info().unwrap();
    assert_eq!((info.reason.as_str(), info.domain.as_str()), ("UNKNOWN_JOB", "mainstay.v1"));
    assert!(missing.message().contains("demo"), "{}", missing.message());
    server.stop().await;
}

#[tokio::test]
async fn jobs_and_ranks_come_in_pages_and_all_at_once_to_callers_that_ask_for_none() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    for job in ["a", "b", "c"] {
        server.job(job);
    }
    let mut client = HealthServiceClient::new(server.unix().await);
    let (mut pages, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = ListJobsRequest { page_size: 2, page_token, without_ranks: true };
        let page = client.list_jobs(request).await.unwrap().into_inner();
        assert!(page.jobs.iter().all(|job| job.ranks.is_empty()));
        pages.push(page.jobs.iter().map(|job| job.id.clone()).collect::<Vec<_>>());
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(pages, [vec!["a".to_owned(), "b".to_owned()], vec!["c".to_owned()]]);
    let all = client.list_jobs(ListJobsRequest::default()).await.unwrap().into_inner();
    assert_eq!((all.jobs.len(), all.next_page_token.as_str()), (3, ""));
    // A full last page has no page behind it.
    let request = ListJobsRequest { page_size: 3, ..Default::default() };
    assert_eq!(client.list_jobs(request).await.unwrap().into_inner().next_page_token, "");

    let whole = GetJobRequest { id: "a".into(), ..Default::default() };
    let whole = client.get_job(whole).await.unwrap().into_inner().job.unwrap();
    let light = GetJobRequest { id: "a".into(), without_ranks: true };
    let light = client.get_job(light).await.unwrap().into_inner().job.unwrap();
    assert_eq!((whole.ranks.len(), light.ranks.len()), (2, 0));
    let (mut ranks, mut page_token) = (Vec::new(), String::new());
    for more in [true, false] {
        let request = ListRanksRequest { job: "a".into(), page_size: 1, page_token };
        let page = client.list_ranks(request).await.unwrap().into_inner();
        assert_eq!((page.ranks.len(), !page.next_page_token.is_empty()), (1, more));
        ranks.extend(page.ranks);
        page_token = page.next_page_token;
    }
    assert_eq!(ranks, whole.ranks);

    let negative = ListRanksRequest { job: "a".into(), page_size: -1, ..Default::default() };
    let foreign = ListRanksRequest { job: "a".into(), page_token: "b".into(), ..Default::default() };
    for (request, field) in [(negative, "page_size"), (foreign, "page_token")] {
        let refused = client.list_ranks(request).await.unwrap_err();
        let violations = refused.get_details_bad_request().unwrap().field_violations;
        assert_eq!((refused.code(), violations[0].field.as_str()), (Code::InvalidArgument, field));
    }
    server.stop().await;
}

#[tokio::test]
async fn over_tcp_a_method_of_the_unix_socket_is_refused_with_a_reason() {
    let dir = testing::tempdir().unwrap();
    let server = Server::start(dir.path()).await;
    let mut operator = OperatorServiceClient::new(server.tcp().await);
    let refused = operator.acknowledge(AcknowledgeRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert_eq!(refused.get_details_error_info().unwrap().reason, "UNIX_SOCKET_ONLY");
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
    let total = BeatView { total_steps: Some(61), ..BeatView::default() };
    server.snapshots.sample(&JobId("demo".into()), Attempt(0), Rank(0), total);
    server.fact(
        22,
        "demo",
        Fact::Progress { attempt: Attempt(0), step: 21, loss: None, saving: Span::default(), saves: 0 },
    );
    assert_eq!(wait_for(21, true).await, Some(2.0));
    // A rank reported the number of its steps.
    let request = GetJobRequest { id: "demo".into(), ..Default::default() };
    let job = client.get_job(request).await.unwrap().into_inner().job.unwrap();
    assert_eq!((job.total_steps, job.remaining.unwrap().seconds), (Some(61), 20));
    server.stop().await;
}
