//! This launcher leads: it decides for the ranks of all hosts and has a stream to the launcher of each.

use std::collections::VecDeque;
use std::time::Duration;

use mainstay_core::base::id::{Attempt, Rank};
use mainstay_core::base::time::{Mono, Span};
use mainstay_core::model::entry::{Body, Entry, Fact};
use mainstay_core::recovery::hosts::merge::{Merge, Next};
use mainstay_core::recovery::hosts::round::{self, Member, Seated};
use mainstay_core::recovery::hosts::sequence::{Inbox, Outbox, Received};
use mainstay_core::recovery::hosts::wire::{Command, Down, Join, PROTOCOL, Report, Up};
use mainstay_core::recovery::job::{Input, Job, Order, Output};
use tokio::sync::mpsc;

use crate::hosts::listen::{FromHost, Listener};
use crate::launch::brain::{Brain, Task};
use crate::launch::hosts::{HostsPlan, member};
use crate::launch::meeting::{FromStore, Meeting, Office};
use crate::launch::predecessor::{Predecessor, is_to_be_remembered};
use crate::launch::recent::Recent;
use crate::launch::rendezvous::{FIRST_RECORD, Gathered, refusal};
use crate::launch::save;
use crate::launch::shell::Launcher;
use crate::os::clock;

/// Commands that a follower has not acknowledged; with more it counts as lost.
const COMMANDS: usize = 1024;

/// How often followers are sent what is new in the journal, at most; and while ranks are stopped and started.
const FED_EVERY: Span = Span::millis(50);
const FED_IN_A_ROUND: Span = Span::millis(500);

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
    pub(super) links: Vec<Link>,
    pub(super) me: u32,
    pub(super) plan: HostsPlan,
    /// The job and its launch, as ranks of all hosts get them.
    pub(super) names: (String, String),
    /// Launchers that wait for a seat.
    pub(super) spares: Vec<(Member, u64, mpsc::Sender<Down>)>,
    pub(super) meeting: Meeting,
    /// Where it writes; none while the store does not know that this launcher leads.
    pub(super) office: Option<Office>,
    /// The epoch of its orders.
    pub(super) epoch: u64,
    /// The newest record that was asked to be stored.
    pub(super) newest_record: u64,
    /// Whether something is to be remembered that the newest record does not have.
    pub(super) record_due: bool,
    /// Orders that wait until their record is stored, or until that time.
    pub(super) held: VecDeque<(u64, Mono, Order)>,
    /// The status of the job, once it is over.
    pub(super) over: Option<i32>,
    /// Another launcher leads: nothing more is decided here.
    pub(super) deposed: bool,
    /// Whose place it took.
    pub(super) predecessor: Option<Predecessor>,
    /// When it last looked after its hosts.
    pub(super) looked: Mono,
    /// When followers were last sent of the journal.
    fed: Mono,
    /// What it wrote last, for the followers; none before the first entry.
    recent: Option<Recent>,
}

/// What comes from outside to a leader.
#[derive(Debug)]
pub(super) enum ToLeader {
    Host(Box<FromHost>),
    Store(FromStore),
}

/// A follower.
#[derive(Debug)]
pub(super) struct Link {
    seated: Seated,
    pub(super) connection: Option<(u64, mpsc::Sender<Down>)>,
    /// Since when there is none.
    pub(super) gone: Option<(Mono, String)>,
    /// How long it may be gone.
    back_within: Span,
    lost: bool,
    inbox: Inbox,
    outbox: Outbox<Command>,
    /// The newest entry that it was sent.
    entries: u64,
}

impl Leading {
    /// The leader of a round that has come together.
    pub(super) fn new(job: Job, gathered: Gathered, names: (String, String)) -> Leading {
        let Gathered { round, me, listener, connections, plan, spares, meeting, office } = gathered;
        let merge = Merge::new(round, plan.join_timeout);
        let mut leading = Leading::of(job, merge, me, listener, plan, names, meeting, office);
        leading.spares = spares;
        for link in &mut leading.links {
            let connection = connections
                .iter()
                .find(|(launcher, ..)| *launcher == link.seated.member.launcher)
                .map(|(_, connection, to)| (*connection, to.clone()));
            link.back_within = BACK_WITHIN;
            if connection.is_some() {
                (link.connection, link.gone) = (connection, None);
            }
        }
        for seat in 0..leading.links.len() {
            leading.welcome(seat);
        }
        leading
    }

