//! The rendezvous of a job's hosts before the first round. They meet in the coordination store; one of them is elected and
//! waits for the others, which connect to it. The terminal of each shows which hosts are missing.

mod arrivals;

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use mainstay_coord::{Ended, Leader};
use mainstay_core::base::id::Attempt;
use mainstay_core::recovery::hosts::clock::Mapping;
use mainstay_core::recovery::hosts::record::Record;
use mainstay_core::recovery::hosts::round::{self, Lacking, Member, Seated};
use mainstay_core::recovery::hosts::wire::{Down, Join, Seat, Spare, Up};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use self::arrivals::Waiting;
use crate::hosts::connect::{self, FromLeader};
use crate::hosts::listen::{Bound, Listener};
use crate::hosts::streams;
use crate::launch::following::Followed;
use crate::launch::hosts::{Aborting, HostsPlan};
use crate::launch::replicas::Known;
use crate::launch::store_access;
use crate::launch::store_session::{Elected, FromStore, RecordWriter, StoreSession, exit_of};
use crate::os::clock;

/// The same line is printed at most this often.
const REPORT_EVERY: Duration = Duration::from_secs(30);

/// How often a launcher without a seat checks whether it may stand for election.
const MAY_LEAD_EVERY: Duration = Duration::from_secs(1);

