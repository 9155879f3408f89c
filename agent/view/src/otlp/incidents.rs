//! A failure of a job as a trace: the failure as a whole, and below it each phase from the fault to the first step.
//!
//! The phases follow each other. A phase that a failure does not have, as the rendezvous of a job that ends, has no span.
//! Texts of the job's program are in no attribute: a collector is on the network.

use std::collections::BTreeMap;

use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::id::{Attempt, JobId};
use mainstay_model::time::{Mono, Span as TimeSpan, Stamp};
use mainstay_model::verdict::{Decision, Outcome, Verdict};
use mainstay_proto::json::ApiEnum;
use mainstay_proto::otlp::common::v1::KeyValue;
use mainstay_proto::otlp::trace::v1::span::SpanKind;
use mainstay_proto::otlp::trace::v1::status::StatusCode;
use mainstay_proto::otlp::trace::v1::{Span, Status};
use twox_hash::XxHash3_128;

use super::{number, text, unix_nanos};
use crate::convert::failure;

/// The failures of jobs of which the end is not known yet: at most one for each job.
#[derive(Debug, Default)]
pub struct Incidents {
    open: BTreeMap<JobId, Open>,
    /// By job: the newest attempt that has ended, and when. A rank that exits ends its attempt before the verdict.
    ended: BTreeMap<JobId, (Attempt, Stamp)>,
}

/// A failure up to now.
#[derive(Debug)]
struct Open {
    /// When the verdict was given: its monotonic times are converted with this.
    at: Stamp,
    verdict: Verdict,
    /// The first decision: a wait may precede the last one.
    decided: Option<Stamp>,
    decision: Option<Decision>,
    /// When no process of the attempt was left.
    stopped: Option<Stamp>,
    /// When the processes of the next attempt were started.
    started: Option<Stamp>,
    /// Time in sections named `restore` before the first step.
    restoring: TimeSpan,
}

/// How a failure ended.
enum End<'a> {
    Training(&'a Outcome),
    /// By the next failure.
    Failed,
    JobEnded,
}

impl Incidents {
    /// Takes in an entry of the journal. Returns the spans of a failure that is over with it.
    pub fn take_in(&mut self, entry: &Entry) -> Vec<Span> {
        let Some(job) = &entry.job else { return Vec::new() };
        match &entry.body {
            Body::Verdict(verdict) => {
                let ended = self.ended.get(job).filter(|(attempt, _)| *attempt == verdict.attempt);
                let next = Open {
                    at: entry.at,
                    verdict: verdict.clone(),
                    decided: None,
                    decision: None,
                    stopped: ended.map(|(_, at)| *at),
                    started: None,
                    restoring: TimeSpan::default(),
                };
                let before = self.open.insert(job.clone(), next);
                return before.map(|open| open.over(job, entry.at, End::Failed)).unwrap_or_default();
            }
            Body::Decision(decision) => {
                if let Some(open) = self.of(job).filter(|open| open.verdict.incident == decision.incident) {
                    open.decided.get_or_insert(entry.at);
                    open.decision = Some(decision.clone());
                }
            }
            Body::Outcome(outcome) => return self.over(job, entry.at, End::Training(outcome)),
            Body::Fact(fact) => return self.fact(job, entry.at, fact),
            Body::Health(_) | Body::Finding(_) => {}
        }
        Vec::new()
    }

    fn fact(&mut self, job: &JobId, at: Stamp, fact: &Fact) -> Vec<Span> {
        let failed = self.of(job).map(|open| open.verdict.attempt);
        let follows = |attempt: &Attempt| failed.is_some_and(|failed| *attempt > failed);
        match fact {
            Fact::AttemptEnded { attempt, .. } => {
                self.ended.insert(job.clone(), (*attempt, at));
                if Some(*attempt) == failed {
                    self.of(job).into_iter().for_each(|open| open.stopped = Some(at));
                }
            }
            Fact::AttemptStarted { attempt, .. } if follows(attempt) => {
                self.of(job).into_iter().for_each(|open| open.started = Some(at));
            }
            Fact::RanksStepping { attempt, restoring, .. } if follows(attempt) => {
                self.of(job).into_iter().for_each(|open| open.restoring = *restoring);
            }
            Fact::JobEnded { .. } | Fact::LauncherLost { .. } => {
                self.ended.remove(job);
                return self.over(job, at, End::JobEnded);
            }
            _ => {}
        }
        Vec::new()
    }

