//! `mainstay.v1.JobOrderService`: what people order for a job, on its launcher's Unix socket. The kernel says who calls, and
//! each order goes into the journal with who and why.

use mainstay_core::id::Rank;
use mainstay_proto::v1::job_order_service_server::JobOrderService;
use mainstay_proto::v1::{
    InjectFaultRequest, InjectFaultResponse, InjectedFault, RestartJobRequest, RestartJobResponse,
    StopJobRequest, StopJobResponse,
};
use nix::libc;
use tokio::sync::{mpsc, oneshot};
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Response, Status};

use crate::launch::order::{Injected, JobOrder, Ordered, Refused};

/// The service.
#[derive(Debug)]
pub struct Orders {
    orders: mpsc::Sender<Ordered>,
}

impl Orders {
    /// A service that passes orders on to the launcher.
    pub fn new(orders: mpsc::Sender<Ordered>) -> Orders {
        Orders { orders }
    }

    async fn pass_on(&self, uid: u32, reason: String, order: JobOrder) -> Result<(), Status> {
        let (answer, answered) = oneshot::channel();
        let gone = || Status::unavailable("the job is over");
        self.orders.send(Ordered { uid, reason, order, answer }).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?.map_err(|refused| match refused {
            Refused::NotNow(_) | Refused::NotAllowed => Status::failed_precondition(refused.to_string()),
            Refused::NoSuchRank(_) => Status::not_found(refused.to_string()),
        })
    }
}

/// Who calls, if it may order: root, or the job's own user.
fn caller<T>(request: &Request<T>) -> Result<u32, Status> {
    let connection = request.extensions().get::<UdsConnectInfo>();
    let credentials = connection
        .and_then(|connection| connection.peer_cred)
        .ok_or_else(|| Status::permission_denied("orders are taken on the Unix socket only"))?;
    let uid = credentials.uid();
    if uid == 0 || uid == nix::unistd::geteuid().as_raw() {
        return Ok(uid);
    }
    Err(Status::permission_denied(format!("user {uid} may not order: the job is another user's")))
}

fn given(reason: String) -> Result<String, Status> {
    if reason.trim().is_empty() {
        return Err(Status::invalid_argument("reason: say why, for those who look after you"));
    }
    Ok(reason)
}

fn injected(fault: InjectedFault) -> Result<Injected, Status> {
    Ok(match fault {
        InjectedFault::Kill => Injected { signal: libc::SIGKILL, word: "kill" },
        InjectedFault::Terminate => Injected { signal: libc::SIGTERM, word: "terminate" },
        InjectedFault::Stop => Injected { signal: libc::SIGSTOP, word: "stop" },
        InjectedFault::Continue => Injected { signal: libc::SIGCONT, word: "continue" },
        InjectedFault::Interrupt => Injected { signal: libc::SIGINT, word: "interrupt" },
        InjectedFault::Unspecified => return Err(Status::invalid_argument("fault: say what is to be done")),
    })
}

#[tonic::async_trait]
impl JobOrderService for Orders {
    async fn restart_job(
        &self,
        request: Request<RestartJobRequest>,
    ) -> Result<Response<RestartJobResponse>, Status> {
        let uid = caller(&request)?;
        let reason = given(request.into_inner().reason)?;
        self.pass_on(uid, reason, JobOrder::Restart).await?;
        Ok(Response::new(RestartJobResponse {}))
    }

    async fn stop_job(&self, request: Request<StopJobRequest>) -> Result<Response<StopJobResponse>, Status> {
        let uid = caller(&request)?;
        let reason = given(request.into_inner().reason)?;
        self.pass_on(uid, reason, JobOrder::Stop).await?;
        Ok(Response::new(StopJobResponse {}))
    }

    async fn inject_fault(
        &self,
        request: Request<InjectFaultRequest>,
    ) -> Result<Response<InjectFaultResponse>, Status> {
        let uid = caller(&request)?;
        let request = request.into_inner();
        let (fault, rank) = (injected(request.fault())?, Rank(request.rank));
        self.pass_on(uid, given(request.reason)?, JobOrder::Inject(fault, rank)).await?;
        Ok(Response::new(InjectFaultResponse {}))
    }
}
