//! Failures of jobs: a host's valid reports reach its peers.

use mainstay_diagnosis::repeats::{FailurePosition, MAX_REPORTED, RemoteFailure};
use mainstay_model::time::Wall;

use super::support::{hosts, until};

fn reported(fingerprint: &str, at: i64) -> RemoteFailure {
    RemoteFailure {
        program: "0123456789abcdef".into(),
        content: None,
        fingerprint: fingerprint.into(),
        position: FailurePosition { step: Some(7), data: Some(64), heartbeats: true },
        at: Wall(at),
    }
}

#[test]
fn peers_receive_failures_and_remember_those_of_a_host_that_is_gone() {
    let mut hosts = hosts(2, |_, _| {});
    hosts.iter().for_each(|host| host.wait_for_peers(1));
    let failures = [reported("f", 1), reported("g", 2)];
    hosts[0].service().set_failures(failures.to_vec());
    let name = hosts[0].name.clone();
    until("the failures", || {
        hosts[1].service().peers_failures().failures.get(&name).is_some_and(|received| received == &failures)
    });
    assert_eq!(hosts[1].service().peers_failures().answered_by, 1);
    assert!(hosts[0].service().peers_failures().failures.is_empty());
    drop(hosts.remove(0));
    until("the host to be gone", || hosts[0].service().peers_failures().answered_by == 0);
    assert_eq!(hosts[0].service().peers_failures().failures[&name], failures);
}

#[test]
fn invalid_fingerprints_are_skipped_and_only_the_newest_failures_are_received() {
    let hosts = hosts(2, |_, _| {});
    hosts.iter().for_each(|host| host.wait_for_peers(1));
    let many = (0..1_000).map(|at| reported("f", at));
    hosts[0].service().set_failures([reported(&"f".repeat(1_000), 0)].into_iter().chain(many).collect());
    until("the failures", || !hosts[1].service().peers_failures().failures.is_empty());
    let received = hosts[1].service().peers_failures().failures.remove(&hosts[0].name).unwrap();
    assert_eq!(
        (received.len(), received.iter().all(|failure| failure.fingerprint == "f")),
        (MAX_REPORTED, true)
    );
}
