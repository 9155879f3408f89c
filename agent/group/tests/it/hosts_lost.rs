//! Detection of lost hosts over simulated links: a dead host is detected soon, and a living host on a slow or lossy
//! link never counts as lost.

use mainstay_group::lost::{Judgement, LivenessMonitor};
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::protocol::ProbeResult;

use crate::support::cluster::Chance;

const LEASE: Span = Span::seconds(10);
const BEAT: u64 = 500;
const LOOK: u64 = 100;

/// A TCP link: delays in milliseconds, lost packets in 1000.
#[derive(Clone, Copy)]
struct Link {
    delay: u64,
    jitter: u64,
    lost: u64,
}

impl Link {
    fn takes(self, chance: &mut Chance) -> u64 {
        self.delay + chance.below(self.jitter as usize + 1) as u64
    }

    fn loses(self, chance: &mut Chance) -> bool {
        (chance.below(1000) as u64) < self.lost
    }

    /// The transit time of a message in ms. A lost packet is sent again after at least 200 ms, then after twice as
    /// long, but at the latest when the receiver has acknowledged three later packets without it.
    fn message(self, chance: &mut Chance) -> u64 {
        let mut wait = (200).max(4 * self.delay);
        let mut took = self.takes(chance);
        while self.loses(chance) {
            took += wait;
            wait = (wait * 2).min(3 * BEAT);
        }
        took
    }

    /// Whether a living launcher answers another one that checks it: six connections, 100 ms apart, 900 ms in all. A
    /// connection that loses a packet of its handshake waits for its retransmission.
    fn answers(self, chance: &mut Chance) -> bool {
        (0..6).any(|knock| {
            let round_trips: u64 = (0..4)
                .map(|at| {
                    let lost = self.loses(chance) || self.loses(chance);
                    // The first packet of a connection is sent again after a second.
                    let again = if at == 0 { 1000 } else { 200 };
                    self.takes(chance) + self.takes(chance) + if lost { again } else { 0 }
                })
                .sum();
            knock * 100 + round_trips < 900
        })
    }
}

/// Simulates a leader that looks every 100 ms at a host over `link` whose launcher ends at `dies`. Returns when the
/// host counts as lost, `None` if not before `until`, and how often others were asked to look. Times are in ms.
fn watch(link: Link, dies: Option<u64>, until: u64, chance: &mut Chance) -> (Option<u64>, u32) {
    let at = |millis: u64| Mono(0).after(Span::millis(millis));
    let mut vital = LivenessMonitor::expected(at(0), LEASE);
    vital.connects(at(0));
    let (mut sent, mut arrives, mut asked, mut looks) = (0, 0, None::<u64>, 0);
    for now in (LOOK..until).step_by(LOOK as usize) {
        while arrives <= now {
            if arrives > 0 {
                vital.beat(at(arrives));
            }
            sent += BEAT;
            if dies.is_some_and(|dies| sent > dies) {
                arrives = u64::MAX;
                break;
            }
            // TCP delivers in order: a late message delays the later ones.
            arrives = arrives.max(sent + link.message(chance));
        }
        match vital.judge(at(now), LEASE) {
            Judgement::Wait => {}
            Judgement::Look => {
                vital.asks(at(now), vec![0, 2, 3]);
                (asked, looks) = (Some(now), looks + 1);
            }
            Judgement::Lost => return (Some(now), looks),
        }
        if asked.is_some_and(|asked| now >= asked + 900) {
            asked = None;
            for looker in [0, 2, 3] {
                let lives = dies.is_none_or(|dies| now < dies);
                let answers = lives && link.answers(chance);
                vital.looked(looker, if answers { ProbeResult::Answers } else { ProbeResult::Silent });
            }
        }
    }
    (None, looks)
}

const GOOD: Link = Link { delay: 5, jitter: 1, lost: 0 };
/// Ten times as slow, and one packet in twenty is lost.
const BAD: Link = Link { delay: 50, jitter: 30, lost: 50 };

#[test]
fn no_living_host_on_a_slow_and_lossy_link_is_lost_in_25_days() {
    let mut looks = 0;
    for seed in 0..300 {
        let mut chance = Chance(seed);
        let (lost, asked) = watch(BAD, None, 2 * 3600 * 1000, &mut chance);
        assert_eq!(lost, None, "seed {seed}");
        looks += asked;
    }
    assert!(looks > 0, "suspicion alone is wrong at times");
}

#[test]
fn a_dead_host_is_lost_within_3_s_on_a_good_link_and_8_s_on_a_bad_one() {
    for seed in 0..300 {
        let mut chance = Chance(seed);
        let dies = 60_000 + chance.below(1000) as u64;
        for (link, within) in [(GOOD, 3_000), (BAD, 8_000)] {
            let (lost, _) = watch(link, Some(dies), dies + 60_000, &mut chance);
            let lost = lost.expect("it is lost");
            assert!(lost >= dies && lost < dies + within, "seed {seed}: {} ms", lost - dies);
        }
    }
}
