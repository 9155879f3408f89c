//! Certificates that the program makes, and an agent whose API over TCP needs them.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

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
    ] {
        assert!(mainstay(arguments).status().unwrap().success(), "{arguments:?}");
    }
    dir.to_owned()
}

/// The exit status of a command that asks over TCP, with the certificate of a client of this authority or without.
fn asked(address: &str, client: Option<&Path>) -> Option<i32> {
    let mut command = mainstay(&["events", "--host", address]);
    if let Some(dir) = client {
        command
            .env("MAINSTAY_TLS_CERTIFICATE", dir.join("client.crt"))
            .env("MAINSTAY_TLS_KEY", dir.join("client.key"))
            .env("MAINSTAY_TLS_AUTHORITIES", dir.join("ca.crt"));
    }
    command.output().unwrap().status.code()
}

#[test]
fn callers_over_tcp_need_a_certificate_and_replaced_files_are_read_again() {
    let dir = testing::tempdir().unwrap();
    let (ours, other) = (authority(&dir.path().join("ours")), authority(&dir.path().join("other")));
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("127.0.0.1:{port}");
    let files = ["agent.crt", "agent.key", "ca.crt"].map(|file| ours.join(file));
    let settings = [
        ("LISTEN", Path::new(&address)),
        ("TLS_CERTIFICATE", &files[0]),
        ("TLS_KEY", &files[1]),
        ("TLS_AUTHORITIES", &files[2]),
    ];
    let _agent = Agent::start(dir.path(), &settings);
    assert_eq!(asked(&address, Some(&ours)), Some(0));
    assert_eq!(asked(&address, None), Some(NO_ANSWER));
    assert_eq!(asked(&address, Some(&other)), Some(NO_ANSWER));

    // A renewed certificate has a new key, and the same authority.
    let before = std::fs::read(&files[1]).unwrap();
    let renewed = mainstay(&["certs", "renew", ours.to_str().unwrap(), "--within", "100"]).status().unwrap();
    assert!(renewed.success());
    assert_ne!(std::fs::read(&files[1]).unwrap(), before);
    assert_eq!(asked(&address, Some(&ours)), Some(0));

    // Another authority replaces the first one.
    for (file, ours) in ["agent.crt", "agent.key", "ca.crt"].into_iter().zip(&files) {
        std::fs::rename(other.join(file), ours).unwrap();
    }
    std::fs::copy(ours.join("ca.crt"), other.join("ca.crt")).unwrap();
    assert_eq!(asked(&address, Some(&other)), Some(0));
    assert_eq!(asked(&address, Some(&ours)), Some(NO_ANSWER));
}
