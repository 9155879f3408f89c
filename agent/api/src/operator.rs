//! `mainstay.v1.OperatorService`: statements of operators about components. Served only on the Unix socket, where
//! the kernel reports the caller's user.

use std::time::Duration;

use mainstay_health::hardware::gpu::reset::ResetError;
use mainstay_model::operator::OperatorAction;
use mainstay_model::time::Wall;
use mainstay_proto::v1::operator_service_server::OperatorService;
use mainstay_proto::v1::{
    AcknowledgeRequest, AcknowledgeResponse, ResetGpuRequest, ResetGpuResponse, SilenceComponentRequest,
    SilenceComponentResponse, UnsilenceComponentRequest, UnsilenceComponentResponse,
};
use tokio::sync::{mpsc, oneshot};
use tonic::{Request, Response, Status};

use super::Clock;
use super::refusal::{Reason, invalid};
use super::roles::Roles;
use mainstay_node::Input;
use mainstay_view::convert::timestamp;

/// Longest silence: longer ones are forgotten by people.
const MAX_SILENCE: Duration = Duration::from_secs(30 * 86_400);

/// Bytes of a reason.
const LONGEST_REASON: usize = 1000;

/// The service.
pub struct Operators {
    inputs: mpsc::Sender<Input>,
    roles: Roles,
    clock: Clock,
}

impl Operators {
    /// A service that informs the node through `inputs`.
    pub fn new(inputs: mpsc::Sender<Input>, roles: Roles, clock: Clock) -> Operators {
        Operators { inputs, roles, clock }
    }

    async fn record(&self, uid: u32, component: String, word: OperatorAction) -> Result<(), Status> {
        let (answer, answered) = oneshot::channel();
        let gone = || Reason::SERVER_STOPPING.refuse("the agent is stopping");
        self.inputs.send(Input::Operator { uid, component, word, answer }).await.map_err(|_| gone())?;
        answered
            .await
            .map_err(|_| gone())?
            .map_err(|unknown| Reason::UNKNOWN_COMPONENT.refuse(unknown.to_string()))
    }
}

#[tonic::async_trait]
impl OperatorService for Operators {
    async fn acknowledge(
        &self,
        request: Request<AcknowledgeRequest>,
    ) -> Result<Response<AcknowledgeResponse>, Status> {
        let uid = self.roles.operator(&request, "Acknowledge")?.user.uid;
        let AcknowledgeRequest { component, reason } = request.into_inner();
        self.record(uid, component, OperatorAction::Acknowledge { reason: given(reason)? }).await?;
        Ok(Response::new(AcknowledgeResponse {}))
    }

    async fn silence_component(
        &self,
        request: Request<SilenceComponentRequest>,
    ) -> Result<Response<SilenceComponentResponse>, Status> {
        let uid = self.roles.operator(&request, "SilenceComponent")?.user.uid;
        let SilenceComponentRequest { component, reason, duration } = request.into_inner();
        let asked = duration.and_then(|duration| Duration::try_from(duration).ok());
        let asked = asked
            .filter(|asked| !asked.is_zero() && *asked <= MAX_SILENCE)
            .ok_or_else(|| invalid("duration", "give a duration of more than zero and at most 30 days"))?;
        let nanos = i64::try_from(asked.as_nanos()).unwrap_or(i64::MAX);
        let until = Wall((self.clock)().wall.0.saturating_add(nanos));
        self.record(uid, component, OperatorAction::Silence { reason: given(reason)?, until }).await?;
        Ok(Response::new(SilenceComponentResponse { until: Some(timestamp(until)) }))
    }

    async fn unsilence_component(
        &self,
        request: Request<UnsilenceComponentRequest>,
    ) -> Result<Response<UnsilenceComponentResponse>, Status> {
        let uid = self.roles.operator(&request, "UnsilenceComponent")?.user.uid;
        self.record(uid, request.into_inner().component, OperatorAction::Unsilence).await?;
        Ok(Response::new(UnsilenceComponentResponse {}))
    }

    async fn reset_gpu(
        &self,
        request: Request<ResetGpuRequest>,
    ) -> Result<Response<ResetGpuResponse>, Status> {
        let uid = self.roles.operator(&request, "ResetGpu")?.user.uid;
        let ResetGpuRequest { gpu, reason } = request.into_inner();
        let (reason, (answer, answered)) = (given(reason)?, oneshot::channel());
        let gone = || Reason::SERVER_STOPPING.refuse("the agent is stopping");
        self.inputs.send(Input::ResetGpu { uid, gpu, reason, answer }).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?.map_err(|error| match &error {
            ResetError::Unknown { .. } => Reason::UNKNOWN_GPU.refuse(error.to_string()),
            error if error.was_tried() => Reason::GPU_RESET_FAILED.refuse(error.to_string()),
            error => Reason::GPU_RESET_REFUSED.refuse(error.to_string()),
        })?;
        Ok(Response::new(ResetGpuResponse {}))
    }
}

fn given(reason: String) -> Result<String, Status> {
    if reason.trim().is_empty() {
        return Err(invalid("reason", "a reason is required; the journal records it"));
    }
    if reason.len() > LONGEST_REASON {
        return Err(invalid("reason", format!("at most {LONGEST_REASON} bytes")));
    }
    Ok(reason)
}
