//! `grpc.health.v1.Health`, as specified: an unknown service is an error of Check but a state of Watch, and a Watch
//! continues until its caller leaves.

use std::collections::BTreeMap;

use mainstay_model::health::HealthState;
use mainstay_proto::grpc_health_v1::health_check_response::ServingStatus;
use mainstay_proto::grpc_health_v1::health_server::Health;
use mainstay_proto::grpc_health_v1::{
    HealthCheckRequest, HealthCheckResponse, HealthListRequest, HealthListResponse,
};
use tonic::{Request, Response, Status};

use super::ReadSide;
use super::refusal::Reason;
use super::stream::{Answers, Caller, End, answer};

/// The services that are SERVING as long as the process answers, whatever the node's health. The empty name is the
/// server as a whole: restarting a healthy agent would not fix a GPU.
const ALWAYS: [&str; 3] = ["", "mainstay.v1.HealthService", "mainstay.v1.EventService"];
/// The node as a whole.
const NODE: &str = "node";
/// Whether work may be sent here, as `/readyz`.
const READY: &str = "ready";

/// The service.
pub(super) struct GrpcHealth(pub(super) ReadSide);

#[tonic::async_trait]
impl Health for GrpcHealth {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        let status = self.0.status_of(&service).ok_or_else(|| {
            Reason::UNKNOWN_SERVICE.refuse(format!(
                "no service {service:?}; there are {NODE:?}, {READY:?} and each component by name (see List)"
            ))
        })?;
        Ok(Response::new(HealthCheckResponse { status: status.into() }))
    }

    async fn list(&self, _: Request<HealthListRequest>) -> Result<Response<HealthListResponse>, Status> {
        let view = self.0.snapshots.view();
        let components = view.components.keys().map(String::as_str);
        let names = ALWAYS.into_iter().chain([NODE, READY]).chain(components);
        let statuses: BTreeMap<String, HealthCheckResponse> = names
            .filter_map(|name| Some((name.to_owned(), self.0.status_of(name)?)))
            .map(|(name, status)| (name, HealthCheckResponse { status: status.into() }))
            .collect();
        Ok(Response::new(HealthListResponse { statuses }))
    }

    type WatchStream = Answers<HealthCheckResponse>;

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let service = request.into_inner().service;
        let read = self.0.clone();
        Ok(Response::new(answer(read.stop.clone(), move |caller| watch(read, service, caller))))
    }
}

async fn watch(read: ReadSide, service: String, caller: Caller<HealthCheckResponse>) -> End {
    let mut snapshots = read.snapshots.clone();
    let (mut reported, mut last) = (None, false);
    loop {
        let status = read.status_of(&service).unwrap_or(ServingStatus::ServiceUnknown);
        if reported != Some(status) {
            if let Err(left) = caller.send(HealthCheckResponse { status: status.into() }).await {
                return left.into();
            }
            reported = Some(status);
        }
        if last {
            std::future::pending::<()>().await;
        }
        if !snapshots.changed().await {
            // The last change is that the status becomes unknown. The stream stays open.
            read.snapshots_gone.cancelled().await;
            last = true;
        }
    }
}

impl ReadSide {
    /// The status of a service; none if the service is unknown.
    fn status_of(&self, service: &str) -> Option<ServingStatus> {
        match service {
            always if ALWAYS.contains(&always) => Some(ServingStatus::Serving),
            NODE => Some(self.serving(self.snapshots.view().state())),
            READY if self.is_ready() => Some(ServingStatus::Serving),
            READY => Some(ServingStatus::NotServing),
            component => {
                self.snapshots.view().components.get(component).map(|component| self.serving(component.state))
            }
        }
    }

    /// A degraded node is still in use. Without a writer of the snapshots the status is unknown.
    fn serving(&self, state: HealthState) -> ServingStatus {
        match state {
            _ if self.snapshots_gone.is_cancelled() => ServingStatus::Unknown,
            HealthState::Healthy | HealthState::Degraded => ServingStatus::Serving,
            HealthState::Unhealthy => ServingStatus::NotServing,
            HealthState::Unknown => ServingStatus::Unknown,
        }
    }
}
