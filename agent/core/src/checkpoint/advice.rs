//! How often a job had better save, by what its own books say: what a save cost, how often it failed, how long it took to go on.

use serde::{Deserialize, Serialize};

use crate::checkpoint::interval::{Cost, advise, cost, rate};
use crate::checkpoint::tiers::Tier;
use crate::model::entry::Fact;
use crate::model::observation::Observation;
use crate::progress::goodput::{TimeAccounting, TimeCategory};

/// Before it has failed, a job is believed to fail about once a day.
const GUESS_S: f64 = 86_400.0;

/// Fewer saves than these say little of what one costs.
const FEWEST: u64 = 3;

/// No job is advised to save more often: where a save costs nothing that can be measured, something else limits it.
const MOST_OFTEN_S: f64 = 1.0;

/// So long after the last one a save is due while nothing is advised yet: a few are needed to know what one costs.
const UNTIL_KNOWN_S: f64 = 60.0;

/// Advice that differs by less from what was told before is not told again.
const REPORTED_AGAIN: f64 = 0.2;

/// The component and the word under which a job's journal has its advice.
const COMPONENT: &str = "checkpoint";
const ADVISED: &str = "interval_advised";

/// What is advised, with what it rests on. All in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Advised {
    /// From one save to the next.
    pub every: f64,
    /// From one save to the next as it was.
    pub was: f64,
    /// For how long training stood still for one save.
    pub stall: f64,
    /// From one failure to the next; with a guess of one a day that weighs like one failure.
    pub between_failures: f64,
    /// From the start of the processes until training went on.
    pub restore: f64,
    /// The share of all time that saves, repeated work and restores then cost, from 0 to 1.
    pub cost: f64,
    /// The same as it was.
    pub cost_was: f64,
}

impl Advised {
    /// In one line.
    pub fn reported(&self) -> String {
        let Advised { every, was, stall, between_failures, cost, cost_was, .. } = self;
        format!(
            "a save stood training still for {stall:.2} s, and a failure is expected each {between_failures:.0} s: saving every \
             {every:.0} s costs least ({:.2} % of all time; every {was:.0} s, as it was, {:.2} %)",
            cost * 100.0,
            cost_was * 100.0
        )
    }

    /// Whether it differs enough from what was told before.
    pub fn is_news_after(&self, reported: Option<&Advised>) -> bool {
        reported.is_none_or(|reported| (self.every - reported.every).abs() > REPORTED_AGAIN * reported.every)
    }

    /// As a job's journal has it.
    pub fn fact(&self) -> Fact {
        let values = self.fields().map(|(name, value)| (name.to_owned(), value.to_string()));
        Fact::Observed(Observation {
            component: COMPONENT.to_owned(),
            event: ADVISED.to_owned(),
            detail: self.reported(),
            values: values.into(),
            ..Observation::default()
        })
    }

    /// What [`fact`](Self::fact) wrote; none if it is about something else, or by a version that wrote it otherwise.
    pub fn read(seen: &Observation) -> Option<Advised> {
        if seen.component != COMPONENT || seen.event != ADVISED {
            return None;
        }
        let value = |name: &str| seen.values.get(name)?.parse::<f64>().ok().filter(|value| value.is_finite());
        Some(Advised {
            every: value("every_s")?,
            was: value("was_s")?,
            stall: value("stall_s")?,
            between_failures: value("between_failures_s")?,
            restore: value("restore_s")?,
            cost: value("cost")?,
            cost_was: value("cost_was")?,
        })
    }

