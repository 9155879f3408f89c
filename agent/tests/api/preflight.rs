//! `RunPreflight`: waits for rooms that have not looked, and no longer than it was told to.

use std::time::Duration;

use mainstay_core::health::HealthState;
use mainstay_core::time::Mono;
use mainstay_proto::v1::health_service_client::HealthServiceClient;
use mainstay_proto::v1::run_preflight_response::Item;
use mainstay_proto::v1::{
    CheckGroup, CheckRequirement, CheckVerdict, PreflightCheck, PreflightSummary, RunPreflightRequest,
};

use crate::server::Server;

async fn ask(server: &Server, request: RunPreflightRequest) -> (Vec<PreflightCheck>, PreflightSummary) {
    let mut stream =
        HealthServiceClient::new(server.unix().await).run_preflight(request).await.unwrap().into_inner();
    let mut checks = Vec::new();
    loop {
        match stream.message().await.unwrap().unwrap().item.unwrap() {
            Item::Check(check) => checks.push(check),
            Item::Summary(summary) => return (checks, summary),
        }
    }
}

fn within(limit: Duration) -> RunPreflightRequest {
    RunPreflightRequest { deadline: Some(limit.try_into().unwrap()), ..RunPreflightRequest::default() }
}

#[tokio::test]
async fn a_room_that_does_not_look_is_unknown_and_the_others_count() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.health("host.memory", HealthState::Healthy);
    server.board.roster().begins("devices", Mono(1));
    let required = vec![CheckRequirement { group: CheckGroup::Gpu.into(), count: 1 }];
    let request = RunPreflightRequest { required, ..within(Duration::from_millis(20)) };
    let (checks, summary) = ask(&server, request).await;
    let of = |name: &str| checks.iter().find(|check| check.name == name).unwrap();
    assert_eq!(of("devices").verdict(), CheckVerdict::Unknown);
    assert_eq!(of("devices").reason, "did not answer in 20 ms");
    assert_eq!(of("required.gpu").verdict(), CheckVerdict::Unknown);
    assert_eq!(of("host.memory").verdict(), CheckVerdict::Pass);
    assert_eq!(summary.verdict(), CheckVerdict::Unknown);
}

#[tokio::test]
async fn it_is_told_as_soon_as_all_have_looked() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.board.roster().begins("host", Mono(1));
    let mut client = HealthServiceClient::new(server.unix().await);
    let asking = tokio::spawn(async move {
        let mut stream = client.run_preflight(within(Duration::from_secs(600))).await.unwrap().into_inner();
        stream.message().await.unwrap().unwrap().item.unwrap()
    });
    server.health("host.memory", HealthState::Unhealthy);
    assert!(server.board.roster().has_looked("host", Mono(2), vec!["host.memory".to_owned()]));
    server.board.publish();
    let Item::Check(first) = asking.await.unwrap() else { panic!("no check") };
    assert_eq!((first.group(), first.verdict()), (CheckGroup::Gpu, CheckVerdict::Skipped));
}

#[tokio::test]
async fn a_look_that_never_returned_makes_unknown_what_it_saw_before() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.health("host.disk", HealthState::Healthy);
    server.board.roster().has_looked("host", Mono(0), vec!["host.disk".to_owned()]);
    server.board.roster().begins("host", Mono(1_000_000_000));
    server.at(30);
    let groups = vec![CheckGroup::Storage.into()];
    let request = RunPreflightRequest { groups, ..RunPreflightRequest::default() };
    assert_eq!(ask(&server, request.clone()).await.1.verdict(), CheckVerdict::Pass);
    server.at(90);
    let (checks, _) = ask(&server, request).await;
    assert_eq!(checks[0].verdict(), CheckVerdict::Unknown);
    assert!(checks[0].reason.contains("has not returned for 89.00 s"), "{}", checks[0].reason);
}
