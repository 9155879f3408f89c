//! `mainstay.v1.HealthService`: the node and its jobs, their current state and its changes.

use std::time::Duration;

use mainstay_model::id::{JobId, Rank};
use mainstay_model::time::Stamp;
use mainstay_proto::v1::health_service_server::HealthService;
use mainstay_proto::v1::{
    GetJobRequest, GetJobResponse, GetNodeRequest, GetNodeResponse, Job, ListDevicesRequest,
    ListDevicesResponse, ListJobsRequest, ListJobsResponse, ListRanksRequest, ListRanksResponse,
    RunPreflightRequest, RunPreflightResponse, Server, TakeStacksRequest, TakeStacksResponse,
    WatchNodeRequest, WatchNodeResponse,
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
use super::refusal::{Reason, invalid};
use super::replicas::Replicas;
use super::saving;
use super::shares::Source;
use super::stream::{Answers, Caller, End, answer};
use super::{Mode, ReadSide};

const USUAL_INTERVAL: Duration = Duration::from_millis(500);
const SHORTEST_INTERVAL: Duration = Duration::from_millis(50);
const LONGEST_INTERVAL: Duration = Duration::from_secs(60);

/// Ranks of a page: below the 4 MiB that callers accept by default.
const MOST_RANKS: usize = 1000;

/// What the message of a rank needs in memory, in bytes, about.
const RANK_BYTES: usize = 1 << 10;

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
        let source = Source::from_connection(request.extensions());
        let ListJobsRequest { page_size, page_token, without_ranks } = request.into_inner();
        let most = page(page_size)?.unwrap_or(usize::MAX);
        let view = self.0.snapshots.view();
        // The token is the last job of the page before. It may have ended and be forgotten.
        let after = (!page_token.is_empty()).then_some(JobId(page_token));
        let rest = view.jobs.iter().skip_while(|(id, _)| after.as_ref().is_some_and(|after| *id <= after));
        let mut listed: Vec<&JobView> = rest.map(|(_, job)| job).take(most.saturating_add(1)).collect();
        let more = listed.len() > most;
        listed.truncate(most);
        let next_page_token = match listed.last() {
            Some(last) if more => last.id.0.clone(),
            _ => String::new(),
        };
        let bytes = bytes_of(listed.iter().copied(), without_ranks);
        let share = self.0.bounds.answer(source, bytes).await?;
        let leading = self.0.of_leader(listed.iter().copied()).await;
        let jobs = self.0.jobs(listed, leading.as_ref(), (self.0.clock)(), reader, without_ranks);
        Ok(bounds::holding(ListJobsResponse { jobs, next_page_token }, share, bytes))
    }

    async fn get_job(&self, request: Request<GetJobRequest>) -> Result<Response<GetJobResponse>, Status> {
        let reader = self.0.readers.reader(&request);
        let source = Source::from_connection(request.extensions());
        let GetJobRequest { id, without_ranks } = request.into_inner();
        let id = JobId(id);
        let view = self.0.snapshots.view();
        let Some(job) = view.jobs.get(&id) else {
            return Err(unknown_job(&id, &view));
        };
        let bytes = bytes_of([job], without_ranks);
        let share = self.0.bounds.answer(source, bytes).await?;
        let leading = self.0.of_leader([job]).await;
        let job = self.0.jobs([job], leading.as_ref(), (self.0.clock)(), reader, without_ranks).pop();
        Ok(bounds::holding(GetJobResponse { job }, share, bytes))
    }

    async fn list_ranks(
        &self,
        request: Request<ListRanksRequest>,
    ) -> Result<Response<ListRanksResponse>, Status> {
        let reader = self.0.readers.reader(&request);
        let source = Source::from_connection(request.extensions());
        let ListRanksRequest { job: id, page_size, page_token } = request.into_inner();
        let most = page(page_size)?.unwrap_or(MOST_RANKS).min(MOST_RANKS);
        let first = match page_token.as_str() {
            "" => 0,
            token => token.parse().map_err(|_| {
                invalid("page_token", format!("{token:?} is no next_page_token of this method"))
            })?,
        };
        let view = self.0.snapshots.view();
        let id = JobId(id);
        let Some(job) = view.jobs.get(&id) else {
            return Err(unknown_job(&id, &view));
        };
        let bytes = most.min(job.ranks.len()) * RANK_BYTES;
        let share = self.0.bounds.answer(source, bytes).await?;
        let leading = self.0.of_leader([job]).await;
        let now = (self.0.clock)();
        if leading.is_some() {
            let whole = self.0.jobs([job], leading.as_ref(), now, reader, false).pop().unwrap_or_default();
            let mut rest = whole.ranks.into_iter().filter(|rank| rank.rank >= first);
            let ranks: Vec<_> = rest.by_ref().take(most).collect();
            let next_page_token = rest.next().map_or_else(String::new, |rank| rank.rank.to_string());
            return Ok(bounds::holding(ListRanksResponse { ranks, next_page_token }, share, bytes));
        }
        let mut views = job.ranks.range(Rank(first)..);
        let mut ranks: Vec<_> =
            views.by_ref().take(most).map(|(_, rank)| from_view::rank(rank, now)).collect();
        if !reader.may_read(Some(job.spec.uid)) {
            ranks.iter_mut().for_each(from_view::withhold_texts_of);
        } else if reader == Reader::Masked {
            ranks.iter_mut().for_each(from_view::mask_secrets_of);
        }
        let next_page_token = views.next().map_or_else(String::new, |(rank, _)| rank.0.to_string());
        Ok(bounds::holding(ListRanksResponse { ranks, next_page_token }, share, bytes))
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
        let share = read.bounds.unread.take(source, bytes_of(snapshots.view().jobs.values(), false)).await;
        let leading = read.of_leader(snapshots.view().jobs.values()).await;
        let now = (read.clock)();
        let view = snapshots.view();
        let message = WatchNodeResponse {
            node: Some(from_view::node(&view, now)),
            server: Some(read.server(now)),
            jobs: read.jobs(view.jobs.values(), leading.as_ref(), now, reader, false),
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

    fn jobs<'a>(
        &self,
        jobs: impl IntoIterator<Item = &'a JobView>,
        leading: Option<&OfLeader>,
        now: Stamp,
        reader: Reader,
        without_ranks: bool,
    ) -> Vec<Job> {
        let replicas = Replicas::from_service(self.checkpoints.as_deref());
        let jobs = jobs.into_iter().map(|job| self.job(job, leading, now, &replicas, reader));
        let light = |job: Job| match without_ranks {
            true => Job { ranks: Vec::new(), ..job },
            false => job,
        };
        jobs.map(light).collect()
    }
}

