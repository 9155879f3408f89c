//! The summary of a job from its journal, for a host whose leader is lost: only the leader accounts each step. Steps
//! between two entries count as equally long.

use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::time::{Mono, Stamp};
use mainstay_model::verdict::{Decision, Outcome, Verdict};
use mainstay_recovery::job::{IncidentTimes, Summary, hosts_to_exclude};

use crate::goodput::Books;

/// What the entries of one job show so far.
#[derive(Clone, Debug, Default)]
pub struct Recounted {
    books: Books,
    incidents: Vec<IncidentTimes>,
    last_verdict: Option<Verdict>,
}

impl Recounted {
    /// Takes in the next entry.
    pub fn entry(&mut self, entry: &Entry) {
        let at = entry.at.mono;
        self.books.entry(entry);
        match &entry.body {
            Body::Fact(Fact::AttemptStarted { .. }) => {
                self.with_incident(|incident| incident.started_at = Some(at));
            }
            Body::Fact(Fact::RankConnected { .. }) => {
                self.with_incident(|incident| incident.connected_at = Some(at));
            }
            Body::Verdict(verdict) => self.verdict(verdict),
            Body::Decision(decision) => self.decision(at, decision),
            Body::Outcome(outcome) => self.outcome(outcome),
            Body::Fact(_) | Body::Health(_) | Body::Finding(_) => {}
        }
    }

    fn verdict(&mut self, verdict: &Verdict) {
        self.last_verdict = Some(verdict.clone());
        if self.incidents.iter().any(|known| known.incident == verdict.incident) {
            return;
        }
        self.incidents.push(IncidentTimes {
            incident: verdict.incident,
            headline: verdict.headline.clone(),
            decision: String::new(),
            fault_at: verdict.fault_at,
            detected_at: verdict.detected_at,
            stopped_at: None,
            decided_at: None,
            started_at: None,
            connected_at: None,
            first_step_at: None,
            reached_before: self.books.reached(),
            first_step: None,
            exclude: None,
        });
    }

    fn decision(&mut self, at: Mono, decision: &Decision) {
        let last = self.last_verdict.as_ref().filter(|verdict| verdict.incident == decision.incident);
        // Which host decided is not in the journal.
        let exclude = last.and_then(|verdict| verdict.host_to_exclude(decision.rule, None));
        self.with_incident(|incident| {
            incident.decided_at = Some(at);
            incident.decision.clone_from(&decision.why);
            incident.exclude = exclude;
        });
    }

    fn outcome(&mut self, outcome: &Outcome) {
        let of = self.incidents.iter_mut().rfind(|incident| incident.incident == outcome.incident);
        if let Some(incident) = of {
            incident.first_step_at = Some(incident.fault_at.after(outcome.to_first_step));
            incident.first_step = Some(outcome.step);
        }
    }

    fn with_incident(&mut self, change: impl FnOnce(&mut IncidentTimes)) {
        if let Some(open) = self.incidents.last_mut().filter(|incident| incident.first_step_at.is_none()) {
            change(open);
        }
    }

    /// The summary at `at`; none if the entries have no start of a job.
    pub fn summary(self, at: Stamp, exit: i32, reason: String) -> Option<Summary> {
        self.books.began?;
        Some(Summary {
            exit,
            reason,
            attempts: self.books.attempts,
            accounting: self.books.accounting(Some(at.wall)),
            exclude: hosts_to_exclude(&self.incidents),
            incidents: self.incidents,
            saving: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_diagnosis::root_rank::start_failed;
    use mainstay_model::entry::{ExitStatus, JobSpec};
    use mainstay_model::id::{Attempt, BootId, Incident, Pid, Rank};
    use mainstay_model::time::{Span, Wall};
    use mainstay_model::verdict::{Action, DecidedBy, Rule};
    use mainstay_progress::goodput::TimeCategory;

    fn recounted(entries: Vec<(u32, Body)>) -> Summary {
        let mut recounted = Recounted::default();
        for (seconds, body) in entries {
            let at = stamp(seconds);
            recounted.entry(&Entry {
                seq: 1,
                at,
                boot: BootId::default(),
                job: None,
                origin_seq: None,
                body,
            });
        }
        recounted.summary(stamp(100), 75, "why".to_owned()).expect("it has a start")
    }

    fn stamp(seconds: u32) -> Stamp {
        let ns = i64::from(seconds) * 1_000_000_000;
        Stamp { mono: Mono(ns.unsigned_abs()), wall: Wall(ns) }
    }

    fn exited(attempt: u32, status: ExitStatus, step: u64, after_stop: bool) -> Body {
        Body::Fact(Fact::RankExited {
            attempt: Attempt(attempt),
            rank: Rank(0),
            pid: Pid(1),
            status,
            step: Some(step),
            data: None,
            after_stop,
            stderr_tail: Vec::new(),
            stdout_tail: Vec::new(),
            stderr_times: Vec::new(),
            stdout_times: Vec::new(),
        })
    }

    fn started(attempt: u32) -> Body {
        let (attempt, ranks, hosts) = (Attempt(attempt), Vec::new(), Vec::new());
        Body::Fact(Fact::AttemptStarted { attempt, master_port: 1, ranks, hosts })
    }

    #[test]
    fn a_journal_shows_attempts_incidents_steps_and_times() {
        let stepping = |attempt, step| {
            Body::Fact(Fact::RanksStepping {
                attempt: Attempt(attempt),
                step,
                counted: false,
                restoring: Span::default(),
            })
        };
        let verdict = start_failed(Incident(1), Attempt(0), "it failed", Mono(40_000_000_000));
        let decision = Decision {
            incident: Incident(1),
            action: Action::RestartInJob { attempt: Attempt(1) },
            after: Span::default(),
            rule: Rule::Restart,
            why: "again".to_owned(),
            by: DecidedBy::Launcher,
            agent_evidence: false,
        };
        let summary = recounted(vec![
            (0, Body::Fact(Fact::JobStarted(JobSpec::default()))),
            (10, started(0)),
            (20, stepping(0, 0)),
            (
                30,
                Body::Fact(Fact::Progress {
                    attempt: Attempt(0),
                    step: 10,
                    loss: None,
                    saving: Span::default(),
                    saves: 0,
                }),
            ),
            (40, exited(0, ExitStatus::Signal(9), 20, false)),
            (50, Body::Fact(Fact::AttemptEnded { attempt: Attempt(0), orphans_killed: 0, waiting: vec![] })),
            (50, Body::Verdict(verdict)),
            (50, Body::Decision(decision)),
            (60, started(1)),
            (70, stepping(1, 11)),
            (90, exited(1, ExitStatus::Signal(15), 30, true)),
        ]);
        assert_eq!((summary.exit, summary.attempts, summary.incidents.len()), (75, 2, 1));
        assert_eq!(summary.incidents[0].started_at, Some(Mono(60_000_000_000)));
        let accounting = &summary.accounting;
        assert_eq!((accounting.steps, accounting.steps_lost), (31, 10), "steps 0 to 30, and 11 to 20 again");
        let part = |of| accounting.parts.get(&of).map(|span| span.as_seconds());
        assert_eq!(part(TimeCategory::Stopping), Some(10.0));
        assert_eq!(part(TimeCategory::Starting), Some(40.0));
        assert_eq!(accounting.wall, Span::seconds(100));
    }
}
