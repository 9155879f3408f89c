//! Machines and the connections between their launchers, with faults: messages are late, held up in one direction,
//! repeated, or lost with their connection. They stay in order, as with TCP.

use std::collections::VecDeque;

use mainstay_group::wire::{Down, Up};
use mainstay_model::time::Mono;
use mainstay_recovery::protocol::ProbeResult;

use super::{Happening, MS, SECOND, Time, World};

/// A connection on which nothing was received for this time is closed.
const SILENT_FOR: Time = 10 * SECOND;

/// The timeout of a connection attempt to a machine that does not answer.
const CONNECTED_WITHIN: Time = 3 * SECOND;

/// The number of the store among the machines.
pub const STORE: usize = usize::MAX;

pub struct Machine {
    /// Whether it has power.
    pub up: bool,
    /// It does nothing until this time.
    pub stalled: Time,
    /// The reading of its clock at time 0 in nanoseconds, and how much too fast the clock runs, in parts per million.
    pub offset: u64,
    pub drift: i64,
    /// The launcher that runs on it, or the last one that did.
    pub launcher: usize,
}

impl Machine {
    pub fn clock(&self, now: Time) -> Mono {
        let drifted = i128::from(now) * i128::from(self.drift) / 1_000_000;
        Mono(u64::try_from(i128::from(self.offset) + i128::from(now) + drifted).expect("small"))
    }
}

/// One direction of a connection.
pub struct Way<T> {
    waiting: VecDeque<T>,
    /// When the newest message arrives. No later message overtakes it.
    last: Time,
}

impl<T> Default for Way<T> {
    fn default() -> Way<T> {
        Way { waiting: VecDeque::new(), last: 0 }
    }
}

#[derive(Clone)]
pub enum Wire<T> {
    Message(T),
    End,
}

pub struct Connection {
    pub follower: usize,
    pub leader: usize,
    pub up: Way<Wire<Up>>,
    pub down: Way<Wire<Down>>,
    /// Whether each end regards it as open, and when it last received a message.
    pub follower_open: bool,
    pub leader_open: bool,
    pub follower_received: Time,
    pub leader_received: Time,
}

impl World {
    pub fn passes(&self, from: usize, to: usize) -> bool {
        !self.blocked.contains(&(from, to))
    }

    fn latency(&mut self) -> Time {
        if self.faults && self.chance.one_in(40) {
            return MS * (20 + self.chance.below(1500) as Time);
        }
        MS / 10 + MS * self.chance.below(5) as Time
    }

    pub fn after_a_while(&mut self) -> Time {
        self.now + self.latency()
    }

    /// A launcher connects to another one. The answer arrives later.
    pub fn connect(&mut self, follower: usize, leader: usize) {
        let (from, to) = (self.launchers[follower].machine, self.launchers[leader].machine);
        let reached = self.passes(from, to) && self.passes(to, from) && self.machines[to].up;
        let reached = reached && self.machines[to].stalled <= self.now;
        if !reached {
            self.at(
                self.now + CONNECTED_WITHIN,
                Happening::NotConnected { follower, leader, refused: false },
            );
        } else if !self.launchers[leader].listens() {
            let at = self.after_a_while();
            self.at(at, Happening::NotConnected { follower, leader, refused: true });
        } else {
            let at = self.after_a_while();
            self.at(at, Happening::Connected { follower, leader });
        }
    }

    /// The result when a launcher checks another one.
    pub fn sight(&self, from: usize, of: usize) -> ProbeResult {
        let (near, far) = (self.launchers[from].machine, self.launchers[of].machine);
        let there = self.passes(near, far) && self.passes(far, near) && self.machines[far].up;
        match () {
            () if !there => ProbeResult::Silent,
            () if self.machines[far].stalled > self.now => ProbeResult::Accepts,
            () if self.launchers[of].listens() => ProbeResult::Answers,
            () => ProbeResult::Refuses,
        }
    }

    pub fn connected(&mut self, follower: usize, leader: usize) {
        if !self.launchers[follower].wants(leader) {
            return;
        }
        if !self.launchers[leader].listens() {
            return self.lost_leader(follower, "the leader has gone", true);
        }
        self.newest_connection += 1;
        let number = self.newest_connection;
        let now = self.now;
        let connection = Connection {
            follower,
            leader,
            up: Way::default(),
            down: Way::default(),
            follower_open: true,
            leader_open: true,
            follower_received: now,
            leader_received: now,
        };
        self.connections.insert(number, connection);
        self.launchers[follower].connection = Some(number);
        let join = self.launchers[follower].join();
        self.send_up(number, Wire::Message(Up::Join(join)));
        self.opened(follower);
    }

    pub fn send_up(&mut self, number: u64, wire: Wire<Up>) {
        let mut at = self.after_a_while();
        let again = self.faults && self.chance.one_in(60) && repeats_up(&wire);
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if again {
            connection.up.waiting.push_back(wire.clone());
        }
        connection.up.waiting.push_back(wire);
        at = at.max(connection.up.last);
        connection.up.last = at;
        self.at(at, Happening::Up(number));
        if again {
            self.at(at, Happening::Up(number));
        }
    }

