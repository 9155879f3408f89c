//! One attempt of a launcher to lead or to join the first round of its job.

use std::time::Duration;

use anyhow::bail;
use mainstay_coord::Leader;
use mainstay_group::clock::Mapping;
use mainstay_group::follow::Leads;
use mainstay_group::lead::Expected;
use mainstay_group::record::Record;
use mainstay_group::round::{self, Member, Seated};
use mainstay_group::wire::{Down, Join, Spare, Up};
use mainstay_model::id::Attempt;
use mainstay_sys::clock;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::group::Followed;
use crate::group::following::leads;
use crate::group::plan::{Aborting, HostsPlan};
use crate::group::rendezvous::preflight::LinkCheck;
use crate::group::rendezvous::{FIRST_RECORD, MAY_LEAD_EVERY, Outcome, REPORT_EVERY, not_come};
use crate::group::store::{Elected, FromStore, StoreSession};
use crate::group::streams::connect::{self, FromLeader};
use crate::group::streams::listen::{FromHost, Listener};
use crate::group::streams::measure::measure_all;
use crate::group::streams::streams;

pub(crate) struct Gathering<'a> {
    pub(crate) plan: &'a HostsPlan,
    pub(crate) join: &'a Join,
    pub(crate) names: &'a (String, String),
    pub(crate) timeout: Instant,
}

