//! Journal facts about the newest step whose shards all have a copy on another host.

use serde::{Deserialize, Serialize};

use mainstay_model::entry::Fact;
use mainstay_model::observation::{Observation, Weight};

/// The component and the events in a job's journal.
const COMPONENT: &str = "checkpoint";
const COPIED: &str = "step_copied";
const BEHIND: &str = "copies_behind";

/// A step that survives the loss of any one host of its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopiedStep {
    /// The attempt that saved it.
    pub attempt: u64,
    /// The step.
    pub step: u64,
}

impl CopiedStep {
    /// The step as a fact for the job's journal.
    pub fn fact(&self) -> Fact {
        let CopiedStep { attempt, step } = self;
        let values = [("attempt", attempt), ("step", step)];
        let values = values.map(|(name, value)| (name.to_owned(), value.to_string()));
        Fact::Observed(Observation {
            component: COMPONENT.to_owned(),
            event: COPIED.to_owned(),
            detail: format!("each shard of step {step} has a copy in the memory of another host"),
            values: values.into(),
            ..Observation::default()
        })
    }

    /// Reads what [`fact`](Self::fact) wrote; `None` for other observations.
    pub fn read(observation: &Observation) -> Option<CopiedStep> {
        if observation.component != COMPONENT || observation.event != COPIED {
            return None;
        }
        let value = |name: &str| observation.values.get(name)?.parse().ok();
        Some(CopiedStep { attempt: value("attempt")?, step: value("step")? })
    }
}

/// The fact that copies do not keep up with saves, with the reason.
pub fn behind(why: &str) -> Fact {
    Fact::Observed(Observation {
        component: COMPONENT.to_owned(),
        event: BEHIND.to_owned(),
        weight: Weight::Warning,
        detail: why.to_owned(),
        ..Observation::default()
    })
}

/// The reason that [`behind`] wrote; `None` for other observations.
pub fn read_behind(observation: &Observation) -> Option<&str> {
    (observation.component == COMPONENT && observation.event == BEHIND).then_some(&*observation.detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observation(fact: Fact) -> Observation {
        match fact {
            Fact::Observed(observation) => observation,
            other => panic!("expected an observation, got {other:?}"),
        }
    }

    #[test]
    fn a_copied_step_is_read_back_from_the_journal_and_other_events_are_not() {
        let copied = CopiedStep { attempt: 3, step: 1_200 };
        let observation = observation(copied.fact());
        assert_eq!(CopiedStep::read(&observation), Some(copied));
        assert_eq!(read_behind(&observation), None);
        let other = Observation { event: "interval_advised".to_owned(), ..observation };
        assert_eq!(CopiedStep::read(&other), None);
    }

    #[test]
    fn the_reason_for_a_lag_is_read_back_from_the_journal() {
        let observation = observation(behind("the link is slow"));
        assert_eq!(read_behind(&observation), Some("the link is slow"));
        assert_eq!(CopiedStep::read(&observation), None);
    }
}
