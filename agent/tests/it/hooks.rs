//! Hooks: who receives a job's failures, what happens to hooks that do not answer, and what is kept.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use mainstay_diagnosis::root_rank::start_failed;
use mainstay_model::entry::{Body, Entry, Fact, JobSpec};
use mainstay_model::finding::{Finding, FindingKind};
use mainstay_model::health::{Component, HealthChange, HealthState};
use mainstay_model::id::{Attempt, BootId, Incident, JobId};
use mainstay_model::time::{Mono, Span, Stamp};
use mainstay_model::verdict::{FaultDomain, Outcome};
use mainstay_node::hook::{HookFormat, HookPlan, Hooks, KINDS};
use mainstay_proto::datamodels::platform_connector_server::{PlatformConnector, PlatformConnectorServer};
use mainstay_proto::datamodels::{HealthEvent, HealthEvents, ProcessingStrategy};
use serde_json::{Value, json};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::rustls::{ServerConfig, ServerConnection, StreamOwned};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

fn plan(directory: &Path) -> HookPlan {
    HookPlan {
        commands: Vec::new(),
        webhooks: Vec::new(),
        authorities: None,
        on: vec!["job_ended".to_owned()],
        format: HookFormat::Raw,
        link: Some("http://node-1:7131/".to_owned()),
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
    let mut hooks = Hooks::start(&HookPlan { commands: vec![command], ..plan(directory.path()) }).unwrap();
    hooks.report(&entry(Fact::AgentStopped), true);
    hooks.report(&ended(), true);
    let text = fs::read_to_string(reported).unwrap();
    let (words, entry) = text.split_once('\n').unwrap();
    assert_eq!(words, "job_ended exp");
    let entry: Value = serde_json::from_str(entry).unwrap();
    assert_eq!(entry["body"]["exit"], 75);
    let host = nix::unistd::gethostname().unwrap();
    assert_eq!(entry["host"], host.to_string_lossy().as_ref(), "a receiver gets entries of many hosts");
    assert_eq!((&entry["schema_version"], &entry["severity"]), (&json!(1), &json!("error")));
    assert_eq!(entry["link"], "http://node-1:7131/");
    assert!(entry["summary"].as_str().unwrap().contains("another host may do"), "{entry}");
}

#[test]
fn what_leaves_the_host_has_no_secrets_of_the_programs_output() {
    let (directory, token) = (testing::tempdir().unwrap(), format!("hf_{}", "Zz".repeat(17)));
    let reported = fifo(directory.path());
    let command = format!("cat > {}; exit 1", reported.display());
    let mut hooks = Hooks::start(&HookPlan { commands: vec![command], ..plan(directory.path()) }).unwrap();
    hooks.report(&entry(Fact::JobEnded { exit: 1, reason: format!("RuntimeError: 401 for {token}") }), true);
    let received = fs::read_to_string(reported).unwrap();
    assert!(received.contains("401 for") && !received.contains(&token), "{received}");
    let letter = dead_letter(directory.path()).to_string();
    assert!(letter.contains("401 for") && !letter.contains(&token), "{letter}");
}

#[test]
fn one_that_fails_and_one_that_hangs_leave_a_dead_letter() {
    for (command, deadline) in
        [("exit 3", Duration::from_secs(20)), ("sleep 1000 & wait", Duration::from_millis(50))]
    {
        let directory = testing::tempdir().unwrap();
        let commands = vec![command.to_owned()];
        let mut hooks = Hooks::start(&HookPlan { commands, deadline, ..plan(directory.path()) }).unwrap();
        hooks.report(&ended(), true);
        let letter = dead_letter(directory.path());
        assert_eq!(letter["hook"], command);
        testing::snapshot!("hooks", command, letter["why"].as_str().unwrap());
        assert_eq!(letter["entry"]["seq"], 7);
    }
}

#[test]
fn a_webhook_is_retried_until_it_answers() {
    let directory = testing::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/events", listener.local_addr().unwrap());
    let plan = HookPlan { webhooks: vec![address], tries: 3, ..plan(directory.path()) };
    let mut hooks = Hooks::start(&plan).unwrap();
    hooks.report(&ended(), true);
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
    let mut hooks = Hooks::start(&plan).unwrap();
    hooks.report(&ended(), true);
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
    let mut hooks = Hooks::start(&plan).unwrap();
    hooks.report(&ended(), true);
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

fn of_job(body: Body) -> Entry {
    Entry { body, ..ended() }
}

fn failed(incident: u64, why: &str) -> Entry {
    of_job(Body::Verdict(start_failed(Incident(incident), Attempt(0), why, Mono(0))))
}

fn trains_again(incident: u64) -> Entry {
    of_job(Body::Outcome(Outcome {
        incident: Incident(incident),
        attempt: Attempt(1),
        step: 7,
        reached_before: 9,
        steps_lost: 2,
        counted: false,
        to_ranks_started: Span::seconds(1),
        to_ranks_connected: None,
        to_first_step: Span::seconds(2),
    }))
}

fn finding(over: bool) -> Entry {
    of_job(Body::Finding(Finding {
        finding: 4,
        attempt: Attempt(0),
        what: FindingKind::SlowRank,
        over,
        headline: "rank 1 is 30 % slower than its peers".into(),
        domain: FaultDomain::Hardware,
        confidence: 0.9,
        ranks: Vec::new(),
        device: None,
        host: None,
        stage: None,
        since_step: 8,
        step: 12,
        cost_percent: Some(25.0),
        evidence: Vec::new(),
        last_agreed_step: None,
        doubtful_steps: Vec::new(),
    }))
}

fn health(from: Option<HealthState>, state: HealthState) -> Entry {
    let component = Component { name: "host.disk".into(), state, ..Component::default() };
    Entry { job: None, ..of_job(Body::Health(HealthChange { from, component })) }
}

/// What a webhook receives for these entries in this format: headers and body of each post.
fn posts(format: HookFormat, entries: &[(Entry, bool)], expected: usize) -> Vec<(String, Value)> {
    let directory = testing::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let plan = HookPlan {
        webhooks: vec![format!(
            "http://{}/#0123456789abcdef0123456789abcdef",
            listener.local_addr().unwrap()
        )],
        on: KINDS.map(str::to_owned).to_vec(),
        format,
        ..plan(directory.path())
    };
    let mut hooks = Hooks::start(&plan).unwrap();
    for (entry, leads) in entries {
        hooks.report(entry, *leads);
    }
    // A last one, after which no other can come.
    hooks.report(&health(None, HealthState::Unhealthy), true);
    let receive = |_| {
        let (mut stream, _) = listener.accept().unwrap();
        let mut head = String::new();
        let mut reader = BufReader::new(&mut stream);
        while !head.ends_with("\r\n\r\n") {
            reader.read_line(&mut head).unwrap();
        }
        let length = head
            .to_ascii_lowercase()
            .lines()
            .find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
        let mut body = vec![0; length.unwrap()];
        reader.read_exact(&mut body).unwrap();
        stream.write_all(b"HTTP/1.1 204 Heard\r\n\r\n").unwrap();
        (head.to_ascii_lowercase(), serde_json::from_slice(&body).unwrap())
    };
    let mut received: Vec<(String, Value)> = (0..=expected).map(receive).collect();
    let (_, last) = received.pop().unwrap();
    assert!(last.to_string().contains("host.disk"), "one too many: {received:#?}");
    received
}

fn bodies(format: HookFormat, entries: &[Entry], expected: usize) -> Vec<Value> {
    let entries: Vec<(Entry, bool)> = entries.iter().map(|entry| (entry.clone(), true)).collect();
    posts(format, &entries, expected).into_iter().map(|(_, body)| body).collect()
}

/// Fails if an object has other keys than these; the first ones are required.
fn has_keys(object: &Value, required: &[&str], optional: &[&str]) {
    let keys: Vec<&str> = object.as_object().unwrap().keys().map(String::as_str).collect();
    assert!(required.iter().all(|key| keys.contains(key)), "{object:#}");
    assert!(keys.iter().all(|key| required.contains(key) || optional.contains(key)), "{object:#}");
}

fn is_time(value: &Value) -> bool {
    let text = value.as_str().unwrap();
    // 2026-11-24T03:50:12Z
    text.len() == 20 && text.as_bytes()[10] == b'T' && text.ends_with('Z')
}

#[test]
fn an_incident_is_one_notice_and_its_resolution() {
    let entries =
        [failed(1, "rank 3 was killed"), failed(1, "rank 3 was killed by the kernel"), trains_again(1)];
    let received = bodies(HookFormat::PagerDuty, &entries, 2);
    let actions = received.iter().map(|of| of["event_action"].as_str().unwrap()).collect::<Vec<_>>();
    assert_eq!(actions, ["trigger", "resolve"]);
    assert_eq!(received[0]["dedup_key"], received[1]["dedup_key"]);
    // A failure that ends the job, which is queued again; the restart of its findings; one that was known before.
    let entries = [
        finding(false),
        finding(false),
        failed(2, "again"),
        ended(),
        of_job(Body::Fact(Fact::JobStarted(JobSpec::default()))),
        trains_again(9),
        health(None, HealthState::Unknown),
        health(Some(HealthState::Unknown), HealthState::Healthy),
    ];
    let received = bodies(HookFormat::PagerDuty, &entries, 7);
    let keys: Vec<(String, String)> = received
        .iter()
        .map(|of| {
            let key = of["dedup_key"].as_str().unwrap().rsplit_once("exp/").map_or("host", |(_, key)| key);
            (of["event_action"].as_str().unwrap().to_owned(), key.to_owned())
        })
        .collect();
    let expected = [
        ("trigger", "finding/4"),
        ("trigger", "incident/2"),
        ("resolve", "finding/4"),
        ("trigger", "incident/2"),
        ("resolve", "incident/2"),
        ("resolve", "incident/9"),
        ("resolve", "host"),
    ];
    assert_eq!(keys, expected.map(|(action, key)| (action.to_owned(), key.to_owned())));
}

#[test]
fn only_the_host_that_leads_a_job_sends_notices_about_it() {
    let entries = [(failed(1, "rank 3 was killed"), false), (trains_again(1), false)];
    assert_eq!(posts(HookFormat::Slack, &entries, 0), []);
    assert_eq!(posts(HookFormat::Raw, &entries[..1], 1).len(), 1, "an entry of each host");
}

/// <https://developer.pagerduty.com/docs/send-alert-event>
#[test]
fn pagerduty_gets_events_of_its_version_2() {
    for of in bodies(HookFormat::PagerDuty, &[failed(1, "why"), trains_again(1)], 2) {
        has_keys(
            &of,
            &["routing_key", "event_action", "payload", "dedup_key"],
            &["client", "client_url", "links", "images"],
        );
        assert_eq!(of["routing_key"], "0123456789abcdef0123456789abcdef");
        assert!(of["dedup_key"].as_str().unwrap().len() <= 255);
        let payload = &of["payload"];
        let optional = ["timestamp", "component", "group", "class", "custom_details"];
        has_keys(payload, &["summary", "source", "severity"], &optional);
        assert!(["critical", "error", "warning", "info"].contains(&payload["severity"].as_str().unwrap()));
        assert!(
            payload["summary"].as_str().unwrap().chars().count() <= 1024 && is_time(&payload["timestamp"])
        );
        has_keys(&of["links"][0], &["href"], &["text"]);
    }
}

/// <https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks> and Block Kit's reference
#[test]
fn slack_gets_messages_of_blocks() {
    let long = format!("<!channel> {}", "a & b ".repeat(1000));
    for of in bodies(HookFormat::Slack, &[failed(1, &long), trains_again(1)], 2) {
        has_keys(&of, &["text", "blocks"], &[]);
        let (section, context) = (&of["blocks"][0], &of["blocks"][1]);
        has_keys(section, &["type", "text"], &[]);
        has_keys(context, &["type", "elements"], &[]);
        assert_eq!((&section["type"], &context["type"]), (&json!("section"), &json!("context")));
        for text in [&section["text"], &context["elements"][0]] {
            has_keys(text, &["type", "text"], &[]);
            let words = text["text"].as_str().unwrap();
            assert!(text["type"] == "mrkdwn" && (1..=3000).contains(&words.chars().count()));
            assert!(!words.contains("<!channel>"), "a message of a program must not notify everyone");
        }
    }
}

/// The attributes of CloudEvents 1.0 and the JSON format's structured mode.
#[test]
fn cloudevents_are_structured_json_of_version_1() {
    let entries = [(failed(1, "why"), true), (Entry { seq: 8, ..trains_again(1) }, true)];
    let received = posts(HookFormat::CloudEvents, &entries, 2);
    for (head, of) in &received {
        assert!(head.contains("content-type: application/cloudevents+json"), "{head}");
        has_keys(
            of,
            &["id", "source", "specversion", "type"],
            &["subject", "time", "datacontenttype", "data"],
        );
        assert_eq!(of["specversion"], "1.0");
        for name in ["id", "source", "type", "subject"] {
            assert!(!of[name].as_str().unwrap().is_empty());
        }
        assert!(is_time(&of["time"]) && of["data"]["schema_version"] == 1, "{of:#}");
    }
    let types = received.iter().map(|(_, of)| of["type"].as_str().unwrap()).collect::<Vec<_>>();
    assert_eq!(types, ["dev.mainstay.incident.opened", "dev.mainstay.incident.resolved"]);
    assert_ne!(received[0].1["id"], received[1].1["id"]);
}

/// A real Alertmanager.
struct Alertmanager(Child, u16);

impl Drop for Alertmanager {
    fn drop(&mut self) {
        // It has ended if it cannot be killed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Alertmanager {
    fn start(directory: &Path) -> Option<Alertmanager> {
        let config = directory.join("alertmanager.yml");
        fs::write(&config, "route: {receiver: none}\nreceivers: [{name: none}]\n").unwrap();
        let port = testing::free_port();
        // As Debian calls it, and as its developers do.
        for program in ["prometheus-alertmanager", "alertmanager"] {
            let mut command = Command::new(program);
            command
                .arg(format!("--config.file={}", config.display()))
                .arg(format!("--storage.path={}", directory.join("alerts").display()))
                .arg(format!("--web.listen-address=127.0.0.1:{port}"))
                .arg("--cluster.listen-address=")
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            if let Ok(child) = command.spawn() {
                return Some(Alertmanager(child, port));
            }
        }
        testing::skip("there is no Alertmanager (apt-get install prometheus-alertmanager)");
        None
    }

    /// The labels of its alerts, as soon as it answers and they are as they should be.
    fn alerts(&mut self, are_right: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        loop {
            assert!(self.0.try_wait().unwrap().is_none(), "Alertmanager has ended");
            if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.1)) {
                let mut answer = String::new();
                let asked = stream.write_all(b"GET /api/v2/alerts HTTP/1.0\r\nHost: localhost\r\n\r\n");
                if asked.and_then(|()| stream.read_to_string(&mut answer)).is_ok()
                    && let Some((_, body)) = answer.split_once("\r\n\r\n")
                    && let Ok(Value::Array(alerts)) = serde_json::from_str(body)
                {
                    let labels: Vec<Value> = alerts.iter().map(|alert| alert["labels"].clone()).collect();
                    if are_right(&labels) {
                        return labels;
                    }
                }
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
fn a_real_alertmanager_opens_and_resolves_alerts() {
    let directory = testing::tempdir().unwrap();
    let Some(mut alertmanager) = Alertmanager::start(directory.path()) else { return };
    alertmanager.alerts(|alerts| alerts.is_empty());
    let plan = HookPlan {
        webhooks: vec![format!("http://127.0.0.1:{}/api/v2/alerts", alertmanager.1)],
        on: KINDS.map(str::to_owned).to_vec(),
        format: HookFormat::Alertmanager,
        ..plan(directory.path())
    };
    let now = |entry: Entry| Entry { at: mainstay_sys::clock::now(), ..entry };
    let mut hooks = Hooks::start(&plan).unwrap();
    hooks.report(&now(failed(1, "rank 3 was killed")), true);
    hooks.report(&now(health(Some(HealthState::Healthy), HealthState::Degraded)), true);
    hooks.report(&now(health(Some(HealthState::Degraded), HealthState::Unhealthy)), true);
    let open = alertmanager
        .alerts(|alerts| alerts.len() == 2 && !alerts.iter().any(|of| of["severity"] == "warning"));
    let names: Vec<&str> = open.iter().map(|of| of["alertname"].as_str().unwrap()).collect();
    assert!(names.contains(&"MainstayIncident") && names.contains(&"MainstayHealth"), "{open:#?}");
    hooks.report(&now(trains_again(1)), true);
    hooks.report(&now(health(Some(HealthState::Unhealthy), HealthState::Healthy)), true);
    alertmanager.alerts(|alerts| alerts.is_empty());
    assert!(!directory.path().join("hooks-failed.jsonl").exists());
}

#[test]
fn a_test_reaches_each_hook_or_says_why_not() {
    let directory = testing::tempdir().unwrap();
    let received = directory.path().join("received");
    let commands = vec![format!("cat > {}", received.display()), "exit 3".to_owned()];
    let plan = HookPlan { commands, format: HookFormat::CloudEvents, ..plan(directory.path()) };
    let results = Hooks::test(&plan).unwrap();
    assert_eq!(results.iter().map(|(_, result)| result.is_ok()).collect::<Vec<_>>(), [true, false]);
    let sent: Value = serde_json::from_str(&fs::read_to_string(received).unwrap()).unwrap();
    assert_eq!(sent["type"], "dev.mainstay.test.resolved");
}

/// NVSentinel's platform connector, which passes events on to the test.
struct Connector(std::sync::mpsc::Sender<HealthEvents>);

#[tonic::async_trait]
impl PlatformConnector for Connector {
    async fn health_event_occurred_v1(&self, request: Request<HealthEvents>) -> Result<Response<()>, Status> {
        self.0.send(request.into_inner()).unwrap();
        Ok(Response::new(()))
    }
}

#[test]
fn nvsentinel_receives_the_state_of_components_and_nothing_of_jobs() {
    let directory = testing::tempdir().unwrap();
    let socket = directory.path().join("nvsentinel.sock");
    let (sender, received) = std::sync::mpsc::channel();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let listener = runtime.block_on(async { tokio::net::UnixListener::bind(&socket) }).unwrap();
    let server =
        tonic::transport::Server::builder().add_service(PlatformConnectorServer::new(Connector(sender)));
    runtime.spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
    let plan = HookPlan {
        webhooks: vec![format!("unix://{}", socket.display())],
        on: KINDS.map(str::to_owned).to_vec(),
        format: HookFormat::NvSentinel,
        ..plan(directory.path())
    };
    let mut hooks = Hooks::start(&plan).unwrap();
    let states = [HealthState::Unhealthy, HealthState::Unknown, HealthState::Healthy];
    hooks.report(&failed(1, "rank 3 was killed"), true);
    for (from, state) in [HealthState::Healthy].into_iter().chain(states).zip(states) {
        hooks.report(&health(Some(from), state), true);
    }
    for state in states {
        let HealthEvents { version: 1, events } = received.recv().unwrap() else {
            panic!("of another version")
        };
        let [
            HealthEvent {
                agent, component_class, check_name, is_fatal, is_healthy, processing_strategy, ..
            },
        ] = &events[..]
        else {
            panic!("one event: {events:?}")
        };
        assert_eq!((&**agent, &**component_class, &**check_name), ("mainstay", "Node", "MainstayHostDisk"));
        let expected = (state == HealthState::Unhealthy, state == HealthState::Healthy);
        assert_eq!((*is_fatal, *is_healthy), expected, "{state:?}");
        assert_eq!(*processing_strategy, i32::from(ProcessingStrategy::StoreOnly));
    }
    drop(hooks);
    runtime.shutdown_background();
}
