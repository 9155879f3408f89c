//! Callers that never read their answers, and launchers that send more than is processed: what the agent holds for them
//! is bounded, and another user is answered meanwhile. The callers are real users with real connections.

use std::future::Future;
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use mainstay_model::entry::{Body, Entry, Fact, StartedRank};
use mainstay_model::id::{Attempt, BootId, JobId, Pid, Rank};
use mainstay_model::time::Stamp;
use mainstay_proto::v1::event_service_client::EventServiceClient;
use mainstay_proto::v1::from_launcher::Message;
use mainstay_proto::v1::health_service_client::HealthServiceClient;
use mainstay_proto::v1::launcher_service_client::LauncherServiceClient;
use mainstay_proto::v1::operator_service_client::OperatorServiceClient;
use mainstay_proto::v1::{
    ExplainIncidentRequest, FromAgent, FromLauncher, ListEventsRequest, ListJobsRequest,
    SilenceComponentRequest, WatchEventsRequest, WatchNodeRequest,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::two_users::{A, B, connect, hello, host_with, message, started};

/// More than the agent needs with all shares of one user used up, and far less than these callers would take.
const MOST: u64 = 400 << 20;

/// What the agent may keep of a flood that is over.
const LEFT: u64 = 32 << 20;

/// The agent returns memory seconds after a flood; this is the limit of the design.
const GIVEN_BACK_WITHIN: Duration = Duration::from_secs(60);

/// Of 64 large messages of one user at once, so many are refused at least.
const ENOUGH: usize = 50;

/// Ranks of one user that are more than the agent keeps.
const TOO_MANY_RANKS: u32 = 66_000;

#[test]
fn answers_that_are_not_read_are_bounded_and_another_user_is_answered() {
    let Some(host) = host_with(&[]) else { return };
    let full = host.client(A, "fill");
    assert_eq!(full.printed, "filled");
    host.agent.wait_for("the last of many");
    let before = host.agent.memory();
    let callers = ["ListEvents", "WatchEvents", "ListJobs", "WatchNode"];
    let hostile: Vec<_> = callers.iter().map(|call| host.client(A, &format!("unread {call}"))).collect();
    assert!(hostile.iter().all(|client| client.printed == "calls"));
    let seen = host.seen_by(B);
    let peak = host.agent.peak_memory();
    println!("with {} MiB at most: {seen:?}", peak >> 20);
    assert!(peak < MOST, "the agent took {} MiB", peak >> 20);
    // When the callers are gone, the memory goes back to the system.
    drop(hostile);
    let until = Instant::now() + GIVEN_BACK_WITHIN;
    while host.agent.memory() > before + LEFT && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(200));
    }
    let left = host.agent.memory();
    println!("{} MiB before, {} MiB after", before >> 20, left >> 20);
    assert!(left <= before + LEFT, "{} MiB before, {} MiB after", before >> 20, left >> 20);
}

#[test]
fn messages_that_wait_to_be_processed_are_bounded() {
    let Some(host) = host_with(&[]) else { return };
    let hostile = host.client(A, "large");
    // 64 times 3.8 MiB: a few wait, and the other streams end with a reason.
    let refused: usize = hostile.printed.strip_prefix("refused ").unwrap().parse().unwrap();
    assert_eq!(refused, ENOUGH);
    host.seen_by(B);
    let peak = host.agent.peak_memory();
    assert!(peak < MOST, "the agent took {} MiB", peak >> 20);
}

#[test]
fn a_job_with_too_many_ranks_is_refused_once_and_stays_attached() {
    let Some(host) = host_with(&[]) else { return };
    let launcher = host.client(A, "ranks");
    assert_eq!(launcher.printed, "ResourceExhausted, then have 2");
}

#[test]
fn a_user_with_very_many_entries_pushes_no_others_out_of_the_journal() {
    let small = [("JOURNAL_MAX_SIZE", Path::new("2MiB"))];
    let Some(host) = host_with(&small) else { return };
    let refused = host.client(A, "refused");
    assert_eq!(refused.printed, "PermissionDenied");
    host.agent.wait_for("agent.calls");
    assert_eq!(host.client(A, "fill").printed, "filled");
    host.agent.wait_for("agent.journal");
    assert!(host.agent.events().contains("agent.calls"), "{}", host.agent.events());
    assert!(host.agent.status().contains("full"), "its job is shown");
}

/// Users of the host, from this one up, who attack the agent at once, each in another way.
const FIRST_HOSTILE: u32 = 61_003;

/// Their ways. The first prepares large answers for those that do not read them.
const ATTACKS: [&str; 16] = [
    "fill",
    "unread ListEvents",
    "unread WatchEvents",
    "unread ListJobs",
    "unread WatchNode",
    "large",
    "ranks",
    "flood 0",
    "flood 1",
    "flood 2",
    "flood 3",
    "refusals",
    "explain",
    "hello",
    "connections silent",
    "connections half",
];

