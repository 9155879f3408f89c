//! Repeated failures: earlier failures in the journal with the same fingerprint, in this job and in others, in this boot of the host
//! and in earlier ones. Failures from before a change of the program do not count. Each run of a job has its own name; runs of one
//! user's program count as one job. Failures reported by other hosts are taken into account.

mod remote;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};

use mainstay_model::entry::{Body, Entry, Fact, JobSpec};
use mainstay_model::id::{BootId, JobId};
use mainstay_model::time::{Mono, Wall};
use mainstay_model::verdict::{Cause, Verdict};
use mainstay_progress::memory;

pub use mainstay_model::repeats::{FailurePosition, OnHost, SeenBefore};
pub use remote::{MAX_REPORTED, RemoteFailure, RemoteFailures};

/// Maximum number of fingerprints kept, the newest.
const MAX_FINGERPRINTS: usize = 512;
/// Maximum number of failures kept per fingerprint, the newest.
const MAX_FAILURES: usize = 32;
/// Maximum number of runs whose programs are kept.
const MAX_JOBS: usize = 512;

#[derive(Clone, Debug)]
struct Failure {
    job: JobId,
    boot: BootId,
    position: FailurePosition,
    fault_at: Mono,
    at: Wall,
    /// The job's program at that time. `None` if its start is unknown.
    ran: Option<Program>,
}

/// The program of a run.
#[derive(Clone, Debug)]
struct Program {
    /// The owner and the program: the same for all its runs, with any arguments.
    name: String,
    /// A hash of its command and files, if they could be read.
    content: Option<String>,
    /// When this run started.
    began: Wall,
    /// Whether it runs on several hosts at once. Then the others fail with this one and are no independent evidence.
    spans: bool,
}

/// Failures by fingerprint. Bounded.
#[derive(Clone, Debug, Default)]
pub struct Repeats {
    failures: BTreeMap<String, VecDeque<Failure>>,
    /// Fingerprints by age, oldest first.
    order: VecDeque<String>,
    /// The program of each run.
    programs: BTreeMap<JobId, Program>,
}

impl Repeats {
    /// Processes a journal entry. Only verdicts on exceptions and starts of jobs matter.
    pub fn take_in(&mut self, entry: &Entry) {
        if let (Body::Fact(Fact::JobStarted(spec)), Some(job)) = (&entry.body, &entry.job) {
            self.started(job, spec, entry.at.wall);
        }
        let (Body::Verdict(verdict), Some(job)) = (&entry.body, &entry.job) else { return };
        let Cause::Exception { fingerprint, .. } = &verdict.cause else { return };
        let failures = self.failures.entry(fingerprint.clone()).or_default();
        if failures.is_empty() {
            self.order.push_back(fingerprint.clone());
        }
        // A verdict that host evidence changed has two entries and counts as one failure.
        failures.retain(|failure| !(failure.fault_at == verdict.fault_at && failure.boot == entry.boot));
        let (job, boot) = (job.clone(), entry.boot.clone());
        let ran = self.programs.get(&job).cloned();
        let (position, fault_at, at) =
            (FailurePosition::from_verdict(verdict), verdict.fault_at, entry.at.wall);
        failures.push_back(Failure { job, boot, position, fault_at, at, ran });
        if failures.len() > MAX_FAILURES {
            failures.pop_front();
        }
        if self.order.len() > MAX_FINGERPRINTS
            && let Some(oldest) = self.order.pop_front()
        {
            self.failures.remove(&oldest);
        }
    }

    /// The failures to report to other hosts, the newest last.
    pub fn recent(&self) -> Vec<RemoteFailure> {
        let all = self
            .failures
            .iter()
            .flat_map(|(fingerprint, failures)| failures.iter().map(move |failure| (fingerprint, failure)));
        let one = |(fingerprint, failure): (&String, &Failure)| {
            let ran = failure.ran.as_ref().filter(|ran| !ran.spans)?;
            Some(ran.remote_failure(fingerprint, failure.position, failure.at))
        };
        let mut recent: Vec<RemoteFailure> = all.filter_map(one).collect();
        recent.sort_by_key(|failure| failure.at);
        recent.split_off(recent.len().saturating_sub(MAX_REPORTED))
    }

    fn started(&mut self, job: &JobId, spec: &JobSpec, began: Wall) {
        self.programs.remove(job);
        if self.programs.len() >= MAX_JOBS {
            // The oldest job: running jobs are usually newer.
            let oldest =
                self.programs.iter().min_by_key(|(_, program)| program.began).map(|(job, _)| job.clone());
            oldest.iter().for_each(|job| _ = self.programs.remove(job));
        }
        let program = Program {
            name: memory::program_of(spec),
            content: spec.program.as_deref().map(str::to_owned),
            began,
            spans: spec.world_size != spec.local_world_size,
        };
        self.programs.insert(job.clone(), program);
    }

    /// Earlier occurrences of the verdict's failure, here and `elsewhere`. `None` if there are none and no other host listens, or if
    /// the verdict has no fingerprint.
    pub fn before(
        &self,
        job: &JobId,
        boot: &BootId,
        verdict: &Verdict,
        elsewhere: &RemoteFailures,
    ) -> Option<SeenBefore> {
        let Cause::Exception { fingerprint, .. } = &verdict.cause else { return None };
        let mut seen = SeenBefore::default();
        let mut others: Vec<&str> = Vec::new();
        let now = self.programs.get(job);
        let failures = self.failures.get(fingerprint).into_iter().flatten();
        for earlier in
            failures.filter(|failure| !(failure.fault_at == verdict.fault_at && failure.boot == *boot))
        {
            let both = earlier.ran.as_ref().zip(now);
            if earlier.job != *job && both.is_none_or(|(then, now)| then.name != now.name) {
                let other = earlier.ran.as_ref().map_or(earlier.job.0.as_str(), |ran| &ran.name);
                if !others.contains(&other) {
                    others.push(other);
                }
            } else if !both
                .is_some_and(|(then, now)| was_changed(then.content.as_ref(), now.content.as_ref()))
            {
                seen.count(earlier.position, FailurePosition::from_verdict(verdict));
                seen.in_other_boots += u32::from(earlier.boot != *boot);
                // By time: a scheduler may start the same job again under the same name.
                let in_earlier_run = now.is_some_and(|now| earlier.at < now.began);
                seen.in_earlier_runs +=
                    u32::from(in_earlier_run && earlier.position.is(FailurePosition::from_verdict(verdict)));
            }
        }
        seen.other_jobs = u32::try_from(others.len()).unwrap_or(u32::MAX);
        if let Some(now) = now.filter(|now| !now.spans) {
            let this =
                now.remote_failure(fingerprint, FailurePosition::from_verdict(verdict), Wall::default());
            seen.elsewhere = elsewhere.before(&this, now.began);
            seen.answered_by = elsewhere.answered_by;
        }
        (!seen.is_nothing() || seen.answered_by > 0).then_some(seen)
    }
}

impl Program {
    /// One of its failures, as numbers.
    fn remote_failure(&self, fingerprint: &str, position: FailurePosition, at: Wall) -> RemoteFailure {
        let (program, content) = (self.name.clone(), self.content.clone());
        RemoteFailure { program, content, fingerprint: memory::number_of(fingerprint), position, at }
    }
}

/// Whether the program was changed. An unreadable program counts as unchanged.
fn was_changed(then: Option<&String>, now: Option<&String>) -> bool {
    then.zip(now).is_some_and(|(then, now)| then != now)
}
