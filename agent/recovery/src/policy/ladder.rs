//! The rungs of the ladder that can be taken now, and how long one may take.
//!
//! Four things close a rung: no component can carry it out; the ranks are not in the state it needs; it cannot help
//! against the cause; it has just failed.

use crate::policy::{Case, CauseKind, JobState, Rung, Rungs, Settings};
use mainstay_model::time::Span;

/// The rungs that can be taken and keep the job on its host, the mildest first.
pub(super) fn open(settings: &Settings, case: Case<'_>) -> Vec<Rung> {
    let mildest = mildest(CauseKind::from_cause(&case.verdict.cause));
    let beyond = case.past.last().filter(|past| past.heartbeats && past.back_after.is_none());
    let just_failed = |rung: Rung| beyond.is_some_and(|past| rung <= past.rung && past.rung < Rung::All);
    let stays = available_rungs(settings, case).iter().filter(|rung| rung.stays());
    stays.filter(|rung| *rung >= mildest && !just_failed(*rung)).collect()
}

/// The rungs that can be carried out: those that always can, and those that the waiting ranks allow.
pub fn available_rungs(settings: &Settings, case: Case<'_>) -> Rungs {
    let named = case.verdict.culprit.is_some();
    let opened = Rung::ALL.into_iter().filter(|rung| is_opened_by_waiting(*rung, case.job, named));
    opened.fold(settings.rungs, Rungs::with)
}

/// The mildest rung that can help against the cause at all.
pub(super) fn mildest(kind: CauseKind) -> Rung {
    match kind {
        // The process is alive, and the exception has ended what its rank was doing.
        CauseKind::Exception => Rung::InProcess,
        CauseKind::ExitCode
        | CauseKind::Signal
        | CauseKind::OutOfMemory
        | CauseKind::Hang
        | CauseKind::HostLost => Rung::Ranks,
        CauseKind::Start => Rung::All,
    }
}

/// Whether ranks that wait in their processes make this rung possible.
fn is_opened_by_waiting(rung: Rung, job: JobState, culprit_is_named: bool) -> bool {
    let all_wait = job.waiting == job.ranks;
    match rung {
        _ if job.waiting == 0 => false,
        Rung::InProcess => all_wait,
        // If no rank is lost, the one that failed gets a new process. With a single rank that would be all of them.
        Rung::Ranks => !all_wait || (job.ranks > 1 && culprit_is_named),
        _ => false,
    }
}

/// A restart has at least this long before the next rung is tried.
const MIN_RUNG_TIME: Span = Span::seconds(300);

/// How long a restart by this rung may take until all ranks have completed a step: three times the longest start of
/// this job. `None` if that is unknown, and for the heaviest rung on the host.
pub fn patience(rung: Rung, longest_start: Option<Span>) -> Option<Span> {
    let known = longest_start.filter(|_| rung < Rung::All)?;
    Some(known.plus(known).plus(known).max(MIN_RUNG_TIME))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Budget, Host, PastFailure};
    use mainstay_diagnosis::root_rank::start_failed;
    use mainstay_model::id::{Attempt, Incident, Rank};
    use mainstay_model::time::Mono;
    use mainstay_model::verdict::{Cause, Verdict};

    fn verdict(cause: Cause, culprit: Option<Rank>) -> Verdict {
        Verdict { cause, culprit, ..start_failed(Incident(1), Attempt(0), "", Mono(0)) }
    }

    fn open_for(verdict: &Verdict, waiting: u32, ranks: u32, past: &[PastFailure]) -> Vec<Rung> {
        let settings = Settings::from(Budget { max_restarts: 3, window: None });
        let job =
            JobState { exit: 1, lived: Span::seconds(60), reached: None, committed: None, ranks, waiting };
        open(
            &settings,
            Case {
                verdict,
                past,
                earlier: &[],
                job,
                host: Host::default(),
                seen: None,
                spares: 0,
                now: Mono(0),
            },
        )
    }

    fn failed(rung: Rung) -> PastFailure {
        PastFailure {
            decided_at: Mono(0),
            cause: Cause::Signal { signal: 9 },
            step: None,
            data: None,
            lived: Span::seconds(60),
            rung,
            reached: None,
            committed: None,
            heartbeats: true,
            back_after: None,
        }
    }

    #[test]
    fn the_rungs_are_those_that_the_waiting_ranks_allow() {
        let raised = Cause::Exception { exception: "E".into(), fingerprint: "f".into() };
        let raised = verdict(raised, Some(Rank(1)));
        assert_eq!(open_for(&raised, 4, 4, &[]), [Rung::InProcess, Rung::Ranks, Rung::All]);
        assert_eq!(open_for(&raised, 3, 4, &[]), [Rung::Ranks, Rung::All]);
        assert_eq!(open_for(&raised, 1, 1, &[]), [Rung::InProcess, Rung::All]);
        assert_eq!(open_for(&raised, 0, 4, &[]), [Rung::All]);
        let no_one = Verdict { culprit: None, ..raised };
        assert_eq!(open_for(&no_one, 4, 4, &[]), [Rung::InProcess, Rung::All], "nobody to be replaced");
    }

    #[test]
    fn rungs_that_cannot_help_against_the_cause_are_closed() {
        let killed = verdict(Cause::Signal { signal: 9 }, Some(Rank(1)));
        assert_eq!(open_for(&killed, 4, 4, &[]), [Rung::Ranks, Rung::All]);
        let not_started = verdict(Cause::StartFailed, None);
        assert_eq!(open_for(&not_started, 4, 4, &[]), [Rung::All]);
    }

    #[test]
    fn a_rung_that_failed_in_this_recovery_is_not_tried_again_in_it() {
        let raised = Cause::Exception { exception: "E".into(), fingerprint: "f".into() };
        let raised = verdict(raised, Some(Rank(1)));
        assert_eq!(open_for(&raised, 4, 4, &[failed(Rung::InProcess)]), [Rung::Ranks, Rung::All]);
        assert_eq!(open_for(&raised, 4, 4, &[failed(Rung::Ranks)]), [Rung::All]);
        // After the heaviest rung all are open again; the budgets end the job.
        assert_eq!(open_for(&raised, 4, 4, &[failed(Rung::All)]), [Rung::InProcess, Rung::Ranks, Rung::All]);
        let helped = PastFailure { back_after: Some(Span::seconds(1)), ..failed(Rung::Ranks) };
        assert_eq!(open_for(&raised, 4, 4, &[helped]), [Rung::InProcess, Rung::Ranks, Rung::All]);
    }

    #[test]
    fn mild_rungs_have_a_time_limit_and_the_heaviest_has_none() {
        assert_eq!(patience(Rung::InProcess, Some(Span::seconds(10))), Some(MIN_RUNG_TIME));
        assert_eq!(patience(Rung::Ranks, Some(Span::seconds(400))), Some(Span::seconds(1200)));
        assert_eq!(patience(Rung::All, Some(Span::seconds(10))), None);
        assert_eq!(patience(Rung::InProcess, None), None, "a job that tells of no steps");
    }
}
