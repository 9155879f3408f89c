//! Before the first round: the hosts of the job come together. The host whose address is the endpoint leads and waits for
//! the others; those connect to it. The terminal of each shows who is missing.

use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::time::Duration;

use anyhow::{Context, bail};
use mainstay_core::recovery::hosts::clock::Mapping;
use mainstay_core::recovery::hosts::round::{self, Lacking, Member, Seated};
use mainstay_core::recovery::hosts::wire::{Down, Join, Seat};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::hosts::Token;
use crate::hosts::connect::{self, FromLeader};
use crate::hosts::listen::{FromHost, Listener};
use crate::launch::following::Followed;
use crate::launch::hosts::HostsPlan;
use crate::launch::leading::protocol;

/// The same line is not printed more often.
const TOLD_EVERY: Duration = Duration::from_secs(30);

/// What a leader starts with.
#[derive(Debug)]
pub struct Gathered {
    /// Who has which seat.
    pub round: Vec<Seated>,
    /// The leader's own seat.
    pub me: u32,
    /// Where followers come back to.
    pub listener: Listener,
    /// Followers by launcher, with their connections.
    pub connections: Vec<(String, u64, mpsc::Sender<Down>)>,
    /// Launchers beyond the round.
    pub spares: Vec<(Member, u64, mpsc::Sender<Down>)>,
    /// `MASTER_ADDR` of all ranks.
    pub master_addr: String,
    /// What was asked for.
    pub plan: HostsPlan,
}

/// How a launcher takes part.
#[derive(Debug)]
pub enum Together {
    /// It leads.
    Leading(Box<Gathered>),
    /// It follows.
    Following(Box<Followed>),
    /// It was asked to stop by this signal while it waited.
    Stopped(i32),
}

impl Together {
    /// This host's seat.
    pub fn seat(&self) -> Option<&Seat> {
        match self {
            Together::Leading(gathered) => {
                gathered.round.get(gathered.me as usize).map(|seated| &seated.seat)
            }
            Together::Following(followed) => Some(&followed.seat),
            Together::Stopped(_) => None,
        }
    }
}

/// Waits until all hosts are there.
///
/// # Errors
/// They did not come in time, or this one cannot take part; in words that say what to check.
pub async fn gather(
    plan: HostsPlan,
    join: Join,
    signals: &mut mpsc::Receiver<i32>,
    say: &impl Fn(String),
) -> anyhow::Result<Together> {
    let token = Token::of(&join.run_id, plan.token.as_deref());
    if !may_lead(&plan) {
        return follow(plan, join, token, signals, say).await;
    }
    match Listener::bind(plan.endpoint.1, token.clone()).await {
        Ok(listener) => lead(plan, join, listener, signals, say).await,
        // Another launcher of this host has the port: it leads.
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse && plan.node_rank.is_none() => {
            follow(plan, join, token, signals, say).await
        }
        Err(error) => Err(error).with_context(|| {
            format!(
                "listening on port {} for the other hosts (--master-port, or the port of --rdzv-endpoint)",
                plan.endpoint.1
            )
        }),
    }
}

/// Whether this is the host whose address is the endpoint.
fn may_lead(plan: &HostsPlan) -> bool {
    match (plan.node_rank, plan.is_host) {
        (Some(rank), _) => rank == 0,
        (None, Some(is_host)) => is_host,
        (None, None) => is_here(&plan.endpoint.0),
    }
}

/// Whether a name is of this host: an address can be bound only where it is.
fn is_here(host: &str) -> bool {
    let Ok(addresses) = (host, 0).to_socket_addrs() else { return false };
    addresses.into_iter().any(|address: SocketAddr| TcpListener::bind(address).is_ok())
}

/// Why a launcher cannot take part, whatever its seat; none if it can.
pub(super) fn refusal(plan: &HostsPlan, join: &Join) -> Option<String> {
    protocol(join).or_else(|| {
        (join.hosts != plan.hosts).then(|| {
            let told = |(least, most): (u32, u32)| match least == most {
                true => least.to_string(),
                false => format!("{least}:{most}"),
            };
            format!("it was started with --nnodes {}, the leader with {}", told(join.hosts), told(plan.hosts))
        })
    })
}

