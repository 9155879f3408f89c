//! This launcher leads: it decides for the ranks of all hosts and has a stream to the launcher of each.

use std::collections::VecDeque;
use std::time::Duration;

use mainstay_core::base::time::{Mono, Span};
use mainstay_core::model::entry::{Body, Entry};
use mainstay_core::recovery::hosts::merge::{Merge, Next};
use mainstay_core::recovery::hosts::round::{self, Member, Seated};
use mainstay_core::recovery::hosts::sequence::{Inbox, Outbox, Received};
use mainstay_core::recovery::hosts::wire::{Command, Down, Join, PROTOCOL, Report, Up};
use mainstay_core::recovery::job::{Input, Job, Output};
use tokio::sync::mpsc;

use crate::hosts::listen::{FromHost, Listener};
use crate::launch::brain::{Brain, Task};
use crate::launch::gather::{Gathered, refusal};
use crate::launch::shell::Launcher;
use crate::launch::{hosts::HostsPlan, save};
use crate::os::clock;

/// Commands that a follower has not acknowledged; with more it counts as lost.
const COMMANDS: usize = 1024;

/// A follower whose connection has ended has this long to come back: a launcher that was killed does not.
const BACK_WITHIN: Span = Span::seconds(2);

/// How long the end of the job waits for followers to know of it.
const END_WITHIN: Duration = Duration::from_secs(5);

/// What a leader has.
#[derive(Debug)]
pub(super) struct Leading {
    pub(super) job: Job,
    merge: Merge,
    next: VecDeque<Next>,
    /// What the job has said and is not carried out yet.
    outputs: VecDeque<(Mono, Output)>,
    listener: Listener,
    links: Vec<Link>,
    me: u32,
    plan: HostsPlan,
    /// The job and its launch, as ranks of all hosts get them.
    names: (String, String),
    /// Launchers that wait for a seat.
    spares: Vec<(Member, u64, mpsc::Sender<Down>)>,
}

/// A follower.
#[derive(Debug)]
struct Link {
    seated: Seated,
    connection: Option<(u64, mpsc::Sender<Down>)>,
    /// Since when there is none.
    gone: Option<(Mono, String)>,
    lost: bool,
    inbox: Inbox,
    outbox: Outbox<Command>,
    /// The newest entry that it was sent.
    entries: u64,
}

impl Leading {
    pub(super) fn new(job: Job, gathered: Gathered, names: (String, String)) -> Leading {
        let Gathered { round, me, listener, connections, plan, master_addr, spares } = gathered;
        let merge = Merge::new(round.clone(), master_addr, plan.join_timeout);
        let links = round
            .into_iter()
            .map(|seated| {
                let connection = connections
                    .iter()
                    .find(|(launcher, ..)| *launcher == seated.member.launcher)
                    .map(|(_, connection, to)| (*connection, to.clone()));
                let mine = seated.seat.group_rank == me;
                let gone = (connection.is_none() && !mine)
                    .then(|| (clock::mono(), "its connection ended".to_owned()));
                Link {
                    seated,
                    connection,
                    gone,
                    lost: false,
                    inbox: Inbox::default(),
                    outbox: Outbox::new(COMMANDS),
                    entries: 0,
                }
            })
            .collect();
        let mut leading = Leading {
            job,
            merge,
            next: VecDeque::new(),
            outputs: VecDeque::new(),
            listener,
            links,
            me,
            plan,
            names,
            spares,
        };
        for seat in 0..leading.links.len() {
            leading.welcome(seat);
        }
        leading
    }

    /// What the job says at its begin. Its first orders wait until what it records is written.
    pub(super) fn begin_with(&mut self, at: Mono, out: Vec<Output>) {
        self.outputs.extend(out.into_iter().map(|output| (at, output)));
    }

    /// Something happened on this host.
    pub(super) fn see(&mut self, at: Mono, input: Input) {
        match Report::of(input.clone()) {
            Some(report) => self.report_of_mine(at, report),
            // What the leader's own host holds and its agent says is for the job itself.
            None => self.next.push_back(Next::Job(at, input)),
        }
    }

    pub(super) fn report_of_mine(&mut self, at: Mono, report: Report) {
        self.merge.report(at, self.me, report, &mut self.next);
    }

    /// The next message of a follower.
    pub(super) async fn next(&mut self) -> FromHost {
        match self.listener.events.recv().await {
            Some(event) => event,
            None => std::future::pending().await,
        }
    }

    fn seat_of(&self, connection: u64) -> Option<usize> {
        self.links.iter().position(|link| link.connection.as_ref().is_some_and(|(of, _)| *of == connection))
    }

