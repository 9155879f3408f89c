//! The journal as a list and as a stream: nothing is lost or duplicated, and gaps are reported.

use mainstay_journal::store::journal::Limits;
use mainstay_model::entry::{Body, ExitStatus, Fact, JobSpec};
use mainstay_model::health::HealthState;
use mainstay_model::id::{Attempt, Incident, Pid, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::{Cause, Doubts, FaultDomain, Verdict};
use mainstay_proto::v1::event_service_client::EventServiceClient;
use mainstay_proto::v1::health_service_client::HealthServiceClient;
use mainstay_proto::v1::watch_events_response::Item;
use mainstay_proto::v1::{
    Event, EventFilter, EventKind, ExplainIncidentRequest, ListEventsRequest, ListJobsRequest, Severity,
    WatchEventsRequest, WatchEventsResponse,
};
use tonic::service::Routes;
use tonic::{Code, Streaming};

use super::server::Server;

fn progress(step: u64) -> Fact {
    Fact::Progress { attempt: Attempt(0), step, loss: None, saving: Span::default(), saves: 0 }
}

fn watch_from(cursor: u64) -> WatchEventsRequest {
    WatchEventsRequest { after_cursor: Some(cursor), filter: None }
}

async fn next(stream: &mut Streaming<WatchEventsResponse>) -> Item {
    stream.message().await.unwrap().unwrap().item.unwrap()
}

async fn next_event(stream: &mut Streaming<WatchEventsResponse>) -> Event {
    match next(stream).await {
        Item::Event(event) => event,
        Item::Gap(gap) => panic!("an event was expected: {gap:?}"),
    }
}

#[tokio::test]
async fn a_stream_resumes_over_a_restart_without_loss_and_without_duplicates() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.job("demo");
    let mut seen = Vec::new();
    let mut client = EventServiceClient::new(server.unix().await);
    let mut stream = client.watch_events(watch_from(0)).await.unwrap().into_inner();
    for step in 0..20 {
        server.fact(20, "demo", progress(step));
    }
    // The server stops while the caller has read only a part of what was sent.
    for _ in 0..10 {
        seen.push(next_event(&mut stream).await.cursor);
    }
    server.stop().await;
    drop(stream);

    let mut server = Server::start(dir.path()).await;
    server.fact(30, "demo", progress(20));
    let last = *seen.last().unwrap();
    let mut client = EventServiceClient::new(server.unix().await);
    let mut stream = client.watch_events(watch_from(last)).await.unwrap().into_inner();
    for _ in 10..24 {
        seen.push(next_event(&mut stream).await.cursor);
    }
    // Events from now on arrive as they happen.
    let cursor = server.fact(31, "demo", progress(21));
    seen.push(next_event(&mut stream).await.cursor);
    assert_eq!(seen, (1..=cursor).collect::<Vec<u64>>());
    server.stop().await;
}

#[tokio::test]
async fn events_before_the_stop_are_sent_before_the_end() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    let mut client = EventServiceClient::new(server.unix().await);
    let mut stream = client.watch_events(watch_from(0)).await.unwrap().into_inner();
    for step in 0..30 {
        server.fact(20, "demo", progress(step));
    }
    let last = server.fact(21, "demo", Fact::JobEnded { exit: 0, reason: "done".into() });
    let stopping = tokio::spawn(server.stop());
    for cursor in 1..=last {
        assert_eq!(next_event(&mut stream).await.cursor, cursor);
    }
    assert_eq!(stream.message().await.unwrap_err().code(), Code::Unavailable);
    stopping.await.unwrap();
}

#[tokio::test]
async fn a_watch_without_a_cursor_sends_only_new_events() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.job("demo");
    let mut client = EventServiceClient::new(server.tcp().await);
    let mut stream = client.watch_events(WatchEventsRequest::default()).await.unwrap().into_inner();
    let cursor = server.fact(20, "demo", progress(5));
    let event = next_event(&mut stream).await;
    assert_eq!((event.cursor, event.message.as_str()), (cursor, "step 5 completed"));
    assert_eq!(event.monotonic_ns, 20_000_000_000);
    server.stop().await;
}

#[tokio::test]
async fn events_that_are_no_longer_kept_are_reported_as_a_gap() {
    let dir = testing::tempdir().unwrap();
    let limits = Limits { segment_bytes: 4096, total_bytes: 8192 };
    let mut server = Server::start_with(dir.path(), limits, Routes::default()).await;
    for step in 0..200 {
        server.fact(20, "demo", progress(step));
    }
    let oldest = server.snapshots.reader().oldest();
    assert!(oldest > 4, "the journal must have dropped something: {oldest}");

    let mut client = EventServiceClient::new(server.unix().await);
    let mut stream = client.watch_events(watch_from(3)).await.unwrap().into_inner();
    let Item::Gap(gap) = next(&mut stream).await else { panic!("a gap comes first") };
    assert_eq!((gap.first_missing, gap.last_missing), (4, oldest - 1));
    assert_eq!(next_event(&mut stream).await.cursor, oldest);

    let request = ListEventsRequest { after_cursor: 3, ..ListEventsRequest::default() };
    let listed = client.list_events(request).await.unwrap().into_inner();
    assert_eq!(listed.gap.unwrap().last_missing, oldest - 1);
    assert_eq!(listed.events[0].cursor, oldest);
    assert_eq!((listed.oldest_cursor, listed.newest_cursor), (oldest, 200));
    server.stop().await;
}