/// What differs between two hosts and may be meant; for people.
fn differences(mine: &Join, other: &Join) -> Vec<String> {
    let mut told = Vec::new();
    if other.version != mine.version {
        told.push(format!("it runs Mainstay {}, this host {}", other.version, mine.version));
    }
    if other.ranks != mine.ranks {
        told.push(format!("it has {} ranks (--nproc-per-node), this host {}", other.ranks, mine.ranks));
    }
    if other.program.is_some() && mine.program.is_some() && other.program != mine.program {
        told.push("its script or command differs from that of this host".to_owned());
    }
    told
}

struct Waiting {
    join: Join,
    member: Member,
    connection: u64,
    to: mpsc::Sender<Down>,
}

async fn lead(
    plan: HostsPlan,
    mine: Join,
    mut listener: Listener,
    signals: &mut mpsc::Receiver<i32>,
    say: &impl Fn(String),
) -> anyhow::Result<Together> {
    let (least, most) = plan.hosts;
    let me = Member { leads: true, ..member(&mine) };
    let mut waiting: Vec<Waiting> = Vec::new();
    let began = Instant::now();
    let timeout = began + Duration::from_nanos(plan.join_timeout.0);
    let mut enough_since: Option<Instant> = None;
    say(format!(
        "this host leads at port {}; if it is lost, the job is: the other hosts then exit with status 75",
        listener.port()
    ));
    let mut told = String::new();
    loop {
        let members: Vec<Member> =
            std::iter::once(me.clone()).chain(waiting.iter().map(|of| of.member.clone())).collect();
        let joined = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let last_call_over =
            enough_since.is_some_and(|since| since.elapsed() >= Duration::from_nanos(plan.last_call.0));
        let hosts = if joined < most && last_call_over { joined.max(least) } else { most };
        let lacking = match round::first(&members, hosts) {
            Ok(round) => {
                return Ok(Together::Leading(Box::new(gathered(plan, &mine, round, listener, waiting))));
            }
            Err(lacking) => lacking,
        };
        if lacking.to_string() != told {
            told = lacking.to_string();
            say(told.clone());
            for of in &waiting {
                let _ = of.to.try_send(Down::Waiting { told: told.clone() });
            }
        }
        enough_since = if joined >= least { enough_since.or_else(|| Some(Instant::now())) } else { None };
        let last_call = enough_since.map(|since| since + Duration::from_nanos(plan.last_call.0));
        let wake = last_call.filter(|at| *at > Instant::now()).map_or(timeout, |at| at.min(timeout));
        tokio::select! {
            event = listener.events.recv() => {
                let Some(event) = event else { bail!("the listening socket is gone") };
                arrived(&plan, &mine, &me, event, &mut waiting, say);
            }
            Some(signal) = signals.recv() => return Ok(Together::Stopped(signal)),
            () = tokio::time::sleep_until(wake) => {
                if Instant::now() >= timeout {
                    bail!("{}", not_come(&plan, &mine.run_id, &lacking));
                }
            }
        }
    }
}

fn member(join: &Join) -> Member {
    Member {
        launcher: join.launcher.clone(),
        host: join.host.clone(),
        node_rank: join.node_rank,
        ranks: join.ranks,
        leads: false,
    }
}

fn arrived(
    plan: &HostsPlan,
    mine: &Join,
    me: &Member,
    event: FromHost,
    waiting: &mut Vec<Waiting>,
    say: &impl Fn(String),
) {
    match event {
        FromHost::Joined { connection, join, peer, to } => {
            waiting.retain(|of| of.member.launcher != join.launcher);
            let member = member(&join);
            let members: Vec<Member> =
                std::iter::once(me.clone()).chain(waiting.iter().map(|of| of.member.clone())).collect();
            let why = refusal(plan, &join).or_else(|| {
                round::admit(&members, &member, plan.hosts.1).err().map(|error| error.to_string())
            });
            if let Some(why) = why {
                say(format!("host {} ({peer}) cannot take part: {why}", join.host));
                let _ = to.try_send(Down::Refused { why });
                return;
            }
            say(format!("host {} ({peer}) has joined{}", join.host, numbered(&join)));
            for difference in differences(mine, &join) {
                let told = format!("host {} ({peer}): {difference}", join.host);
                let _ = to.try_send(Down::Waiting { told: told.clone() });
                say(told);
            }
            waiting.push(Waiting { join, member, connection, to });
        }
        FromHost::Gone { connection, why } => {
            if let Some(at) = waiting.iter().position(|of| of.connection == connection) {
                let gone = waiting.remove(at);
                say(format!("host {} has left{}: {why}", gone.join.host, numbered(&gone.join)));
            }
        }
        FromHost::Said { .. } => {}
    }
}

