//! Collects the findings of one component in one sample.

use super::Checked;
use mainstay_model::health::{Evidence, HealthState, RecommendedAction};

#[derive(Debug, Default)]
pub(super) struct Findings {
    problems: Vec<(HealthState, String)>,
    action: RecommendedAction,
    notes: Vec<String>,
    summaries: Vec<String>,
    evidence: Vec<Evidence>,
    incomplete: bool,
}

impl Findings {
    /// Adds the result of a check. Healthy results are ignored.
    pub(super) fn problem(&mut self, checked: impl Into<Checked>, reason: String, action: RecommendedAction) {
        let Checked { state, recovering } = checked.into();
        if state > HealthState::Healthy {
            let text = if recovering {
                format!("{reason}; recovering, but not for long enough yet")
            } else {
                reason
            };
            self.problems.push((state, text));
            self.action = self.action.max(action);
        }
    }

    /// Something was read and does not count yet.
    pub(super) fn unknown(&mut self, reason: String) {
        self.problems.push((HealthState::Unknown, reason));
    }

    /// A required reading failed.
    pub(super) fn unreadable(&mut self, reason: String) {
        self.incomplete = true;
        self.unknown(reason);
    }

    /// A note that is shown if the component is healthy.
    pub(super) fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    /// The summary that is shown if the component is healthy.
    pub(super) fn summary(&mut self, summary: String) {
        self.summaries.push(summary);
    }

    pub(super) fn evidence(&mut self, source: &str, reading: String, limit: Option<String>) {
        self.evidence.push(Evidence { source: source.to_owned(), reading, limit, ..Evidence::default() });
    }

    /// The most severe state of all problems.
    pub(super) fn state(&self) -> HealthState {
        self.problems.iter().map(|(state, _)| *state).max().unwrap_or(HealthState::Healthy)
    }

    pub(super) fn action(&self) -> RecommendedAction {
        self.action
    }

    /// Whether every required reading succeeded.
    pub(super) fn complete(&self) -> bool {
        !self.incomplete
    }

    /// The problems, most severe first; or the summary with the notes.
    pub(super) fn reason(&self) -> String {
        let mut problems: Vec<&(HealthState, String)> = self.problems.iter().collect();
        problems.sort_by_key(|(state, _)| std::cmp::Reverse(*state));
        let texts: Vec<&str> = if problems.is_empty() {
            self.summaries.iter().chain(&self.notes).map(String::as_str).collect()
        } else {
            problems.into_iter().map(|(_, reason)| reason.as_str()).collect()
        };
        texts.join("; ")
    }

    pub(super) fn into_evidence(self) -> Vec<Evidence> {
        self.evidence
    }
}