#[tokio::test]
async fn a_cursor_of_another_journal_is_refused_instead_of_waited_for() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.fact(20, "demo", progress(1));
    let mut client = EventServiceClient::new(server.unix().await);
    let refused = client.watch_events(watch_from(500)).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange);
    let request = ListEventsRequest { after_cursor: 500, ..ListEventsRequest::default() };
    assert_eq!(client.list_events(request).await.unwrap_err().code(), Code::OutOfRange);
    server.stop().await;
}

#[tokio::test]
async fn pages_of_a_list_follow_each_other() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    for step in 0..25 {
        server.fact(20, "demo", progress(step));
    }
    let mut client = EventServiceClient::new(server.unix().await);
    let (mut after_cursor, mut seen, mut pages) = (0, Vec::new(), 0);
    loop {
        let request =
            ListEventsRequest { after_cursor, limit: 10, filter: None, ..ListEventsRequest::default() };
        let page = client.list_events(request).await.unwrap().into_inner();
        assert!(page.events.len() <= 10);
        seen.extend(page.events.iter().map(|event| event.cursor));
        (after_cursor, pages) = (page.next_cursor, pages + 1);
        if page.caught_up {
            break;
        }
    }
    assert_eq!(seen, (1..=25).collect::<Vec<u64>>());
    assert_eq!(pages, 3);

    // The same by the usual names of paging.
    let (mut page_token, mut by_token) = (String::new(), Vec::new());
    loop {
        let request = ListEventsRequest { page_size: 10, page_token, ..ListEventsRequest::default() };
        let page = client.list_events(request).await.unwrap().into_inner();
        by_token.extend(page.events.iter().map(|event| event.cursor));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(by_token, seen);
    for wrong in [
        ListEventsRequest { page_token: "x".to_owned(), ..ListEventsRequest::default() },
        ListEventsRequest { page_size: -1, ..ListEventsRequest::default() },
    ] {
        let refused = client.list_events(wrong).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    }
    server.stop().await;
}

#[tokio::test]
async fn a_page_of_long_events_stays_below_what_callers_take() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    for _ in 0..12 {
        server.fact(20, "demo", Fact::AgentLost { reason: "x".repeat(500_000) });
    }
    // This client accepts 4 MiB, the default of clients.
    let mut client = EventServiceClient::new(server.unix().await);
    let (mut after_cursor, mut seen) = (0, 0);
    loop {
        let request =
            ListEventsRequest { after_cursor, limit: 1000, filter: None, ..ListEventsRequest::default() };
        let page = client.list_events(request).await.unwrap().into_inner();
        (after_cursor, seen) = (page.next_cursor, seen + page.events.len());
        if page.caught_up {
            break;
        }
    }
    assert_eq!(seen, 12);
    server.stop().await;
}

#[tokio::test]
async fn filters_restrict_and_do_not_stop_the_cursor() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.fact(20, "a", progress(1));
    server.fact(20, "b", progress(2));
    server.health("host.disk", HealthState::Degraded);
    let killed = Fact::RankExited {
        attempt: Attempt(0),
        rank: Rank(1),
        pid: Pid(9),
        status: ExitStatus::Signal(9),
        step: Some(4),
        data: None,
        after_stop: false,
        stderr_tail: vec!["last words".into()],
        stdout_tail: Vec::new(),
        stderr_times: Vec::new(),
        stdout_times: Vec::new(),
    };
    server.record(21, Some("b"), Body::Fact(killed));
    let mut client = EventServiceClient::new(server.unix().await);
    let mut listed = async |filter: EventFilter| {
        let request = ListEventsRequest { filter: Some(filter), ..ListEventsRequest::default() };
        let page = client.list_events(request).await.unwrap().into_inner();
        assert_eq!((page.next_cursor, page.caught_up), (4, true));
        page.events.iter().map(|event| event.cursor).collect::<Vec<u64>>()
    };
    assert_eq!(listed(EventFilter::default()).await, [1, 2, 3, 4]);
    assert_eq!(listed(EventFilter { job: Some("b".into()), ..Default::default() }).await, [2, 4]);
    let health = EventFilter { kinds: vec![EventKind::Health.into()], ..Default::default() };
    assert_eq!(listed(health).await, [3]);
    let bad = EventFilter { min_severity: Severity::Warning.into(), ..Default::default() };
    assert_eq!(listed(bad).await, [3, 4]);
    server.stop().await;
}