    fn fields(&self) -> [(&'static str, f64); 7] {
        [
            ("every_s", self.every),
            ("was_s", self.was),
            ("stall_s", self.stall),
            ("between_failures_s", self.between_failures),
            ("restore_s", self.restore),
            ("cost", self.cost),
            ("cost_was", self.cost_was),
        ]
    }

    /// Seconds from one save to the next in each tier, the nearest first: what is saved into memory comes to the others by itself, but
    /// not more often than a step takes to arrive there. `arrives` are the seconds that this takes, of the tiers in which it is known.
    pub fn by_tier(&self, arrives: &[(Tier, f64)]) -> Vec<(Tier, f64)> {
        let failures = 1.0 / self.between_failures.max(f64::MIN_POSITIVE);
        let mut tiers: Vec<(Tier, f64)> =
            arrives.iter().copied().filter(|(tier, _)| *tier > Tier::Memory).collect();
        tiers.sort_by_key(|(tier, _)| *tier);
        let behind = |in_flight: f64| Cost { stall: 0.0, in_flight, failures, restore: self.restore };
        let mut nearer = self.every;
        let mut advised = vec![(Tier::Memory, self.every)];
        for (tier, in_flight) in tiers {
            // What is advised for the tier before stands for it: its interval is what this one's is a multiple of.
            let before = Cost { in_flight: nearer, ..behind(0.0) };
            nearer = advise(&[before, behind(in_flight.max(0.0))]).last().map_or(nearer, |of| of.every);
            advised.push((tier, nearer));
        }
        advised
    }
}

/// Whether a save is due `since_last` seconds after the last one, by what is advised or, before anything is, by rule of thumb.
pub fn is_due(advised: Option<&Advised>, since_last: f64) -> bool {
    since_last >= advised.map_or(UNTIL_KNOWN_S, |advised| advised.every)
}

/// The advice that a job's books give after so many failures; none before it has saved a few times.
pub fn of(books: &TimeAccounting, failures: u32) -> Option<Advised> {
    let seconds = |of: TimeCategory| books.parts.get(&of).map_or(0.0, |span| span.as_seconds());
    if books.saves < FEWEST {
        return None;
    }
    let saves = books.saves as f64;
    let stall = seconds(TimeCategory::Checkpointing) / saves;
    let trained = seconds(TimeCategory::Training)
        + seconds(TimeCategory::LostWork)
        + seconds(TimeCategory::Checkpointing);
    let restore = (seconds(TimeCategory::Starting) + seconds(TimeCategory::Initialising))
        / f64::from(failures.saturating_add(1));
    let failures = rate(failures, books.wall.as_seconds(), GUESS_S);
    let of = Cost { stall, in_flight: 0.0, failures, restore };
    let every = advise(&[of]).first()?.every.max(MOST_OFTEN_S);
    let was = trained / saves;
    Some(Advised {
        every,
        was,
        stall,
        between_failures: 1.0 / failures,
        restore,
        cost: cost(&of, every),
        cost_was: cost(&of, was),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::time::Span;

    fn books(saves: u64, saving_s: u64, training_s: u64) -> TimeAccounting {
        let parts = [
            (TimeCategory::Training, Span::seconds(training_s)),
            (TimeCategory::Checkpointing, Span::seconds(saving_s)),
            (TimeCategory::Starting, Span::seconds(30)),
        ];
        let wall = Span::seconds(training_s + saving_s + 30);
        TimeAccounting { wall, parts: parts.into(), goodput: Some(0.9), steps: 1000, steps_lost: 0, saves }
    }

    #[test]
    fn a_job_that_saves_seldom_and_fails_often_is_told_to_save_more() {
        // A day, a save of one second each two hours, and eleven failures.
        let reported = of(&books(12, 12, 86_400), 11).unwrap();
        assert!((reported.stall - 1.0).abs() < 1e-9 && (reported.was - 7201.0).abs() < 1e-6);
        assert!((reported.between_failures - 172_842.0 / 12.0).abs() < 1.0, "{reported:?}");
        assert!((reported.every - (2.0 * reported.between_failures).sqrt()).abs() < 1e-6);
        assert!(reported.cost < reported.cost_was / 10.0, "{reported:?}");
        assert!(reported.reported().contains("saving every 170 s costs least"), "{}", reported.reported());
    }

    #[test]
    fn a_job_that_saves_all_the_time_and_never_fails_is_told_to_save_less() {
        let reported = of(&books(1000, 2000, 10_000), 0).unwrap();
        assert!(reported.every > 10.0 * reported.was && reported.cost < reported.cost_was);
    }

    #[test]
    fn each_tier_is_saved_to_as_often_as_the_nearer_one_or_as_often_as_steps_arrive() {
        let reported = Advised { every: 100.0, ..of(&books(12, 12, 86_400), 11).unwrap() };
        assert_eq!(reported.by_tier(&[]), [(Tier::Memory, 100.0)]);
        // Given in any order; the slower tier takes each third.
        let by_tier = reported.by_tier(&[(Tier::Durable, 250.0), (Tier::Peer, 8.0)]);
        assert_eq!(by_tier, [(Tier::Memory, 100.0), (Tier::Peer, 100.0), (Tier::Durable, 300.0)]);
    }

    #[test]
    fn the_journal_gives_back_what_was_advised_and_nothing_else_is_taken_for_it() {
        let reported = of(&books(12, 12, 86_400), 11).unwrap();
        let Fact::Observed(mut seen) = reported.fact() else { panic!("an observation") };
        assert_eq!(Advised::read(&seen), Some(reported));
        seen.values.insert("every_s".into(), "soon".into());
        assert_eq!(Advised::read(&seen), None);
        assert_eq!(Advised::read(&Observation { event: ADVISED.into(), ..Observation::default() }), None);
    }

    #[test]
    fn advice_is_told_again_when_it_has_changed_and_not_each_time() {
        let reported = of(&books(12, 12, 86_400), 11).unwrap();
        let near = Advised { every: reported.every * 1.1, ..reported };
        let far = Advised { every: reported.every * 0.7, ..reported };
        assert!(
            reported.is_news_after(None)
                && far.is_news_after(Some(&reported))
                && !near.is_news_after(Some(&reported))
        );
    }

    #[test]
    fn a_save_is_due_when_the_advised_time_has_passed_and_each_minute_before_that_is_known() {
        let reported = of(&books(12, 12, 86_400), 11).unwrap();
        assert!(is_due(Some(&reported), reported.every) && !is_due(Some(&reported), reported.every - 1.0));
        assert!(is_due(None, 60.0) && !is_due(None, 59.0));
    }

    #[test]
    fn saves_that_cost_nothing_are_not_advised_all_the_time() {
        assert_eq!(of(&books(100, 0, 10_000), 5).unwrap().every, 1.0);
    }

    #[test]
    fn a_job_that_has_hardly_saved_is_told_nothing() {
        assert_eq!(of(&books(2, 2, 1000), 3), None);
    }
}
