//! `RunPreflight`: waits for rooms that have not looked, up to the deadline.

use std::path::Path;
use std::time::Duration;

use mainstay_api::DeepChecks;
use mainstay_health::host::preflight::deep::DeepLimits;
use mainstay_model::health::HealthState;
use mainstay_model::time::Mono;
use mainstay_proto::v1::health_service_client::HealthServiceClient;
use mainstay_proto::v1::run_preflight_response::Item;
use mainstay_proto::v1::{
    CheckGroup, CheckRequirement, CheckVerdict, PreflightCheck, PreflightSummary, RunPreflightRequest,
};
use mainstay_sensors::source::active::{ActivePlan, Deep};

use super::server::Server;

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
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.health("host.memory", HealthState::Healthy);
    server.snapshots.roster().starts("devices", Mono(1));
    let required = vec![CheckRequirement { group: CheckGroup::Gpu.into(), count: 1 }];
    let request = RunPreflightRequest { required, ..within(Duration::from_millis(20)) };
    let (checks, summary) = ask(&server, request).await;
    let of = |name: &str| checks.iter().find(|check| check.name == name).unwrap();
    assert_eq!(of("devices").verdict(), CheckVerdict::Unknown);
    testing::snapshot!("preflight", "devices that do not answer", of("devices").reason);
    assert_eq!(of("required.gpu").verdict(), CheckVerdict::Unknown);
    assert_eq!(of("host.memory").verdict(), CheckVerdict::Pass);
    assert_eq!(summary.verdict(), CheckVerdict::Unknown);
}

#[tokio::test]
async fn the_checks_are_sent_as_soon_as_all_rooms_have_looked() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.snapshots.roster().starts("host", Mono(1));
    let mut client = HealthServiceClient::new(server.unix().await);
    let asking = tokio::spawn(async move {
        let mut stream = client.run_preflight(within(Duration::from_secs(600))).await.unwrap().into_inner();
        stream.message().await.unwrap().unwrap().item.unwrap()
    });
    server.health("host.memory", HealthState::Unhealthy);
    assert!(server.snapshots.roster().has_looked("host", Mono(2), vec!["host.memory".to_owned()]));
    server.snapshots.publish();
    let Item::Check(first) = asking.await.unwrap() else { panic!("no check") };
    assert_eq!((first.group(), first.verdict()), (CheckGroup::Gpu, CheckVerdict::Skipped));
}

#[tokio::test]
async fn a_look_that_never_returned_makes_unknown_what_it_saw_before() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.health("host.disk", HealthState::Healthy);
    server.snapshots.roster().has_looked("host", Mono(0), vec!["host.disk".to_owned()]);
    server.snapshots.roster().starts("host", Mono(1_000_000_000));
    server.at(30);
    let groups = vec![CheckGroup::Storage.into()];
    let request = RunPreflightRequest { groups, ..RunPreflightRequest::default() };
    assert_eq!(ask(&server, request.clone()).await.1.verdict(), CheckVerdict::Pass);
    server.at(90);
    let (checks, _) = ask(&server, request).await;
    assert_eq!(checks[0].verdict(), CheckVerdict::Unknown);
    testing::snapshot!("preflight", "a look that never returned", checks[0].reason);
}

fn deep(groups: &[CheckGroup]) -> RunPreflightRequest {
    let groups = groups.iter().map(|group| (*group).into()).collect();
    RunPreflightRequest { groups, deep: true, ..within(Duration::from_secs(60)) }
}

/// Probes that run this program, with a directory to write to.
fn probes(directory: &Path) -> DeepChecks {
    probes_of(Path::new(env!("CARGO_BIN_EXE_mainstay")), directory)
}

fn probes_of(program: &Path, directory: &Path) -> DeepChecks {
    DeepChecks::new(Deep {
        plan: ActivePlan {
            program: program.to_owned(),
            deadline: Duration::from_secs(1),
            limits: DeepLimits::default(),
            cuda: Some("/nowhere/libcuda.so.1".into()),
        },
        probes: true,
        paths: vec![directory.to_owned()],
        peers: Vec::new(),
        exclusive: false,
        force: false,
    })
}

#[tokio::test]
async fn active_probes_are_reported_after_the_monitored_checks() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::with_probes(dir.path(), probes(dir.path())).await;
    server.health("host.disk", HealthState::Healthy);
    let (checks, summary) = ask(&server, deep(&[CheckGroup::Storage])).await;
    let names: Vec<&str> = checks.iter().map(|check| check.name.as_str()).collect();
    let probe = format!("deep.storage:{}", dir.path().display());
    assert_eq!(names, ["host.disk", &probe]);
    // A slow disk only warns: this test checks that it was probed.
    let last = checks.last().unwrap();
    assert!(matches!(last.verdict(), CheckVerdict::Pass | CheckVerdict::Warn), "{last:?}");
    assert_eq!(last.deadline.map(|deadline| deadline.seconds), Some(60), "that of the request");
    assert!(!last.evidence.is_empty());
    assert_eq!(summary.verdict(), last.verdict());
}

#[tokio::test]
async fn gpus_are_probed_by_what_was_read_of_them_last() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::with_probes(dir.path(), probes(dir.path())).await;
    let (checks, _) = ask(&server, deep(&[CheckGroup::Gpu])).await;
    let of = |checks: &[PreflightCheck]| {
        checks.iter().find(|check| check.name == "deep.gpu").map(|check| check.verdict())
    };
    assert_eq!(of(&checks), Some(CheckVerdict::Skipped), "there are none");
    server.health("gpu.driver", HealthState::Unknown);
    let (checks, _) = ask(&server, deep(&[CheckGroup::Gpu])).await;
    assert_eq!(of(&checks), Some(CheckVerdict::Unknown));
}

#[tokio::test]
async fn a_probe_that_does_not_answer_in_time_is_unknown() {
    let dir = testing::tempdir().unwrap();
    let server = Server::with_probes(dir.path(), probes(dir.path())).await;
    let request = RunPreflightRequest {
        deadline: Some(Duration::from_millis(10).try_into().unwrap()),
        ..deep(&[CheckGroup::Network])
    };
    let (checks, summary) = ask(&server, request).await;
    let probe = checks.iter().find(|check| check.name == "deep.loopback").unwrap();
    assert_eq!(probe.verdict(), CheckVerdict::Unknown, "{probe:?}");
    assert_eq!(summary.verdict(), CheckVerdict::Unknown);
}

#[tokio::test]
async fn active_probes_are_for_the_unix_socket_and_one_request_at_a_time() {
    let dir = testing::tempdir().unwrap();
    let hangs = dir.path().join("hangs");
    testing::executable(&hangs, "#!/bin/sh\nexec sleep 600\n");
    let server = Server::with_probes(dir.path(), probes_of(&hangs, dir.path())).await;
    let mut far = HealthServiceClient::connect(format!("http://{}", server.grpc)).await.unwrap();
    let refused = far.run_preflight(deep(&[CheckGroup::Storage])).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::PermissionDenied, "{refused}");
    let mut client = HealthServiceClient::new(server.unix().await);
    let until_then = RunPreflightRequest {
        deadline: Some(Duration::from_secs(3).try_into().unwrap()),
        ..deep(&[CheckGroup::Storage])
    };
    let first = client.run_preflight(until_then).await.unwrap();
    let second = client.run_preflight(deep(&[CheckGroup::Storage])).await.unwrap_err();
    assert_eq!(second.code(), tonic::Code::ResourceExhausted, "{second}");
    drop(first);
}
