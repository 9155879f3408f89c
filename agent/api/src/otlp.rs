//! Sends the devices' metrics, and a trace for each failure of a job, to a collector of OpenTelemetry. It is off unless
//! the standard variable names a collector.
//!
//! Nothing waits for the collector: this is a task of its own, which reads what is published and the journal's files as
//! any other reader does. What the collector does not take is dropped when too much of it waits.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::time::Duration;

use mainstay_journal::state::StateReader;
use mainstay_journal::store::journal::Most;
use mainstay_proto::otlp::collector::metrics::v1::ExportMetricsServiceRequest;
use mainstay_proto::otlp::collector::metrics::v1::metrics_service_client::MetricsServiceClient;
use mainstay_proto::otlp::collector::trace::v1::ExportTraceServiceRequest;
use mainstay_proto::otlp::collector::trace::v1::trace_service_client::TraceServiceClient;
use mainstay_proto::otlp::metrics::v1::{ResourceMetrics, ScopeMetrics};
use mainstay_proto::otlp::trace::v1::{ResourceSpans, ScopeSpans, Span};
use mainstay_view::otlp::incidents::Incidents;
use mainstay_view::otlp::metrics::metrics;
use mainstay_view::otlp::{resource, scope};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use super::{Clock, ServerInfo};

/// Names the collector: `http://HOST:PORT`.
const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
/// Only `grpc` is spoken.
const PROTOCOL: &str = "OTEL_EXPORTER_OTLP_PROTOCOL";
/// Milliseconds between two sends of the metrics.
const INTERVAL: &str = "OTEL_METRIC_EXPORT_INTERVAL";

/// By the specification of OpenTelemetry.
const USUAL_INTERVAL: Duration = Duration::from_secs(60);

/// How long a collector may take to connect and to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Spans that may wait for a collector: those of some 30 failures. The oldest are dropped first.
const MOST_SPANS: usize = 256;

/// What is read from the journal at a time.
const CHUNK: Most = Most { entries: 500, bytes: 64 << 10 };

/// A collector, and how often it gets metrics.
#[derive(Clone, Debug)]
pub struct Exporter {
    endpoint: Endpoint,
    interval: Duration,
}

/// Why nothing is sent to the collector that the environment names.
#[derive(Debug, thiserror::Error)]
#[error("{variable}: {problem}")]
pub struct ExporterError {
    /// The variable that is wrong.
    pub variable: &'static str,
    /// What is wrong, and what would be right.
    pub problem: String,
}

impl Exporter {
    /// The exporter that the standard variables describe; none if they name no collector.
    ///
    /// # Errors
    /// A variable has a value that cannot be used.
    pub fn from_environment(
        variable: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<Option<Exporter>, ExporterError> {
        let value = |name| {
            let value = variable(name).map(|value| value.to_string_lossy().into_owned());
            value.filter(|value| !value.is_empty())
        };
        let Some(address) = value(ENDPOINT) else { return Ok(None) };
        let wrong = |variable, problem: String| ExporterError { variable, problem };
        if let Some(protocol) = value(PROTOCOL).filter(|protocol| protocol != "grpc") {
            return Err(wrong(PROTOCOL, format!("{protocol:?} is not supported; set grpc")));
        }
        if !address.starts_with("http://") {
            let problem =
                format!("{address:?} must be http://HOST:PORT; for TLS, run a collector on this host");
            return Err(wrong(ENDPOINT, problem));
        }
        let endpoint = Endpoint::from_shared(address.clone())
            .map_err(|error| wrong(ENDPOINT, format!("{address:?} must be http://HOST:PORT: {error}")))?;
        let endpoint = endpoint.connect_timeout(PATIENCE).timeout(PATIENCE);
        let interval = value(INTERVAL).map(|text| {
            let millis = text.parse::<u64>().ok().filter(|millis| *millis > 0);
            let wrong = || wrong(INTERVAL, format!("{text:?} must be milliseconds, 1 or more"));
            millis.map(Duration::from_millis).ok_or_else(wrong)
        });
        Ok(Some(Exporter { endpoint, interval: interval.transpose()?.unwrap_or(USUAL_INTERVAL) }))
    }

    /// Sends until `stop` is cancelled or nothing is published any more.
    pub async fn run(self, snapshots: StateReader, about: ServerInfo, clock: Clock, stop: CancellationToken) {
        tracing::info!(
            collector = %self.endpoint.uri(),
            "metrics and traces are sent to a collector of OpenTelemetry"
        );
        let mut sending = Sending::new(self.endpoint.connect_lazy(), about);
        let follow = sending.follow(snapshots, clock, self.interval);
        tokio::select! {
            () = follow => {}
            () = stop.cancelled() => {}
        }
    }
}

/// What is sent, and what waits.
struct Sending {
    metrics: MetricsServiceClient<Channel>,
    traces: TraceServiceClient<Channel>,
    about: ServerInfo,
    incidents: Incidents,
    waiting: VecDeque<Span>,
    /// Whether the last request failed.
    is_away: bool,
}

impl Sending {
    fn new(channel: Channel, about: ServerInfo) -> Sending {
        Sending {
            metrics: MetricsServiceClient::new(channel.clone()),
            traces: TraceServiceClient::new(channel),
            about,
            incidents: Incidents::default(),
            waiting: VecDeque::new(),
            is_away: false,
        }
    }