    fn welcome(&mut self, seat: usize) {
        let (job, launch) = self.names.clone();
        let link = &mut self.links[seat];
        let have = link.inbox.have();
        let seated = link.seated.seat.clone();
        link.send(Down::Welcome { seat: seated, job, launch, have });
        let again: Vec<Down> = link
            .outbox
            .unacknowledged()
            .map(|(number, command)| Down::Command { number, command: command.clone() })
            .collect();
        again.into_iter().for_each(|down| link.send(down));
    }

    fn joined(&mut self, at: Mono, connection: u64, join: &Join, to: mpsc::Sender<Down>) -> Option<String> {
        if let Some(why) = refusal(&self.plan, join) {
            let said = format!("host {} cannot take part: {why}", join.host);
            let _ = to.try_send(Down::Refused { why });
            return Some(said);
        }
        let known = self.links.iter().position(|link| link.seated.member.launcher == join.launcher);
        if let Some(seat) = known {
            let link = &mut self.links[seat];
            if link.lost {
                let why =
                    "this launcher was taken for lost, and its ranks were counted as ended; start it again";
                let _ = to.try_send(Down::Refused { why: why.to_owned() });
                return None;
            }
            link.outbox.acknowledged(join.have.0);
            link.entries = join.have.1;
            (link.connection, link.gone) = (Some((connection, to)), None);
            self.welcome(seat);
            return None;
        }
        let member = Member {
            launcher: join.launcher.clone(),
            host: join.host.clone(),
            node_rank: join.node_rank,
            ranks: join.ranks,
            leads: false,
        };
        let said = format!("host {} has joined and waits for a seat", join.host);
        self.spares.retain(|(other, ..)| other.launcher != member.launcher);
        let _ = to.try_send(Down::Waiting { told: "all hosts are there; waiting as a spare".to_owned() });
        self.spares.push((member, connection, to));
        self.seat_spares(at);
        Some(said)
    }

    /// Gives seats of lost hosts to launchers that wait.
    fn seat_spares(&mut self, at: Mono) {
        let mut waiting = std::mem::take(&mut self.spares);
        waiting.retain(|(member, connection, to)| {
            let Some(seat) = round::vacant(&self.merge.lost_seats(), member) else { return true };
            let Some(link) = self.links.get_mut(seat as usize) else { return true };
            let seated = Seated { member: member.clone(), seat: link.seated.seat.clone() };
            *link = Link {
                seated: seated.clone(),
                connection: Some((*connection, to.clone())),
                gone: None,
                lost: false,
                inbox: Inbox::default(),
                outbox: Outbox::new(COMMANDS),
                entries: 0,
            };
            self.welcome(seat as usize);
            self.merge.taken(at, seated, &mut self.next);
            false
        });
        self.spares = waiting;
    }

    fn lose(&mut self, at: Mono, seat: usize, how: &str) {
        let link = &mut self.links[seat];
        (link.lost, link.connection, link.gone) = (true, None, None);
        self.merge.lost(at, link.seated.seat.group_rank, how, &mut self.next);
        self.seat_spares(at);
    }

    fn command(&mut self, seat: u32, command: Command) -> Option<Command> {
        if seat == self.me {
            return Some(command);
        }
        let link = self.links.get_mut(seat as usize)?;
        match link.outbox.push(command.clone()) {
            Ok(number) => link.send(Down::Command { number, command }),
            Err(error) => link.gone = Some((Mono(0), error.to_string())),
        }
        None
    }

    /// Sends what followers have not of the job's journal.
    fn feed(&mut self, entries_after: impl Fn(u64) -> Vec<Entry>) {
        for link in self.links.iter_mut().filter(|link| link.connection.is_some()) {
            for entry in entries_after(link.entries) {
                link.entries = entry.seq;
                let of_the_job = entry.job.is_some() && !matches!(entry.body, Body::Health(_));
                if of_the_job {
                    link.send(Down::Entry { seq: entry.seq, at: entry.at, body: Box::new(entry.body) });
                }
            }
        }
    }
}

impl Link {
    /// A connection that takes no more is given up; the follower makes another.
    fn send(&mut self, down: Down) {
        let sent = self.connection.as_ref().map(|(_, to)| to.try_send(down).is_ok());
        if sent == Some(false) {
            self.connection = None;
            self.gone = Some((clock::mono(), "it does not read its messages".to_owned()));
        }
    }
}

