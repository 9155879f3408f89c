//! libtpu's metrics service, and the translation of its answers.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::io;
use std::time::Duration;

use mainstay_health::hardware::tpu::{CoreState, Runtime, RuntimeReply};
use mainstay_proto::libtpu::tpu::monitoring::runtime::attr_value::Attr;
use mainstay_proto::libtpu::tpu::monitoring::runtime::metric::Measure;
use mainstay_proto::libtpu::tpu::monitoring::runtime::runtime_metric_service_client::RuntimeMetricServiceClient;
use mainstay_proto::libtpu::tpu::monitoring::runtime::{
    GetTpuRuntimeStatusRequest, ListSupportedMetricsRequest, Metric, MetricRequest, counter, gauge,
};
use mainstay_proto::libtpu::tpu_telemetry::CurrentCoreStateSummary;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

const HBM_USED: &str = "tpu.runtime.hbm.memory.usage.bytes";
const HBM_TOTAL: &str = "tpu.runtime.hbm.memory.total.bytes";
const DUTY_CYCLE: &str = "tpu.runtime.tensorcore.dutycycle.percent";
const IDLE: &str = "tpu.runtime.tensorcore.idle_duration.seconds";
const BANDWIDTH: &str = "tpu.runtime.hbm.utilization.percent";

/// Type of a core: a TensorCore. 2 and 3 are SparseCores.
const TENSOR_CORE: i32 = 1;

/// More cores than any host has, and longer texts than anyone reads: limits what a broken service can send.
const MOST_CORES: usize = 1024;
const LONGEST_TEXT: usize = 1024;

/// A request to one service.
#[derive(Debug)]
pub(super) struct Question {
    pub(super) endpoint: String,
    /// Whether it reports only its own process.
    pub(super) own: bool,
    pub(super) deadline: Duration,
    /// The state of its cores at the last look.
    pub(super) before: Vec<CoreState>,
}

/// Asks a service; returns within the deadline.
pub(super) async fn ask(question: Question) -> RuntimeReply {
    match tokio::time::timeout(question.deadline, talk(&question)).await {
        Ok(Ok(runtime)) => RuntimeReply::Reported(runtime),
        Ok(Err(answer)) => answer,
        Err(_) => RuntimeReply::Silent,
    }
}

async fn talk(question: &Question) -> Result<Runtime, RuntimeReply> {
    let endpoint = Endpoint::from_shared(format!("http://{}", question.endpoint))
        .map_err(|error| RuntimeReply::Improper(error.to_string()))?;
    let channel = endpoint.connect().await.map_err(|error| {
        if was_refused(&error) { RuntimeReply::Refused } else { RuntimeReply::Improper(causes(&error)) }
    })?;
    let mut client = RuntimeMetricServiceClient::new(channel);
    let cores = cores(&mut client, &question.before).await?;
    let supported = supported(&mut client).await?;
    let known = supported.is_some();
    let count = supported.as_ref().map(BTreeSet::len).filter(|count| *count > 0);
    // A list without the metrics of every version is not a list of the supported ones.
    let supported = supported.filter(|names| names.contains(HBM_USED) || names.contains(DUTY_CYCLE));
    let mut metrics = Metrics { client, own: question.own, known, supported };
    let whole = |value: f64| if value >= 0.0 { value as u64 } else { 0 };
    let bytes =
        |values: BTreeMap<i64, f64>| values.into_iter().map(|(chip, value)| (chip, whole(value))).collect();
    let runtime = Runtime {
        hbm_used: bytes(metrics.get(HBM_USED).await?),
        hbm_total: bytes(metrics.get(HBM_TOTAL).await?),
        duty_cycle: metrics.get(DUTY_CYCLE).await?,
        idle_seconds: metrics.get(IDLE).await?,
        hbm_bandwidth: metrics.get(BANDWIDTH).await?,
        supported: count,
        cores,
    };
    if runtime.cores.is_none() && !metrics.known {
        return Err(RuntimeReply::Improper(
            "it is a gRPC server that does not have libtpu's service".to_owned(),
        ));
    }
    Ok(runtime)
}

type Client = RuntimeMetricServiceClient<Channel>;

/// The state of the cores; none if this libtpu does not report it. The texts of the program are expensive for the trainer
/// that serves them: they are requested only while it does not move.
async fn cores(client: &mut Client, before: &[CoreState]) -> Result<Option<Vec<CoreState>>, RuntimeReply> {
    let Some(cores) = status(client, false).await? else { return Ok(None) };
    let still =
        cores.len() == before.len() && cores.iter().zip(before).all(|(core, was)| core.stands_as(was));
    if !still || !cores.iter().any(CoreState::is_busy) {
        return Ok(Some(cores));
    }
    status(client, true).await
}

/// The supported metrics; none if this libtpu does not list them.
async fn supported(client: &mut Client) -> Result<Option<BTreeSet<String>>, RuntimeReply> {
    match client.list_supported_metrics(ListSupportedMetricsRequest::default()).await {
        Ok(answer) => {
            let metrics = answer.into_inner().supported_metric.into_iter().take(MOST_CORES);
            Ok(Some(metrics.map(|metric| metric.metric_name).collect()))
        }
        Err(status) if status.code() == Code::Unimplemented => Ok(None),
        Err(status) => Err(improper(&status)),
    }
}