impl Gathering<'_> {
    /// No launcher leads: this one stands for election if it may.
    pub(crate) async fn stand(
        &self,
        store_session: &mut StoreSession,
        elected: &mut Option<Elected>,
        signals: &mut mpsc::Receiver<i32>,
        print: &impl Fn(String),
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
                    FromStore::Notice(why) => print(why),
                    FromStore::Problem(why) => bail!("{why}"),
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

    pub(crate) async fn lead(
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
        let me = Member { leads: true, ..Member::from_join(mine) };
        let mut waiting: Vec<Waiting> = Vec::new();
        let mut enough_since: Option<Instant> = None;
        let mut status = String::new();
        // The round is final once it is being written: hosts that come later are spares.
        let mut round: Option<Vec<Seated>> = None;
        let mut links = LinkCheck::new(plan.preflight);
        let mut found = Vec::new();
        loop {
            let members: Vec<Member> =
                std::iter::once(me.clone()).chain(waiting.iter().map(|other| other.member.clone())).collect();
            let joined = u32::try_from(members.len()).unwrap_or(u32::MAX);
            let last_call_over =
                enough_since.is_some_and(|since| since.elapsed() >= Duration::from_nanos(plan.last_call.0));
            let hosts = if joined < most && last_call_over { joined.max(least) } else { most };
            let mut lacking = None;
            if round.is_none() {
                match round::first(&links.fit(&members, hosts), hosts) {
                    Ok(_) if !links.is_done() => {
                        if let Some(line) = links.look(&me, &waiting, &store_session.token) {
                            tell(&waiting, &line);
                            print(line);
                        }
                        if links.is_done() {
                            continue;
                        }
                    }
                    Ok(now) => {
                        let seats: Vec<&Member> = now.iter().map(|seated| &seated.member).collect();
                        let (facts, refusal) = links.result(&seats);
                        if let Some(why) = refusal {
                            let why = format!("--preflight=require: {why}");
                            for other in &waiting {
                                let _ =
                                    other.to.try_send(Down::Refused { why: why.clone(), may_return: false });
                            }
                            // Until they have read why, the connections stay.
                            tokio::time::sleep(REFUSED_WITHIN).await;
                            bail!("{why}");
                        }
                        found = facts;
                        record_writer.write(FIRST_RECORD, &self.record(&now));
                        round = Some(now);
                    }
                    Err(error) => lacking = Some(error),
                }
            }
            if let Some(lacking) = &lacking
                && lacking.to_string() != status
            {
                status = lacking.to_string();
                print(status.clone());
                tell(&waiting, &status);
            }
            enough_since = if joined >= least { enough_since.or_else(|| Some(Instant::now())) } else { None };
            let last_call = enough_since.map(|since| since + Duration::from_nanos(plan.last_call.0));
            let wake = last_call.filter(|at| *at > Instant::now()).map_or(timeout, |at| at.min(timeout));
            let wake = links.wake().map_or(wake, |at| at.min(wake));
            tokio::select! {
                event = listener.events.recv() => {
                    let Some(event) = event else { bail!("the listening socket is gone") };
                    if let FromHost::Received { connection, up: Up::Measured { links: measured }, .. } = event {
                        if let Some(other) = waiting.iter().find(|other| other.connection == connection) {
                            links.measured(&other.member.launcher, measured);
                        }
                        continue;
                    }
                    arrived(plan, mine, &me, event, &mut waiting, print);
                }
                update = store_session.next() => match update {
                    FromStore::Written(FIRST_RECORD) => {
                        if let Some(round) = round {
                            return Ok(Outcome::Round(round, waiting, record_writer, found));
                        }
                    }
                    FromStore::Deposed(_) => {
                        print("the coordination store lost this leader; the hosts come together again".to_owned());
                        return Ok(Outcome::Again);
                    }
                    FromStore::Ended(ended) => return Ok(Outcome::Over(ended)),
                    FromStore::Notice(why) => print(why),
                    FromStore::Problem(why) => bail!("{why}"),
                    FromStore::Leader(_)
                    | FromStore::LeaderMissed
                    | FromStore::Elected(_)
                    | FromStore::Written(_) => {}
                },
                measured = links.own() => links.measured(&mine.launcher, measured),
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

    pub(crate) async fn follow(
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
        let (mut problem, mut reported_at) = (String::new(), None::<Instant>);
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    None => bail!("the connection to {at} is gone"),
                    Some(FromLeader::Connected { to: way }) => to = Some(way),
                    Some(FromLeader::Lost { why, .. }) => {
                        to = None;
                        if store_session.leader.is_none() {
                            return Ok(Outcome::Again);
                        }
                        if why != problem || reported_at.is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
                            print(format!("cannot reach the leader {at}: {why}; still trying"));
                            (problem, reported_at) = (why, Some(Instant::now()));
                        }
                    }
                    Some(FromLeader::Received { at: received, down }) => match down {
                        Down::Waiting { status, spare: None } => print(status),
                        Down::Waiting { status, spare: Some(spare) } => {
                            print(status);
                            let Spare { seat, job, launch } = *spare;
                            let (waits, newest, leads) = (true, 0, leads(&leader));
                            return Ok(Outcome::Seated(Box::new(Followed {
                                waits, newest, seat, job, launch, leads, events, to, clock, join: join_sender, task,
                            })));
                        }
                        Down::Refused { why, .. } => bail!("the leader {at} refuses this host: {why}"),
                        Down::Beat { sent, at: leader } => clock.round_trip(sent, leader, received),
                        Down::Welcome { seat, job, launch, epoch, newest, .. } => {
                            let (waits, leads) = (false, Leads { epoch, ..leads(&leader) });
                            return Ok(Outcome::Seated(Box::new(Followed {
                                waits, newest, seat, job, launch, leads, events, to, clock, join: join_sender, task,
                            })));
                        }
                        Down::Measure { peers, every } => {
                            let (token, to) = (store_session.token.clone(), to.clone());
                            let every = Duration::from_nanos(every.0);
                            streams().spawn(async move {
                                let links = measure_all(peers, every, token).await;
                                if let Some(to) = to {
                                    // The leader may be gone meanwhile.
                                    let _ = to.send(Up::Measured { links }).await;
                                }
                            });
                        }
                        Down::Command { .. } | Down::Entry { .. } | Down::Received { .. } | Down::Meet { .. } => {}
                    },
                },
                update = store_session.next() => match update {
                    FromStore::Leader(Some(now)) if now.launch != leader.launch => return Ok(Outcome::Again),
                    // One that has a connection is there, even if the store has lost it.
                    FromStore::Leader(None) if to.is_none() => return Ok(Outcome::Again),
                    FromStore::Ended(ended) => return Ok(Outcome::Over(ended)),
                    FromStore::Notice(why) | FromStore::Problem(why) => print(why),
                    FromStore::Leader(_)
                    | FromStore::LeaderMissed
                    | FromStore::Elected(_)
                    | FromStore::Deposed(_)
                    | FromStore::Written(_) => {}
                },
                // A launcher that takes this one for the leader gets no answer.
                Some(_) = listener.events.recv() => {}
                Some(signal) = signals.recv() => return Ok(Outcome::Stopped(signal)),
                () = tokio::time::sleep_until(self.timeout) => bail!("{}", self.not_in(&problem)),
            }
        }
    }

    fn not_in(&self, problem: &str) -> String {
        format!(
            "this host did not get into the job at {} within {}{}. Check that `mainstay run` is running on the \
             endpoint's host with the same --nnodes and --rdzv-id, and that the port is open in the firewall",
            self.plan.endpoint(),
            self.plan.join_timeout,
            if problem.is_empty() { String::new() } else { format!(" ({problem})") }
        )
    }
}