    fn of(&mut self, job: &JobId) -> Option<&mut Open> {
        self.open.get_mut(job)
    }

    fn over(&mut self, job: &JobId, at: Stamp, end: End<'_>) -> Vec<Span> {
        self.open.remove(job).map(|open| open.over(job, at, end)).unwrap_or_default()
    }
}

impl Open {
    fn over(self, job: &JobId, at: Stamp, end: End<'_>) -> Vec<Span> {
        let fault = self.wall(self.verdict.fault_at);
        let trace =
            XxHash3_128::oneshot(format!("{}\0{}\0{fault}", job.0, self.verdict.incident.0).as_bytes());
        let trace = Trace { id: trace.to_be_bytes().to_vec(), job };
        let over = match &end {
            End::Training(outcome) => fault.saturating_add(outcome.to_first_step.0),
            End::Failed | End::JobEnded => unix_nanos(at.wall).max(fault),
        };
        let root = trace.span("incident", None, (fault, over));
        let id = root.span_id.clone();
        let mut spans = Vec::new();
        let mut before = fault;
        let mut phase = |name: &str, until: u64| {
            // The clocks of two entries may differ by what the wall clock was set.
            let until = until.clamp(before, over.max(before));
            spans.push(trace.span(name, Some(&id), (before, until)));
            before = until;
        };
        phase("detect", self.wall(self.verdict.detected_at));
        let mut phases = [
            ("stop", self.stopped),
            ("judge", Some(self.at)),
            ("decide", self.decided),
            ("rendezvous", self.started),
        ];
        // Ranks that hang are stopped after the decision.
        phases.sort_by_key(|(_, at)| at.map(|at| at.mono));
        for (name, at) in phases {
            if let Some(at) = at {
                phase(name, unix_nanos(at.wall));
            }
        }
        if let End::Training(outcome) = end {
            let connected = outcome.to_ranks_connected.map(|after| fault.saturating_add(after.0));
            if let Some(connected) = connected.filter(|_| self.started.is_some()) {
                phase("connect", connected);
            }
            if !self.restoring.is_zero() {
                let from = connected.or(self.started.map(|at| unix_nanos(at.wall))).unwrap_or(fault);
                phase("restore", from.saturating_add(self.restoring.0));
            }
            phase("first step", over);
        }
        spans.insert(0, Span { attributes: self.attributes(job, &end), status: Some(status(&end)), ..root });
        spans
    }

    /// Nanoseconds of the wall clock at a moment of the monotonic one.
    fn wall(&self, at: Mono) -> u64 {
        let wall = unix_nanos(self.at.wall);
        wall.saturating_sub(self.at.mono.since(at).0).saturating_add(at.since(self.at.mono).0)
    }

    fn attributes(&self, job: &JobId, end: &End<'_>) -> Vec<KeyValue> {
        let verdict = failure::verdict(&self.verdict, self.at);
        let mut all = vec![
            text("mainstay.job.name", job.0.clone()),
            number("mainstay.incident", verdict.incident),
            number("mainstay.attempt", verdict.attempt),
            text("mainstay.cause", verdict.cause.clone()),
            text("mainstay.fault_domain", verdict.domain().name()),
            number("mainstay.confidence_percent", (verdict.confidence * 100.0).round() as u64),
        ];
        all.extend(self.verdict.class.as_ref().map(|class| text("mainstay.class", class.clone())));
        all.extend(verdict.culprit.map(|rank| number("mainstay.culprit.rank", rank)));
        all.extend(self.verdict.host.as_ref().map(|host| text("mainstay.culprit.host", host.clone())));
        all.extend(verdict.step.map(|step| number("mainstay.step", step)));
        let action = self.decision.as_ref().map(|decision| failure::decision(decision).action().name());
        all.extend(action.map(|action| text("mainstay.action", action)));
        if let End::Training(outcome) = end {
            all.push(number("mainstay.steps_lost", outcome.steps_lost));
        }
        all
    }
}

