//! `nvhcd.HealthCheckService`, the node health service that NVRx's ft_launcher asks before every rendezvous.
//!
//! Its client treats a node as healthy after any error, a late answer or one that it does not understand. So the
//! answer comes from memory, and any doubt here is a plain "no".

use std::time::Duration;

use mainstay_health::host::preflight::{NodeHealth, node_health};
use mainstay_model::time::Span;
use mainstay_proto::nvhcd::health_check_service_server::HealthCheckService;
use mainstay_proto::nvhcd::{HealthCheckRequest, HealthCheckResponse};
use serde_json::json;
use tonic::{Request, Response, Status};

use super::{Clock, preflight};
use mainstay_journal::state::StateReader;

/// How long to wait for sensors that have not looked since the agent's start. The client gives up after 60 s.
const FIRST_SAMPLE_TIMEOUT: Duration = Duration::from_secs(20);

/// The exit status of a script that finds the node unfit; the client only logs it.
const UNFIT: i32 = 2;

/// The service.
pub struct NodeHealthService {
    snapshots: StateReader,
    clock: Clock,
    fail_on_unknown: bool,
}

impl NodeHealthService {
    /// A service over the published snapshots. `fail_on_unknown`: an unknown state keeps the node out too.
    pub fn new(snapshots: StateReader, clock: Clock, fail_on_unknown: bool) -> NodeHealthService {
        NodeHealthService { snapshots, clock, fail_on_unknown }
    }
}

#[tonic::async_trait]
impl HealthCheckService for NodeHealthService {
    /// Arguments are for scripts of other implementations: any are accepted.
    async fn run_health_check(
        &self,
        _: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        if tokio::time::timeout(FIRST_SAMPLE_TIMEOUT, preflight::all_have_looked(&self.snapshots)).await
            == Ok(false)
        {
            let why = "no agent watches the node: this one is ending";
            return Ok(Response::new(answer(NodeHealth {
                failed: vec![why.to_owned()],
                ..NodeHealth::default()
            })));
        }
        Ok(Response::new(answer(health(&self.snapshots, &self.clock, self.fail_on_unknown))))
    }
}

/// The node of the newest snapshot.
pub fn health(snapshots: &StateReader, clock: &Clock, fail_on_unknown: bool) -> NodeHealth {
    let patience = Span(u64::try_from(FIRST_SAMPLE_TIMEOUT.as_nanos()).unwrap_or(u64::MAX));
    let (checks, silent) = preflight::watched(snapshots, clock().mono, patience);
    node_health(&checks, &silent, fail_on_unknown)
}

fn answer(health: NodeHealth) -> HealthCheckResponse {
    let output = json!({
        "fail_count": health.failed.len(),
        "failed_checks": health.failed,
        "warnings": health.warnings,
        "unknown": health.unknown,
    });
    HealthCheckResponse {
        success: health.is_fit(),
        exit_code: if health.is_fit() { 0 } else { UNFIT },
        output: output.to_string(),
        error: health.failed.join("; "),
    }
}
