//! What only the launcher that leads knows of a job on several hosts: what the ranks of other hosts do, and how they
//! compare. A launcher that follows asks it, so that each host answers for the whole job.

use std::sync::Arc;
use std::time::Duration;

use mainstay_launcher::group::streams::api::{HostApi, KnownHosts};
use mainstay_proto::v1::health_service_client::HealthServiceClient;
use mainstay_proto::v1::{Job, ListJobsRequest};
use mainstay_view::convert::health::complete;
use mainstay_view::node::{JobPhase, JobView};
use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, timeout};
use tonic::transport::Channel;

use super::ReadSide;

/// How long the leader may take. Commands wait for 2 s, and show what this host knows if the leader does not answer.
const WITHIN: Duration = Duration::from_secs(1);

/// An answer is used again for this long: many may ask at the same time.
const FRESH: Duration = Duration::from_millis(500);

/// Ranks of a large job exceed gRPC's default of 4 MiB.
const MOST_BYTES: usize = 64 << 20;

/// The launchers of the job on other hosts, of which one may lead. Clones share one connection to that one.
#[derive(Clone)]
pub(super) struct Leader {
    known: watch::Receiver<Option<KnownHosts>>,
    last: Arc<Mutex<Option<Asked>>>,
}

/// The leader that was asked last, and what it answered.
struct Asked {
    of: HostApi,
    channel: Option<Channel>,
    at: Instant,
    answer: OfLeader,
}

/// The leader's answer.
#[derive(Clone)]
pub(super) struct OfLeader {
    host: String,
    job: Result<Arc<Job>, String>,
}

impl Leader {
    pub(super) fn new(known: watch::Receiver<Option<KnownHosts>>) -> Leader {
        Leader { known, last: Arc::default() }
    }

    /// The other launchers of the job, or why they are unknown.
    pub(super) async fn other_hosts(&self) -> Result<Vec<HostApi>, String> {
        let known = self.known.borrow().clone().ok_or("the launchers of the job have not met yet")?;
        let asked = timeout(WITHIN, known.all()).await;
        let late = || format!("the coordination store does not answer within {} s", WITHIN.as_secs());
        asked.map_err(|_| late())?.map_err(|error| error.to_string())
    }

    async fn ask(&self) -> OfLeader {
        let known = self.known.borrow().as_ref().and_then(|known| known.leader.clone());
        let Some(leader) = known else {
            return OfLeader {
                host: String::new(),
                job: Err("no launcher is known to lead the job".to_owned()),
            };
        };
        // One caller asks, and the others wait for its answer.
        let mut last = self.last.lock().await;
        let before = last.take().filter(|asked| asked.of.is(&leader));
        if let Some(asked) = before.as_ref().filter(|asked| asked.at.elapsed() < FRESH) {
            let answer = asked.answer.clone();
            *last = before;
            return answer;
        }
        let channel = before.and_then(|asked| asked.channel);
        let asking = timeout(WITHIN, job_of(&leader, channel)).await;
        let asked = asking.unwrap_or_else(|_| Err(format!("no answer within {} s", WITHIN.as_secs())));
        let (channel, job) = match asked {
            Ok((channel, job)) => (Some(channel), Ok(Arc::new(job))),
            Err(why) => {
                (None, Err(format!("the launcher on host {}, which leads the job: {why}", leader.host)))
            }
        };
        let answer = OfLeader { host: leader.host.clone(), job };
        *last = Some(Asked { of: leader, channel, at: Instant::now(), answer: answer.clone() });
        answer
    }
}

/// The job of a launcher, and the channel to ask it again.
async fn job_of(leader: &HostApi, channel: Option<Channel>) -> Result<(Channel, Job), String> {
    let channel = match channel {
        Some(channel) => channel,
        None => leader.connect().await.map_err(|error| in_full(&error))?,
    };
    let mut health = HealthServiceClient::new(channel.clone()).max_decoding_message_size(MOST_BYTES);
    let jobs =
        health.list_jobs(ListJobsRequest::default()).await.map_err(|status| status.message().to_owned())?;
    let job = jobs.into_inner().jobs.pop().ok_or("it has no job")?;
    Ok((channel, job))
}

/// An error with its causes: gRPC's own text names none of them.
pub(super) fn in_full(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.last().map_or_else(|| error.to_string(), ToString::to_string)
}

impl OfLeader {
    /// Adds what it has to a job as this host knows it, or why it has nothing.
    pub(super) fn complete(&self, job: &mut Job) {
        job.leading_host.clone_from(&self.host);
        match &self.job {
            Ok(leading) => complete(job, leading),
            Err(why) => job.incomplete = format!("what the ranks of other hosts do is unknown: {why}"),
        }
    }
}

/// Whether another launcher leads the job, and the job is not over.
pub(super) fn is_led_elsewhere(job: &JobView) -> bool {
    !job.leads && !matches!(job.phase, JobPhase::Ended(_) | JobPhase::Lost)
}

impl ReadSide {
    /// What the leader reports of the one of these jobs that this launcher takes part in; none if it leads that itself.
    pub(super) async fn of_leader(&self, jobs: impl IntoIterator<Item = &JobView>) -> Option<OfLeader> {
        let leader = self.leader.as_ref()?;
        if !jobs.into_iter().any(is_led_elsewhere) {
            return None;
        }
        Some(leader.ask().await)
    }
}
