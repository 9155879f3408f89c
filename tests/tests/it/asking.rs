//! While a job runs, `mainstay status` and `mainstay events` report on it, and so does the standard health
//! protocol.

use std::cell::RefCell;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use hyper_util::rt::TokioIo;
use mainstay_model::entry::Fact;
use mainstay_proto::grpc_health_v1::HealthCheckRequest;
use mainstay_proto::grpc_health_v1::health_check_response::ServingStatus;
use mainstay_proto::grpc_health_v1::health_client::HealthClient;
use mainstay_tests::{Stage, has_client, mainstay, processes};
use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::net::UnixStream;
use tonic::transport::{Endpoint, Uri};

#[test]
fn status_shows_the_job_its_ranks_and_what_befell_them() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
mainstay.step(40 + ATTEMPT, loss=2.5)
with mainstay.section("data"):
    mark(f"up.{RANK}.{ATTEMPT}")
    wait_for(f"end.{ATTEMPT}")
"#;
    let job = stage.python(script).ranks(2).start();
    job.mark("up.0.0");
    job.mark("up.1.0");
    job.kill_rank(0, 1);
    job.mark("up.0.1");
    job.mark("up.1.1");
    let ranks = job.attempt(1).pids;
    job.wait_for_fact("steps", |fact| matches!(fact, Fact::RanksStepping { attempt, .. } if attempt.0 == 1));
    // The API samples the pages now and then; the test polls until the newest step is reported.
    let reported = RefCell::new(Value::Null);
    processes::wait_until("status tells of step 41", || {
        let (_, status) = job.status(&stage);
        let of_job = status["servers"][0]["jobs"][0].clone();
        let newest = of_job["ranks"][1]["step"] == 41;
        *reported.borrow_mut() = of_job;
        newest
    });
    let reported = reported.into_inner();
    assert_eq!(
        (&reported["id"], &reported["phase"]),
        (&Value::from(job.id()), &Value::from("RUNNING")),
        "{reported:#}"
    );
    assert_eq!(
        (&reported["attempt"], &reported["restarts"]),
        (&Value::from(1), &Value::from(1)),
        "{reported:#}"
    );
    assert_eq!(reported["last_verdict"]["culprit"], 1, "{reported:#}");
    assert_eq!(reported["last_decision"]["action"], "RESTART_IN_JOB", "{reported:#}");
    for (rank, pid) in &ranks {
        assert_eq!(reported["ranks"][*rank as usize]["pid"], *pid, "{reported:#}");
    }
    assert!(reported["ranks"][0].to_string().contains("data"), "the open section is told: {reported:#}");
    stage.mark("end.1");
    let socket = job.socket().clone();
    job.end().assert_status(0);
    assert!(!socket.exists(), "the launcher takes its socket along");
}

#[test]
fn events_can_be_followed_to_the_end_of_the_job() {
    let stage = Stage::new();
    let job = stage.sh(r#"mark "up.$RANK.$ATTEMPT"; wait_for "end.$ATTEMPT""#).ranks(2).start();
    job.mark("up.1.0");
    let mut events = Command::new(mainstay());
    // The runtime directory leads to the launcher's socket, as it does for a person.
    events
        .args(["events", "--follow", "--json", "--job", job.id()])
        .env("MAINSTAY_RUNTIME_DIR", stage.tmpfs());
    events.env("HOME", stage.home()).env_remove("XDG_RUNTIME_DIR").env_remove("MAINSTAY_SOCKET");
    let mut follower = events.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("mainstay starts");
    let mut lines = BufReader::new(follower.stdout.take().expect("a pipe")).lines();
    let mut next = || -> Option<Value> {
        let line = lines.next()?.expect("text");
        Some(serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}")))
    };
    // The past events first, then new ones.
    let mut reported = vec![next().expect("an event")];
    assert_eq!(reported[0]["type"], "job_started", "{}", reported[0]);
    job.kill_rank(0, 1);
    while reported.last().is_some_and(|event| event["kind"] != "DECISION") {
        reported.push(next().expect("an event"));
    }
    job.mark("up.1.1");
    stage.mark("end.1");
    reported.extend(std::iter::from_fn(next));
    assert!(follower.wait().expect("our own child").success());
    let end = job.end();
    end.assert_status(0);
    let types: Vec<&str> = reported.iter().filter_map(|event| event["type"].as_str()).collect();
    for expected in ["attempt_started", "rank_exited", "attempt_ended", "job_ended"] {
        assert!(types.contains(&expected), "{expected} in {types:?}");
    }
    let cursors: Vec<u64> = reported.iter().filter_map(|event| event["cursor"].as_u64()).collect();
    assert!(cursors.is_sorted_by(|a, b| a < b), "in order and each once: {cursors:?}");
    assert_eq!(types.last(), Some(&"job_ended"), "{end}");
}

#[test]
fn a_follower_waits_for_a_server_that_does_not_answer_while_the_past_is_read() {
    let stage = Stage::new();
    let agent = stage.agent();
    agent.signal(Signal::SIGSTOP);
    let mut events = Command::new(mainstay());
    events.args(["events", "--follow", "--json", "--socket"]).arg(agent.socket());
    let mut follower = events.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mainstay starts");
    let notes = BufReader::new(follower.stderr.take().expect("a pipe")).lines();
    let reported = BufReader::new(follower.stdout.take().expect("a pipe")).lines();
    let note = notes.map_while(Result::ok).next().expect("it says that nothing answers");
    testing::snapshot!("commands", "events: a server that does not answer", stage.masked(&note));
    agent.signal(Signal::SIGCONT);
    let first = reported.map_while(Result::ok).next().expect("an event");
    assert!(first.contains("agent_started"), "{first}");
    follower.kill().expect("our own child");
    follower.wait().expect("our own child");
}

#[tokio::test]
async fn the_standard_health_protocol_answers_at_the_launchers_socket() {
    let stage = Stage::new();
    let job = stage.sh("mark up; wait_for end").start();
    job.mark("up");
    let socket = job.socket().clone();
    let connect = move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    };
    let endpoint = Endpoint::from_static("http://launcher.local");
    let channel = endpoint.connect_with_connector(tower::service_fn(connect)).await.expect("it answers");
    let mut health = HealthClient::new(channel);
    let answer = health.check(HealthCheckRequest::default()).await.expect("the launcher lives").into_inner();
    assert_eq!(answer.status(), ServingStatus::Serving);
    let unknown = health.check(HealthCheckRequest { service: "no.such".to_owned() }).await;
    assert_eq!(unknown.expect_err("no such service").code(), tonic::Code::NotFound);
    stage.mark("end");
    job.end().assert_status(0);
}

#[test]
fn the_exit_status_of_status_shows_the_state_of_a_job() {
    let stage = Stage::new();
    let job = stage.sh("mark up; wait_for end").start();
    job.mark("up");
    let (running, status) = job.status(&stage);
    assert!(matches!(running, Some(0 | 1)), "{status:#}");
    stage.mark("end");
    let socket = job.socket().clone();
    job.end().assert_status(0);
    let gone = Command::new(mainstay()).args(["status", "--socket"]).arg(socket).output().expect("it starts");
    assert_eq!(gone.status.code(), Some(3), "nothing answers any more");
}
