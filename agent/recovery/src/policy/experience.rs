//! What runs of a job learned about rungs: how often each helped against causes of a kind, and how long it took. It
//! is kept for the job's next run, which then need not start with guesses. It weighs little compared with what that
//! run sees itself.

use crate::policy::history::PastFailure;
use crate::policy::{Rung, learned};
use mainstay_model::policy::{CauseKind, Experience, MAX_DURATION_SECONDS, MAX_EXPERIENCE_WEIGHT};

/// What is known after a run that started with `earlier` and had these failures. Failures without a visible outcome
/// are ignored: those without heartbeats, and the last one if the job did not fail again.
pub fn experiences(earlier: &[Experience], past: &[PastFailure], failed_again: bool) -> Vec<Experience> {
    let is_open = |place: usize| place + 1 == past.len() && !failed_again;
    let reported = |(place, past): &(usize, &PastFailure)| {
        past.heartbeats && (past.back_after.is_some() || !is_open(*place))
    };
    let past: Vec<PastFailure> =
        past.iter().enumerate().filter(reported).map(|(_, past)| past.clone()).collect();
    let mut known = Vec::new();
    for cause in CauseKind::ALL {
        for rung in Rung::ALL {
            let is_of_kind =
                |past: &&PastFailure| past.rung == rung && CauseKind::from_cause(&past.cause) == cause;
            let before = learned::of_rung(earlier, cause, rung);
            let (mut tried, mut helped) = before.map_or((0.0, 0.0), |before| (before.tried, before.helped));
            tried += past.iter().filter(is_of_kind).count() as f64;
            helped += past.iter().filter(is_of_kind).filter(|past| past.back_after.is_some()).count() as f64;
            if tried == 0.0 {
                continue;
            }
            let light = (MAX_EXPERIENCE_WEIGHT / tried).min(1.0);
            let seconds = if helped > 0.0 {
                learned::cost(cause, rung, &past, earlier).min(MAX_DURATION_SECONDS)
            } else {
                0.0
            };
            known.push(Experience { cause, rung, tried: tried * light, helped: helped * light, seconds });
        }
    }
    known
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_model::time::{Mono, Span};
    use mainstay_model::verdict::Cause;

    fn tried(rung: Rung, back_after: Option<Span>) -> PastFailure {
        PastFailure {
            decided_at: Mono(0),
            cause: Cause::Signal { signal: 9 },
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
    fn the_next_run_knows_the_last_and_many_runs_count_as_a_few() {
        let run = [tried(Rung::Ranks, None), tried(Rung::Ranks, Some(Span::seconds(2)))];
        let known = experiences(&[], &run, true);
        assert_eq!(known.len(), 1);
        let one = &known[0];
        assert_eq!((one.cause, one.rung, one.tried, one.helped), (CauseKind::Signal, Rung::Ranks, 2.0, 1.0));
        assert!(one.seconds > 1.0 && one.seconds < 2.0, "{one:?}");
        let many = (0..50).fold(known, |known, _| experiences(&known, &run, true));
        assert!((many[0].tried - MAX_EXPERIENCE_WEIGHT).abs() < 1e-9 && many[0].is_sound(), "{many:?}");
        assert!((many[0].helped - MAX_EXPERIENCE_WEIGHT / 2.0).abs() < 0.5, "{many:?}");
        assert!((many[0].seconds - 2.0).abs() < 0.01, "{many:?}");
    }

    #[test]
    fn a_restart_without_a_visible_outcome_is_ignored() {
        let stopped_meanwhile = [tried(Rung::All, None)];
        assert_eq!(experiences(&[], &stopped_meanwhile, false), []);
        assert_eq!(experiences(&[], &stopped_meanwhile, true).len(), 1, "it failed again");
        let mute = [PastFailure { heartbeats: false, ..tried(Rung::All, None) }];
        assert_eq!(experiences(&[], &mute, true), []);
    }

    #[test]
    fn impossible_values_are_ignored() {
        let good =
            Experience { cause: CauseKind::Hang, rung: Rung::All, tried: 4.0, helped: 3.0, seconds: 9.0 };
        assert!(good.is_sound());
        for spoilt in [
            Experience { helped: 5.0, ..good.clone() },
            Experience { tried: 1e9, ..good.clone() },
            Experience { seconds: -1.0, ..good.clone() },
            Experience { seconds: f64::NAN, ..good.clone() },
        ] {
            assert!(!spoilt.is_sound(), "{spoilt:?}");
        }
    }
}
