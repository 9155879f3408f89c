//! The network between the leader and its followers: sizes, speed and latency of each message.

use mainstay_group::wire::{Down, Message, Up};
use mainstay_model::time::Mono;
use mainstay_recovery::protocol::{Command, Event};

use super::follower::FollowerReport;
use super::{Crowd, Happening, STEPS_EVERY, messages};

impl Crowd {
    /// Sends a message to a follower.
    pub(super) fn down(&mut self, at: u64, host: usize, down: Down) {
        self.buffer.clear();
        let _ = down.write(&mut self.buffer);
        let bytes = self.buffer.len() as u64 + 4;
        self.counts.sent = (self.counts.sent.0 + 1, self.counts.sent.1 + bytes);
        self.counts.longest = self.counts.longest.max(bytes);
        self.sends = self.sends.max(at) + (bytes as f64 / self.plan.bytes_per_second * 1e9) as u64;
        if let Down::Command { number, command, .. } = down {
            let arrives = self.sends + self.plan.latency;
            self.starts(arrives, &command);
            let mut ack = Vec::new();
            let _ = Up::Received { number }.write(&mut ack);
            self.arrives(arrives, host, ack);
            for answer in self.followers[host].obey(&command) {
                self.at(arrives + self.plan.host, Happening::Answered(host, answer));
            }
        }
    }

    /// Notes that a host has a command of a phase. After the last start command the ranks train.
    pub(super) fn starts(&mut self, at: u64, command: &Command) {
        let phase = match command {
            Command::Stop { .. } => "stop",
            Command::Seat { .. } => "seat",
            Command::Open { .. } => "open",
            Command::Gather { .. } => "gather",
            Command::Bring { .. } => "bring",
            Command::Start { .. } => "start",
            _ => return,
        };
        match self.phases.last_mut() {
            Some((last, when)) if *last == phase => *when = (*when).max(at),
            _ => self.phases.push((phase, at)),
        }
        let Command::Start { attempt, .. } = command else { return };
        if self.reported.0 != *attempt {
            self.reported = (*attempt, 0, 0);
        }
        self.reported = (*attempt, self.reported.1 + 1, self.reported.2.max(at));
        if self.reported.1 == self.plan.hosts {
            self.started.insert(*attempt, self.reported.2);
            self.trains = true;
            self.hangs.begin_attempt(*attempt, Mono(at));
        }
    }

    /// Handles a message of a follower.
    pub(super) fn receive(&mut self, host: usize, bytes: &[u8]) {
        let Ok(up) = Up::read(bytes) else { return };
        let (at, connection) = (self.busy, host as u64);
        if let Up::Beat { sent } = up {
            self.down(at, host, Down::Beat { sent, at: Mono(at) });
        }
        self.lead.receive(Mono(at), connection, up);
    }

    /// Sends a message of a follower.
    pub(super) fn up(&mut self, host: usize, up: &Up) {
        let mut bytes = Vec::new();
        let _ = up.write(&mut bytes);
        self.arrives(self.now, host, bytes);
    }

    fn arrives(&mut self, sent: u64, host: usize, bytes: Vec<u8>) {
        let length = bytes.len() as u64 + 4;
        self.counts.received = (self.counts.received.0 + 1, self.counts.received.1 + length);
        let jitter = self.below(self.plan.latency / 4 + 1);
        let came = self.receives.max(sent + self.plan.latency + jitter);
        self.receives = came + (length as f64 / self.plan.bytes_per_second * 1e9) as u64;
        // Messages of one connection stay in order.
        let at = self.receives.max(self.followers[host].last + 1);
        self.followers[host].last = at;
        self.at(at, Happening::Up(host, bytes));
    }

    pub(super) fn answer(&mut self, host: usize, answer: FollowerReport) {
        let at = Mono(self.now);
        for event in self.events_of(host, answer) {
            let number = self.followers[host].next_number();
            self.up(host, &Up::Event { number, at, event });
        }
    }

    pub(super) fn mine(&mut self, answer: FollowerReport) {
        for event in self.events_of(0, answer) {
            self.work(|crowd| crowd.lead.step(Mono(crowd.busy), event));
        }
    }

    fn events_of(&self, host: usize, answer: FollowerReport) -> Vec<Event> {
        messages::events(&self.plan, &self.followers[host], answer)
    }

    pub(super) fn stepped(&mut self, host: usize) {
        if !self.trains || !self.runs() {
            return;
        }
        let (step, attempt) = (self.now / STEPS_EVERY, self.lead.merge().attempt());
        let done = vec![messages::step(self.now, step)];
        let ranks = self.followers[host].ranks().map(|rank| (rank, done.clone())).collect();
        let event = Event::Steps { attempt, ranks };
        if host == 0 {
            return self.work(|crowd| crowd.lead.step(Mono(crowd.busy), event));
        }
        let number = self.followers[host].next_number();
        self.up(host, &Up::Event { number, at: Mono(self.now), event });
    }

    pub(super) fn seen(&mut self, host: usize) {
        if !self.trains || !self.runs() {
            return;
        }
        let attempt = self.lead.merge().attempt();
        let (now, ranks) = (self.now, self.followers[host].ranks());
        let ranks = ranks.map(|rank| messages::seen(now, rank, STEPS_EVERY)).collect();
        if host > 0 {
            self.up(host, &Up::Seen { attempt, ranks });
        }
    }
}