    /// A leader that no follower is connected to yet.
    #[expect(clippy::too_many_arguments, reason = "all of it is what a leader has")]
    pub(super) fn of(
        job: Job,
        merge: Merge,
        me: u32,
        listener: Listener,
        plan: HostsPlan,
        names: (String, String),
        meeting: Meeting,
        office: Office,
    ) -> Leading {
        let now = clock::mono();
        let link = |seated: &Seated| Link {
            seated: seated.clone(),
            connection: None,
            gone: (seated.seat.group_rank != me).then(|| (now, "it has not come back".to_owned())),
            back_within: plan.lease().plus(BACK_WITHIN),
            lost: false,
            inbox: Inbox::default(),
            outbox: Outbox::new(COMMANDS),
            entries: 0,
        };
        let mut job = job;
        job.on_hosts(merge.places());
        Leading {
            links: merge.seats().map(link).collect(),
            job,
            merge,
            next: VecDeque::new(),
            outputs: VecDeque::new(),
            listener,
            me,
            plan,
            names,
            spares: Vec::new(),
            meeting,
            epoch: office.epoch,
            office: Some(office),
            newest_record: FIRST_RECORD,
            record_due: false,
            held: VecDeque::new(),
            over: None,
            deposed: false,
            predecessor: None,
            looked: now,
            fed: Mono(0),
            recent: None,
        }
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
        self.take_report(at, self.me, report);
    }

    fn take_report(&mut self, at: Mono, seat: u32, report: Report) {
        if matches!(report, Report::Fact { fact: Fact::StopRequested { .. } }) {
            self.give_up_held_start(at);
        }
        self.merge.report(at, seat, report, &mut self.next);
    }

    /// Something that the job learns from its leader.
    pub(super) fn tell_job(&mut self, at: Mono, input: Input) {
        self.next.push_back(Next::Job(at, input));
    }

    /// Hands an order of the job to the hosts.
    pub(super) fn pass_on(&mut self, at: Mono, order: Order) {
        self.merge.order(at, order, &mut self.next);
    }

    pub(super) fn give_up_start(&mut self, at: Mono) {
        self.merge.give_up_start(at, &mut self.next);
    }

    pub(super) fn seats(&self) -> Vec<Seated> {
        self.merge.seats().cloned().collect()
    }

    /// Whether all ranks of this attempt have started.
    pub(super) fn has_started(&self, attempt: Attempt) -> bool {
        self.merge.has_started() && self.merge.attempt() == attempt
    }

    /// The next message of a follower or of the store.
    pub(super) async fn next(&mut self) -> ToLeader {
        tokio::select! {
            Some(event) = self.listener.events.recv() => ToLeader::Host(Box::new(event)),
            news = self.meeting.next() => ToLeader::Store(news),
        }
    }

    fn seat_of(&self, connection: u64) -> Option<usize> {
        self.links.iter().position(|link| link.connection.as_ref().is_some_and(|(of, _)| *of == connection))
    }

    fn welcome(&mut self, seat: usize) {
        let (job, launch) = self.names.clone();
        let epoch = self.epoch;
        let link = &mut self.links[seat];
        let have = link.inbox.have();
        let seated = link.seated.seat.clone();
        link.send(Down::Welcome { seat: seated, job, launch, have, epoch });
        let again: Vec<Down> = link
            .outbox
            .unacknowledged()
            .map(|(number, command)| Down::Command { number, epoch, command: command.clone() })
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
            if self.meeting.launcher() == join.have_of {
                link.outbox.acknowledged(join.have.0);
                link.entries = join.have.1;
            } else if let Some(predecessor) = &self.predecessor {
                link.entries = link.entries.max(predecessor.position(join));
            }
            (link.connection, link.gone, link.back_within) = (Some((connection, to)), None, BACK_WITHIN);
            self.welcome(seat);
            return None;
        }
        let member = member(join);
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
                back_within: BACK_WITHIN,
                lost: false,
                inbox: Inbox::default(),
                outbox: Outbox::new(COMMANDS),
                entries: 0,
            };
            self.record_due = true;
            self.welcome(seat as usize);
            self.merge.taken(at, seated, &mut self.next);
            false
        });
        self.spares = waiting;
        self.job.on_hosts(self.merge.places());
    }

    pub(super) fn lose(&mut self, at: Mono, seat: usize, how: &str) {
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
            Ok(number) => link.send(Down::Command { number, epoch: self.epoch, command }),
            Err(error) => link.gone = Some((Mono(0), error.to_string())),
        }
        None
    }

    /// Keeps an entry that was written just now for the followers, so that none is read back from the disk.
    pub(super) fn keep_recent(&mut self, entry: &Entry) {
        self.recent.get_or_insert_with(|| Recent::complete_from(entry.seq)).push(entry.clone());
    }

    /// Sends what followers have not of the job's journal. `read` has what is older than what is kept in memory; none if it
    /// cannot be read now.
    fn feed(&mut self, read: impl Fn(u64) -> Option<Vec<Entry>>) {
        let Some(recent) = &self.recent else { return };
        // What a leader wrote before it led is of the leader before it, or of its host alone.
        let since = self.predecessor.as_ref().map_or(0, Predecessor::since);
        for link in self.links.iter_mut().filter(|link| link.connection.is_some()) {
            if link.entries < recent.complete_after() {
                // Nothing newer goes before it: it is read again later.
                let Some(older) = read(link.entries) else { continue };
                for entry in older.iter().filter(|entry| entry.seq <= recent.complete_after()) {
                    link.send_entry(entry, since);
                }
                link.entries = recent.complete_after();
            }
            for entry in recent.after(link.entries) {
                link.send_entry(entry, since);
            }
        }
    }
}

