//! Heartbeats of a live host over links that lose packets, on a machine that stalls occasionally: how often the
//! leader judges the host lost, by the code of the core.
//!
//! A heartbeat is sent over TCP: a lost packet is sent again after 200 ms, then after twice as long each time, and
//! later data waits for it. A look is a connection, a handshake and an answer over the same links. Its limit, 900 ms,
//! is that of `launcher/group/streams/probe.rs`.

use std::collections::BTreeMap;

use mainstay_group::lost::{Judgement, LivenessMonitor, PROBERS};
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::protocol::ProbeResult;

use crate::random::Random;

const MS: u64 = 1_000_000;

/// How often followers send heartbeats, and how often the leader judges.
const BEATS_EVERY: u64 = 500 * MS;
const LOOKS_EVERY: u64 = 100 * MS;

/// The first retransmission timeout of TCP: on an established connection, and while connecting.
const RETRANSMISSION_TIMEOUT: u64 = 200 * MS;
const CONNECTS_AGAIN_AFTER: u64 = 1000 * MS;

/// The time limit of a look.
const PROBE_TIMEOUT: u64 = 900 * MS;

/// Round trips of a look after the connection: TLS, the proof of the token, and the answer.
const ROUND_TRIPS: usize = 3;

/// The lease of a launcher.
const LEASE: Span = Span::seconds(10);

/// The properties of a host and its link.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// The share of packets that are lost in each direction.
    pub loss: f32,
    /// The delay of a heartbeat: median in milliseconds, and the standard deviation of its logarithm.
    pub late: (f32, f32),
    /// Stalls of the machine: number per day, and mean duration in milliseconds. Both are exponentially distributed.
    pub stalls: (f32, f32),
}

/// Events in the simulated time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SilenceCounts {
    /// How often other hosts were asked to look.
    pub suspected: u64,
    /// How often the host was judged lost.
    pub lost: u64,
}

/// Simulates a host of this kind for `hours` hours.
pub fn watch(kind: Kind, hours: u64, seed: u64) -> SilenceCounts {
    let mut host = Host::new(kind, seed);
    let until = hours * 3_600_000 * MS;
    while host.now < until {
        host.look();
    }
    host.seen
}

struct Host {
    kind: Kind,
    random: Random,
    vital: LivenessMonitor,
    now: u64,
    /// The time at which the next heartbeat is due, and the arrival time of the one before.
    due: u64,
    arrives: u64,
    stands_still: (u64, u64),
    answers: BTreeMap<u64, (u32, ProbeResult)>,
    seen: SilenceCounts,
}

impl Host {
    fn new(kind: Kind, seed: u64) -> Host {
        let mut vital = LivenessMonitor::expected(Mono(0), LEASE);
        vital.connects(Mono(0));
        let random = Random::new(seed);
        let mut host = Host {
            kind,
            random,
            vital,
            now: 0,
            due: 0,
            arrives: 0,
            stands_still: (0, 0),
            answers: BTreeMap::new(),
            seen: SilenceCounts::default(),
        };
        host.next_stall();
        host.next_beat();
        host
    }

    fn exponential(&mut self, mean: f64) -> u64 {
        (-mean * f64::from(1.0 - self.random.unit()).ln()) as u64
    }

    fn next_stall(&mut self) {
        let (a_day, mean) = self.kind.stalls;
        let apart = 86_400_000.0 * MS as f64 / f64::from(a_day).max(1e-9);
        let starts = self.stands_still.1 + self.exponential(apart);
        let took = self.exponential(f64::from(mean) * MS as f64);
        self.stands_still = (starts, starts + took);
    }

    /// The time at which work of the host at `at` is done: after a stall, if one is in progress.
    fn done(&mut self, at: u64) -> u64 {
        while self.stands_still.1 <= self.now {
            self.next_stall();
        }
        let (starts, ends) = self.stands_still;
        if (starts..ends).contains(&at) { ends } else { at }
    }

    /// The time that a message takes if a lost one is sent again after `first`, then after twice as long each time.
    fn way(&mut self, first: u64) -> u64 {
        let (mut took, mut again) = (MS / 2, first);
        while self.random.happens(self.kind.loss) {
            took += again;
            again *= 2;
        }
        took
    }

    fn next_beat(&mut self) {
        let (median, deviation) = self.kind.late;
        let late = f64::from(median) * f64::from(deviation * self.random.normals().0).exp();
        let sent = self.done(self.due + (late * MS as f64) as u64);
        self.due = sent.max(self.due) + BEATS_EVERY;
        // Later data waits for a lost packet.
        self.arrives = (sent + self.way(RETRANSMISSION_TIMEOUT)).max(self.arrives + 1);
    }

    fn look(&mut self) {
        self.now += LOOKS_EVERY;
        while self.arrives <= self.now {
            self.vital.beat(Mono(self.arrives));
            self.next_beat();
        }
        while let Some(first) = self.answers.first_entry().filter(|first| *first.key() <= self.now) {
            let (by, sight) = first.remove();
            self.vital.looked(by, sight);
        }
        match self.vital.judge(Mono(self.now), LEASE) {
            Judgement::Wait => {}
            Judgement::Look => {
                self.seen.suspected += 1;
                let asked: Vec<u32> = (0..=PROBERS as u32).collect();
                self.vital.asks(Mono(self.now), asked.clone());
                self.answers.clear();
                for by in asked {
                    let (sight, took) = self.sight();
                    // No two answers have the same time.
                    self.answers.insert(self.now + took + u64::from(by), (by, sight));
                }
            }
            Judgement::Lost => {
                self.seen.lost += 1;
                // Continue as if with another host.
                self.vital.connects(Mono(self.now));
            }
        }
    }

    /// The result of a look at the host now, and the time that the look takes.
    fn sight(&mut self) -> (ProbeResult, u64) {
        // There and back. The kernel answers even while the launcher is stalled.
        let mut took = self.way(CONNECTS_AGAIN_AFTER) + self.way(CONNECTS_AGAIN_AFTER);
        if took > PROBE_TIMEOUT {
            return (ProbeResult::Silent, PROBE_TIMEOUT);
        }
        let begin = self.now;
        for _ in 0..ROUND_TRIPS {
            took += self.way(RETRANSMISSION_TIMEOUT);
            took = self.done(begin + took) - begin + self.way(RETRANSMISSION_TIMEOUT);
        }
        if took > PROBE_TIMEOUT {
            (ProbeResult::Accepts, PROBE_TIMEOUT)
        } else {
            (ProbeResult::Answers, took)
        }
    }
}