/// Connections over TCP that send nothing, or half a request.
const STRANGERS: usize = 200;

#[test]
fn hostile_users_and_strangers_at_once_keep_no_one_from_the_agent_and_take_bounded_memory() {
    let address = format!("127.0.0.1:{}", testing::free_port());
    let users = (0..=ATTACKS.len() as u32).map(|number| (B + number).to_string());
    let users = users.collect::<Vec<_>>().join(", ");
    let further = [("LISTEN", Path::new(&address)), ("ALLOW_UIDS", Path::new(&users))];
    let Some(host) = host_with(&further) else { return };
    let hostile: Vec<_> =
        (FIRST_HOSTILE..).zip(ATTACKS).map(|(user, attack)| host.client(user, attack)).collect();
    assert!(hostile.iter().all(|client| !client.printed.is_empty()));
    let strangers: Vec<TcpStream> = (0..STRANGERS)
        .map(|number| {
            let mut stranger = TcpStream::connect(&address).unwrap();
            if number % 2 == 0 {
                // One that makes room for another is closed.
                let _ = stranger.write_all(b"GET /metrics HTTP/1.1\r\nHost:");
            }
            stranger
        })
        .collect();
    let status = host.agent.status();
    assert!(status.contains("host."), "{status}");
    let seen = host.seen_by(B);
    let peak = host.agent.peak_memory();
    println!("with {} MiB at most: {seen:?}", peak >> 20);
    assert!(peak < MOST, "the agent took {} MiB", peak >> 20);
    drop((hostile, strangers));
}

/// What this program does as another user: `two_users::as_another_user` calls it.
pub(crate) async fn play(role: &str, about: &str, socket: String) {
    match role {
        "fill" => fill(socket).await,
        "unread" => unread(socket, about).await,
        "large" => large(socket).await,
        "refused" => refused(socket).await,
        "refusals" => refusals(socket).await,
        "explain" => explain(socket).await,
        "hello" => without_hello(socket).await,
        "connections" => connections(&socket, about == "half"),
        _ => ranks(socket).await,
    }
    std::future::pending::<()>().await;
}

/// An attached launcher.
struct Launcher {
    sends: mpsc::Sender<FromLauncher>,
    answers: Streaming<FromAgent>,
    welcome: FromAgent,
}

async fn attach(socket: &str, job: &str) -> Launcher {
    let mut client = LauncherServiceClient::new(connect(socket.to_owned()).await);
    let (sends, receives) = mpsc::channel(4);
    sends.send(hello(job)).await.unwrap();
    let mut answers = client.attach(ReceiverStream::new(receives)).await.unwrap().into_inner();
    let welcome = answers.message().await.unwrap().unwrap();
    Launcher { sends, answers, welcome }
}

fn entry(job: &str, seq: u64, fact: Fact) -> FromLauncher {
    let (boot, job) = (BootId("boot".to_owned()), Some(JobId(job.to_owned())));
    let entry = Entry { seq, at: Stamp::default(), boot, job, origin_seq: None, body: Body::Fact(fact) };
    let line = serde_json::to_string(&entry).unwrap();
    message(Message::Entry(mainstay_proto::v1::ForwardedEntry { line }))
}

fn attempt(ranks: u32) -> Fact {
    let rank = |number| StartedRank {
        rank: Rank(number),
        local_rank: number,
        pid: Pid(2),
        page: None,
        start_ticks: None,
    };
    Fact::AttemptStarted {
        attempt: Attempt(0),
        master_port: 1,
        ranks: (0..ranks).map(rank).collect(),
        hosts: Vec::new(),
    }
}

/// A job with many ranks, and a journal of 8 MiB.
async fn fill(socket: String) {
    let launcher = attach(&socket, "full").await;
    launcher.sends.send(started("full", 1, "python".to_owned())).await.unwrap();
    launcher.sends.send(entry("full", 2, attempt(4_000))).await.unwrap();
    for seq in 3..1500 {
        let reason = "x".repeat(3600);
        launcher.sends.send(entry("full", seq, Fact::PagesUnavailable { reason })).await.unwrap();
    }
    let reason = "the last of many".to_owned();
    launcher.sends.send(entry("full", 1500, Fact::PagesUnavailable { reason })).await.unwrap();
    println!("\nclient: filled");
    std::future::pending::<()>().await;
}

