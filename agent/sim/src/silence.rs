//! Beats of a host that lives, over links that lose packets, on machines that stand still now and then: how often its leader
//! takes it for lost, by the core's own judgement.
//!
//! A beat travels over TCP: a lost packet is sent again after 200 ms, then after twice as long each time, and what comes after it
//! waits. A look is a connection, a handshake and an answer over the same links; it has 900 ms, as `hosts/look.rs` gives it.

use std::collections::BTreeMap;

use mainstay_core::base::time::{Mono, Span};
use mainstay_core::recovery::hosts::lost::{Judgement, LOOKERS, Sight, Vital};

use crate::random::Random;

const MS: u64 = 1_000_000;

/// How often followers beat, and how often the leader judges.
const BEATS_EVERY: u64 = 500 * MS;
const LOOKS_EVERY: u64 = 100 * MS;

/// The first time after which TCP sends again: established, and for a connection that is being made.
const AGAIN_AFTER: u64 = 200 * MS;
const CONNECTS_AGAIN_AFTER: u64 = 1000 * MS;

/// How long a look waits.
const LOOK_WITHIN: u64 = 900 * MS;

/// Round trips of a look after the connection: TLS, the proof of the token, and the answer.
const ROUND_TRIPS: usize = 3;

/// The lease of launchers.
const LEASE: Span = Span::seconds(10);

/// What a host and its link are like.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// The share of packets that are lost, in each direction.
    pub loss: f32,
    /// How late a beat is sent, in milliseconds: median, and the standard deviation of the logarithm.
    pub late: (f32, f32),
    /// Times a day in which the machine stands still, and for how long on average, in milliseconds; exponentially distributed.
    pub stalls: (f32, f32),
}

/// What happened in some time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// How often others were asked to look.
    pub suspected: u64,
    /// How often it was taken for lost.
    pub lost: u64,
}

/// Lets a host of this kind beat for so many hours.
pub fn watch(kind: Kind, hours: u64, seed: u64) -> Seen {
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
    vital: Vital,
    now: u64,
    /// When the next beat is due to be sent, and the one before arrived or will arrive.
    due: u64,
    arrives: u64,
    stands_still: (u64, u64),
    answers: BTreeMap<u64, (u32, Sight)>,
    seen: Seen,
}

impl Host {
    fn new(kind: Kind, seed: u64) -> Host {
        let mut vital = Vital::expected(Mono(0), LEASE);
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
            seen: Seen::default(),
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

    /// When what the host wants to do then is done.
    fn done(&mut self, at: u64) -> u64 {
        while self.stands_still.1 <= self.now {
            self.next_stall();
        }
        let (starts, ends) = self.stands_still;
        if (starts..ends).contains(&at) { ends } else { at }
    }

    /// How long a message takes, when a lost one is sent again after this, then after twice as long.
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
        // What comes after a lost packet waits for it.
        self.arrives = (sent + self.way(AGAIN_AFTER)).max(self.arrives + 1);
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
                let asked: Vec<u32> = (0..=LOOKERS as u32).collect();
                self.vital.asks(Mono(self.now), asked.clone());
                self.answers.clear();
                for by in asked {
                    let (sight, took) = self.sight();
                    // No two at the same time.
                    self.answers.insert(self.now + took + u64::from(by), (by, sight));
                }
            }
            Judgement::Lost => {
                self.seen.lost += 1;
                // Another host, as far as that is asked.
                self.vital.connects(Mono(self.now));
            }
        }
    }

    /// What one finds that looks at the host now, and how long that takes.
    fn sight(&mut self) -> (Sight, u64) {
        // There and back; the kernel answers also while the launcher stands still.
        let mut took = self.way(CONNECTS_AGAIN_AFTER) + self.way(CONNECTS_AGAIN_AFTER);
        if took > LOOK_WITHIN {
            return (Sight::Silent, LOOK_WITHIN);
        }
        let begin = self.now;
        for _ in 0..ROUND_TRIPS {
            took += self.way(AGAIN_AFTER);
            took = self.done(begin + took) - begin + self.way(AGAIN_AFTER);
        }
        if took > LOOK_WITHIN { (Sight::Accepts, LOOK_WITHIN) } else { (Sight::Answers, took) }
    }
}
