//! Problems found while the job runs. They are recorded at once, and kept while they last, because they may explain a
//! failure of the job.

use mainstay_model::entry::Body;
use mainstay_model::finding::{Finding, FindingKind};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::observation::Observation;
use mainstay_model::verdict::{FaultDomain, Verdict};
use mainstay_progress::monitor::Watch;

use super::Output;

/// The most findings in the host evidence, those with the highest confidence first.
const TESTIFIED: usize = 8;

/// The event of the component `job` that the file system of the checkpoints does not answer.
pub const FILE_SYSTEM_SILENT: &str = "file_system_silent";
/// The event that it answers again.
pub const FILE_SYSTEM_ANSWERS: &str = "file_system_answers";

/// The findings of an attempt.
#[derive(Clone, Debug)]
pub(super) struct Findings {
    /// Watches the step times of the ranks.
    pub(super) watch: Watch,
    /// Those that are not over.
    standing: Vec<Finding>,
}

impl Findings {
    pub(super) fn new(watch: Watch) -> Findings {
        Findings { watch, standing: Vec::new() }
    }

    /// Starts an attempt with these ranks.
    pub(super) fn begin_attempt(&mut self, attempt: Attempt, ranks: Vec<Rank>) {
        self.watch.begin_attempt(attempt, ranks);
        self.standing.clear();
    }

    /// The file system of the checkpoints stopped answering, or answers again, at this step.
    pub(super) fn file_system_observed(
        &mut self,
        seen: &Observation,
        attempt: Attempt,
        step: u64,
        out: &mut Vec<Output>,
    ) {
        let standing = self.standing.iter().find(|stood| stood.what == FindingKind::SilentFileSystem);
        let finding = match standing.cloned() {
            Some(stood) if seen.event == FILE_SYSTEM_ANSWERS => {
                Finding { over: true, step, headline: seen.detail.clone(), ..stood }
            }
            None if seen.event == FILE_SYSTEM_SILENT => Finding {
                finding: self.watch.next_number(),
                attempt,
                what: FindingKind::SilentFileSystem,
                over: false,
                headline: seen.detail.clone(),
                domain: FaultDomain::Infrastructure,
                confidence: 1.0,
                ranks: Vec::new(),
                device: None,
                host: None,
                stage: None,
                since_step: step,
                step,
                cost_percent: None,
                evidence: Vec::new(),
                last_agreed_step: None,
                doubtful_steps: Vec::new(),
            },
            _ => return,
        };
        self.report(vec![finding], out);
    }

    /// Records findings. Current ones are kept until they are over.
    pub(super) fn report(&mut self, found: Vec<Finding>, out: &mut Vec<Output>) {
        for finding in found {
            self.standing.retain(|stood| stood.finding != finding.finding);
            if !finding.over {
                self.standing.push(finding.clone());
            }
            out.push(Output::Record(Body::Finding(finding)));
        }
    }

    /// Findings that were current in the failed attempt and may be related to the failure. A slow rank does not
    /// explain a failure elsewhere.
    pub(super) fn related_to(&self, verdict: &Verdict) -> Vec<Finding> {
        let concerns = |finding: &&Finding| {
            let is_of_a_place = matches!(finding.what, FindingKind::SlowRank | FindingKind::SlowHost);
            let of_the_culprit = || verdict.culprit.is_some_and(|rank| finding.ranks.contains(&rank));
            finding.attempt == verdict.attempt && (!is_of_a_place || of_the_culprit())
        };
        let mut standing: Vec<Finding> = self.standing.iter().filter(concerns).cloned().collect();
        standing.sort_by(|one, other| other.confidence.total_cmp(&one.confidence));
        standing.truncate(TESTIFIED);
        standing
    }
}
