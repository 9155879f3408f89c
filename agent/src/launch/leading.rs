//! This launcher leads: it decides for the ranks of all hosts and has a stream to the launcher of each. What it decides is in
//! `core::recovery::hosts::lead`; here that meets connections, the store, the journal and the ranks of this host.

use std::collections::BTreeMap;
use std::time::Duration;

use mainstay_core::base::time::Mono;
use mainstay_core::model::entry::Entry;
use mainstay_core::recovery::hosts::lead::{self, Act, Lead, SteppedDown};
use mainstay_core::recovery::hosts::link::Connection;
use mainstay_core::recovery::hosts::merge::Merge;
use mainstay_core::recovery::hosts::wire::{Command, Down};
use mainstay_core::recovery::job::Job;
use mainstay_tier::pool::world;
use tokio::sync::mpsc;

use crate::hosts::listen::{FromHost, Listener};
use crate::launch::brain::{Brain, Task};
use crate::launch::hosts::{HostsPlan, span};
use crate::launch::meeting::{FromStore, Meeting, Office};
use crate::launch::rendezvous::{FIRST_RECORD, Gathered};
use crate::launch::save;
use crate::launch::shell::{LOOK_EVERY, Launcher};
use crate::os::clock;
use crate::state::StateReader;

/// How long the end of the job waits for followers to know of it.
const END_WITHIN: Duration = Duration::from_secs(5);

/// What a leader has.
#[derive(Debug)]
pub(super) struct Leading {
    pub(super) lead: Lead,
    listener: Listener,
    /// The ways to followers and spares.
    ways: BTreeMap<Connection, mpsc::Sender<Down>>,
    pub(super) plan: HostsPlan,
    pub(super) meeting: Meeting,
    /// Where it writes; none while the store does not know that this launcher leads.
    pub(super) office: Option<Office>,
}

/// What comes from outside to a leader.
#[derive(Debug)]
pub(super) enum ToLeader {
    Host(Box<FromHost>),
    Store(FromStore),
}

/// So many entries of what is older than what the leader keeps in memory; none if the journal cannot be read now.
fn entries_after(reader: &StateReader, have: u64, most: usize) -> Option<Vec<Entry>> {
    reader.entries_after(have, most).ok().map(|read| read.entries)
}

impl Leading {
    /// The leader of a round that has come together.
    pub(super) fn new(job: Job, gathered: Gathered, names: (String, String)) -> Leading {
        let Gathered { round, me, listener, connections, plan, spares, meeting, office } = gathered;
        let merge = Merge::new(round, plan.join_timeout);
        let mut leading = Leading::of(job, merge, me, listener, plan, names, meeting, office);
        let mut followers = Vec::new();
        for (launcher, connection, to) in connections {
            leading.ways.insert(connection, to);
            followers.push((launcher, connection));
        }
        let mut waiting = Vec::new();
        for (member, connection, to) in spares {
            leading.ways.insert(connection, to);
            waiting.push((member, connection));
        }
        leading.lead.gathered(&followers, waiting);
        leading
    }

    /// A leader that no follower is connected to yet.
    #[expect(clippy::too_many_arguments, reason = "all of it is what a leader has")]
    pub(super) fn of(
        job: Job,
        merge: Merge,
        seat: u32,
        listener: Listener,
        plan: HostsPlan,
        names: (String, String),
        meeting: Meeting,
        office: Office,
    ) -> Leading {
        let by = lead::Office {
            seat,
            launcher: meeting.launcher().to_owned(),
            names,
            hosts: plan.hosts,
            lease: plan.lease(),
            looks_every: span(LOOK_EVERY),
            epoch: office.epoch,
            newest_record: FIRST_RECORD,
        };
        Leading {
            lead: Lead::new(clock::mono(), job, merge.within(plan.limits(), &by.launcher), by),
            listener,
            ways: BTreeMap::new(),
            plan,
            meeting,
            office: Some(office),
        }
    }

    /// The next message of a follower or of the store.
    pub(super) async fn next(&mut self) -> ToLeader {
        tokio::select! {
            Some(event) = self.listener.events.recv() => ToLeader::Host(Box::new(event)),
            news = self.meeting.next() => ToLeader::Store(news),
        }
    }

    /// A connection that takes no more is given up; the follower makes another.
    fn send(&mut self, now: Mono, connection: Connection, down: Down) {
        if self.ways.get(&connection).is_some_and(|to| to.try_send(down).is_err()) {
            self.ways.remove(&connection);
            self.lead.gone(now, connection, "it does not read its messages".to_owned());
        }
    }
}

impl Launcher {
    /// Does what the leader wants to have done, until there is nothing left.
    pub(super) fn lead(&mut self, now: Mono) {
        self.carry_out_acts(now);
        if let Brain::Leading(leading) = &mut self.brain
            && leading.lead.is_feed_due(now)
        {
            self.feed();
            self.carry_out_acts(now);
        }
    }

    fn carry_out_acts(&mut self, now: Mono) {
        while let Brain::Leading(leading) = &mut self.brain {
            let Some(act) = leading.lead.next_act(now) else { return };
            self.carry_out_act(now, act);
        }
    }

