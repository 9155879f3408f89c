//! Components, events, codes and failures, explained: over TCP as over the Unix socket.

use mainstay_health::hardware::gpu::{DeviceJudge, DeviceLimits};
use mainstay_health::parse::log::LogReader;
use mainstay_journal::store::journal::JournalReader;
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::health::HealthChange;
use mainstay_model::id::{Attempt, Incident};
use mainstay_model::kernel::Xid;
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::{Action, DecidedBy, Decision, Outcome, Rule};
use mainstay_proto::v1::explain_request::Target;
use mainstay_proto::v1::explain_response::Report;
use mainstay_proto::v1::explain_service_client::ExplainServiceClient;
use mainstay_proto::v1::{
    CodeBlame, CodeMeaning, ExplainRequest, FailureTarget, FaultCode, RecommendedAction, fault_code::Code,
};
use mainstay_view::convert::failure::report_in;
use mainstay_view::incident_report;
use tonic::transport::Channel;
use tonic::{Code as Status, Status as Refusal};

use super::events::verdict;
use super::server::Server;

const GPU: &str = "gpu.0000:3b:00";

async fn ask(channel: Channel, target: Target) -> Result<Report, Refusal> {
    let request = ExplainRequest { target: Some(target) };
    let answer = ExplainServiceClient::new(channel).explain(request).await?;
    Ok(answer.into_inner().report.unwrap())
}

fn read(line: &str) -> Fact {
    LogReader::default().line(Mono(1), line, 1).unwrap().1
}

fn xid(code: u32) -> Option<FaultCode> {
    Some(FaultCode { code: Some(Code::Xid(code)) })
}

/// Shows the GPU as judged after these facts.
fn judged(server: &mut Server, facts: &[Fact]) {
    let catalog = mainstay_app::catalog::load(&[]).unwrap();
    let mut judge = DeviceJudge::new(catalog, DeviceLimits::default());
    for fact in facts {
        judge.take_in(Mono(1), fact);
    }
    let (components, gpus) = judge.judge(Mono(2));
    server.snapshots.set_gpus(gpus);
    for component in components {
        server.record(50, None, Body::Health(HealthChange { from: None, component }));
    }
}

async fn meanings(server: &Server, target: Target) -> Vec<CodeMeaning> {
    match ask(server.tcp().await, target).await.unwrap() {
        Report::Component(report) => report.meanings,
        Report::Event(report) => report.meanings,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_component_keeps_the_codes_of_its_lines_and_the_server_knows_their_meaning() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    let line = "NVRM: Xid (PCI:0000:3b:00): 63, pid=1, name=a, Row Remapper: New row marked";
    judged(&mut server, &[read(line)]);
    // Also by its address alone.
    for name in [GPU, "0000:3b:00"] {
        let target = Target::Component(name.into());
        let over_tcp = ask(server.tcp().await, target.clone()).await.unwrap();
        assert_eq!(ask(server.unix().await, target).await.unwrap(), over_tcp);
        let Report::Component(report) = over_tcp else { panic!("{over_tcp:?}") };
        let component = report.component.unwrap();
        assert_eq!(
            (component.name.as_str(), component.recommended_action()),
            (GPU, RecommendedAction::ResetDevice)
        );
        assert_eq!(
            (component.evidence[0].reading.as_str(), component.evidence[0].code.clone()),
            (line, xid(63))
        );
        let [meaning] = report.meanings.as_slice() else { panic!("{:?}", report.meanings) };
        assert_eq!((meaning.code.clone(), meaning.blame()), (xid(63), CodeBlame::Device));
        assert_eq!(component.evidence[0].meaning.as_deref(), Some(meaning.name.as_str()));
        assert!(meaning.differs.is_some() && meaning.origin.is_none(), "{meaning:?}");
        assert_eq!(report.document, "docs/reference/checks.md");
    }
    server.stop().await;
}

#[tokio::test]
async fn an_event_of_the_driver_has_no_line_and_is_explained_too() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    let gpu = mainstay_model::pci::PciAddress::parse("0000:3b:00").unwrap();
    judged(&mut server, &[Fact::Xid(Xid { gpu, code: 79, by_event: true, ..Xid::default() })]);
    let meanings = meanings(&server, Target::Component(GPU.into())).await;
    assert_eq!(meanings.iter().map(|meaning| meaning.code.clone()).collect::<Vec<_>>(), [xid(79)]);
    server.stop().await;
}

