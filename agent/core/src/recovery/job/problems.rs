//! Problems found while the job runs. They are recorded at once, and kept while they last, because they may explain a
//! failure of the job.

use crate::model::entry::Body;
use crate::model::finding::{Finding, FindingKind};
use crate::model::verdict::Verdict;

use super::{Job, Output};

/// The most findings in the host evidence, those with the highest confidence first.
const TESTIFIED: usize = 8;

impl Job {
    /// Records findings. Current ones are kept until they are over.
    pub(super) fn report_found(&mut self, found: Vec<Finding>, out: &mut Vec<Output>) {
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
    pub(super) fn standing_at(&self, verdict: &Verdict) -> Vec<Finding> {
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