fn status(end: &End<'_>) -> Status {
    let code = match end {
        End::Training(_) => StatusCode::Ok,
        End::Failed | End::JobEnded => StatusCode::Error,
    };
    Status { code: code.into(), ..Status::default() }
}

struct Trace<'a> {
    id: Vec<u8>,
    job: &'a JobId,
}

impl Trace<'_> {
    /// The ids are computed from the failure: a second export of it is the same trace.
    fn span(&self, name: &str, parent: Option<&Vec<u8>>, (start, end): (u64, u64)) -> Span {
        let mut of = self.id.clone();
        of.extend(name.as_bytes());
        let id = XxHash3_128::oneshot(&of).to_be_bytes();
        Span {
            trace_id: self.id.clone(),
            span_id: id[..8].to_vec(),
            parent_span_id: parent.cloned().unwrap_or_default(),
            name: name.to_owned(),
            kind: SpanKind::Internal.into(),
            start_time_unix_nano: start,
            end_time_unix_nano: end,
            attributes: vec![text("mainstay.job.name", self.job.0.clone())],
            ..Span::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use mainstay_model::id::{BootId, Incident};
    use mainstay_model::time::Wall;
    use mainstay_model::verdict::{Action, Cause, DecidedBy, Rule};

    use super::*;

    const SECOND: u64 = 1_000_000_000;
    /// The wall clock when the host started.
    const EPOCH: i64 = 1_795_492_212_000_000_000;

    fn entry(job: &str, second: u64, body: Body) -> Entry {
        let mono = Mono(second * SECOND);
        Entry {
            seq: second,
            at: Stamp { mono, wall: Wall(EPOCH + mono.0 as i64) },
            boot: BootId::default(),
            job: Some(JobId(job.to_owned())),
            origin_seq: None,
            body,
        }
    }

    /// A failure two seconds before its verdict, detected one second before it.
    fn verdict(incident: u64, second: u64) -> Body {
        let at = Mono((second - 2) * SECOND);
        let cause = Cause::Signal { signal: 9 };
        let verdict = Verdict::new(Incident(incident), Attempt(0), cause, "a quote of the program", at);
        Body::Verdict(Verdict { detected_at: Mono((second - 1) * SECOND), ..verdict })
    }

    fn decision(incident: u64, action: Action) -> Body {
        Body::Decision(Decision {
            incident: Incident(incident),
            action,
            after: TimeSpan::default(),
            rule: Rule::default(),
            why: String::new(),
            by: DecidedBy::Launcher,
            agent_evidence: false,
        })
    }

    fn started(attempt: u32) -> Body {
        let attempt = Attempt(attempt);
        Body::Fact(Fact::AttemptStarted { attempt, master_port: 1, ranks: Vec::new(), hosts: Vec::new() })
    }

    fn ended(attempt: u32) -> Body {
        let attempt = Attempt(attempt);
        Body::Fact(Fact::AttemptEnded { attempt, orphans_killed: 0, waiting: Vec::new() })
    }

    fn stepping(attempt: u32, restoring: TimeSpan) -> Body {
        Body::Fact(Fact::RanksStepping { attempt: Attempt(attempt), step: 1, counted: false, restoring })
    }

    fn outcome(incident: u64) -> Body {
        Body::Outcome(Outcome {
            incident: Incident(incident),
            attempt: Attempt(1),
            step: 5,
            reached_before: 7,
            steps_lost: 3,
            counted: false,
            to_ranks_started: TimeSpan::seconds(6),
            to_ranks_connected: Some(TimeSpan::seconds(8)),
            to_first_step: TimeSpan::seconds(12),
        })
    }

    fn job_ended() -> Body {
        Body::Fact(Fact::JobEnded { exit: 1, reason: String::new() })
    }

    /// Name, seconds from the fault to its start and to its end.
    fn phases(spans: &[Span]) -> Vec<(&str, u64, u64)> {
        let fault = spans[0].start_time_unix_nano;
        let second = |at: u64| (at - fault) / SECOND;
        let phase = |of: &Span| (second(of.start_time_unix_nano), second(of.end_time_unix_nano));
        spans.iter().map(|span| (span.name.as_str(), phase(span).0, phase(span).1)).collect()
    }

    fn code(spans: &[Span]) -> StatusCode {
        spans[0].status.as_ref().unwrap().code()
    }

    #[test]
    fn the_phases_of_a_restart_follow_each_other_and_of_another_job_nothing_is_taken() {
        let mut incidents = Incidents::default();
        let restart = Action::RestartInJob { attempt: Attempt(1) };
        let before = [
            ("a", 10, started(0)),
            ("a", 12, verdict(1, 12)),
            ("b", 12, verdict(1, 12)),
            ("a", 13, decision(1, Action::Wait)),
            ("a", 14, decision(1, restart)),
            ("b", 14, ended(0)),
            ("a", 15, ended(0)),
            ("a", 16, started(1)),
            ("b", 17, started(1)),
            ("a", 22, stepping(1, TimeSpan::seconds(2))),
        ];
        for (job, second, body) in before {
            assert!(incidents.take_in(&entry(job, second, body)).is_empty());
        }
        let spans = incidents.take_in(&entry("a", 22, outcome(1)));
        assert_eq!(
            phases(&spans),
            [
                ("incident", 0, 12),
                ("detect", 0, 1),
                ("judge", 1, 2),
                ("decide", 2, 3),
                ("stop", 3, 5),
                ("rendezvous", 5, 6),
                ("connect", 6, 8),
                ("restore", 8, 10),
                ("first step", 10, 12)
            ]
        );
        assert_eq!(spans[0].start_time_unix_nano, EPOCH as u64 + 10 * SECOND);
        assert_eq!(code(&spans), StatusCode::Ok);
        let ids: std::collections::BTreeSet<&[u8]> =
            spans.iter().map(|span| span.span_id.as_slice()).collect();
        assert_eq!((ids.len(), spans[0].trace_id.len(), spans[0].span_id.len()), (spans.len(), 16, 8));
        let quotes = format!("{spans:?}").contains("a quote of the program");
        assert!(!quotes, "texts of the program are not sent");

        let others = incidents.take_in(&entry("b", 30, job_ended()));
        assert_eq!(code(&others), StatusCode::Error);
        assert_ne!(others[0].trace_id, spans[0].trace_id);
        assert!(incidents.open.is_empty());
    }

    #[test]
    fn a_failure_ends_with_the_job_or_with_the_next_one() {
        let mut incidents = Incidents::default();
        incidents.take_in(&entry("a", 12, verdict(1, 12)));
        incidents.take_in(&entry("a", 13, decision(1, Action::RestartInJob { attempt: Attempt(1) })));
        let first = incidents.take_in(&entry("a", 15, verdict(2, 15)));
        assert_eq!(phases(&first), [("incident", 0, 5), ("detect", 0, 1), ("judge", 1, 2), ("decide", 2, 3)]);
        incidents.take_in(&entry("a", 16, decision(2, Action::Stop { exit: 1 })));
        incidents.take_in(&entry("a", 17, ended(0)));
        let second = incidents.take_in(&entry("a", 18, job_ended()));
        assert_eq!(
            phases(&second),
            [("incident", 0, 5), ("detect", 0, 1), ("judge", 1, 2), ("decide", 2, 3), ("stop", 3, 4)]
        );
        assert_eq!([code(&first), code(&second)], [StatusCode::Error; 2]);
        assert!(incidents.take_in(&entry("a", 19, job_ended())).is_empty());
    }
}