/// How long hosts may take to read why they are refused.
const REFUSED_WITHIN: Duration = Duration::from_millis(500);

/// Shows a line on the terminals of hosts that wait.
fn tell(waiting: &[Waiting], line: &str) {
    for other in waiting {
        let _ = other.to.try_send(Down::Waiting { status: line.to_owned(), spare: None });
    }
}

/// A host that has joined and waits for the round.
pub struct Waiting {
    pub join: Join,
    pub member: Member,
    pub connection: u64,
    pub to: mpsc::Sender<Down>,
}

/// A host joins or leaves: updates `waiting` and prints it on the terminals of both hosts.
fn arrived(
    plan: &HostsPlan,
    mine: &Join,
    me: &Member,
    event: FromHost,
    waiting: &mut Vec<Waiting>,
    print: &impl Fn(String),
) {
    match event {
        FromHost::Joined { connection, join, peer, to } => {
            waiting.retain(|other| other.member.launcher != join.launcher);
            let member = Member::from_join(&join);
            let members: Vec<Member> =
                std::iter::once(me.clone()).chain(waiting.iter().map(|other| other.member.clone())).collect();
            let expected = Expected { leader: mine.clone(), mixed: plan.mixed };
            let seat = || round::admit(&members, &member, plan.hosts.1).err().map(|error| error.to_string());
            let why = expected.refusal(&join).or_else(|| expected.difference(&join)).or_else(seat);
            if let Some(why) = why {
                print(format!("host {} ({peer}) cannot take part: {why}", join.host));
                let _ = to.try_send(Down::Refused { why, may_return: false });
                return;
            }
            print(format!("host {} ({peer}) has joined{}", join.host, numbered(&join)));
            let version = (join.version != mine.version)
                .then(|| format!("it runs Mainstay {}, host {} {}", join.version, mine.host, mine.version));
            for difference in version.into_iter().chain(expected.differences(&join)) {
                let status = format!("host {} ({peer}): {difference}", join.host);
                let _ = to.try_send(Down::Waiting { status: status.clone(), spare: None });
                print(status);
            }
            waiting.push(Waiting { join, member, connection, to });
        }
        FromHost::Gone { connection, why } => {
            if let Some(at) = waiting.iter().position(|other| other.connection == connection) {
                let gone = waiting.remove(at);
                print(format!("host {} has left{}: {why}", gone.join.host, numbered(&gone.join)));
            }
        }
        FromHost::Received { .. } => {}
    }
}

fn numbered(join: &Join) -> String {
    join.node_rank.map_or(String::new(), |rank| format!(" as node rank {rank}"))
}