impl Launcher {
    /// Has the job and the merge take in what has come up, until there is nothing left.
    pub(super) fn lead(&mut self, now: Mono) {
        loop {
            let Brain::Leading(leading) = &mut self.brain else { return };
            if let Some((at, output)) = leading.outputs.pop_front() {
                match output {
                    Output::Record(body) => self.publish_body(at, body),
                    Output::Order(order) => leading.merge.order(now, order, &mut leading.next),
                }
                continue;
            }
            let Some(next) = leading.next.pop_front() else { break };
            match next {
                Next::Job(at, input) => {
                    let mut out = Vec::new();
                    leading.job.step(at, input, &mut out);
                    leading.outputs.extend(out.into_iter().map(|output| (at, output)));
                }
                Next::Command(seat, command) => {
                    let command = match command {
                        Command::Stop { attempt, why, .. } => {
                            // Other hosts learn of it later than this one.
                            let save_after = save::after_step(&self.ranks, &self.pages);
                            let save_after = save_after.map(|step| step.saturating_add(1));
                            Command::Stop { attempt, why, save_after }
                        }
                        Command::Finish { exit, .. } => {
                            let summary = Some(Box::new(leading.job.summary(now)));
                            Command::Finish { exit, summary }
                        }
                        command => command,
                    };
                    let mine = leading.command(seat, command);
                    self.tasks.extend(mine.map(Task::Command));
                }
                Next::Local(order) => self.tasks.push_back(Task::Order(order)),
            }
        }
        self.feed();
    }

    fn feed(&mut self) {
        let reader = self.board.reader();
        if let Brain::Leading(leading) = &mut self.brain {
            leading.feed(|have| {
                reader.entries_after(have, usize::MAX).map(|read| read.entries).unwrap_or_default()
            });
        }
    }

    /// A message of a follower.
    pub(super) fn hear_host(&mut self, event: FromHost) {
        let now = clock::mono();
        let Brain::Leading(leading) = &mut self.brain else { return };
        match event {
            FromHost::Joined { connection, join, to, .. } => {
                if let Some(said) = leading.joined(now, connection, &join, to) {
                    self.terminal.say(said);
                }
            }
            FromHost::Gone { connection, why } => {
                leading.spares.retain(|(_, of, _)| *of != connection);
                if let Some(seat) = leading.seat_of(connection) {
                    let link = &mut leading.links[seat];
                    (link.connection, link.gone) = (None, Some((now, why)));
                }
            }
            FromHost::Said { connection, up } => {
                let Some(seat) = leading.seat_of(connection) else { return };
                let link = &mut leading.links[seat];
                match up {
                    Up::Report { number, at, report } => match link.inbox.receive(number) {
                        Received::New => {
                            link.send(Down::Received { number });
                            leading.merge.report(at, seat as u32, report, &mut leading.next);
                        }
                        Received::Again => link.send(Down::Received { number: link.inbox.have() }),
                        Received::Gap => {
                            (link.connection, link.gone) =
                                (None, Some((now, "a report is missing".to_owned())));
                        }
                    },
                    Up::Received { number } => link.outbox.acknowledged(number),
                    Up::Join(_) | Up::Beat { .. } => {}
                }
            }
        }
        self.lead(now);
    }

    /// Followers that did not come back in time are lost.
    pub(super) fn look_at_hosts(&mut self) {
        let now = clock::mono();
        let Brain::Leading(leading) = &mut self.brain else { return };
        for seat in 0..leading.links.len() {
            let gone = leading.links[seat].gone.clone();
            if let Some((since, why)) = gone.filter(|(since, _)| now.since(*since) >= BACK_WITHIN) {
                let silent = now.since(since);
                leading.lose(now, seat, &format!("its launcher has had no connection for {silent} ({why})"));
            }
        }
        leading.merge.look(now, &mut leading.next);
        self.lead(now);
    }

    /// A save is due on the ranks of all hosts, after the same step.
    pub(super) fn save_is_due_everywhere(&mut self) {
        let Some(step) = save::after_step(&self.ranks, &self.pages) else { return };
        // Other hosts learn of it later than this one.
        let step = step.saturating_add(1);
        let attempt = self.attempt;
        let Brain::Leading(leading) = &mut self.brain else { return };
        for seat in 0..leading.links.len() as u32 {
            let mine = leading.command(seat, Command::SaveDue { attempt, step });
            self.tasks.extend(mine.map(Task::Command));
        }
    }

    /// Waits until all followers know that the job is over, or long enough.
    pub(super) async fn part_from_hosts(&mut self) {
        self.feed();
        let until = tokio::time::Instant::now() + END_WITHIN;
        loop {
            let Brain::Leading(leading) = &mut self.brain else { return };
            // One that has no connection at this moment may come back for it.
            let open = |link: &Link| !link.lost && !link.outbox.is_empty();
            if !leading.links.iter().any(open) {
                return;
            }
            match tokio::time::timeout_at(until, leading.next()).await {
                Ok(event) => self.hear_host(event),
                Err(_) => return,
            }
        }
    }
}

/// The join of a launcher of another protocol cannot be understood further.
pub(super) fn protocol(join: &Join) -> Option<String> {
    (join.protocol != PROTOCOL).then(|| {
        format!(
            "it runs Mainstay {} with protocol {} between launchers; the leader has {} with protocol {PROTOCOL}: \
             install the same version on all hosts",
            join.version,
            join.protocol,
            env!("CARGO_PKG_VERSION")
        )
    })
}
