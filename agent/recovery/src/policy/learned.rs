//! Chooses the rung by the cost of each and how often it helped in this job and its earlier runs, for causes of the
//! same kind.
//!
//! A rung that fails costs its own time and then that of the next one, so the value of rung `r` is
//! `cost(r) + (1 - helps(r)) * value(next)`. The cheapest is taken (`docs/reference/policy.md`).

use crate::policy::Rung;
use crate::policy::history::PastFailure;
use mainstay_model::policy::CauseKind;
use mainstay_model::policy::Experience;
use mainstay_model::time::Span;

/// The assumption about a rung before it was taken: how often of how many times it helps, and its duration in
/// seconds.
struct Prior {
    helped: f64,
    tried: f64,
    seconds: f64,
}

fn prior(rung: Rung) -> Prior {
    let (helped, tried, seconds) = match rung {
        Rung::InProcess => (3.0, 4.0, 0.3),
        Rung::Ranks => (3.5, 4.0, 1.0),
        Rung::Host => (3.6, 4.0, 3.0),
        Rung::All => (3.8, 4.0, 5.0),
        Rung::Replace => (3.9, 4.0, 60.0),
        Rung::Shrink => (3.9, 4.0, 120.0),
        Rung::HandBack | Rung::Stop => (4.0, 4.0, 600.0),
    };
    Prior { helped, tried, seconds }
}

/// A rung that failed this often in a row for causes of a kind is not taken again for them until it helped.
const FAILURES_IN_A_ROW: usize = 2;

/// The rung to take, of rungs in order from the mildest. `None` if there are none.
pub fn cheapest(
    kind: CauseKind,
    open: &[Rung],
    past: &[PastFailure],
    earlier: &[Experience],
) -> Option<Rung> {
    // The heaviest rung always stays open: the budgets end it.
    let (heaviest, milder) = open.split_last()?;
    let value = |rung: Rung, next: f64| value(kind, rung, past, earlier, next);
    let mut best = (*heaviest, value(*heaviest, prior(Rung::HandBack).seconds));
    for rung in milder.iter().rev() {
        if failed_in_a_row(kind, *rung, past) >= FAILURES_IN_A_ROW {
            continue;
        }
        let value = value(*rung, best.1);
        if value < best.1 {
            best = (*rung, value);
        }
    }
    Some(best.0)
}

/// The expected cost of taking the rung, in seconds, if the next one costs `next`.
fn value(kind: CauseKind, rung: Rung, past: &[PastFailure], earlier: &[Experience], next: f64) -> f64 {
    let Prior { helped, tried: assumed, .. } = prior(rung);
    let known = of_rung(earlier, kind, rung).map_or((0.0, 0.0), |known| (known.helped, known.tried));
    let tried = past.iter().filter(|past| past.rung == rung && CauseKind::from_cause(&past.cause) == kind);
    let successes = backs(kind, rung, past).count() as f64;
    let helps = (helped + known.0 + successes) / (assumed + known.1 + tried.count() as f64);
    cost(kind, rung, past, earlier) + (1.0 - helps) * next
}

/// How long the rung takes if it helps, in seconds.
pub(super) fn cost(kind: CauseKind, rung: Rung, past: &[PastFailure], earlier: &[Experience]) -> f64 {
    let known = of_rung(earlier, kind, rung).filter(|known| known.helped > 0.0);
    let seconds = known.map_or(prior(rung).seconds, |known| known.seconds);
    // The newest values count most: the cost of a restart changes with the state to load.
    backs(kind, rung, past).fold(seconds, |cost, back| cost * 0.7 + back.as_seconds() * 0.3)
}

fn backs(kind: CauseKind, rung: Rung, past: &[PastFailure]) -> impl Iterator<Item = Span> {
    let tried =
        past.iter().filter(move |past| past.rung == rung && CauseKind::from_cause(&past.cause) == kind);
    tried.filter_map(|past| past.back_after)
}

