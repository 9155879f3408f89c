//! `mainstay.v1.HealthService`: the node and its jobs, their current state and its changes.

use std::time::Duration;

use mainstay_model::id::JobId;
use mainstay_model::time::Stamp;
use mainstay_proto::v1::health_service_server::HealthService;
use mainstay_proto::v1::{
    GetJobRequest, GetJobResponse, GetNodeRequest, GetNodeResponse, Job, ListDevicesRequest,
    ListDevicesResponse, ListJobsRequest, ListJobsResponse, RunPreflightRequest, RunPreflightResponse,
    Server, TakeStacksRequest, TakeStacksResponse, WatchNodeRequest, WatchNodeResponse,
};
use mainstay_view::convert::device::device;
use mainstay_view::convert::health as from_view;
use mainstay_view::node::{JobView, NodeView};
use tonic::{Request, Response, Status};

use super::bounds;
use super::convert;
use super::leader::{OfLeader, is_led_elsewhere};
use super::preflight::{self, PreflightPlan};
use super::readers::Reader;
use super::replicas::Replicas;
use super::saving;
use super::shares::Source;
use super::stream::{Answers, Caller, End, answer};
use super::{Mode, ReadSide};

const USUAL_INTERVAL: Duration = Duration::from_millis(500);
const SHORTEST_INTERVAL: Duration = Duration::from_millis(50);
const LONGEST_INTERVAL: Duration = Duration::from_secs(60);

/// The service.
pub(super) struct Health(pub(super) ReadSide);

#[tonic::async_trait]
impl HealthService for Health {
    async fn get_node(&self, _: Request<GetNodeRequest>) -> Result<Response<GetNodeResponse>, Status> {
        let now = (self.0.clock)();
        let node = from_view::node(&self.0.snapshots.view(), now);
        let server = self.0.server(now);
        Ok(Response::new(GetNodeResponse { node: Some(node), server: Some(server) }))
    }

    async fn list_jobs(
        &self,
        request: Request<ListJobsRequest>,
    ) -> Result<Response<ListJobsResponse>, Status> {
        let reader = self.0.readers.reader(&request);
        let view = self.0.snapshots.view();
        let bytes = bytes_of(view.jobs.values());
        let share = self.0.bounds.answer(Source::from_connection(request.extensions()), bytes).await?;
        let leading = self.0.of_leader(view.jobs.values()).await;
        let jobs = self.0.jobs(&view, leading.as_ref(), (self.0.clock)(), reader);
        Ok(bounds::holding(ListJobsResponse { jobs }, share, bytes))
    }

    async fn get_job(&self, request: Request<GetJobRequest>) -> Result<Response<GetJobResponse>, Status> {
        let reader = self.0.readers.reader(&request);
        let source = Source::from_connection(request.extensions());
        let id = JobId(request.into_inner().id);
        let view = self.0.snapshots.view();
        let Some(job) = view.jobs.get(&id) else {
            let known: Vec<&str> = view.jobs.keys().map(|id| id.0.as_str()).collect();
            return Err(Status::not_found(format!("no job {:?} here; known: {known:?}", id.0)));
        };
        let bytes = bytes_of([job]);
        let share = self.0.bounds.answer(source, bytes).await?;
        let leading = self.0.of_leader([job]).await;
        let replicas = Replicas::from_service(self.0.checkpoints.as_deref());
        let job = self.0.job(job, leading.as_ref(), (self.0.clock)(), &replicas, reader);
        Ok(bounds::holding(GetJobResponse { job: Some(job) }, share, bytes))
    }

    async fn list_devices(
        &self,
        _: Request<ListDevicesRequest>,
    ) -> Result<Response<ListDevicesResponse>, Status> {
        let now = (self.0.clock)();
        let devices = self.0.snapshots.view().gpus.iter().map(|gpu| device(gpu, now)).collect();
        Ok(Response::new(ListDevicesResponse { devices, server: Some(self.0.server(now)) }))
    }

    type WatchNodeStream = Answers<WatchNodeResponse>;

    async fn watch_node(
        &self,
        request: Request<WatchNodeRequest>,
    ) -> Result<Response<Self::WatchNodeStream>, Status> {
        let (reader, source) =
            (self.0.readers.reader(&request), Source::from_connection(request.extensions()));
        let interval = interval(request.into_inner().min_interval);
        let read = self.0.clone();
        let stop = read.stop.clone();
        Ok(Response::new(answer(stop, move |caller| watch(read, interval, (reader, source), caller))))
    }