/// What the messages of these jobs need in memory, in bytes, about.
fn bytes_of<'a>(jobs: impl IntoIterator<Item = &'a JobView>, without_ranks: bool) -> usize {
    const JOB: usize = 16 << 10;
    let ranks = |job: &JobView| if without_ranks { 0 } else { job.ranks.len() };
    jobs.into_iter().map(|job| JOB + ranks(job) * RANK_BYTES).sum::<usize>() + JOB
}

/// The most entries of a page; none if the caller sets no limit.
fn page(size: i32) -> Result<Option<usize>, Status> {
    let size = usize::try_from(size).map_err(|_| invalid("page_size", format!("{size} is negative")))?;
    Ok((size > 0).then_some(size))
}

/// Names some jobs that are known: a status has to fit into the headers that callers accept.
fn unknown_job(id: &JobId, view: &NodeView) -> Status {
    const NAMED: usize = 16;
    let known: Vec<&str> = view.jobs.keys().map(|id| id.0.as_str()).take(NAMED).collect();
    let more = match view.jobs.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Reason::UNKNOWN_JOB.refuse(format!("no job {:?} here; known: {known:?}{more}", id.0))
}

fn interval(asked: Option<prost_types::Duration>) -> Duration {
    // A negative or extreme interval is clamped to the nearest allowed one, as the API documents.
    asked.map_or(USUAL_INTERVAL, |asked| {
        Duration::try_from(asked).unwrap_or_default().clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL)
    })
}
