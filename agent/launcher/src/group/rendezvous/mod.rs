//! The rendezvous of a job's hosts before the first round. They meet in the coordination store; one of them is elected and
//! waits for the others, which connect to it. The terminal of each shows which hosts are missing.

mod arrivals;
mod gathering;

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use mainstay_coord::{Ended, Leader};
use mainstay_group::clock::Mapping;
use mainstay_group::round::{Lacking, Member, Seated};
use mainstay_group::wire::{Down, Join, Up};
use mainstay_recovery::protocol::Seat;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::checkpoints::replicas::Known;
use crate::group::Followed;
use crate::group::plan::{Aborting, HostsPlan};
use crate::group::rendezvous::arrivals::Waiting;
use crate::group::rendezvous::gathering::Gathering;
use crate::group::store::access;
use crate::group::store::{RecordWriter, StoreSession, exit_of};
use crate::group::streams::connect::FromLeader;
use crate::group::streams::listen::{Bound, Listener};

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
    pub round: Vec<Seated>,
    /// The leader's own seat.
    pub me: u32,
    /// Where followers reconnect.
    pub listener: Listener,
    /// Followers by launcher, with their connections.
    pub connections: Vec<(String, u64, mpsc::Sender<Down>)>,
    /// Launchers beyond the round.
    pub spares: Vec<(Member, u64, mpsc::Sender<Down>)>,
    /// What was asked for on the command line.
    pub plan: HostsPlan,
    /// The leader's own description.
    pub join: Join,
    /// The group of the job.
    pub store_session: StoreSession,
    /// Write access to the store.
    pub record_writer: RecordWriter,
}

/// How a launcher takes part.
#[derive(Debug)]
pub enum JoinOutcome {
    /// It leads.
    Leading(Box<Gathered>),
    /// It follows.
    Following(Box<Followed>),
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
            JoinOutcome::Leading(gathered) => {
                gathered.round.get(gathered.me as usize).map(|seated| &seated.seat)
            }
            JoinOutcome::Following(followed) => Some(&followed.seat),
            JoinOutcome::Stopped(_) | JoinOutcome::Over { .. } => None,
        }
    }
}

impl JoinOutcome {
    /// Whether this host has no ranks yet and waits as a spare.
    pub fn waits(&self) -> bool {
        matches!(self, JoinOutcome::Following(followed) if followed.waits)
    }

    /// How this launcher is known to others that keep copies of checkpoints for it; none if it keeps none itself.
    pub fn known(&self) -> Option<Known> {
        match self {
            JoinOutcome::Leading(gathered) => {
                let me = &gathered.round.get(gathered.me as usize)?.member;
                Known::of(&gathered.plan, &me.replicas, &gathered.store_session.pass)
            }
            JoinOutcome::Following(followed) => {
                Known::of(&followed.plan, &followed.join.borrow().replicas, &followed.store_session.pass)
            }
            JoinOutcome::Stopped(_) | JoinOutcome::Over { .. } => None,
        }
    }
}

/// The result of one attempt to meet.
enum Outcome {
    /// This launcher leads; the round is stored.
    Round(Vec<Seated>, Vec<Waiting>, RecordWriter),
    /// It has a seat.
    Seated(Box<Welcomed>),
    /// Another launcher leads now, or none.
    Again,
    Stopped(i32),
    Over(Ended),
}

struct Welcomed {
    /// Whether it waits as a spare; then the seat is only like the one that it may get.
    waits: bool,
    /// The newest entry of the leader's journal.
    newest: u64,
    seat: Seat,
    job: String,
    launch: String,
    epoch: u64,
    leader: Leader,
    events: mpsc::Receiver<FromLeader>,
    to: Option<mpsc::Sender<Up>>,
    clock: Mapping,
    join: watch::Sender<Join>,
    task: Aborting,
}

/// Waits until all hosts are there. `names` are the job and its launch, for the case that this launcher leads; `directory`
/// is for the data of a store that runs here.
///
/// # Errors
/// They did not come in time, or this one cannot take part. The error names what to check.
pub async fn gather(
    plan: HostsPlan,
    mut join: Join,
    names: (String, String),
    directory: &Path,
    signals: &mut mpsc::Receiver<i32>,
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
    let mut listener = bound.listen(store_session.token.clone());
    let mut elected = None;
    loop {
        let gathering = Gathering { plan: &plan, join: &join, names: &names, timeout };
        let outcome = match (elected.take(), store_session.leader().cloned()) {
            (Some(elected), _) => {
                gathering.lead(elected, &mut store_session, &mut listener, signals, print).await?
            }
            (None, Some(leader)) if !store_session.is_me(&leader) => {
                gathering.follow(leader, &mut store_session, &mut listener, signals, print).await?
            }
            (None, _) => gathering.stand(&mut store_session, &mut elected, signals).await?,
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
            Outcome::Round(round, waiting, record_writer) => {
                store_session.take_seat();
                let gathered =
                    gathered(plan, &join, round, listener, waiting, (store_session, record_writer));
                return Ok(JoinOutcome::Leading(Box::new(gathered)));
            }
            Outcome::Seated(welcomed) => {
                if !welcomed.waits {
                    store_session.take_seat();
                }
                let Welcomed {
                    waits,
                    newest,
                    seat,
                    job,
                    launch,
                    epoch,
                    leader,
                    events,
                    to,
                    clock,
                    join,
                    task,
                } = *welcomed;
                return Ok(JoinOutcome::Following(Box::new(Followed {
                    waits,
                    newest,
                    seat,
                    job,
                    launch,
                    epoch,
                    leader,
                    events,
                    to,
                    clock,
                    join,
                    plan,
                    task,
                    store_session,
                    listener,
                })));
            }
        }
    }
}

fn gathered(
    plan: HostsPlan,
    mine: &Join,
    round: Vec<Seated>,
    listener: Listener,
    waiting: Vec<Waiting>,
    (store_session, record_writer): (StoreSession, RecordWriter),
) -> Gathered {
    let seated = |launcher: &str| round.iter().any(|seated| seated.member.launcher == launcher);
    let (taking_part, beyond): (Vec<Waiting>, Vec<Waiting>) =
        waiting.into_iter().partition(|of| seated(&of.member.launcher));
    let spares = beyond.into_iter().map(|of| (of.member, of.connection, of.to)).collect();
    let connections = taking_part.into_iter().map(|of| (of.member.launcher, of.connection, of.to)).collect();
    let me = round.iter().find(|seated| seated.member.launcher == mine.launcher);
    let me = me.map_or(0, |seated| seated.seat.group_rank);
    let join = mine.clone();
    Gathered { round, me, listener, connections, spares, plan, join, store_session, record_writer }
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

/// The address by which other hosts reach this one, where the user gave one.
pub fn local_address(plan: &HostsPlan) -> String {
    plan.local_addr
        .clone()
        .filter(|address| address.parse::<IpAddr>().is_ok() || !address.is_empty())
        .unwrap_or_default()
}