fn failed_in_a_row(kind: CauseKind, rung: Rung, past: &[PastFailure]) -> usize {
    let tried =
        past.iter().rev().filter(|past| past.rung == rung && CauseKind::from_cause(&past.cause) == kind);
    tried.take_while(|past| past.back_after.is_none()).count()
}

/// What earlier runs learned about a rung.
pub(super) fn of_rung(earlier: &[Experience], cause: CauseKind, rung: Rung) -> Option<&Experience> {
    earlier.iter().find(|known| known.cause == cause && known.rung == rung)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_model::time::Mono;
    use mainstay_model::verdict::Cause;

    const ALL: [Rung; 3] = [Rung::InProcess, Rung::Ranks, Rung::All];

    fn tried(rung: Rung, back_after: Option<Span>) -> PastFailure {
        PastFailure {
            decided_at: Mono(0),
            cause: Cause::Exception { exception: "E".into(), fingerprint: "f".into() },
            step: None,
            data: None,
            lived: Span::seconds(60),
            rung,
            reached: Some(1),
            committed: None,
            heartbeats: true,
            back_after,
        }
    }

    #[test]
    fn the_mildest_open_rung_is_taken_first() {
        assert_eq!(cheapest(CauseKind::Exception, &ALL, &[], &[]), Some(Rung::InProcess));
        assert_eq!(cheapest(CauseKind::Signal, &ALL[1..], &[], &[]), Some(Rung::Ranks));
        assert_eq!(cheapest(CauseKind::Signal, &ALL[2..], &[], &[]), Some(Rung::All));
        assert_eq!(cheapest(CauseKind::Signal, &[], &[], &[]), None);
    }

    #[test]
    fn a_rung_that_fails_is_skipped_and_one_that_helped_is_kept() {
        let fails: Vec<PastFailure> = (0..2).map(|_| tried(Rung::InProcess, None)).collect();
        assert_eq!(cheapest(CauseKind::Exception, &ALL, &fails, &[]), Some(Rung::Ranks));
        // Other causes are not affected.
        assert_eq!(cheapest(CauseKind::Hang, &ALL[1..], &fails, &[]), Some(Rung::Ranks));
        let helps: Vec<PastFailure> =
            (0..9).map(|_| tried(Rung::InProcess, Some(Span::millis(90)))).collect();
        assert_eq!(cheapest(CauseKind::Exception, &ALL, &helps, &[]), Some(Rung::InProcess));
    }

    #[test]
    fn a_rung_that_costs_more_than_the_next_is_not_worth_it() {
        let slow: Vec<PastFailure> =
            (0..20).map(|_| tried(Rung::InProcess, Some(Span::seconds(40)))).collect();
        assert_eq!(cheapest(CauseKind::Exception, &ALL, &slow, &[]), Some(Rung::Ranks));
    }

    #[test]
    fn earlier_runs_count_and_this_run_outweighs_them() {
        let known = |helped: f64, seconds: f64| {
            let (cause, rung) = (CauseKind::Exception, Rung::InProcess);
            [Experience { cause, rung, tried: 8.0, helped, seconds }]
        };
        let chosen = |past: &[PastFailure], earlier: [Experience; 1]| {
            cheapest(CauseKind::Exception, &ALL, past, &earlier)
        };
        assert_eq!(chosen(&[], known(8.0, 0.1)), Some(Rung::InProcess));
        assert_eq!(chosen(&[], known(8.0, 60.0)), Some(Rung::Ranks), "it took longer than the next");
        // This shows nothing about other kinds of causes.
        assert_eq!(cheapest(CauseKind::Hang, &ALL, &[], &known(8.0, 60.0)), Some(Rung::InProcess));
        let helps: Vec<PastFailure> =
            (0..20).map(|_| tried(Rung::InProcess, Some(Span::millis(90)))).collect();
        assert_eq!(chosen(&helps, known(8.0, 60.0)), Some(Rung::InProcess));
    }
}