    async fn take_stacks(
        &self,
        request: Request<TakeStacksRequest>,
    ) -> Result<Response<TakeStacksResponse>, Status> {
        if self.0.about.mode == Mode::Agent {
            return Err(Status::unimplemented("ask the launcher of the job"));
        }
        if self.0.readers.reader(&request) == Reader::Stranger {
            return Err(Status::permission_denied("stacks are for the job's user"));
        }
        // One caller at a time: others wait for their turn.
        let _turn = self.0.bounds.whole_reads.take(Source::from_connection(request.extensions()), 1).await;
        let TakeStacksRequest { native, elsewhere } = request.into_inner();
        let hosts = match elsewhere {
            true => self.0.stacks_elsewhere(native).await?,
            false => self.0.stacks_here(native).await?.into_iter().collect(),
        };
        Ok(Response::new(TakeStacksResponse { hosts }))
    }

    type RunPreflightStream = Answers<RunPreflightResponse>;

    async fn run_preflight(
        &self,
        request: Request<RunPreflightRequest>,
    ) -> Result<Response<Self::RunPreflightStream>, Status> {
        let read = self.0.clone();
        let wanted = PreflightPlan::from_request(&read, request.get_ref())?;
        Ok(Response::new(answer(read.stop.clone(), move |caller| preflight::run(read, wanted, caller))))
    }
}

/// Sends the newest complete state after each change. Changes coalesce while the caller is busy or the interval
/// runs.
async fn watch(
    read: ReadSide,
    interval: Duration,
    (reader, source): (Reader, Source),
    caller: Caller<WatchNodeResponse>,
) -> End {
    let mut snapshots = read.snapshots.clone();
    loop {
        let share = read.bounds.unread.take(source, bytes_of(snapshots.view().jobs.values())).await;
        let leading = read.of_leader(snapshots.view().jobs.values()).await;
        let now = (read.clock)();
        let view = snapshots.view();
        let message = WatchNodeResponse {
            node: Some(from_view::node(&view, now)),
            server: Some(read.server(now)),
            jobs: read.jobs(&view, leading.as_ref(), now, reader),
        };
        drop(view);
        if let Err(left) = caller.send(message).await {
            return left.into();
        }
        // Nothing is built for a caller that has not accepted the message before.
        if let Err(left) = caller.ready().await {
            return left.into();
        }
        drop(share);
        tokio::time::sleep(interval).await;
        if !snapshots.changed().await {
            return End::snapshots_gone();
        }
    }
}

impl ReadSide {
    fn server(&self, now: Stamp) -> Server {
        convert::server(&self.about, self.snapshots.journal_error().as_deref(), now)
    }

    fn job(
        &self,
        job: &JobView,
        leading: Option<&OfLeader>,
        now: Stamp,
        replicas: &Replicas,
        reader: Reader,
    ) -> Job {
        let tiers = saving::by_tier(job, self.checkpoints.as_deref());
        let mut reported = from_view::job(job, now, self.pace.steps_per_second(&job.id, now.mono), &tiers);
        replicas.add_to(&mut reported);
        if let Some(leading) = leading.filter(|_| is_led_elsewhere(job)) {
            leading.complete(&mut reported);
        }
        if !reader.may_read(Some(job.spec.uid)) {
            from_view::withhold_texts(&mut reported);
        } else if reader == Reader::Masked {
            from_view::mask_secrets(&mut reported);
        }
        reported
    }

    fn jobs(&self, view: &NodeView, leading: Option<&OfLeader>, now: Stamp, reader: Reader) -> Vec<Job> {
        let replicas = Replicas::from_service(self.checkpoints.as_deref());
        view.jobs.values().map(|job| self.job(job, leading, now, &replicas, reader)).collect()
    }
}

/// What the messages of these jobs need in memory, in bytes, about.
fn bytes_of<'a>(jobs: impl IntoIterator<Item = &'a JobView>) -> usize {
    const JOB: usize = 16 << 10;
    const RANK: usize = 1 << 10;
    jobs.into_iter().map(|job| JOB + job.ranks.len() * RANK).sum::<usize>() + JOB
}

fn interval(asked: Option<prost_types::Duration>) -> Duration {
    // A negative or extreme interval is clamped to the nearest allowed one, as the API documents.
    asked.map_or(USUAL_INTERVAL, |asked| {
        Duration::try_from(asked).unwrap_or_default().clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL)
    })
}