    fn carry_out_act(&mut self, now: Mono, act: Act) {
        let Brain::Leading(leading) = &mut self.brain else { return };
        match act {
            Act::Send(connection, down) => leading.send(now, connection, down),
            Act::Close(connection) => drop(leading.ways.remove(&connection)),
            Act::Record(at, body) => self.publish_body(at, body),
            Act::Command(seat, command) => self.complete_command(seat, command),
            Act::Obey(command) => self.tasks.push_back(Task::Command(command)),
            Act::Local(order) => self.tasks.push_back(Task::Order(order)),
            Act::Store(number, mut record) => {
                record.at = clock::now();
                if let Some(office) = &leading.office {
                    office.write(number, &record);
                }
            }
            Act::Say(line) => self.terminal.say(line),
            Act::Campaign => {
                leading.office = None;
                leading.meeting.campaign();
            }
            Act::StepDown(why) => self.step_down(why),
            Act::Finished(attempt, rank) if attempt == self.attempt => {
                self.hangs.finished_elsewhere(rank, now);
            }
            Act::Seen(attempt, ranks) if attempt == self.attempt => self.hangs.seen_elsewhere(&ranks, now),
            Act::Finished(..) | Act::Seen(..) => {}
            Act::Meet { hosts, spares } => self.meet(&hosts, spares),
        }
    }

    /// Adds what only this launcher knows.
    fn complete_command(&mut self, seat: u32, command: Command) {
        let command = match command {
            Command::Stop { attempt, why, .. } => {
                Command::Stop { attempt, why, save_after: self.save_after() }
            }
            command => command,
        };
        if matches!(command, Command::Finish { .. }) {
            // A follower reads nothing that comes after it.
            let reader = self.board.reader();
            if let Brain::Leading(leading) = &mut self.brain {
                leading.lead.feed_all(|have, most| entries_after(&reader, have, most));
            }
        }
        if let Brain::Leading(leading) = &mut self.brain {
            leading.lead.command(seat, command);
        }
    }

    /// After which step all ranks save. Other hosts learn of it later than this one.
    fn save_after(&self) -> Option<u64> {
        save::after_step(&self.ranks, &self.pages).map(|step| step.saturating_add(1))
    }

    fn feed(&mut self) {
        let reader = self.board.reader();
        if let Brain::Leading(leading) = &mut self.brain {
            leading.lead.feed(|have, most| entries_after(&reader, have, most));
        }
    }

    /// A message of a follower.
    pub(super) fn hear_host(&mut self, event: FromHost) {
        let now = clock::mono();
        let Brain::Leading(leading) = &mut self.brain else { return };
        match event {
            FromHost::Joined { connection, join, to, .. } => {
                leading.ways.insert(connection, to);
                leading.lead.joined(now, connection, &join);
            }
            FromHost::Gone { connection, why } => {
                leading.ways.remove(&connection);
                leading.lead.gone(now, connection, why);
            }
            FromHost::Said { connection, at, up } => leading.lead.said(at, connection, up),
        }
        self.lead(now);
    }

    /// Followers that did not come back in time are lost.
    pub(super) fn look_at_hosts(&mut self) {
        let now = clock::mono();
        let Brain::Leading(leading) = &mut self.brain else { return };
        let silent = leading.meeting.silent_for().map(span);
        if leading.plan.limits().vary() {
            let pool = self.crew.checkpoint_pool.as_deref();
            leading.lead.keep_world(pool.is_some_and(world::is_kept));
        }
        leading.lead.look(now, silent);
        self.lead(now);
    }

    /// A save is due on the ranks of all hosts, after the same step.
    pub(super) fn save_is_due_everywhere(&mut self) {
        let Some(step) = self.save_after() else { return };
        let attempt = self.attempt;
        if let Brain::Leading(leading) = &mut self.brain {
            leading.lead.command_all(&Command::SaveDue { attempt, step });
        }
        self.carry_out_acts(clock::mono());
    }

    /// Another launcher leads, or this one is cut off: its ranks are stopped, and nothing more is decided here.
    fn step_down(&mut self, why: SteppedDown) {
        let Brain::Leading(leading) = &mut self.brain else { return };
        leading.office = None;
        leading.meeting.stand_down();
        let why = match why {
            SteppedDown::Ended { exit } => {
                self.terminal.say("another launcher has led the job to its end".to_owned());
                self.exit = Some(exit);
                return;
            }
            SteppedDown::Replaced { host, epoch } => format!("host {host} leads the job now (epoch {epoch})"),
            SteppedDown::LedMeanwhile => "another launcher has led the job meanwhile".to_owned(),
            SteppedDown::CutOff => {
                let (endpoint, lease) = (leading.plan.endpoint(), leading.plan.lease);
                format!("neither {endpoint} nor any other host has answered for {lease:?}")
            }
        };
        self.terminal.say(why);
        self.terminal.say("the ranks of this host are stopped: this launcher leads no more".to_owned());
        self.stop_and_hand_back();
    }

    /// Waits until all followers know that the job is over, or long enough.
    pub(super) async fn tell_the_end(&mut self) {
        self.feed();
        self.carry_out_acts(clock::mono());
        let until = tokio::time::Instant::now() + END_WITHIN;
        loop {
            let leading = match &mut self.brain {
                Brain::Leading(leading) => leading,
                Brain::Following(following) => return following.wait_for_the_end().await,
                Brain::Alone(_) | Brain::Gone => return,
            };
            // One that has no connection at this moment may come back for it.
            if !leading.lead.awaits_followers() {
                // Followers wait for that.
                leading.lead.close_all();
                return self.carry_out_acts(clock::mono());
            }
            match tokio::time::timeout_at(until, leading.next()).await {
                Ok(ToLeader::Host(event)) => self.hear_host(*event),
                Ok(ToLeader::Store(_)) => {}
                Err(_) => return,
            }
        }
    }
}
