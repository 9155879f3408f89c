//! What the ranks of a job are doing, for people: `mainstay stacks`. Each launcher reads the ranks of its own host, and asks
//! the launchers of the other hosts for theirs.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use mainstay_launcher::group::streams::api::HostApi;
use mainstay_model::id::{Pid, Rank};
use mainstay_proto::v1::health_service_client::HealthServiceClient;
use mainstay_proto::v1::{self, HostStacks, Job, RankPhase, TakeStacksRequest};
use mainstay_sensors::source::evidence::{self, Frames, Subject};
use mainstay_sys::processes;
use mainstay_view::convert::health::job as job_message;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::Status;

use super::ReadSide;
use super::leader::in_full;

/// How long one host may take to read its ranks.
const TAKEN_WITHIN: Duration = Duration::from_secs(4);

/// How long one host may take to answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(6);

/// A job on more hosts is not asked: the answers would be too long for people.
const MOST_HOSTS: usize = 256;

/// Bytes of the answer of a host.
const MOST_BYTES: usize = 16 << 20;

/// The ranks of a job that live, by where they are.
#[derive(Debug, Default)]
pub struct RanksByHost<'a> {
    /// Those of this host.
    pub here: Vec<&'a v1::Rank>,
    /// Those of this host whose PID is that of another process.
    pub unknown: Vec<&'a v1::Rank>,
    /// Those of other hosts: their PIDs mean nothing here.
    pub elsewhere: BTreeMap<&'a str, Vec<Rank>>,
}

impl<'a> RanksByHost<'a> {
    /// Sorts the ranks of a job, as the host with the name `this` sees them.
    pub fn of(job: &'a Job, this: &str) -> RanksByHost<'a> {
        let mut sorted = RanksByHost::default();
        for rank in job.ranks.iter().filter(|rank| rank.phase() != RankPhase::Exited) {
            match rank.host.as_deref().filter(|host| *host != this) {
                Some(host) => sorted.elsewhere.entry(host).or_default().push(Rank(rank.rank)),
                None if is_itself(rank) => sorted.here.push(rank),
                None => sorted.unknown.push(rank),
            }
        }
        sorted
    }

    /// Those of this host, as subjects whose stacks are taken.
    pub fn subjects(&self, job: &Job) -> Vec<Subject> {
        let attempt = Path::new(&job.run_dir).join(format!("attempt_{}", job.attempt));
        let subject = |rank: &&v1::Rank| {
            Some(Subject {
                rank: Rank(rank.rank),
                pid: Pid(i32::try_from(rank.pid).ok()?),
                stacks: Some(attempt.join(rank.local_rank.to_string()).join("stacks.txt")),
                step: rank.step,
                sections: rank.sections.clone(),
                last_steps: Vec::new(),
            })
        };
        self.here.iter().filter_map(subject).collect()
    }
}

/// Whether the process with the PID of a rank is that rank: hosts may have the same name, and PIDs are used again.
fn is_itself(rank: &v1::Rank) -> bool {
    let Some(ticks) = rank.start_ticks else { return true };
    i32::try_from(rank.pid).is_ok_and(|pid| processes::start_ticks(Pid(pid)) == Some(ticks))
}

impl ReadSide {
    /// The stacks of the ranks on this launcher's host; none if it has no living ranks.
    pub(super) async fn stacks_here(&self, native: bool) -> Result<Option<HostStacks>, Status> {
        let now = (self.clock)();
        let view = self.snapshots.view();
        let Some(job) = view.jobs.values().next().map(|job| job_message(job, now, None, &[])) else {
            return Ok(None);
        };
        let host = self.about.hostname.clone();
        let subjects = RanksByHost::of(&job, &host).subjects(&job);
        if subjects.is_empty() {
            return Ok(None);
        }
        let frames = if native { Frames::Native } else { Frames::Python };
        let take = move || evidence::take(&subjects, frames, Instant::now() + TAKEN_WITHIN);
        let taken = tokio::task::spawn_blocking(take).await;
        let taken = taken.map_err(|error| Status::internal(format!("reading the ranks: {error}")))?;
        let json = serde_json::to_string(&taken).map_err(|error| Status::internal(error.to_string()))?;
        Ok(Some(HostStacks { host, json, error: String::new() }))
    }

    /// The stacks of the ranks on the other hosts of the job, or why there are none of a host.
    pub(super) async fn stacks_elsewhere(&self, native: bool) -> Result<Vec<HostStacks>, Status> {
        let Some(leader) = &self.leader else { return Ok(Vec::new()) };
        let hosts = leader.other_hosts().await.map_err(Status::unavailable)?;
        if hosts.len() > MOST_HOSTS {
            let count = hosts.len();
            let words = format!("the job has {count} other hosts, and at most {MOST_HOSTS} are asked");
            return Err(Status::failed_precondition(words));
        }
        let mut asking = JoinSet::new();
        for host in hosts {
            asking.spawn(async move {
                let name = host.host.clone();
                let answer = timeout(ANSWERS_WITHIN, stacks_of(&host, native)).await;
                let late = || Err(format!("no answer within {} s", ANSWERS_WITHIN.as_secs()));
                answer
                    .unwrap_or_else(|_| late())
                    .unwrap_or_else(|error| vec![HostStacks { host: name, error, ..HostStacks::default() }])
            });
        }
        let mut stacks = asking.join_all().await.concat();
        stacks.sort_by(|a, b| a.host.cmp(&b.host));
        Ok(stacks)
    }
}

/// The stacks of the ranks on another host.
async fn stacks_of(host: &HostApi, native: bool) -> Result<Vec<HostStacks>, String> {
    let channel = host.connect().await.map_err(|error| in_full(&error))?;
    let mut health = HealthServiceClient::new(channel).max_decoding_message_size(MOST_BYTES);
    let request = TakeStacksRequest { native, elsewhere: false };
    let answer = health.take_stacks(request).await.map_err(|status| status.message().to_owned())?;
    Ok(answer.into_inner().hosts)
}