fn numbered(join: &Join) -> String {
    join.node_rank.map_or(String::new(), |rank| format!(" as node rank {rank}"))
}

fn gathered(
    plan: HostsPlan,
    mine: &Join,
    round: Vec<Seated>,
    listener: Listener,
    waiting: Vec<Waiting>,
) -> Gathered {
    let seated = |launcher: &str| round.iter().any(|seated| seated.member.launcher == launcher);
    let (taking_part, beyond): (Vec<Waiting>, Vec<Waiting>) =
        waiting.into_iter().partition(|of| seated(&of.member.launcher));
    let spares = beyond.into_iter().map(|of| {
        let told = "all hosts are there; waiting as a spare".to_owned();
        let _ = of.to.try_send(Down::Waiting { told });
        (of.member, of.connection, of.to)
    });
    let spares = spares.collect();
    let connections = taking_part.into_iter().map(|of| (of.member.launcher, of.connection, of.to)).collect();
    let me = round.iter().find(|seated| seated.member.launcher == mine.launcher);
    let me = me.map_or(0, |seated| seated.seat.group_rank);
    // Followers have reached this host under the endpoint's name.
    let master_addr = if mine.address.is_empty() { plan.endpoint.0.clone() } else { mine.address.clone() };
    Gathered { round, me, listener, connections, spares, master_addr, plan }
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

async fn follow(
    plan: HostsPlan,
    join: Join,
    token: Token,
    signals: &mut mpsc::Receiver<i32>,
    say: &impl Fn(String),
) -> anyhow::Result<Together> {
    let (join_sender, join_receiver) = watch::channel(join);
    let (sender, mut events) = mpsc::channel(1024);
    let task = tokio::spawn(connect::keep(plan.endpoint.clone(), token, join_receiver, sender));
    let task = Aborting(task);
    let timeout = Instant::now() + Duration::from_nanos(plan.join_timeout.0);
    say(format!("joining the job at {}", plan.endpoint()));
    let mut to = None;
    let mut clock = Mapping::default();
    let (mut trouble, mut told_at) = (String::new(), None::<Instant>);
    loop {
        tokio::select! {
            event = events.recv() => match event {
                None => bail!("the connection to {} is gone", plan.endpoint()),
                Some(FromLeader::Connected { to: way }) => to = Some(way),
                Some(FromLeader::Lost { why }) => {
                    to = None;
                    if why != trouble || told_at.is_none_or(|at| at.elapsed() >= TOLD_EVERY) {
                        say(format!("cannot reach the leader at {}: {why}; still trying", plan.endpoint()));
                        (trouble, told_at) = (why, Some(Instant::now()));
                    }
                }
                Some(FromLeader::Said { at, down }) => match down {
                    Down::Waiting { told } => say(told),
                    Down::Refused { why } => bail!("the leader at {} refuses this host: {why}", plan.endpoint()),
                    Down::Beat { sent, at: leader } => clock.round_trip(sent, leader, at),
                    Down::Welcome { seat, job, launch, .. } => {
                        let followed = Followed {
                            seat, job, launch, events, to, clock, join: join_sender, plan, task,
                        };
                        return Ok(Together::Following(Box::new(followed)));
                    }
                    Down::Command { .. } | Down::Entry { .. } | Down::Received { .. } => {}
                },
            },
            Some(signal) = signals.recv() => return Ok(Together::Stopped(signal)),
            () = tokio::time::sleep_until(timeout) => bail!(
                "this host did not get into the job at {} within {}{}. Check that `mainstay run` is running on the \
                 endpoint's host with the same --nnodes and --rdzv-id, and that the port is open in the firewall",
                plan.endpoint(),
                plan.join_timeout,
                if trouble.is_empty() { String::new() } else { format!(" ({trouble})") }
            ),
        }
    }
}

/// A task that ends with its handle.
#[derive(Debug)]
pub struct Aborting(pub tokio::task::JoinHandle<()>);

impl Drop for Aborting {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The address by which other hosts reach this one, where the user gave one.
pub fn local_address(plan: &HostsPlan) -> String {
    plan.local_addr
        .clone()
        .filter(|address| address.parse::<IpAddr>().is_ok() || !address.is_empty())
        .unwrap_or_default()
}
