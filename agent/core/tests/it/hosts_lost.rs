//! When a host is lost, over simulated links: never on a link that is slow or loses packets, and soon when it is true.

use mainstay_core::base::time::{Mono, Span};
use mainstay_core::recovery::hosts::lost::{Judgement, Sight, Vital};

use crate::support::cluster::Chance;

const LEASE: Span = Span::seconds(10);
const BEAT: u64 = 500;
const LOOK: u64 = 100;

/// A link of TCP, in milliseconds and packets lost of 1000.
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

    /// How long a message is on its way: a lost packet is sent again after 200 ms at least, then after twice as long, but at the
    /// latest when the receiver has acknowledged three later ones without it.
    fn message(self, chance: &mut Chance) -> u64 {
        let mut wait = (200).max(4 * self.delay);
        let mut took = self.takes(chance);
        while self.loses(chance) {
            took += wait;
            wait = (wait * 2).min(3 * BEAT);
        }
        took
    }

    /// Whether a launcher that lives answers one that looks: six connections, 100 ms apart, 900 ms in all. One that loses a
    /// packet of its greeting has to wait for it.
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

/// What a leader that looks every 100 ms sees of a host over `link`, whose launcher ends at `dies`. When it is lost, at most
/// within so many milliseconds; and how often others were asked to look.
fn watch(link: Link, dies: Option<u64>, until: u64, chance: &mut Chance) -> (Option<u64>, u32) {
    let at = |millis: u64| Mono(0).after(Span::millis(millis));
    let mut vital = Vital::expected(at(0), LEASE);
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
            // In order: a late one holds up those behind it.
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
                vital.looked(looker, if answers { Sight::Answers } else { Sight::Silent });
            }
        }
    }
    (None, looks)
}

const GOOD: Link = Link { delay: 5, jitter: 1, lost: 0 };
/// Ten times as slow, and one packet of twenty is lost.
const BAD: Link = Link { delay: 50, jitter: 30, lost: 50 };

#[test]
fn no_host_on_a_slow_link_that_loses_packets_is_lost_in_a_month() {
    let mut looks = 0;
    for seed in 0..300 {
        let mut chance = Chance(seed);
        let (lost, asked) = watch(BAD, None, 2 * 3600 * 1000, &mut chance);
        assert_eq!(lost, None, "seed {seed}");
        looks += asked;
    }
    assert!(looks > 0, "suspicion alone would have been wrong at times");
}

#[test]
fn a_host_that_dies_is_lost_within_three_seconds_on_a_good_link_and_within_eight_on_a_bad_one() {
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