/// The number of the record of the first round.
pub(super) const FIRST_RECORD: u64 = 1;

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
    let timeout = Instant::now() + Duration::from_nanos(plan.join_timeout.0);
    let bound = Bound::new().await.context("listening for the other hosts")?;
    let port = bound.port().context("listening for the other hosts")?;
    join.address = store_access::address(&plan, &join);
    if join.replicas.starts_with(':') {
        join.replicas = format!("{}{}", store_access::bracketed(&join.address), join.replicas);
    }
    join.listens = format!("{}:{port}", store_access::bracketed(&join.address));
    let mut store_session = tokio::select! {
        store_session = StoreSession::open(&plan, &join, port, directory, print) => store_session?,
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
                let Welcomed { waits, seat, job, launch, epoch, leader, events, to, clock, join, task } =
                    *welcomed;
                return Ok(JoinOutcome::Following(Box::new(Followed {
                    waits,
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

struct Gathering<'a> {
    plan: &'a HostsPlan,
    join: &'a Join,
    names: &'a (String, String),
    timeout: Instant,
}

impl Gathering<'_> {
    /// No launcher leads: this one stands for election if it may.
    async fn stand(
        &self,
        store_session: &mut StoreSession,
        elected: &mut Option<Elected>,
        signals: &mut mpsc::Receiver<i32>,
    ) -> anyhow::Result<Outcome> {
        let mut looks = tokio::time::interval(MAY_LEAD_EVERY);
        loop {
            tokio::select! {
                update = store_session.next() => match update {
                    FromStore::Elected(now) => {
                        *elected = Some(*now);
                        return Ok(Outcome::Again);
                    }
                    FromStore::Leader(Some(leader)) if !store_session.is_me(&leader) => {
                        store_session.stand_down();
                        return Ok(Outcome::Again);
                    }
                    FromStore::Ended(ended) => return Ok(Outcome::Over(ended)),
                    FromStore::Trouble(why) => bail!("{why}"),
                    FromStore::Leader(_)
                    | FromStore::LeaderMissed
                    | FromStore::Deposed(_)
                    | FromStore::Written(_) => {}
                },
                // A job that others can go on with is not started again.
                _ = looks.tick() => {
                    if store_session.may_begin && !store_session.goes_on_elsewhere().await {
                        store_session.campaign();
                    }
                }
                Some(signal) = signals.recv() => return Ok(Outcome::Stopped(signal)),
                () = tokio::time::sleep_until(self.timeout) => bail!("{}", self.not_in("no launcher leads the job")),
            }
        }
    }

    async fn lead(
        &self,
        elected: Elected,
        store_session: &mut StoreSession,
        listener: &mut Listener,
        signals: &mut mpsc::Receiver<i32>,
        print: &impl Fn(String),
    ) -> anyhow::Result<Outcome> {
        let Gathering { plan, join: mine, timeout, .. } = *self;
        let (least, most) = plan.hosts;
        let record_writer = elected.record_writer;
        print(format!("this host leads the job (epoch {})", record_writer.epoch));
        let me = Member { leads: true, ..Member::of(mine) };
        let mut waiting: Vec<Waiting> = Vec::new();
        let mut enough_since: Option<Instant> = None;
        let mut reported = String::new();
        // The round is final once it is being written: hosts that come later are spares.
        let mut round: Option<Vec<Seated>> = None;
        loop {
            let members: Vec<Member> =
                std::iter::once(me.clone()).chain(waiting.iter().map(|of| of.member.clone())).collect();
            let joined = u32::try_from(members.len()).unwrap_or(u32::MAX);
            let last_call_over =
                enough_since.is_some_and(|since| since.elapsed() >= Duration::from_nanos(plan.last_call.0));
            let hosts = if joined < most && last_call_over { joined.max(least) } else { most };
            let mut lacking = None;
            if round.is_none() {
                match round::first(&members, hosts) {
                    Ok(now) => {
                        record_writer.write(FIRST_RECORD, &self.record(&now));
                        round = Some(now);
                    }
                    Err(error) => lacking = Some(error),
                }
            }
            if let Some(lacking) = &lacking
                && lacking.to_string() != reported
            {
                reported = lacking.to_string();
                print(reported.clone());
                for of in &waiting {
                    let _ = of.to.try_send(Down::Waiting { reported: reported.clone(), spare: None });
                }
            }
            enough_since = if joined >= least { enough_since.or_else(|| Some(Instant::now())) } else { None };
            let last_call = enough_since.map(|since| since + Duration::from_nanos(plan.last_call.0));
            let wake = last_call.filter(|at| *at > Instant::now()).map_or(timeout, |at| at.min(timeout));
            tokio::select! {
                event = listener.events.recv() => {
                    let Some(event) = event else { bail!("the listening socket is gone") };
                    arrivals::take(plan, mine, &me, event, &mut waiting, print);
                }
                update = store_session.next() => match update {
                    FromStore::Written(FIRST_RECORD) => {
                        if let Some(round) = round {
                            return Ok(Outcome::Round(round, waiting, record_writer));
                        }
                    }
                    FromStore::Deposed(_) => {
                        print("the coordination store lost this leader; the hosts come together again".to_owned());
                        return Ok(Outcome::Again);
                    }
                    FromStore::Ended(ended) => return Ok(Outcome::Over(ended)),
                    FromStore::Trouble(why) => bail!("{why}"),
                    FromStore::Leader(_)
                    | FromStore::LeaderMissed
                    | FromStore::Elected(_)
                    | FromStore::Written(_) => {}
                },
                Some(signal) = signals.recv() => return Ok(Outcome::Stopped(signal)),
                () = tokio::time::sleep_until(wake) => {
                    if Instant::now() >= timeout {
                        match lacking {
                            Some(lacking) => bail!("{}", not_come(plan, &mine.run_id, &lacking)),
                            None => bail!("{}", self.not_in("the coordination store did not take the round")),
                        }
                    }
                }
            }
        }
    }

    fn record(&self, round: &[Seated]) -> Record {
        let (job, launch) = self.names.clone();
        Record {
            at: clock::now(),
            seats: round.to_vec(),
            leader: self.join.launcher.clone(),
            job,
            launch,
            attempt: Attempt(0),
            running: false,
            carried: None,
            ended: None,
        }
    }

    async fn follow(
        &self,
        leader: Leader,
        store_session: &mut StoreSession,
        listener: &mut Listener,
        signals: &mut mpsc::Receiver<i32>,
        print: &impl Fn(String),
    ) -> anyhow::Result<Outcome> {
        let (join_sender, join_receiver) = watch::channel(self.join.clone());
        let (sender, mut events) = mpsc::channel(1024);
        let keep =
            connect::keep(leader.addresses.clone(), store_session.token.clone(), join_receiver, sender);
        let task = Aborting(streams().spawn(keep));
        let at = format!("{} at {}", leader.host, leader.addresses.join(", "));
        print(format!("joining the job; its leader is {at}"));
        let mut to = None;
        let mut clock = Mapping::default();
        let (mut trouble, mut reported_at) = (String::new(), None::<Instant>);
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    None => bail!("the connection to {at} is gone"),
                    Some(FromLeader::Connected { to: way }) => to = Some(way),
                    Some(FromLeader::Lost { why, .. }) => {
                        to = None;
                        if store_session.leader().is_none() {
                            return Ok(Outcome::Again);
                        }
                        if why != trouble || reported_at.is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
                            print(format!("cannot reach the leader {at}: {why}; still trying"));
                            (trouble, reported_at) = (why, Some(Instant::now()));
                        }
                    }
                    Some(FromLeader::Received { at: received, down }) => match down {
                        Down::Waiting { reported, spare: None } => print(reported),
                        Down::Waiting { reported, spare: Some(spare) } => {
                            print(reported);
                            let Spare { seat, job, launch } = *spare;
                            let (waits, epoch) = (true, leader.epoch);
                            return Ok(Outcome::Seated(Box::new(Welcomed {
                                waits, seat, job, launch, epoch, leader, events, to, clock, join: join_sender, task,
                            })));
                        }
                        Down::Refused { why } => bail!("the leader {at} refuses this host: {why}"),
                        Down::Beat { sent, at: leader } => clock.round_trip(sent, leader, received),
                        Down::Welcome { seat, job, launch, epoch, .. } => {
                            return Ok(Outcome::Seated(Box::new(Welcomed {
                                waits: false, seat, job, launch, epoch, leader, events, to, clock, join: join_sender, task,
                            })));
                        }
                        Down::Command { .. } | Down::Entry { .. } | Down::Received { .. } | Down::Meet { .. } => {}
                    },
                },
                update = store_session.next() => match update {
                    FromStore::Leader(Some(now)) if now.launch != leader.launch => return Ok(Outcome::Again),
                    // One that has a connection is there, even if the store has lost it.
                    FromStore::Leader(None) if to.is_none() => return Ok(Outcome::Again),
                    FromStore::Ended(ended) => return Ok(Outcome::Over(ended)),
                    FromStore::Trouble(why) => print(why),
                    FromStore::Leader(_)
                    | FromStore::LeaderMissed
                    | FromStore::Elected(_)
                    | FromStore::Deposed(_)
                    | FromStore::Written(_) => {}
                },
                // A launcher that takes this one for the leader gets no answer.
                Some(_) = listener.events.recv() => {}
                Some(signal) = signals.recv() => return Ok(Outcome::Stopped(signal)),
                () = tokio::time::sleep_until(self.timeout) => bail!("{}", self.not_in(&trouble)),
            }
        }
    }

    fn not_in(&self, trouble: &str) -> String {
        format!(
            "this host did not get into the job at {} within {}{}. Check that `mainstay run` is running on the \
             endpoint's host with the same --nnodes and --rdzv-id, and that the port is open in the firewall",
            self.plan.endpoint(),
            self.plan.join_timeout,
            if trouble.is_empty() { String::new() } else { format!(" ({trouble})") }
        )
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
    Gathered { round, me, listener, connections, spares, plan, store_session, record_writer }
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