    async fn follow(&mut self, mut snapshots: StateReader, clock: Clock, interval: Duration) {
        let mut cursor = snapshots.newest();
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {
                    self.send_metrics(&snapshots, &clock).await;
                    self.send_spans().await;
                }
                newer = snapshots.newer_than(cursor) => {
                    if !newer {
                        return;
                    }
                    cursor = self.take_in(&snapshots, cursor).await;
                    if !self.is_away {
                        self.send_spans().await;
                    }
                }
            }
        }
    }

    /// Reads on in the journal. Returns where the next look begins.
    async fn take_in(&mut self, snapshots: &StateReader, cursor: u64) -> u64 {
        let newest = snapshots.newest();
        let reader = snapshots.clone();
        let read = tokio::task::spawn_blocking(move || reader.entries_after(cursor, CHUNK)).await;
        let read = match read {
            Ok(Ok(read)) => read,
            Ok(Err(error)) => {
                tracing::warn!(%error, "failures may be missing in the traces: the journal cannot be read");
                return newest;
            }
            Err(_) => return newest,
        };
        let view = snapshots.view();
        for entry in &read.entries {
            // Of a job of several hosts, the host that decides sends the trace.
            let leads = entry.job.as_ref().and_then(|job| view.jobs.get(job)).is_none_or(|job| job.leads);
            let spans = self.incidents.take_in(entry);
            if leads {
                self.waiting.extend(spans);
            }
        }
        let surplus = self.waiting.len().saturating_sub(MOST_SPANS);
        if surplus > 0 {
            self.waiting.drain(..surplus);
            tracing::warn!(spans = surplus, "spans are dropped: the collector does not take them");
        }
        // Entries before `newest` that were not read are damaged.
        if read.entries.is_empty() { newest.max(read.cursor) } else { read.cursor }
    }

    async fn send_metrics(&mut self, snapshots: &StateReader, clock: &Clock) {
        let metrics = metrics(&snapshots.view(), self.about.started, clock());
        if metrics.is_empty() {
            return;
        }
        let scope_metrics =
            ScopeMetrics { scope: Some(scope(&self.about.version)), metrics, ..ScopeMetrics::default() };
        let resource_metrics = ResourceMetrics {
            resource: Some(resource(&self.about.hostname, &self.about.version)),
            scope_metrics: vec![scope_metrics],
            ..ResourceMetrics::default()
        };
        let request = ExportMetricsServiceRequest { resource_metrics: vec![resource_metrics] };
        let sent = self.metrics.export(request).await.map(drop);
        self.note(sent);
    }

    async fn send_spans(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let spans: Vec<Span> = self.waiting.iter().cloned().collect();
        let scope_spans =
            ScopeSpans { scope: Some(scope(&self.about.version)), spans, ..ScopeSpans::default() };
        let resource_spans = ResourceSpans {
            resource: Some(resource(&self.about.hostname, &self.about.version)),
            scope_spans: vec![scope_spans],
            ..ResourceSpans::default()
        };
        let request = ExportTraceServiceRequest { resource_spans: vec![resource_spans] };
        let sent = self.traces.export(request).await.map(drop);
        if sent.is_ok() {
            self.waiting.clear();
        }
        self.note(sent);
    }

    /// One line when the collector goes away, and one when it is back.
    fn note(&mut self, sent: Result<(), Status>) {
        match &sent {
            Ok(()) if self.is_away => tracing::info!("the collector of OpenTelemetry answers again"),
            Err(status) if !self.is_away => {
                tracing::warn!(
                    error = status.message(),
                    "the collector of OpenTelemetry does not take what is sent"
                );
            }
            _ => {}
        }
        self.is_away = sent.is_err();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Exporter>, &'static str> {
        let find =
            |name: &str| variables.iter().find(|(of, _)| *of == name).map(|(_, value)| (*value).into());
        Exporter::from_environment(&find).map_err(|error| error.variable)
    }

    #[tokio::test]
    async fn the_standard_variables_name_the_collector() {
        assert!(read(&[]).unwrap().is_none());
        assert!(read(&[(ENDPOINT, "")]).unwrap().is_none());
        let found = read(&[(ENDPOINT, "http://localhost:4317"), (PROTOCOL, "grpc")]).unwrap().unwrap();
        assert_eq!(found.interval, USUAL_INTERVAL);
        let found = read(&[(ENDPOINT, "http://localhost:4317"), (INTERVAL, "500")]).unwrap().unwrap();
        assert_eq!(found.interval, Duration::from_millis(500));
        for (name, value) in [
            (ENDPOINT, "localhost:4317"),
            (ENDPOINT, "https://localhost:4317"),
            (ENDPOINT, "http://"),
            (PROTOCOL, "http/protobuf"),
            (INTERVAL, "0"),
            (INTERVAL, "1m"),
        ] {
            let wrong = read(
                &[(ENDPOINT, "http://localhost:4317"), (name, value)]
                    .map(|(of, usual)| if of == name { (of, value) } else { (of, usual) }),
            );
            assert_eq!(wrong.err(), Some(name), "{value}");
        }
    }
}
