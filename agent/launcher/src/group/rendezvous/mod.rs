//! The rendezvous of a job's hosts before the first round. They meet in the coordination store; one of them is elected and
//! waits for the others, which connect to it. The terminal of each shows which hosts are missing.

mod gathering;
mod preflight;

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use mainstay_coord::JobEndedNote;
use mainstay_group::round::{Lacking, Member, Seated};
use mainstay_group::wire::{Down, Join};
use mainstay_model::entry::Fact;
use mainstay_recovery::protocol::Seat;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::checkpoints::replicas::ReplicaPlan;
use crate::group::plan::HostsPlan;
use crate::group::rendezvous::gathering::{Gathering, Waiting};
use crate::group::store::{RecordWriter, StoreSession, access, exit_of};
use crate::group::streams::api::ApiLinks;
use crate::group::streams::listen::Bound;
use crate::group::{Followed, Remote};

/// The same line is printed at most this often.
const REPORT_EVERY: Duration = Duration::from_secs(30);

/// How often a launcher without a seat checks whether it may stand for election.
const MAY_LEAD_EVERY: Duration = Duration::from_secs(1);

/// The number of the record of the first round.
pub(crate) const FIRST_RECORD: u64 = 1;

/// What a leader starts with.
#[derive(Debug)]
pub struct Gathered {
    /// Who has which seat.
    pub(super) round: Vec<Seated>,
    pub(super) me: u32,
    /// Followers by launcher, with their connections.
    pub(super) connections: Vec<(String, u64, mpsc::Sender<Down>)>,
    /// Launchers beyond the round.
    pub(super) spares: Vec<(Member, u64, mpsc::Sender<Down>)>,
    pub(super) join: Join,
    pub(super) record_writer: RecordWriter,
    /// What was found of the links between the hosts, for the journal.
    pub(super) links: Vec<Fact>,
}

/// How a launcher takes part.
#[derive(Debug)]
pub enum JoinOutcome {
    /// It leads.
    Leading(Box<Gathered>, Box<Remote>),
    /// It follows.
    Following(Box<Followed>, Box<Remote>),
    /// It was asked to stop by this signal while it waited.
    Stopped(i32),
    /// The job ended without it.
    Over {
        /// The status of the job.
        exit: i32,
        /// Why it ended.
        why: String,
    },
}

impl JoinOutcome {
    /// This host's seat.
    pub fn seat(&self) -> Option<&Seat> {
        match self {
            JoinOutcome::Leading(gathered, _) => {
                gathered.round.get(gathered.me as usize).map(|seated| &seated.seat)
            }
            JoinOutcome::Following(followed, _) => Some(&followed.seat),
            JoinOutcome::Stopped(_) | JoinOutcome::Over { .. } => None,
        }
    }

    /// Whether this host has no ranks yet and waits as a spare.
    pub fn waits(&self) -> bool {
        matches!(self, JoinOutcome::Following(followed, _) if followed.waits)
    }

    /// How this launcher is known to others that keep copies of checkpoints for it; none if it keeps none itself.
    pub fn known(&self) -> Option<ReplicaPlan> {
        let (name, remote) = match self {
            JoinOutcome::Leading(gathered, remote) => {
                (gathered.round.get(gathered.me as usize)?.member.replicas.clone(), remote)
            }
            JoinOutcome::Following(followed, remote) => (followed.join.borrow().replicas.clone(), remote),
            JoinOutcome::Stopped(_) | JoinOutcome::Over { .. } => return None,
        };
        ReplicaPlan::new(&remote.plan, name, &remote.store_session.pass)
    }
}

/// The result of one attempt to meet.
enum Outcome {
    /// This launcher leads; the round is stored.
    Round(Vec<Seated>, Vec<Waiting>, RecordWriter, Vec<Fact>),
    Seated(Box<Followed>),
    /// Another launcher leads now, or none.
    Again,
    Stopped(i32),
    Over(JobEndedNote),
}

