//! Hooks: who receives a job's failures, what happens to hooks that do not answer, and what is kept.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::id::{BootId, JobId};
use mainstay_model::time::Stamp;
use mainstay_node::hook::{HookPlan, Hooks};
use serde_json::Value;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::words::reasons;

fn plan(directory: &Path) -> HookPlan {
    HookPlan {
        commands: Vec::new(),
        webhooks: Vec::new(),
        authorities: None,
        on: vec!["job_ended".to_owned()],
        deadline: Duration::from_secs(20),
        tries: 1,
        directory: directory.to_owned(),
    }
}

fn entry(fact: Fact) -> Entry {
    Entry {
        seq: 7,
        at: Stamp::default(),
        boot: BootId("b".into()),
        job: Some(JobId("exp".into())),
        origin_seq: None,
        body: Body::Fact(fact),
    }
}

fn ended() -> Entry {
    entry(Fact::JobEnded { exit: 75, reason: "another host may do".into() })
}

/// Reads a FIFO to its end: the hook at the other end has received an entry.
fn fifo(directory: &Path) -> std::path::PathBuf {
    let path = directory.join("told");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    path
}

/// The dead letters, as soon as there is one.
fn dead_letter(directory: &Path) -> Value {
    loop {
        let text = fs::read_to_string(directory.join("hooks-failed.jsonl")).unwrap_or_default();
        if let Some(line) = text.split_inclusive('\n').find(|line| line.ends_with('\n')) {
            return serde_json::from_str(line).unwrap();
        }
        std::thread::yield_now();
    }
}

#[test]
fn a_command_receives_only_the_entries_that_it_asks_for() {
    let directory = testing::tempdir().unwrap();
    let reported = fifo(directory.path());
    let command = format!("{{ echo $MAINSTAY_EVENT $MAINSTAY_JOB_ID; cat; }} > {}", reported.display());
    let hooks = Hooks::start(&HookPlan { commands: vec![command], ..plan(directory.path()) }).unwrap();
    hooks.report(&entry(Fact::AgentStopped));
    hooks.report(&ended());
    let text = fs::read_to_string(reported).unwrap();
    let (words, entry) = text.split_once('\n').unwrap();
    assert_eq!(words, "job_ended exp");
    let entry: Value = serde_json::from_str(entry).unwrap();
    assert_eq!(entry["body"]["exit"], 75);
    let host = nix::unistd::gethostname().unwrap();
    assert_eq!(entry["host"], host.to_string_lossy().as_ref(), "a receiver gets entries of many hosts");
}

#[test]
fn what_leaves_the_host_has_no_secrets_of_the_programs_output() {
    let (directory, token) = (testing::tempdir().unwrap(), format!("hf_{}", "Zz".repeat(17)));
    let reported = fifo(directory.path());
    let command = format!("cat > {}; exit 1", reported.display());
    let hooks = Hooks::start(&HookPlan { commands: vec![command], ..plan(directory.path()) }).unwrap();
    hooks.report(&entry(Fact::JobEnded { exit: 1, reason: format!("RuntimeError: 401 for {token}") }));
    let received = fs::read_to_string(reported).unwrap();
    assert!(received.contains("401 for") && !received.contains(&token), "{received}");
    let letter = dead_letter(directory.path()).to_string();
    assert!(letter.contains("401 for") && !letter.contains(&token), "{letter}");
}

#[test]
fn one_that_fails_and_one_that_hangs_leave_a_dead_letter() {
    for (command, deadline, why) in [
        ("exit 3", Duration::from_secs(20), "exit status: 3"),
        ("sleep 1000 & wait", Duration::from_millis(50), reasons::PROBE_TOO_LONG),
    ] {
        let directory = testing::tempdir().unwrap();
        let commands = vec![command.to_owned()];
        let hooks = Hooks::start(&HookPlan { commands, deadline, ..plan(directory.path()) }).unwrap();
        hooks.report(&ended());
        let letter = dead_letter(directory.path());
        assert_eq!(letter["hook"], command);
        assert!(letter["why"].as_str().unwrap().contains(why), "{letter}");
        assert_eq!(letter["entry"]["seq"], 7);
    }
}

