//! A service with libtpu's wire format, as a trainer on TPUs has it in its process.
#![allow(
    clippy::unwrap_used,
    dead_code,
    reason = "a panic is how a test reports; not every test uses all of it"
)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use mainstay_proto::libtpu::tpu::monitoring::runtime::runtime_metric_service_server::{
    RuntimeMetricService, RuntimeMetricServiceServer,
};
use mainstay_proto::libtpu::tpu::monitoring::runtime::{
    AttrValue, Attribute, Gauge, GetTpuRuntimeStatusRequest, GetTpuRuntimeStatusResponse,
    ListSupportedMetricsRequest, ListSupportedMetricsResponse, Metric, MetricRequest, MetricResponse,
    SupportedMetric, TpuMetric, attr_value, gauge, metric,
};
use mainstay_proto::libtpu::tpu_telemetry::{
    CurrentCoreStateSummary, QueuedProgramInfo, SequencerInfo, TpuCoreIdentifier, TpuCoreOnChip,
};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// What the service returns; it may be changed while it runs.
#[derive(Clone, Default)]
pub struct Script {
    /// Metrics by name: values by core.
    pub metrics: BTreeMap<String, BTreeMap<i64, gauge::Value>>,
    /// The states of the cores; none as in older versions, which do not report them.
    pub cores: Option<BTreeMap<i32, CurrentCoreStateSummary>>,
    /// It accepts requests and does not answer.
    pub hangs: bool,
    /// It has none of the methods.
    pub empty: bool,
    /// The metrics that were requested.
    pub metrics_asked: Vec<String>,
    /// How often the expensive texts were requested.
    pub texts_asked: usize,
}

/// The service; it ends when this is dropped.
pub struct Libtpu {
    pub port: u16,
    pub script: Arc<Mutex<Script>>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Libtpu {
    /// Serves on a port that the kernel chooses.
    pub fn start(script: Script) -> Libtpu {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let port = listener.local_addr().unwrap().port();
        let script = Arc::new(Mutex::new(script));
        let service = RuntimeMetricServiceServer::new(Served(script.clone()));
        runtime.spawn(
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(TcpListenerStream::new(listener)),
        );
        Libtpu { port, script, runtime: Some(runtime) }
    }

    pub fn endpoint(&self) -> String {
        format!("localhost:{}", self.port)
    }

    pub fn change(&self, change: impl FnOnce(&mut Script)) {
        change(&mut self.script.lock().unwrap());
    }
}

impl Drop for Libtpu {
    fn drop(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }
}

/// A TensorCore that runs the launch, on a separate chip.
pub fn core(number: i32, launch: i32) -> CurrentCoreStateSummary {
    CurrentCoreStateSummary {
        core_id: Some(TpuCoreIdentifier {
            global_core_id: Some(number),
            chip_id: Some(number),
            core_on_chip: Some(TpuCoreOnChip { r#type: Some(1), index: Some(0) }),
        }),
        sequencer_info: vec![SequencerInfo {
            sequencer_type: Some(1),
            pc: Some(0x1f40),
            run_id: Some(7),
            ..SequencerInfo::default()
        }],
        program_fingerprint: Some(vec![0xab, 0xcd]),
        launch_id: Some(launch),
        queued_program_info: vec![QueuedProgramInfo {
            launch_id: Some(i64::from(launch) + 1),
            ..Default::default()
        }],
        ..CurrentCoreStateSummary::default()
    }
}

struct Served(Arc<Mutex<Script>>);

impl Served {
    async fn script(&self) -> Result<Script, Status> {
        let script = self.0.lock().unwrap().clone();
        if script.hangs {
            std::future::pending::<()>().await;
        }
        if script.empty { Err(Status::unimplemented("unknown service")) } else { Ok(script) }
    }
}

#[tonic::async_trait]
impl RuntimeMetricService for Served {
    async fn get_runtime_metric(
        &self,
        request: Request<MetricRequest>,
    ) -> Result<Response<MetricResponse>, Status> {
        let script = self.script().await?;
        let name = request.into_inner().metric_name;
        self.0.lock().unwrap().metrics_asked.push(name.clone());
        let values = script.metrics.get(&name).ok_or_else(|| Status::not_found(name.clone()))?;
        let metric = |(core, value): (&i64, &gauge::Value)| Metric {
            attribute: Some(Attribute {
                key: "device-id".into(),
                value: Some(AttrValue { attr: Some(attr_value::Attr::IntAttr(*core)) }),
            }),
            timestamp: None,
            measure: Some(metric::Measure::Gauge(Gauge { value: Some(value.clone()) })),
        };
        let metrics = values.iter().map(metric).collect();
        Ok(Response::new(MetricResponse {
            metric: Some(TpuMetric { name, description: String::new(), metrics }),
        }))
    }

    async fn list_supported_metrics(
        &self,
        _request: Request<ListSupportedMetricsRequest>,
    ) -> Result<Response<ListSupportedMetricsResponse>, Status> {
        let names = self.script().await?.metrics.into_keys();
        let supported_metric = names.map(|metric_name| SupportedMetric { metric_name }).collect();
        Ok(Response::new(ListSupportedMetricsResponse { supported_metric }))
    }

    async fn get_tpu_runtime_status(
        &self,
        request: Request<GetTpuRuntimeStatusRequest>,
    ) -> Result<Response<GetTpuRuntimeStatusResponse>, Status> {
        let script = self.script().await?;
        let mut cores = script.cores.ok_or_else(|| Status::unimplemented("not in this version"))?;
        if request.into_inner().include_hlo_info {
            self.0.lock().unwrap().texts_asked += 1;
            for sequencer in cores.values_mut().flat_map(|core| &mut core.sequencer_info) {
                sequencer.hlo_location = Some("%all-reduce.17".into());
            }
        }
        Ok(Response::new(GetTpuRuntimeStatusResponse {
            host_name: Some("worker-3".into()),
            core_states: cores,
        }))
    }
}
