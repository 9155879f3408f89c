//! A launcher that leads carries out the decisions for all hosts.

use mainstay_group::lead::{Act, SteppedDown};
use mainstay_group::wire::Command;
use mainstay_model::time::Mono;
use mainstay_tier::pool::world;

use super::{END_WITHIN, Remote, ToLeader, entries_after};
use crate::hosts::listen::FromHost;
use crate::launch::decider::{Decider, Task};
use crate::launch::event_loop::Launcher;
use crate::launch::hosts::span;
use crate::launch::save;
use mainstay_sys::clock;

impl Launcher {
    /// Carries out what the leader wants, until nothing is left.
    pub(in crate::launch) fn lead(&mut self, now: Mono) {
        self.carry_out_acts(now);
        if let Decider::Leading(leading) = &mut self.decider
            && leading.remote.is_some()
            && leading.lead.is_feed_due(now)
        {
            self.feed();
            self.carry_out_acts(now);
        }
    }

    fn carry_out_acts(&mut self, now: Mono) {
        while let Decider::Leading(leading) = &mut self.decider {
            let Some(act) = leading.lead.next_act(now) else { return };
            self.carry_out_act(now, act);
        }
    }

    fn carry_out_act(&mut self, now: Mono, act: Act) {
        let Decider::Leading(leading) = &mut self.decider else { return };
        match act {
            Act::Send(connection, down) => leading.send(now, connection, down),
            Act::Close(connection) => {
                leading.remote.as_mut().and_then(|remote| remote.ways.remove(&connection));
            }
            Act::Record(at, body) => self.publish_body(at, body),
            Act::Command(seat, command) => self.complete_command(seat, command),
            Act::Obey(command) => self.tasks.push_back(Task::Command(command)),
            Act::Local(order) => self.tasks.push_back(Task::Order(order)),
            Act::Store(number, mut record) => {
                record.at = clock::now();
                let writer = leading.remote.as_ref().and_then(|remote| remote.record_writer.as_ref());
                writer.inspect(|writer| writer.write(number, &record));
            }
            Act::Print(line) => self.terminal.print(line),
            Act::Campaign => {
                if let Some(remote) = &mut leading.remote {
                    remote.record_writer = None;
                    remote.store_session.campaign();
                }
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
            Command::Stop { attempt, why, .. } if why.lets_save() => {
                Command::Stop { attempt, why, save_after: self.save_after() }
            }
            Command::AskToSave { attempt, .. } => {
                Command::AskToSave { attempt, save_after: self.save_after() }
            }
            command => command,
        };
        if matches!(command, Command::Finish { .. }) {
            // A follower reads nothing that comes after it.
            let reader = self.snapshots.reader();
            if let Decider::Leading(leading) = &mut self.decider {
                leading.lead.feed_all(|have, most| entries_after(&reader, have, most));
            }
        }
        if let Decider::Leading(leading) = &mut self.decider {
            leading.lead.command(seat, command);
        }
    }

    /// The step after which all ranks save.
    fn save_after(&self) -> Option<u64> {
        // Other hosts learn of it later than this one.
        let later = u64::from(self.decider.has_other_hosts());
        save::after_step(&self.ranks, &self.pages).map(|step| step.saturating_add(later))
    }

    fn feed(&mut self) {
        let reader = self.snapshots.reader();
        if let Decider::Leading(leading) = &mut self.decider {
            leading.lead.feed(|have, most| entries_after(&reader, have, most));
        }
    }

    /// Processes a message of a follower.
    pub(in crate::launch) fn host_reported(&mut self, event: FromHost) {
        let now = clock::mono();
        let Decider::Leading(leading) = &mut self.decider else { return };
        let Some(Remote { ways, .. }) = &mut leading.remote else { return };
        match event {
            FromHost::Joined { connection, join, to, .. } => {
                ways.insert(connection, to);
                leading.lead.joined(now, connection, &join);
            }
            FromHost::Gone { connection, why } => {
                ways.remove(&connection);
                leading.lead.gone(now, connection, why);
            }
            FromHost::Received { connection, at, up } => leading.lead.receive(at, connection, up),
        }
        self.lead(now);
    }

    /// Marks followers that did not come back in time as lost.
    pub(in crate::launch) fn look_at_hosts(&mut self) {
        let now = clock::mono();
        let Decider::Leading(leading) = &mut self.decider else { return };
        let Some(remote) = &mut leading.remote else { return };
        let silent = remote.store_session.silent_for().map(span);
        if remote.plan.limits().vary() {
            let pool = self.rank_spec.checkpoint_pool.as_deref();
            leading.lead.keep_world(pool.is_some_and(world::is_kept));
        }
        leading.lead.look(now, silent);
        self.lead(now);
    }

    /// A save is due on the ranks of all hosts, after the same step.
    pub(in crate::launch) fn save_is_due_everywhere(&mut self) {
        let Some(step) = self.save_after() else { return };
        let attempt = self.attempt;
        if let Decider::Leading(leading) = &mut self.decider {
            leading.lead.command_all(&Command::SaveDue { attempt, step });
        }
        self.carry_out_acts(clock::mono());
    }

    /// Another launcher leads, or this one is cut off: its ranks are stopped, and nothing more is decided here.
    fn step_down(&mut self, why: SteppedDown) {
        let Decider::Leading(leading) = &mut self.decider else { return };
        let Some(remote) = &mut leading.remote else { return };
        remote.record_writer = None;
        remote.store_session.stand_down();
        let why = match why {
            SteppedDown::Ended { exit } => {
                self.terminal.print("another launcher has led the job to its end".to_owned());
                self.exit = Some(exit);
                return;
            }
            SteppedDown::Replaced { host, epoch } => format!("host {host} leads the job now (epoch {epoch})"),
            SteppedDown::LedMeanwhile => "another launcher has led the job meanwhile".to_owned(),
            SteppedDown::CutOff => {
                let (endpoint, lease) = (remote.plan.endpoint(), remote.plan.lease);
                format!("neither {endpoint} nor any other host has answered for {lease:?}")
            }
        };
        self.terminal.print(why);
        self.terminal
            .print("the ranks of this host are stopped: this launcher no longer leads the job".to_owned());
        self.stop_and_hand_back();
    }

    /// Waits until all followers know that the job is over, or long enough.
    pub(in crate::launch) async fn announce_end(&mut self) {
        if !self.decider.has_other_hosts() {
            return;
        }
        self.feed();
        self.carry_out_acts(clock::mono());
        let until = tokio::time::Instant::now() + END_WITHIN;
        loop {
            let leading = match &mut self.decider {
                Decider::Leading(leading) => leading,
                Decider::Following(following) => return following.wait_for_the_end().await,
                Decider::Gone => return,
            };
            // One that has no connection now may reconnect for it.
            if !leading.lead.awaits_followers() {
                // Followers wait for that.
                leading.lead.close_all();
                return self.carry_out_acts(clock::mono());
            }
            match tokio::time::timeout_at(until, leading.next()).await {
                Ok(ToLeader::Host(event)) => self.host_reported(*event),
                Ok(ToLeader::Store(_)) => {}
                Err(_) => return,
            }
        }
    }
}
