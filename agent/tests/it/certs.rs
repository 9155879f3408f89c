//! Certificates that the program makes, and an agent whose API over TCP needs them.

use std::path::{Path, PathBuf};
use std::process::Command;

use mainstay_proto::v1::AcknowledgeRequest;
use mainstay_proto::v1::operator_service_client::OperatorServiceClient;
use serde_json::Value;

use crate::support::Agent;

/// The exit status of `mainstay events` if nothing answers.
const NO_ANSWER: i32 = 3;

fn mainstay(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mainstay"));
    command.args(arguments);
    command
}

/// An authority in this directory with certificates for an agent on this host and for a client.
fn authority(dir: &Path) -> PathBuf {
    let at = dir.to_str().unwrap();
    for arguments in [
        &["certs", "init", at][..],
        &["certs", "issue", at, "agent", "--host", "127.0.0.1"],
        &["certs", "issue", at, "client"],
        &["certs", "issue", at, "admin", "--role", "operator"],
    ] {
        assert!(mainstay(arguments).status().unwrap().success(), "{arguments:?}");
    }
    dir.to_owned()
}

/// The exit status of a command that asks over TCP, with the certificate of a client of this authority or without.
fn asked(address: &str, client: Option<&Path>) -> Option<i32> {
    let mut command = mainstay(&["events", "--host", address]);
    if let Some(dir) = client {
        with_certificate(&mut command, dir, "client");
    }
    command.output().unwrap().status.code()
}

fn with_certificate(command: &mut Command, dir: &Path, name: &str) {
    command.env("MAINSTAY_TLS", dir.join(name));
}

/// The recorded calls that the owner of a certificate reads, with their values: none are readable, or all.
fn calls_read_by(address: &str, dir: &Path, name: &str) -> Vec<Value> {
    let mut command = mainstay(&["events", "--json", "--host", address]);
    with_certificate(&mut command, dir, name);
    let printed = command.output().unwrap();
    assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
    let events = String::from_utf8(printed.stdout).unwrap();
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event.to_string().contains("agent.calls")).collect()
}

fn free_address() -> String {
    format!("127.0.0.1:{}", testing::free_port())
}

#[test]
fn refused_callers_are_recorded_and_an_operator_reads_who_they_were() {
    let dir = testing::tempdir().unwrap();
    let ours = authority(&dir.path().join("ours"));
    let address = free_address();
    let tls = ours.join("agent");
    let settings = [("LISTEN", Path::new(&address)), ("TLS", &tls)];
    let agent = Agent::start(dir.path(), &settings);
    assert_eq!(asked(&address, None), Some(NO_ANSWER));
    let refused = agent.wait_for_observation("agent.calls", "refused").to_string();
    assert!(refused.contains("127.0.0.1") && refused.contains("TLS"), "{refused}");
    let [of_reader, of_operator] =
        ["client", "admin"].map(|name| calls_read_by(&address, &ours, name)).map(|calls| {
            assert!(!calls.is_empty(), "everyone sees that there was a call");
            calls.iter().any(|call| call.to_string().contains("127.0.0.1"))
        });
    assert_eq!((of_reader, of_operator), (false, true));
}

#[tokio::test]
async fn a_call_over_tcp_that_only_local_users_may_make_is_refused_and_recorded() {
    let dir = testing::tempdir().unwrap();
    let address = free_address();
    let agent = Agent::start(dir.path(), &[("LISTEN", Path::new(&address))]);
    let mut operators = OperatorServiceClient::connect(format!("http://{address}")).await.unwrap();
    let acknowledge = AcknowledgeRequest { component: "host.disk".to_owned(), reason: "x".to_owned() };
    let refused = operators.acknowledge(acknowledge).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::PermissionDenied, "{refused}");
    let recorded = agent.wait_for_observation("agent.calls", "refused").to_string();
    assert!(recorded.contains("Acknowledge") && recorded.contains("127.0.0.1"), "{recorded}");
}

#[test]
fn callers_over_tcp_need_a_certificate_and_replaced_files_are_read_again() {
    let dir = testing::tempdir().unwrap();
    let (ours, other) = (authority(&dir.path().join("ours")), authority(&dir.path().join("other")));
    let address = free_address();
    let tls = ours.join("agent");
    let settings = [("LISTEN", Path::new(&address)), ("TLS", &tls)];
    let _agent = Agent::start(dir.path(), &settings);
    assert_eq!(asked(&address, Some(&ours)), Some(0));
    assert_eq!(asked(&address, None), Some(NO_ANSWER));
    assert_eq!(asked(&address, Some(&other)), Some(NO_ANSWER));

    // A renewed certificate has a new key, and the same authority.
    let key = tls.join("tls.key");
    let before = std::fs::read(&key).unwrap();
    let renewed = mainstay(&["certs", "renew", ours.to_str().unwrap(), "--within", "100"]).status().unwrap();
    assert!(renewed.success());
    assert_ne!(std::fs::read(&key).unwrap(), before);
    assert_eq!(asked(&address, Some(&ours)), Some(0));

    // Another authority replaces the first one.
    for file in ["tls.crt", "tls.key", "ca.crt"] {
        std::fs::rename(other.join("agent").join(file), tls.join(file)).unwrap();
    }
    assert_eq!(asked(&address, Some(&other)), Some(0));
    assert_eq!(asked(&address, Some(&ours)), Some(NO_ANSWER));
}
