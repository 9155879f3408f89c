//! Reflection, in both versions that callers use.

use std::collections::BTreeSet;

use tokio_stream::{StreamExt, once};
use tonic_reflection::pb::{v1, v1alpha};

use super::server::Server;

const SERVICES: [&str; 3] =
    ["grpc.health.v1.Health", "mainstay.v1.EventService", "mainstay.v1.HealthService"];

#[tokio::test]
async fn services_are_listed_in_both_versions() {
    let dir = testing::tempdir().unwrap();
    let server = Server::start(dir.path()).await;

    let mut client = v1::server_reflection_client::ServerReflectionClient::new(server.unix().await);
    let request = v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(v1::server_reflection_request::MessageRequest::ListServices(String::new())),
    };
    let mut answers = client.server_reflection_info(once(request)).await.unwrap().into_inner();
    let answer = answers.next().await.unwrap().unwrap().message_response.unwrap();
    let v1::server_reflection_response::MessageResponse::ListServicesResponse(listed) = answer else {
        panic!("{answer:?}");
    };
    let names: BTreeSet<String> = listed.service.into_iter().map(|service| service.name).collect();
    assert!(SERVICES.iter().all(|service| names.contains(*service)), "{names:?}");

    let mut client = v1alpha::server_reflection_client::ServerReflectionClient::new(server.tcp().await);
    let symbol = "mainstay.v1.HealthService".to_owned();
    let request = v1alpha::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(v1alpha::server_reflection_request::MessageRequest::FileContainingSymbol(
            symbol,
        )),
    };
    let mut answers = client.server_reflection_info(once(request)).await.unwrap().into_inner();
    let answer = answers.next().await.unwrap().unwrap().message_response.unwrap();
    let described = matches!(
        answer,
        v1alpha::server_reflection_response::MessageResponse::FileDescriptorResponse(ref files)
            if !files.file_descriptor_proto.is_empty()
    );
    assert!(described, "{answer:?}");
    server.stop().await;
}