impl Link {
    /// Sends an entry, if it is one of the job.
    fn send_entry(&mut self, entry: &Entry, since: u64) {
        self.entries = entry.seq;
        let mine = entry.seq > since || entry.origin_seq.is_some();
        if mine && entry.job.is_some() && !matches!(entry.body, Body::Health(_)) {
            self.send(Down::Entry { seq: entry.seq, at: entry.at, body: Box::new(entry.body.clone()) });
        }
    }

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
            if leading.deposed {
                return;
            }
            if let Some((at, output)) = leading.outputs.pop_front() {
                match output {
                    Output::Record(body) => {
                        leading.record_due |= is_to_be_remembered(&body);
                        self.publish_body(at, body);
                    }
                    Output::Order(order) => leading.order(now, order),
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
                    if matches!(command, Command::Finish { .. }) {
                        // A follower reads nothing that comes after it.
                        self.feed();
                    }
                    let Brain::Leading(leading) = &mut self.brain else { return };
                    let mine = leading.command(seat, command);
                    self.tasks.extend(mine.map(Task::Command));
                }
                Next::Local(order) => self.tasks.push_back(Task::Order(order)),
            }
        }
        if let Brain::Leading(leading) = &mut self.brain
            && leading.record_due
        {
            leading.write_record();
        }
        self.feed_if_due(now);
    }

    /// Followers get the journal in parts, and not while they are to stop or start ranks: what is ordered comes first.
    fn feed_if_due(&mut self, now: Mono) {
        let Brain::Leading(leading) = &mut self.brain else { return };
        let every = if leading.merge.is_settled() { FED_EVERY } else { FED_IN_A_ROUND };
        if now.since(leading.fed) >= every {
            leading.fed = now;
            self.feed();
        }
    }

    fn feed(&mut self) {
        let reader = self.board.reader();
        if let Brain::Leading(leading) = &mut self.brain {
            leading.feed(|have| reader.entries_after(have, usize::MAX).ok().map(|read| read.entries));
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
                            if let Some(rank) = finished(&report, self.attempt) {
                                self.hangs.finished_elsewhere(rank, now);
                            }
                            leading.take_report(at, seat as u32, report);
                        }
                        Received::Again => link.send(Down::Received { number: link.inbox.have() }),
                        Received::Gap => {
                            (link.connection, link.gone) =
                                (None, Some((now, "a report is missing".to_owned())));
                        }
                    },
                    Up::Seen { attempt, ranks } if attempt == self.attempt => {
                        self.hangs.seen_elsewhere(&ranks, now);
                    }
                    Up::Seen { .. } => {}
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
        if leading.deposed {
            return;
        }
        let stalled = now.since(std::mem::replace(&mut leading.looked, now)) >= BACK_WITHIN;
        leading.release_held(now, 0);
        if stalled || leading.office.is_none() {
            // Those that were not heard may have spoken; and without the store nothing is decided.
            leading.links.iter_mut().filter_map(|link| link.gone.as_mut()).for_each(|gone| gone.0 = now);
            self.look_at_store();
            return self.lead(now);
        }
        for seat in 0..leading.links.len() {
            let within = leading.links[seat].back_within;
            let gone = leading.links[seat].gone.clone();
            if let Some((since, why)) = gone.filter(|(since, _)| now.since(*since) >= within) {
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
    pub(super) async fn tell_the_end(&mut self) {
        self.feed();
        let until = tokio::time::Instant::now() + END_WITHIN;
        loop {
            let leading = match &mut self.brain {
                Brain::Leading(leading) => leading,
                Brain::Following(following) => return following.wait_for_the_end().await,
                Brain::Alone(_) | Brain::Gone => return,
            };
            // One that has no connection at this moment may come back for it.
            let open = |link: &Link| !link.lost && !link.outbox.is_empty();
            if leading.deposed || !leading.links.iter().any(open) {
                // Followers wait for that.
                leading.links.iter_mut().for_each(|link| link.connection = None);
                return;
            }
            match tokio::time::timeout_at(until, leading.next()).await {
                Ok(ToLeader::Host(event)) => self.hear_host(*event),
                Ok(ToLeader::Store(_)) => {}
                Err(_) => return,
            }
        }
    }
}

/// The rank of this attempt whose end in order is reported.
fn finished(report: &Report, of: Attempt) -> Option<Rank> {
    match report {
        Report::Fact { fact: Fact::RankExited { attempt, rank, status, .. } }
            if *attempt == of && status.is_success() =>
        {
            Some(*rank)
        }
        _ => None,
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
