//! Advises how often a job should save, from its time accounting: cost of a save, failure rate, time to resume.

use serde::{Deserialize, Serialize};

use crate::interval::{Cost, advise, cost, rate};
use crate::tiers::Tier;
use mainstay_model::entry::Fact;
use mainstay_model::observation::Observation;
use mainstay_progress::goodput::{TimeAccounting, TimeCategory};

/// Before its first failure, a job is assumed to fail about once a day.
const GUESS_S: f64 = 86_400.0;

/// Fewer saves say little about the cost of one.
const MIN_SAVES: u64 = 3;

/// The shortest interval that is advised: if the cost of a save is too small to measure, something else limits it.
const MIN_INTERVAL_S: f64 = 1.0;

/// The interval while there is no advice yet: a few saves are needed to measure the cost of one.
const UNTIL_KNOWN_S: f64 = 60.0;

/// New advice is reported only if it differs from the last reported one by more than this share.
const MIN_REPORTED_CHANGE: f64 = 0.2;

/// The component and the event of advice in a job's journal.
const COMPONENT: &str = "checkpoint";
const ADVISED: &str = "interval_advised";

/// The advised interval and what it is based on. Times are in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Advised {
    /// The advised time from one save to the next.
    pub every: f64,
    /// The time from one save to the next so far.
    pub was: f64,
    /// How long training stopped for one save.
    pub stall: f64,
    /// The expected time between failures; includes a guess of one a day that has the weight of one failure.
    pub between_failures: f64,
    /// The time from the start of the processes until training resumed.
    pub restore: f64,
    /// The share of all time that saves, lost work and restores cost at the advised interval, from 0 to 1.
    pub cost: f64,
    /// The same at the interval so far.
    pub cost_was: f64,
}

impl Advised {
    /// The advice in one line.
    pub fn describe(&self) -> String {
        let Advised { every, was, stall, between_failures, cost, cost_was, .. } = self;
        format!(
            "a save paused training for {stall:.2} s, and a failure is expected each {between_failures:.0} s: saving every \
             {every:.0} s costs least ({:.2} % of all time; every {was:.0} s, as it was, {:.2} %)",
            cost * 100.0,
            cost_was * 100.0
        )
    }

    /// Whether it differs enough from the last reported advice.
    pub fn is_news_after(&self, before: Option<&Advised>) -> bool {
        before.is_none_or(|before| (self.every - before.every).abs() > MIN_REPORTED_CHANGE * before.every)
    }

    /// The advice as a fact for the job's journal.
    pub fn fact(&self) -> Fact {
        let values = self.fields().map(|(name, value)| (name.to_owned(), value.to_string()));
        Fact::Observed(Observation {
            component: COMPONENT.to_owned(),
            event: ADVISED.to_owned(),
            detail: self.describe(),
            values: values.into(),
            ..Observation::default()
        })
    }

