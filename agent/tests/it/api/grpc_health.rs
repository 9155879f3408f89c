//! The standard health protocol, tested sentence by sentence against its specification.

use mainstay_model::health::HealthState;
use mainstay_proto::grpc_health_v1::health_check_response::ServingStatus;
use mainstay_proto::grpc_health_v1::health_client::HealthClient;
use mainstay_proto::grpc_health_v1::{HealthCheckRequest, HealthListRequest};
use tonic::Code;
use tonic::transport::Channel;

use super::server::Server;

fn request(service: &str) -> HealthCheckRequest {
    HealthCheckRequest { service: service.to_owned() }
}

async fn check(client: &mut HealthClient<Channel>, service: &str) -> Result<ServingStatus, Code> {
    client
        .check(request(service))
        .await
        .map(|answer| answer.into_inner().status())
        .map_err(|status| status.code())
}

#[tokio::test]
async fn the_server_serves_whatever_the_health_of_the_node() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    let mut client = HealthClient::new(server.unix().await);
    assert_eq!(check(&mut client, "").await, Ok(ServingStatus::Serving));
    assert_eq!(check(&mut client, "node").await, Ok(ServingStatus::Unknown));
    server.health("host.disk", HealthState::Unhealthy);
    assert_eq!(check(&mut client, "").await, Ok(ServingStatus::Serving));
    assert_eq!(check(&mut client, "mainstay.v1.HealthService").await, Ok(ServingStatus::Serving));
    assert_eq!(check(&mut client, "node").await, Ok(ServingStatus::NotServing));
    assert_eq!(check(&mut client, "ready").await, Ok(ServingStatus::NotServing));
    server.stop().await;
}

#[tokio::test]
async fn each_component_is_a_service_and_an_unknown_one_is_not_found() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.health("host.cpu", HealthState::Healthy);
    server.health("host.memory", HealthState::Degraded);
    server.health("host.disk", HealthState::Unhealthy);
    server.health("gpu.0", HealthState::Unknown);
    let mut client = HealthClient::new(server.tcp().await);
    assert_eq!(check(&mut client, "host.cpu").await, Ok(ServingStatus::Serving));
    assert_eq!(check(&mut client, "host.memory").await, Ok(ServingStatus::Serving));
    assert_eq!(check(&mut client, "host.disk").await, Ok(ServingStatus::NotServing));
    assert_eq!(check(&mut client, "gpu.0").await, Ok(ServingStatus::Unknown));
    assert_eq!(check(&mut client, "gpu.1").await, Err(Code::NotFound));

    let listed = client.list(HealthListRequest {}).await.unwrap().into_inner().statuses;
    let of = |name: &str| listed.get(name).map(|answer| answer.status());
    assert_eq!(of(""), Some(ServingStatus::Serving));
    assert_eq!(of("host.disk"), Some(ServingStatus::NotServing));
    assert_eq!(of("ready"), Some(ServingStatus::NotServing));
    assert_eq!(of("gpu.1"), None);
    server.stop().await;
}

#[tokio::test]
async fn a_watch_of_an_unknown_service_goes_on_until_the_service_appears() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    let mut client = HealthClient::new(server.unix().await);
    let mut watch = client.watch(request("host.disk")).await.unwrap().into_inner();
    let next = async |watch: &mut tonic::Streaming<_>| {
        let answer: mainstay_proto::grpc_health_v1::HealthCheckResponse =
            watch.message().await.unwrap().unwrap();
        answer.status()
    };
    assert_eq!(next(&mut watch).await, ServingStatus::ServiceUnknown);
    // A change elsewhere is no change here: the next message is the component's.
    server.health("host.cpu", HealthState::Healthy);
    server.health("host.disk", HealthState::Healthy);
    assert_eq!(next(&mut watch).await, ServingStatus::Serving);
    server.health("host.disk", HealthState::Degraded);
    server.health("host.disk", HealthState::Unhealthy);
    assert_eq!(next(&mut watch).await, ServingStatus::NotServing);
    server.stop().await;
    // The stop of the server is reported.
    assert_eq!(watch.message().await.unwrap_err().code(), Code::Unavailable);
}

#[tokio::test]
async fn a_watch_goes_on_when_nothing_watches_the_node_any_more() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.health("host.disk", HealthState::Healthy);
    let mut client = HealthClient::new(server.unix().await);
    let mut disk = client.watch(request("host.disk")).await.unwrap().into_inner();
    let mut ready = client.watch(request("ready")).await.unwrap().into_inner();
    assert_eq!(disk.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    assert_eq!(ready.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    let serving = server.lose_board();
    assert_eq!(disk.message().await.unwrap().unwrap().status(), ServingStatus::Unknown);
    assert_eq!(ready.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    assert_eq!(check(&mut client, "").await, Ok(ServingStatus::Serving));
    serving.abort();
}