    pub fn send_down(&mut self, number: u64, wire: Wire<Down>) {
        let mut at = self.after_a_while();
        let again = self.faults && self.chance.one_in(60) && repeats_down(&wire);
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if again {
            connection.down.waiting.push_back(wire.clone());
        }
        connection.down.waiting.push_back(wire);
        at = at.max(connection.down.last);
        connection.down.last = at;
        self.at(at, Happening::Down(number));
        if again {
            self.at(at, Happening::Down(number));
        }
    }

    pub fn arrives_up(&mut self, number: u64) {
        let Some(connection) = self.connections.get(&number) else { return };
        let (from, to) = (connection.follower, connection.leader);
        if !self.reaches(from, to, Happening::Up(number)) {
            return;
        }
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let Some(wire) = connection.up.waiting.pop_front() else { return };
        if !connection.leader_open || !self.launchers[to].runs() {
            return;
        }
        connection.leader_received = now;
        match wire {
            Wire::Message(up) => self.heard_from_follower(to, number, up),
            Wire::End => {
                connection.leader_open = false;
                self.follower_gone(to, number, "the connection was closed by the other side");
            }
        }
    }

    pub fn arrives_down(&mut self, number: u64) {
        let Some(connection) = self.connections.get(&number) else { return };
        let (from, to) = (connection.leader, connection.follower);
        if !self.reaches(from, to, Happening::Down(number)) {
            return;
        }
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let Some(wire) = connection.down.waiting.pop_front() else { return };
        let current = self.launchers[to].connection == Some(number);
        if !connection.follower_open || !self.launchers[to].runs() || !current {
            return;
        }
        connection.follower_received = now;
        match wire {
            Wire::Message(down) => self.heard_from_leader(to, down),
            Wire::End => {
                connection.follower_open = false;
                self.launchers[to].connection = None;
                self.lost_leader(to, "the connection was closed by the other side", false);
            }
        }
    }

    /// Whether a message passes now. If it is held up, it is delivered when the stall or the block ends.
    fn reaches(&mut self, from: usize, to: usize, event: Happening) -> bool {
        let (from, to) = (self.launchers[from].machine, self.launchers[to].machine);
        let stalled = self.machines[to].stalled;
        if stalled > self.now {
            self.at(stalled, event);
            return false;
        }
        if !self.passes(from, to) {
            self.held_up.push(event);
            return false;
        }
        self.machines[to].up
    }

    /// The follower closes the connection.
    pub fn end_as_follower(&mut self, number: u64) {
        if let Some(connection) = self.connections.get_mut(&number)
            && std::mem::take(&mut connection.follower_open)
        {
            self.send_up(number, Wire::End);
        }
    }

    /// The leader closes the connection.
    pub fn end_as_leader(&mut self, number: u64) {
        if let Some(connection) = self.connections.get_mut(&number)
            && std::mem::take(&mut connection.leader_open)
        {
            self.send_down(number, Wire::End);
        }
    }

    /// Ends all connections of a launcher that exited. The kernel of its machine notifies the peers if it has power.
    pub fn end_all_of(&mut self, launcher: usize) {
        let of = |connection: &Connection| connection.follower == launcher || connection.leader == launcher;
        let all: Vec<u64> =
            self.connections.iter().filter(|(_, c)| of(c)).map(|(number, _)| *number).collect();
        let matches_stderr = self.machines[self.launchers[launcher].machine].up;
        for number in all {
            let connection = self.connections.get_mut(&number).expect("listed");
            match connection.follower == launcher {
                true if matches_stderr => self.end_as_follower(number),
                true => connection.follower_open = false,
                false if matches_stderr => self.end_as_leader(number),
                false => connection.leader_open = false,
            }
        }
    }

    /// Closes connections on which this launcher has received nothing for too long.
    pub fn look_at_connections(&mut self, launcher: usize) {
        let now = self.now;
        let silent = |received: Time| now.saturating_sub(received) >= SILENT_FOR;
        let mut as_follower = None;
        let mut as_leader = Vec::new();
        for (number, connection) in &self.connections {
            if connection.follower == launcher
                && connection.follower_open
                && silent(connection.follower_received)
            {
                as_follower = Some(*number);
            }
            if connection.leader == launcher && connection.leader_open && silent(connection.leader_received) {
                as_leader.push(*number);
            }
        }
        if let Some(number) = as_follower {
            self.end_as_follower(number);
            if self.launchers[launcher].connection == Some(number) {
                self.launchers[launcher].connection = None;
                self.lost_leader(launcher, "no answer within 10 s", false);
            }
        }
        for number in as_leader {
            self.end_as_leader(number);
            self.follower_gone(launcher, number, "no answer within 10 s");
        }
        self.connections.retain(|_, connection| connection.follower_open || connection.leader_open);
    }
}

/// Messages that may arrive twice: numbered ones, and those that a newer message of the same kind replaces.
fn repeats_up(wire: &Wire<Up>) -> bool {
    matches!(wire, Wire::Message(Up::Event { .. } | Up::Received { .. }))
}

fn repeats_down(wire: &Wire<Down>) -> bool {
    matches!(wire, Wire::Message(Down::Command { .. } | Down::Received { .. } | Down::Entry { .. }))
}