    /// Reads what [`fact`](Self::fact) wrote; `None` for other observations and for the format of another version.
    pub fn read(observation: &Observation) -> Option<Advised> {
        if observation.component != COMPONENT || observation.event != ADVISED {
            return None;
        }
        let value =
            |name: &str| observation.values.get(name)?.parse::<f64>().ok().filter(|value| value.is_finite());
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

    /// Seconds from one save to the next in each tier, the nearest first. What is saved to memory reaches the other
    /// tiers by itself, but no more often than a step takes to arrive there. `arrives` has the seconds that this takes,
    /// for the tiers where it is known.
    pub fn by_tier(&self, arrives: &[(Tier, f64)]) -> Vec<(Tier, f64)> {
        let failures = 1.0 / self.between_failures.max(f64::MIN_POSITIVE);
        let mut tiers: Vec<(Tier, f64)> =
            arrives.iter().copied().filter(|(tier, _)| *tier > Tier::Memory).collect();
        tiers.sort_by_key(|(tier, _)| *tier);
        let behind = |in_flight: f64| Cost { stall: 0.0, in_flight, failures, restore: self.restore };
        let mut nearer = self.every;
        let mut advised = vec![(Tier::Memory, self.every)];
        for (tier, in_flight) in tiers {
            // `before` represents the nearer tier: this tier's interval is a multiple of its interval.
            let before = Cost { in_flight: nearer, ..behind(0.0) };
            nearer =
                advise(&[before, behind(in_flight.max(0.0))]).last().map_or(nearer, |advice| advice.every);
            advised.push((tier, nearer));
        }
        advised
    }
}

/// Whether a save is due `since_last` seconds after the last one: by the advice, or by a rule of thumb without advice.
pub fn is_due(advised: Option<&Advised>, since_last: f64) -> bool {
    since_last >= advised.map_or(UNTIL_KNOWN_S, |advised| advised.every)
}

/// The advice for a job with this time accounting and number of failures; `None` before it has saved a few times.
pub fn advice_for(accounting: &TimeAccounting, failures: u32) -> Option<Advised> {
    let seconds =
        |category: TimeCategory| accounting.parts.get(&category).map_or(0.0, |span| span.as_seconds());
    if accounting.saves < MIN_SAVES {
        return None;
    }
    let saves = accounting.saves as f64;
    let stall = seconds(TimeCategory::Checkpointing) / saves;
    let trained = seconds(TimeCategory::Training)
        + seconds(TimeCategory::LostWork)
        + seconds(TimeCategory::Checkpointing);
    let started = seconds(TimeCategory::Starting)
        + seconds(TimeCategory::Initialising)
        + seconds(TimeCategory::Restoring);
    let restore = started / f64::from(failures.saturating_add(1));
    let failures = rate(failures, accounting.wall.as_seconds(), GUESS_S);
    let costs = Cost { stall, in_flight: 0.0, failures, restore };
    let every = advise(&[costs]).first()?.every.max(MIN_INTERVAL_S);
    let was = trained / saves;
    Some(Advised {
        every,
        was,
        stall,
        between_failures: 1.0 / failures,
        restore,
        cost: cost(&costs, every),
        cost_was: cost(&costs, was),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_model::time::Span;

    fn accounting(saves: u64, saving_s: u64, training_s: u64) -> TimeAccounting {
        let parts = [
            (TimeCategory::Training, Span::seconds(training_s)),
            (TimeCategory::Checkpointing, Span::seconds(saving_s)),
            (TimeCategory::Starting, Span::seconds(30)),
        ];
        let wall = Span::seconds(training_s + saving_s + 30);
        TimeAccounting {
            wall,
            parts: parts.into(),
            goodput: Some(0.9),
            steps: 1000,
            steps_lost: 0,
            counted: false,
            saves,
        }
    }

    #[test]
    fn a_job_that_saves_rarely_and_fails_often_is_advised_to_save_more() {
        // One day, a save of one second every two hours, and eleven failures.
        let advised = advice_for(&accounting(12, 12, 86_400), 11).unwrap();
        assert!((advised.stall - 1.0).abs() < 1e-9 && (advised.was - 7201.0).abs() < 1e-6);
        assert!((advised.between_failures - 172_842.0 / 12.0).abs() < 1.0, "{advised:?}");
        assert!((advised.every - (2.0 * advised.between_failures).sqrt()).abs() < 1e-6);
        assert!(advised.cost < advised.cost_was / 10.0, "{advised:?}");
        testing::snapshot!(
            "messages",
            "advice: a job that saves rarely and fails often is advised to save more",
            advised.describe()
        );
    }

    #[test]
    fn a_job_that_saves_constantly_and_never_fails_is_advised_to_save_less() {
        let advised = advice_for(&accounting(1000, 2000, 10_000), 0).unwrap();
        assert!(advised.every > 10.0 * advised.was && advised.cost < advised.cost_was);
    }

    #[test]
    fn the_interval_of_a_tier_is_a_multiple_of_the_nearer_one_and_lets_steps_arrive() {
        let advised = Advised { every: 100.0, ..advice_for(&accounting(12, 12, 86_400), 11).unwrap() };
        assert_eq!(advised.by_tier(&[]), [(Tier::Memory, 100.0)]);
        // In any order; the slowest tier takes every third save.
        let by_tier = advised.by_tier(&[(Tier::Durable, 250.0), (Tier::Peer, 8.0)]);
        assert_eq!(by_tier, [(Tier::Memory, 100.0), (Tier::Peer, 100.0), (Tier::Durable, 300.0)]);
    }

    #[test]
    fn advice_is_read_back_from_the_journal_and_other_observations_are_not() {
        let advised = advice_for(&accounting(12, 12, 86_400), 11).unwrap();
        let Fact::Observed(mut seen) = advised.fact() else { panic!("an observation") };
        assert_eq!(Advised::read(&seen), Some(advised));
        seen.values.insert("every_s".into(), "soon".into());
        assert_eq!(Advised::read(&seen), None);
        assert_eq!(Advised::read(&Observation { event: ADVISED.into(), ..Observation::default() }), None);
    }

    #[test]
    fn advice_is_reported_again_only_if_it_changed_enough() {
        let advised = advice_for(&accounting(12, 12, 86_400), 11).unwrap();
        let near = Advised { every: advised.every * 1.1, ..advised };
        let far = Advised { every: advised.every * 0.7, ..advised };
        assert!(
            advised.is_news_after(None)
                && far.is_news_after(Some(&advised))
                && !near.is_news_after(Some(&advised))
        );
    }

    #[test]
    fn a_save_is_due_after_the_advised_interval_or_every_minute_without_advice() {
        let advised = advice_for(&accounting(12, 12, 86_400), 11).unwrap();
        assert!(is_due(Some(&advised), advised.every) && !is_due(Some(&advised), advised.every - 1.0));
        assert!(is_due(None, 60.0) && !is_due(None, 59.0));
    }

    #[test]
    fn saves_that_cost_nothing_are_advised_at_most_once_a_second() {
        assert_eq!(advice_for(&accounting(100, 0, 10_000), 5).unwrap().every, 1.0);
    }

    #[test]
    fn a_job_with_fewer_than_three_saves_gets_no_advice() {
        assert_eq!(advice_for(&accounting(2, 2, 1000), 3), None);
    }
}
