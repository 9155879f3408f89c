//! `mainstay.v1.JobOrderService`: orders of people for a job, on its launcher's Unix socket. The kernel reports the
//! caller's user, and each order is written to the journal with its user and reason.

use mainstay_model::id::Rank;
use mainstay_proto::v1::job_order_service_server::JobOrderService;
use mainstay_proto::v1::{
    ExcludeRankRequest, ExcludeRankResponse, InjectFaultRequest, InjectFaultResponse, InjectedFault,
    RestartJobRequest, RestartJobResponse, StopJobRequest, StopJobResponse,
};
use nix::libc;
use tokio::sync::{mpsc, oneshot};
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Response, Status};

use super::refusal::{Reason, invalid};
use mainstay_launcher::drill::{Fault, Injected};
use mainstay_launcher::order::{JobOrder, Ordered, Refused};

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
        let gone = || Reason::SERVER_STOPPING.refuse("the job is over");
        self.orders.send(Ordered { uid, reason, order, answer }).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?.map_err(|refused| match refused {
            Refused::NotNow(_) | Refused::NotAllowed | Refused::NotHere(_) => {
                Reason::ORDER_NOT_POSSIBLE.refuse(refused.to_string())
            }
            Refused::NoSuchRank(_) => Reason::UNKNOWN_RANK.refuse(refused.to_string()),
        })
    }
}

/// The caller's user, if it may order: root, or the job's own user.
fn caller<T>(request: &Request<T>) -> Result<u32, Status> {
    let connection = request.extensions().get::<UdsConnectInfo>();
    let credentials = connection
        .and_then(|connection| connection.peer_cred)
        .ok_or_else(|| Reason::UNIX_SOCKET_ONLY.refuse("orders are taken on the Unix socket only"))?;
    let uid = credentials.uid();
    if uid == 0 || uid == nix::unistd::geteuid().as_raw() {
        return Ok(uid);
    }
    Err(Reason::CALLER_NOT_ALLOWED
        .refuse(format!("user {uid} may not control this job: it belongs to another user")))
}

fn given(reason: String) -> Result<String, Status> {
    if reason.trim().is_empty() {
        return Err(invalid("reason", "a reason is required; the journal records it"));
    }
    Ok(reason)
}

/// Share of its time that a slow rank may lose; with more it would make no progress.
const SLOW_PERCENT: std::ops::RangeInclusive<u32> = 1..=95;

fn injected(request: &InjectFaultRequest) -> Result<Injected, Status> {
    let signal = |signal, word| Fault::Signal { signal, word };
    let percent = request.slow_percent.unwrap_or(50);
    let fault = match request.fault() {
        InjectedFault::Kill => signal(libc::SIGKILL, "kill"),
        InjectedFault::Terminate => signal(libc::SIGTERM, "terminate"),
        InjectedFault::Stop => signal(libc::SIGSTOP, "stop"),
        InjectedFault::Continue => signal(libc::SIGCONT, "continue"),
        InjectedFault::Interrupt => signal(libc::SIGINT, "interrupt"),
        InjectedFault::DiskFull => Fault::DiskFull,
        InjectedFault::Exception => Fault::Exception,
        InjectedFault::Hang => Fault::Hang,
        InjectedFault::Slow if SLOW_PERCENT.contains(&percent) => Fault::Slow { percent },
        InjectedFault::Slow => return Err(invalid("slow_percent", "from 1 to 95")),
        InjectedFault::Network => Fault::Network,
        InjectedFault::Ecc => Fault::Ecc,
        InjectedFault::Unspecified => return Err(invalid("fault", "give the action")),
    };
    Ok(Injected { fault, at_step: request.at_step })
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

    async fn exclude_rank(
        &self,
        request: Request<ExcludeRankRequest>,
    ) -> Result<Response<ExcludeRankResponse>, Status> {
        let uid = caller(&request)?;
        let request = request.into_inner();
        self.pass_on(uid, given(request.reason)?, JobOrder::Exclude(Rank(request.rank))).await?;
        Ok(Response::new(ExcludeRankResponse {}))
    }

    async fn inject_fault(
        &self,
        request: Request<InjectFaultRequest>,
    ) -> Result<Response<InjectFaultResponse>, Status> {
        let uid = caller(&request)?;
        let request = request.into_inner();
        let (fault, rank) = (injected(&request)?, Rank(request.rank));
        self.pass_on(uid, given(request.reason)?, JobOrder::Inject(fault, rank)).await?;
        Ok(Response::new(InjectFaultResponse {}))
    }
}
