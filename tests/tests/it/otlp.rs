//! The agent sends the devices' metrics and a trace of each failure to a collector of OpenTelemetry, and needs none.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender, channel};

use mainstay_model::entry::{Body, Fact};
use mainstay_proto::otlp::collector::metrics::v1::metrics_service_server::{
    MetricsService, MetricsServiceServer,
};
use mainstay_proto::otlp::collector::metrics::v1::{
    ExportMetricsServiceRequest, ExportMetricsServiceResponse,
};
use mainstay_proto::otlp::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use mainstay_proto::otlp::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use mainstay_proto::otlp::common::v1::KeyValue;
use mainstay_proto::otlp::common::v1::any_value::Value;
use mainstay_proto::otlp::metrics::v1::metric::Data;
use mainstay_proto::otlp::metrics::v1::{Metric, NumberDataPoint, number_data_point};
use mainstay_proto::otlp::trace::v1::Span;
use mainstay_proto::otlp::trace::v1::status::StatusCode;
use mainstay_tests::{Stage, has_client, journal};
use tokio::runtime::Runtime;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use super::gpus::Host;

/// Two ranks that train until one of them is killed, and again to the end.
const TRAINING: &str = r#"
import mainstay
with mainstay.section("restore"):
    time.sleep(0.05)
for step in range(10):
    mainstay.step(step)
    if ATTEMPT == 0 and step == 4:
        mark(f"up.{RANK}", os.getpid())
        while True:
            time.sleep(0.01)
"#;

/// What a collector received.
enum Received {
    Spans(Vec<Span>),
    Metrics(Vec<Metric>),
}

struct Services(Sender<Received>);

#[tonic::async_trait]
impl TraceService for Services {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let resources = request.into_inner().resource_spans;
        let spans = resources.into_iter().flat_map(|of| of.scope_spans).flat_map(|of| of.spans);
        let _ = self.0.send(Received::Spans(spans.collect()));
        Ok(Response::new(Default::default()))
    }
}

#[tonic::async_trait]
impl MetricsService for Services {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        let resources = request.into_inner().resource_metrics;
        let metrics = resources.into_iter().flat_map(|of| of.scope_metrics).flat_map(|of| of.metrics);
        let _ = self.0.send(Received::Metrics(metrics.collect()));
        Ok(Response::new(Default::default()))
    }
}

/// A collector.
struct Collector {
    address: SocketAddr,
    received: Receiver<Received>,
    _runtime: Runtime,
}

impl Collector {
    fn start() -> Collector {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, received) = channel();
        let server = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(Services(sender.clone())))
            .add_service(MetricsServiceServer::new(Services(sender)))
            .serve_with_incoming(TcpListenerStream::new(listener));
        runtime.spawn(server);
        Collector { address, received, _runtime: runtime }
    }

    /// The variables by which an agent finds it.
    fn settings(&self) -> [String; 2] {
        settings(self.address)
    }

    /// Waits for a thing that it receives.
    fn wait_for<T>(&self, find: impl Fn(Received) -> Option<T>) -> T {
        self.received.iter().find_map(find).expect("the collector runs")
    }
}

fn settings(address: SocketAddr) -> [String; 2] {
    [format!("OTEL_EXPORTER_OTLP_ENDPOINT=http://{address}"), "OTEL_METRIC_EXPORT_INTERVAL=100".to_owned()]
}

fn attribute(of: &[KeyValue], key: &str) -> Option<String> {
    let value = of.iter().find(|of| of.key == key)?.value.as_ref()?.value.as_ref()?;
    Some(match value {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        other => panic!("{key}: {other:?}"),
    })
}

