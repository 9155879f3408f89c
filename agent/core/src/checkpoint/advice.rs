//! How often a job had better save, by what its own books say: what a save cost, how often it failed, how long it took to go on.

use serde::{Deserialize, Serialize};

use crate::checkpoint::interval::{Cost, advise, cost, rate};
use crate::ledger::{Books, Spending};

/// Before it has failed, a job is believed to fail about once a day.
const GUESS_S: f64 = 86_400.0;

/// Fewer saves than these say little of what one costs.
const FEWEST: u64 = 3;

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
    pub fn told(&self) -> String {
        let Advised { every, was, stall, between_failures, cost, cost_was, .. } = self;
        format!(
            "a save stood training still for {stall:.2} s, and a failure is expected each {between_failures:.0} s: saving every \
             {every:.0} s costs least ({:.2} % of all time; every {was:.0} s, as it was, {:.2} %)",
            cost * 100.0,
            cost_was * 100.0
        )
    }
}

/// The advice that a job's books give after so many failures; none before it has saved a few times.
pub fn of(books: &Books, failures: u32) -> Option<Advised> {
    let seconds = |of: Spending| books.parts.get(&of).map_or(0.0, |span| span.as_seconds());
    if books.saves < FEWEST {
        return None;
    }
    let saves = books.saves as f64;
    let stall = seconds(Spending::Checkpointing) / saves;
    let trained =
        seconds(Spending::Training) + seconds(Spending::LostWork) + seconds(Spending::Checkpointing);
    let restore = (seconds(Spending::Starting) + seconds(Spending::Initialising))
        / f64::from(failures.saturating_add(1));
    let failures = rate(failures, books.wall.as_seconds(), GUESS_S);
    let of = Cost { stall, in_flight: 0.0, failures, restore };
    let best = *advise(&[of]).first()?;
    let was = trained / saves;
    Some(Advised {
        every: best.every,
        was,
        stall,
        between_failures: 1.0 / failures,
        restore,
        cost: best.cost,
        cost_was: cost(&of, was),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Span;

    fn books(saves: u64, saving_s: u64, training_s: u64) -> Books {
        let parts = [
            (Spending::Training, Span::seconds(training_s)),
            (Spending::Checkpointing, Span::seconds(saving_s)),
            (Spending::Starting, Span::seconds(30)),
        ];
        let wall = Span::seconds(training_s + saving_s + 30);
        Books { wall, parts: parts.into(), goodput: 0.9, steps: 1000, steps_lost: 0, saves }
    }

    #[test]
    fn a_job_that_saves_seldom_and_fails_often_is_told_to_save_more() {
        // A day, a save of one second each two hours, and eleven failures.
        let told = of(&books(12, 12, 86_400), 11).unwrap();
        assert!((told.stall - 1.0).abs() < 1e-9 && (told.was - 7201.0).abs() < 1e-6);
        assert!((told.between_failures - 172_842.0 / 12.0).abs() < 1.0, "{told:?}");
        assert!((told.every - (2.0 * told.between_failures).sqrt()).abs() < 1e-6);
        assert!(told.cost < told.cost_was / 10.0, "{told:?}");
        assert!(told.told().contains("saving every 170 s costs least"), "{}", told.told());
    }

    #[test]
    fn a_job_that_saves_all_the_time_and_never_fails_is_told_to_save_less() {
        let told = of(&books(1000, 2000, 10_000), 0).unwrap();
        assert!(told.every > 10.0 * told.was && told.cost < told.cost_was);
    }

    #[test]
    fn a_job_that_has_hardly_saved_is_told_nothing() {
        assert_eq!(of(&books(2, 2, 1000), 3), None);
    }
}