/// Waits until all hosts are there. `names` are the job and its launch, for the case that this launcher leads; `directory`
/// is for the data of a store that runs here, and `api` connects the API of this launcher with those of the others.
///
/// # Errors
/// They did not come in time, or this one cannot take part. The error names what to check.
pub async fn gather(
    plan: HostsPlan,
    mut join: Join,
    names: (String, String),
    directory: &Path,
    signals: &mut mpsc::Receiver<i32>,
    api: ApiLinks,
    print: &impl Fn(String),
) -> anyhow::Result<JoinOutcome> {
    let timeout = Instant::now() + Duration::from_nanos(plan.waits().0);
    let bound = Bound::new().await.context("listening for the other hosts")?;
    let port = bound.port().context("listening for the other hosts")?;
    join.address = access::address(&plan, &join);
    if join.replicas.starts_with(':') {
        join.replicas = format!("{}{}", access::bracketed(&join.address), join.replicas);
    }
    join.listens = format!("{}:{port}", access::bracketed(&join.address));
    let mut store_session = tokio::select! {
        store_session = StoreSession::open(&plan, &join, port, directory, print) => match store_session? {
            Ok(store_session) => store_session,
            Err(ended) => return Ok(JoinOutcome::Over { exit: exit_of(&ended), why: ended.why }),
        },
        Some(signal) = signals.recv() => return Ok(JoinOutcome::Stopped(signal)),
    };
    let mut listener = bound.listen(store_session.token.clone(), Some(api.callers));
    let mut elected = None;
    loop {
        let gathering = Gathering { plan: &plan, join: &join, names: &names, timeout };
        let outcome = match (elected.take(), store_session.leader.clone()) {
            (Some(elected), _) => {
                gathering.lead(elected, &mut store_session, &mut listener, signals, print).await?
            }
            (None, Some(leader)) if !store_session.is_me(&leader) => {
                gathering.follow(leader, &mut store_session, &mut listener, signals, print).await?
            }
            (None, _) => gathering.stand(&mut store_session, &mut elected, signals, print).await?,
        };
        match outcome {
            Outcome::Again => {}
            Outcome::Stopped(signal) => {
                store_session.leave_early("it was asked to stop before the job began").await;
                return Ok(JoinOutcome::Stopped(signal));
            }
            Outcome::Over(ended) => {
                return Ok(JoinOutcome::Over { exit: exit_of(&ended), why: ended.why });
            }
            Outcome::Round(round, waiting, record_writer, links) => {
                store_session.set_seated(true);
                let gathered = gathered(&join, round, waiting, (record_writer, links));
                let remote = Remote { plan, store_session, listener, known_hosts: api.known };
                remote.show_hosts(false);
                return Ok(JoinOutcome::Leading(Box::new(gathered), Box::new(remote)));
            }
            Outcome::Seated(followed) => {
                if !followed.waits {
                    store_session.set_seated(true);
                }
                let remote = Remote { plan, store_session, listener, known_hosts: api.known };
                remote.show_hosts(true);
                return Ok(JoinOutcome::Following(followed, Box::new(remote)));
            }
        }
    }
}

fn gathered(
    mine: &Join,
    round: Vec<Seated>,
    waiting: Vec<Waiting>,
    (record_writer, links): (RecordWriter, Vec<Fact>),
) -> Gathered {
    let seated = |launcher: &str| round.iter().any(|seated| seated.member.launcher == launcher);
    let (taking_part, beyond): (Vec<Waiting>, Vec<Waiting>) =
        waiting.into_iter().partition(|other| seated(&other.member.launcher));
    let spares = beyond.into_iter().map(|other| (other.member, other.connection, other.to)).collect();
    let connections =
        taking_part.into_iter().map(|other| (other.member.launcher, other.connection, other.to)).collect();
    let me = round.iter().find(|seated| seated.member.launcher == mine.launcher);
    let me = me.map_or(0, |seated| seated.seat.group_rank);
    Gathered { round, me, connections, spares, join: mine.clone(), record_writer, links }
}

/// What to check when hosts do not come.
fn not_come(plan: &HostsPlan, run_id: &str, lacking: &Lacking) -> String {
    format!(
        "{lacking} within {}. Check on the missing hosts that `mainstay run` is running with the same --nnodes and \
         --rdzv-id (here {run_id}), that {} is the right address there, and that its port is open in the firewall. \
         --rdzv-conf join_timeout=SECONDS waits longer",
        plan.join_timeout,
        plan.endpoint()
    )
}