fn points(metric: &Metric) -> &[NumberDataPoint] {
    match metric.data.as_ref().unwrap() {
        Data::Gauge(gauge) => &gauge.data_points,
        Data::Sum(sum) => &sum.data_points,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_collector_gets_a_trace_of_a_failure_from_the_fault_to_the_first_step_and_the_state_of_each_gpu() {
    if !has_client() {
        return;
    }
    let collector = Collector::start();
    let (host, agent) = Host::with(&collector.settings());
    let metrics = collector.wait_for(|received| match received {
        Received::Metrics(metrics) => {
            let names: BTreeSet<&str> = metrics.iter().map(|metric| metric.name.as_str()).collect();
            names.contains("hw.temperature").then_some(metrics)
        }
        Received::Spans(_) => None,
    });
    let status = metrics.iter().find(|metric| metric.name == "hw.status").unwrap();
    let now = points(status).iter().filter(|point| {
        attribute(&point.attributes, "hw.type").as_deref() == Some("gpu")
            && point.value == Some(number_data_point::Value::AsInt(1))
    });
    let states: Vec<String> = now.filter_map(|point| attribute(&point.attributes, "hw.state")).collect();
    assert_eq!(states, ["ok", "ok"]);

    let job = host.stage().python(TRAINING).ranks(2).options("--max-restarts 1").with(&agent).start();
    job.wait_for_fact("the agent", |fact| matches!(fact, Fact::AgentFound { .. }));
    job.mark("up.0");
    job.mark("up.1");
    job.kill_rank(0, 1);
    let spans = collector.wait_for(|received| match received {
        Received::Spans(spans) => Some(spans),
        Received::Metrics(_) => None,
    });
    let id = job.id().to_owned();
    let end = job.end();
    end.assert_status(0);
    let verdict = journal::verdicts(&end.journal)[0];
    let outcome = journal::outcomes(&end.journal)[0];

    let by_name: BTreeMap<&str, &Span> = spans.iter().map(|span| (span.name.as_str(), span)).collect();
    let root = by_name["incident"];
    assert!(root.parent_span_id.is_empty());
    assert_eq!(root.status.as_ref().unwrap().code(), StatusCode::Ok);
    assert_eq!(root.end_time_unix_nano - root.start_time_unix_nano, outcome.to_first_step.0);
    for (key, value) in [
        ("mainstay.job.name", id),
        ("mainstay.incident", verdict.incident.0.to_string()),
        ("mainstay.cause", "signal".to_owned()),
        ("mainstay.culprit.rank", "1".to_owned()),
        ("mainstay.steps_lost", outcome.steps_lost.to_string()),
    ] {
        assert_eq!(attribute(&root.attributes, key), Some(value), "{key}");
    }
    // Each phase begins where the one before it ends.
    let phases = ["detect", "stop", "judge", "decide", "rendezvous", "connect", "restore", "first step"];
    let mut before = root.start_time_unix_nano;
    for phase in phases {
        let span = by_name[phase];
        assert_eq!((&span.trace_id, &span.parent_span_id), (&root.trace_id, &root.span_id));
        assert_eq!(span.start_time_unix_nano, before, "{phase}");
        assert!(span.end_time_unix_nano >= before, "{phase}");
        before = span.end_time_unix_nano;
    }
    assert_eq!((before, spans.len()), (root.end_time_unix_nano, phases.len() + 1));
    assert_eq!(agent.stop(), Some(0));
}

#[test]
fn an_agent_whose_collector_never_answers_works_as_without_one() {
    // It accepts connections, and reads nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (host, agent) = Host::with(&settings(silent.local_addr().unwrap()));
    let (connection, _) = silent.accept().unwrap();
    let job = host.stage().sh("exit 3").options("--max-restarts 0").with(&agent).start();
    let id = job.id().to_owned();
    job.end().assert_status(3);
    agent.wait_for_fact(&id, "the end", |fact| matches!(fact, Fact::JobEnded { .. }));
    assert_eq!(agent.stop(), Some(0));
    drop(connection);
}

#[test]
fn an_agent_starts_without_a_collector_that_it_cannot_use() {
    let stage = Stage::new();
    let line = [
        "env".to_owned(),
        "OTEL_EXPORTER_OTLP_ENDPOINT=nowhere".to_owned(),
        mainstay_tests::mainstay().display().to_string(),
    ];
    let agent = mainstay_tests::Agent::start_under(&line, &stage);
    agent.wait_for("its start", |entry| {
        matches!(&entry.body, Body::Fact(Fact::AgentStarted { .. })).then_some(())
    });
    assert_eq!(agent.stop(), Some(0));
    let log = std::fs::read_to_string(stage.home().join("agent.err")).unwrap();
    assert!(log.contains("OTEL_EXPORTER_OTLP_ENDPOINT"), "{log}");
}
