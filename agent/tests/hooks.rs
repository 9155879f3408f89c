//! Hooks: who is told of a job's failures, what happens to those that do not listen, and what is kept of it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use mainstay_agent::act::hook::{HookPlan, Hooks};
use mainstay_core::entry::{Body, Entry, Fact};
use mainstay_core::id::{BootId, JobId};
use mainstay_core::time::Stamp;
use serde_json::Value;

fn plan(directory: &Path) -> HookPlan {
    HookPlan {
        commands: Vec::new(),
        webhooks: Vec::new(),
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

/// Reads a FIFO to its end: the hook at the other one has been told.
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
fn a_command_gets_the_entry_and_is_told_only_of_what_it_wants_to_know() {
    let directory = tempfile::tempdir().unwrap();
    let told = fifo(directory.path());
    let command = format!("{{ echo $MAINSTAY_EVENT $MAINSTAY_JOB_ID; cat; }} > {}", told.display());
    let hooks = Hooks::start(&HookPlan { commands: vec![command], ..plan(directory.path()) }).unwrap();
    hooks.tell(&entry(Fact::AgentStopped));
    hooks.tell(&ended());
    let text = fs::read_to_string(told).unwrap();
    let (words, entry) = text.split_once('\n').unwrap();
    assert_eq!(words, "job_ended exp");
    let entry: Value = serde_json::from_str(entry).unwrap();
    assert_eq!(entry["body"]["exit"], 75);
}

#[test]
fn one_that_fails_and_one_that_hangs_leave_a_dead_letter() {
    for (command, deadline, why) in [
        ("exit 3", Duration::from_secs(20), "exit status: 3"),
        ("sleep 1000 & wait", Duration::from_millis(50), "took longer than 0.05 s"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let commands = vec![command.to_owned()];
        let hooks = Hooks::start(&HookPlan { commands, deadline, ..plan(directory.path()) }).unwrap();
        hooks.tell(&ended());
        let letter = dead_letter(directory.path());
        assert_eq!(letter["hook"], command);
        assert!(letter["why"].as_str().unwrap().contains(why), "{letter}");
        assert_eq!(letter["entry"]["seq"], 7);
    }
}

#[test]
fn a_webhook_is_tried_again_until_it_hears() {
    let directory = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/events", listener.local_addr().unwrap());
    let plan = HookPlan { webhooks: vec![address], tries: 3, ..plan(directory.path()) };
    let hooks = Hooks::start(&plan).unwrap();
    hooks.tell(&ended());
    for answer in ["HTTP/1.1 503 Busy\r\n\r\n", "HTTP/1.1 204 Heard\r\n\r\n"] {
        let (mut stream, _) = listener.accept().unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            if line == "\r\n" {
                break;
            }
            head.push(line.trim_end().to_owned());
        }
        assert_eq!(head[0], "POST /events HTTP/1.1");
        let of = |line: &String| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok();
        let length: usize = head.iter().find_map(of).unwrap();
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        assert_eq!(serde_json::from_slice::<Value>(&body).unwrap()["job"], "exp");
        stream.write_all(answer.as_bytes()).unwrap();
    }
    assert!(!directory.path().join("hooks-failed.jsonl").exists());
}