/// Many calls on several connections. Each is sent, and its answer is never read.
async fn unread(socket: String, call: &str) {
    type Call = Pin<Box<dyn Future<Output = Result<(), Status>>>>;
    let mut calls: Vec<Call> = Vec::new();
    let (mut events_of, mut states_of) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        let channel = connect(socket.clone()).await;
        let (events, health) = (EventServiceClient::new(channel.clone()), HealthServiceClient::new(channel));
        for _ in 0..100 {
            let (mut events, mut health) = (events.clone(), health.clone());
            match call {
                "ListEvents" => calls.push(Box::pin(async move {
                    let request = ListEventsRequest { limit: 1000, ..Default::default() };
                    events.list_events(request).await.map(drop)
                })),
                "ListJobs" => calls.push(Box::pin(async move {
                    health.list_jobs(ListJobsRequest::default()).await.map(drop)
                })),
                "WatchEvents" => {
                    let request = WatchEventsRequest { after_cursor: Some(0), ..Default::default() };
                    events_of.extend(events.watch_events(request).await);
                }
                _ => {
                    let request = WatchNodeRequest::default();
                    states_of.extend(health.watch_node(request).await);
                }
            }
        }
    }
    // Sent at the first poll; to read the answer, it would be polled again.
    let mut context = Context::from_waker(Waker::noop());
    for call in &mut calls {
        assert!(call.as_mut().poll(&mut context).is_pending());
    }
    println!("\nclient: calls");
    std::future::pending::<()>().await;
}

/// Launchers that each send one message of almost the largest size.
async fn large(socket: String) {
    let mut launchers = Vec::new();
    for number in 0..64 {
        launchers.push((format!("large-{number}"), attach(&socket, &format!("large-{number}")).await));
    }
    let mut ends = tokio::task::JoinSet::new();
    for (job, Launcher { sends, mut answers, .. }) in launchers {
        sends.send(started(&job, 1, "x".repeat(3_900_000))).await.unwrap();
        // It sends nothing more: a connection whose message is accepted ends once that is processed.
        drop(sends);
        let is_refused = |status: Status| status.code() == Code::ResourceExhausted;
        ends.spawn(async move { answers.message().await.is_err_and(is_refused) });
    }
    let (mut refused, mut accepted) = (0, 0);
    while refused < ENOUGH && accepted < 64 - ENOUGH {
        let is_refused = ends.join_next().await.unwrap().unwrap();
        (refused, accepted) = (refused + usize::from(is_refused), accepted + usize::from(!is_refused));
    }
    println!("\nclient: refused {refused}");
    std::future::pending::<()>().await;
}

/// A call that only operators may make.
async fn refused(socket: String) {
    let mut client = OperatorServiceClient::new(connect(socket).await);
    let refused = client.silence_component(SilenceComponentRequest::default()).await.unwrap_err();
    println!("\nclient: {:?}", refused.code());
}

/// The same call again and again.
async fn refusals(socket: String) {
    let mut client = OperatorServiceClient::new(connect(socket).await);
    println!("\nclient: refusals");
    loop {
        let _ = client.silence_component(SilenceComponentRequest::default()).await;
    }
}

/// Reports that need the whole journal, about failures that are not there.
async fn explain(socket: String) {
    let client = EventServiceClient::new(connect(socket).await);
    println!("\nclient: explain");
    let calls = (0..64).map(|number| {
        let mut client = client.clone();
        tokio::spawn(async move {
            let request = ExplainIncidentRequest { job: format!("none-{number}"), ..Default::default() };
            loop {
                let _ = client.explain_incident(request.clone()).await;
            }
        })
    });
    for call in calls.collect::<Vec<_>>() {
        let _ = call.await;
    }
}

/// Launchers that do not say which they are.
async fn without_hello(socket: String) {
    let client = LauncherServiceClient::new(connect(socket).await);
    let mut launchers = Vec::new();
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..100 {
        let (sends, receives) = mpsc::channel::<FromLauncher>(1);
        let mut client = client.clone();
        let mut attaching = Box::pin(async move { client.attach(ReceiverStream::new(receives)).await });
        assert!(attaching.as_mut().poll(&mut context).is_pending());
        launchers.push((sends, attaching));
    }
    println!("\nclient: hello");
    std::future::pending::<()>().await;
}

/// As many connections as the agent accepts. Each sends nothing, or half of the first bytes.
fn connections(socket: &str, half: bool) {
    let mut held = Vec::new();
    for _ in 0..200 {
        let mut connection = UnixStream::connect(socket).unwrap();
        if half {
            let _ = connection.write_all(b"PRI * HTTP/2.0\r\n\r\nSM");
        }
        held.push(connection);
    }
    println!("\nclient: connections");
    std::thread::sleep(Duration::MAX);
}

/// A job that starts with too many ranks, and attaches again.
async fn ranks(socket: String) {
    let Launcher { sends, mut answers, .. } = attach(&socket, "huge").await;
    sends.send(started("huge", 1, "python".to_owned())).await.unwrap();
    sends.send(entry("huge", 2, attempt(TOO_MANY_RANKS))).await.unwrap();
    // An agent that accepts it ends the connection without an error.
    drop(sends);
    let refused = answers.message().await.unwrap_err();
    let again = attach(&socket, "huge").await;
    let Some(mainstay_proto::v1::from_agent::Message::Welcome(welcome)) = again.welcome.message else {
        panic!("{:?}", again.welcome)
    };
    println!("\nclient: {:?}, then have {}", refused.code(), welcome.have_sequence);
    std::future::pending::<()>().await;
}