#[test]
fn a_webhook_is_retried_until_it_answers() {
    let directory = testing::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/events", listener.local_addr().unwrap());
    let plan = HookPlan { webhooks: vec![address], tries: 3, ..plan(directory.path()) };
    let hooks = Hooks::start(&plan).unwrap();
    hooks.report(&ended());
    for answer in ["HTTP/1.1 503 Busy\r\n\r\n", "HTTP/1.1 204 Heard\r\n\r\n"] {
        let (mut stream, _) = listener.accept().unwrap();
        let (first, body) = posted(&mut stream).unwrap();
        assert_eq!((first.as_str(), &body["job"]), ("POST /events HTTP/1.1", &Value::from("exp")));
        stream.write_all(answer.as_bytes()).unwrap();
    }
    assert!(!directory.path().join("hooks-failed.jsonl").exists());
}

/// What was posted: the first line, and the body.
fn posted(stream: &mut impl Read) -> std::io::Result<(String, Value)> {
    let mut reader = BufReader::new(stream);
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        if line == "\r\n" {
            break;
        }
        head.push(line.trim_end().to_owned());
    }
    let of = |line: &String| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok();
    let mut body = vec![0; head.iter().find_map(of).unwrap()];
    reader.read_exact(&mut body)?;
    Ok((head.swap_remove(0), serde_json::from_slice(&body).unwrap()))
}

/// A TLS server for this name, with a new CA: its address, and the CA's certificate.
fn secure_server(directory: &Path, name: &str) -> (TcpListener, Arc<ServerConfig>, PathBuf) {
    let made = rcgen::generate_simple_self_signed(vec![name.to_owned()]).unwrap();
    let authority = directory.join("authority.pem");
    fs::write(&authority, made.cert.pem()).unwrap();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    (TcpListener::bind("127.0.0.1:0").unwrap(), Arc::new(config), authority)
}

#[test]
fn a_tls_webhook_receives_entries_if_the_server_is_authenticated() {
    let directory = testing::tempdir().unwrap();
    let (listener, config, authority) = secure_server(directory.path(), "localhost");
    let address = format!("https://localhost:{}/events", listener.local_addr().unwrap().port());
    let plan = HookPlan { webhooks: vec![address], authorities: Some(authority), ..plan(directory.path()) };
    let hooks = Hooks::start(&plan).unwrap();
    hooks.report(&ended());
    let (stream, _) = listener.accept().unwrap();
    let mut stream = StreamOwned::new(ServerConnection::new(config).unwrap(), stream);
    let (first, body) = posted(&mut stream).unwrap();
    assert_eq!((first.as_str(), &body["job"]), ("POST /events HTTP/1.1", &Value::from("exp")));
    stream.write_all(b"HTTP/1.1 204 Heard\r\n\r\n").unwrap();
    drop(hooks);
    assert!(!directory.path().join("hooks-failed.jsonl").exists());
}

#[test]
fn a_server_that_fails_authentication_receives_nothing() {
    let directory = testing::tempdir().unwrap();
    // Its certificate is valid, but for another name.
    let (listener, config, authority) = secure_server(directory.path(), "pager.example");
    let address = format!("https://localhost:{}/events", listener.local_addr().unwrap().port());
    let plan = HookPlan { webhooks: vec![address], authorities: Some(authority), ..plan(directory.path()) };
    let hooks = Hooks::start(&plan).unwrap();
    hooks.report(&ended());
    let (stream, _) = listener.accept().unwrap();
    let mut stream = StreamOwned::new(ServerConnection::new(config).unwrap(), stream);
    assert!(posted(&mut stream).is_err());
    let letter = dead_letter(directory.path());
    assert!(letter["why"].as_str().unwrap().contains("certificate"), "{letter}");
}

#[test]
fn a_ca_file_without_certificates_is_an_error_at_the_start() {
    let directory = testing::tempdir().unwrap();
    let file = directory.path().join("authorities.pem");
    fs::write(&file, "no certificate\n").unwrap();
    for authorities in [file, directory.path().join("missing.pem")] {
        let webhooks = vec!["https://pager.example/".to_owned()];
        let authorities_of = Some(authorities.clone());
        let refused =
            Hooks::start(&HookPlan { webhooks, authorities: authorities_of, ..plan(directory.path()) });
        let printed = refused.unwrap_err().to_string();
        assert!(printed.contains(authorities.to_str().unwrap()) && printed.contains("in PEM"), "{printed}");
    }
}