/// Every entry of the catalogs, by its example line.
#[tokio::test]
async fn every_event_of_the_catalog_is_explained() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    let catalog = mainstay_app::catalog::load(&[]).unwrap();
    let codes = (0..1000).filter_map(|code| catalog.xid(code));
    let codes = codes.chain((10_000..30_000).filter_map(|code| catalog.sxid(code)));
    let of_codes = codes.map(|of| (of.example.as_str(), of.name.as_str()));
    let of_lines = catalog.kernel_meanings().map(|of| (of.example.as_str(), of.name.as_str()));
    let all: Vec<(&str, &str)> = of_codes.chain(of_lines).collect();
    assert!(all.len() > 150, "{}", all.len());
    let mut client = ExplainServiceClient::new(server.tcp().await);
    for (line, name) in all {
        let cursor = server.record(20, None, Body::Fact(read(line)));
        let request = ExplainRequest { target: Some(Target::Cursor(cursor)) };
        let answer = client.explain(request).await.unwrap().into_inner().report;
        let Some(Report::Event(report)) = answer else { panic!("{answer:?}") };
        let names: Vec<&str> = report.meanings.iter().map(|meaning| meaning.name.as_str()).collect();
        assert_eq!((report.event.unwrap().cursor, names.as_slice()), (cursor, [name].as_slice()), "{line}");
    }
    server.stop().await;
}

#[tokio::test]
async fn registers_of_a_link_are_decoded() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    let line = "NVRM: Xid (PCI:0003:00:00): 74, NVLink: fatal error detected on link 14(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)";
    let cursor = server.record(20, None, Body::Fact(read(line)));
    let meanings = meanings(&server, Target::Cursor(cursor)).await;
    testing::snapshot!("explain", "registers of a link", meanings[0].meaning);
    server.stop().await;
}

#[tokio::test]
async fn a_code_is_explained_whether_it_was_seen_or_not_and_what_nobody_knows_is_not_found() {
    let dir = testing::tempdir().unwrap();
    let server = Server::start(dir.path()).await;
    let code = |code| Target::Code(FaultCode { code: Some(code) });
    let Report::Code(meaning) = ask(server.tcp().await, code(Code::Xid(79))).await.unwrap() else {
        panic!("another report")
    };
    assert_eq!(
        (meaning.code.clone(), meaning.recommended_action()),
        (xid(79), RecommendedAction::RebootNode)
    );
    let failure = FailureTarget { job: "nobody".into(), incident: None };
    for target in [
        code(Code::Xid(987_654)),
        code(Code::KernelLine("of a later version".into())),
        Target::Component("host.none".into()),
        Target::Cursor(4711),
        Target::Failure(failure),
    ] {
        assert_eq!(ask(server.tcp().await, target).await.unwrap_err().code(), Status::NotFound);
    }
    server.stop().await;
}

#[tokio::test]
async fn a_failure_arrives_as_the_journal_has_it() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.job("demo");
    server.record(20, Some("demo"), verdict(1, "rank 3 raised ValueError: first"));
    let (incident, attempt) = (Incident(1), Attempt(1));
    let (by, after) = (DecidedBy::Launcher, Span::seconds(5));
    let action = Action::RestartInJob { attempt };
    let (rule, why) = (Rule::Unknown, "1 of 3".into());
    let decision = Decision { incident, action, after, rule, why, by, agent_evidence: true };
    server.record(21, Some("demo"), Body::Decision(decision));
    server.record(
        30,
        Some("demo"),
        Body::Outcome(Outcome {
            incident,
            attempt,
            step: 4,
            reached_before: 4,
            steps_lost: 1,
            counted: false,
            to_ranks_started: Span::millis(1500),
            to_ranks_connected: None,
            to_first_step: Span::seconds(3),
        }),
    );
    let failure = |incident| Target::Failure(FailureTarget { job: "demo".into(), incident });
    let Report::Failure(report) = ask(server.tcp().await, failure(None)).await.unwrap() else {
        panic!("another report")
    };
    let mut entries: Vec<Entry> = Vec::new();
    JournalReader::new(&dir.path().join("journal")).replay(|entry| entries.push(entry)).unwrap();
    assert_eq!(report_in(report).ok(), incident_report::from_entries(entries.iter(), None));
    assert_eq!(ask(server.unix().await, failure(Some(9))).await.unwrap_err().code(), Status::NotFound);
    server.stop().await;
}