async fn status(client: &mut Client, include_hlo_info: bool) -> Result<Option<Vec<CoreState>>, RuntimeReply> {
    match client.get_tpu_runtime_status(GetTpuRuntimeStatusRequest { include_hlo_info }).await {
        Ok(answer) => Ok(Some(core_states(answer.into_inner().core_states))),
        Err(status) if status.code() == Code::Unimplemented => Ok(None),
        Err(status) => Err(improper(&status)),
    }
}

struct Metrics {
    client: Client,
    own: bool,
    /// Whether the service itself is there, whatever metrics it has.
    known: bool,
    /// The metrics that it lists: no others are requested.
    supported: Option<BTreeSet<String>>,
}

impl Metrics {
    /// A metric by core or chip; empty if this libtpu does not have it.
    async fn get(&mut self, name: &str) -> Result<BTreeMap<i64, f64>, RuntimeReply> {
        if self.supported.as_ref().is_some_and(|supported| !supported.contains(name)) {
            return Ok(BTreeMap::new());
        }
        let request = MetricRequest { metric_name: name.to_owned(), skip_node_aggregation: self.own };
        let metrics = match self.client.get_runtime_metric(request).await {
            Ok(answer) => answer.into_inner().metric.unwrap_or_default().metrics,
            Err(status) => match status.code() {
                Code::Unimplemented => return Ok(BTreeMap::new()),
                Code::NotFound | Code::InvalidArgument => Vec::new(),
                _ => return Err(improper(&status)),
            },
        };
        self.known = true;
        Ok(metrics
            .iter()
            .take(MOST_CORES)
            .filter_map(|metric| Some((whose(metric)?, value(metric)?)))
            .collect())
    }
}

fn whose(metric: &Metric) -> Option<i64> {
    match metric.attribute.as_ref()?.value.as_ref()?.attr.as_ref()? {
        Attr::IntAttr(number) => Some(*number),
        Attr::StringAttr(number) => number.parse().ok(),
        _ => None,
    }
}

fn value(metric: &Metric) -> Option<f64> {
    let value = match metric.measure.as_ref()? {
        Measure::Gauge(gauge) => match gauge.value.as_ref()? {
            gauge::Value::AsDouble(value) => *value,
            gauge::Value::AsInt(value) => *value as f64,
            gauge::Value::AsString(_) | gauge::Value::AsBool(_) => return None,
        },
        Measure::Counter(counter) => match counter.value.as_ref()? {
            counter::Value::AsDouble(value) => *value,
            counter::Value::AsInt(value) => *value as f64,
        },
    };
    value.is_finite().then_some(value)
}

/// The cores of an answer or of a stall summary, sorted by number.
pub(super) fn core_states(summaries: BTreeMap<i32, CurrentCoreStateSummary>) -> Vec<CoreState> {
    summaries.into_iter().take(MOST_CORES).map(|(number, summary)| core_state(number, summary)).collect()
}

fn core_state(number: i32, summary: CurrentCoreStateSummary) -> CoreState {
    let id = summary.core_id.unwrap_or_default();
    let of_type = id.core_on_chip.and_then(|core| core.r#type);
    let sequencers = &summary.sequencer_info;
    let fingerprint = summary.program_fingerprint.unwrap_or_default();
    CoreState {
        core: id.global_core_id.unwrap_or(number),
        chip: id.chip_id,
        // A core without a type is of a kind of chip that has no other cores.
        tensor_core: of_type.is_none_or(|of_type| of_type == TENSOR_CORE),
        program: fingerprint.iter().take(16).map(|byte| format!("{byte:02x}")).collect(),
        launch: summary.launch_id.map(i64::from),
        counters: sequencers
            .iter()
            .filter_map(|sequencer| sequencer.pc)
            .filter(|pc| *pc != 0)
            .take(16)
            .collect(),
        hlo: sequencers
            .iter()
            .filter_map(|sequencer| sequencer.hlo_location.as_deref())
            .find(|hlo| !hlo.is_empty())
            .map(cut)
            .unwrap_or_default(),
        queued: summary.queued_program_info.len(),
        error: summary.error_message.filter(|error| !error.is_empty()).as_deref().map(cut),
    }
}

fn cut(text: &str) -> String {
    text.chars().take(LONGEST_TEXT).collect()
}

fn was_refused(error: &tonic::transport::Error) -> bool {
    let mut cause: Option<&dyn Error> = Some(error);
    while let Some(error) = cause {
        if error
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        {
            return true;
        }
        cause = error.source();
    }
    false
}

fn improper(status: &Status) -> RuntimeReply {
    let cause = status.source().map(|error| format!(" ({})", causes(error))).unwrap_or_default();
    RuntimeReply::Improper(cut(&format!("{:?}: {}{cause}", status.code(), status.message())))
}

/// An error with all its causes.
fn causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    cut(&text)
}