#[tokio::test]
async fn many_watchers_each_see_every_event() {
    const WATCHERS: usize = 100;
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    let channel = server.unix().await;
    let mut watchers = tokio::task::JoinSet::new();
    for _ in 0..WATCHERS {
        let mut client = EventServiceClient::new(channel.clone());
        let mut stream = client.watch_events(watch_from(0)).await.unwrap().into_inner();
        watchers.spawn(async move {
            let mut seen = Vec::new();
            while seen.len() < 50 {
                seen.push(next_event(&mut stream).await.cursor);
            }
            seen
        });
    }
    // A watcher that never reads blocks neither the others nor the server.
    let mut idle = EventServiceClient::new(server.unix().await);
    let _unread = idle.watch_events(watch_from(0)).await.unwrap();
    for step in 0..50 {
        server.fact(20, "demo", progress(step));
        tokio::task::yield_now().await;
    }
    for seen in watchers.join_all().await {
        assert_eq!(seen, (1..=50).collect::<Vec<u64>>());
    }
    server.stop().await;
}

/// What supports a verdict, and what contradicts it.
const EVIDENCE: &str = "exit note of rank 3";
const AGAINST: &str = "an ECC error: of GPU 3";

pub fn verdict(incident: u64, headline: &str) -> Body {
    Body::Verdict(Verdict {
        incident: Incident(incident),
        attempt: Attempt(0),
        headline: headline.into(),
        cause: Cause::ExitCode { code: 1 },
        domain: FaultDomain::User,
        class: Some("user_code".into()),
        deterministic: true,
        doubts: Doubts {
            against: vec![AGAINST.into()],
            would_change: vec!["The same step on another host.".into()],
        },
        confidence: 0.9,
        culprit_confidence: None,
        cannot_run: false,
        culprit: Some(Rank(3)),
        host: None,
        victims: Vec::new(),
        step: Some(4),
        data: None,
        heartbeats: true,
        fault_at: Mono(1),
        detected_at: Mono(2),
        evidence: vec![EVIDENCE.into()],
    })
}

#[tokio::test]
async fn a_failure_is_explained_and_one_that_there_is_not_is_not_found() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.record(20, Some("demo"), verdict(1, "rank 3 raised ValueError: first"));
    server.record(21, Some("other"), verdict(1, "of another job"));
    server.record(22, Some("demo"), verdict(2, "rank 3 raised ValueError: last"));
    let mut client = EventServiceClient::new(server.unix().await);
    let mut ask = async |job: &str, incident| {
        client.explain_incident(ExplainIncidentRequest { job: job.into(), incident, all: true }).await
    };
    let last = ask("demo", None).await.unwrap().into_inner();
    assert_eq!(last.incident, 2);
    // The advice follows from the decision, and there is none.
    testing::snapshot!("explain", "a failure without a decision: text", last.text);
    testing::snapshot!("explain", "a failure without a decision: Markdown", last.markdown);
    let json: serde_json::Value = serde_json::from_str(&last.json).unwrap();
    assert_eq!(json["verdict"]["class"], "user_code");
    assert_eq!(json["verdict"]["against"][0], AGAINST);
    let first = ask("demo", Some(1)).await.unwrap().into_inner();
    assert!(first.text.contains("ValueError: first"), "{}", first.text);
    assert_eq!(ask("demo", Some(9)).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(ask("nobody", None).await.unwrap_err().code(), Code::NotFound);
    server.stop().await;
}

#[tokio::test]
async fn callers_over_the_network_get_texts_without_secrets() {
    const TOKEN: &str = "hf_AbCdEfGhIjKlMnOpQrSt";
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.job("demo");
    let spec =
        JobSpec { command: vec!["train.py".into(), "--key".into(), TOKEN.into()], ..JobSpec::default() };
    server.fact(19, "secret", Fact::JobStarted(spec));
    server.record(20, Some("secret"), verdict(1, &format!("rank 3 raised ValueError: 401 for {TOKEN}")));
    for (channel, shown) in [(server.unix().await, true), (server.tcp().await, false)] {
        let mut client = EventServiceClient::new(channel.clone());
        let events = client.list_events(ListEventsRequest::default()).await.unwrap().into_inner().events;
        assert!(events.iter().any(|event| event.message.contains("ValueError: 401 for ")), "{events:?}");
        let mut stream = client.watch_events(watch_from(0)).await.unwrap().into_inner();
        let mut watched = Vec::new();
        while watched.len() < events.len() {
            watched.push(next_event(&mut stream).await);
        }
        let ask = ExplainIncidentRequest { job: "secret".into(), incident: None, all: true };
        let report = client.explain_incident(ask).await.unwrap().into_inner();
        let mut health = HealthServiceClient::new(channel);
        let jobs = health.list_jobs(ListJobsRequest::default()).await.unwrap().into_inner().jobs;
        let job = jobs.into_iter().find(|job| job.id == "secret").unwrap();
        let answers = [
            format!("{events:?}"),
            format!("{watched:?}"),
            format!("{report:?}"),
            format!("{:?}", job.command),
            format!("{:?}", job.last_verdict),
        ];
        for answer in answers {
            assert_eq!(answer.contains(TOKEN), shown, "{answer}");
            assert_eq!(answer.contains("<masked>"), !shown, "{answer}");
        }
    }
    server.stop().await;
}
