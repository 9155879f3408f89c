//! The newest step of which each shard has its copy on another host, as the journal has it.

use serde::{Deserialize, Serialize};

use crate::model::entry::Fact;
use crate::model::observation::{Observation, Weight};

/// The component and the words under which a job's journal has it.
const COMPONENT: &str = "checkpoint";
const COPIED: &str = "step_copied";
const BEHIND: &str = "copies_behind";

/// A step that survives the loss of any one host of its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopiedStep {
    /// The attempt that saved it.
    pub attempt: u64,
    /// Which step.
    pub step: u64,
}

impl CopiedStep {
    /// As a job's journal has it.
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

    /// What [`fact`](Self::fact) wrote; none if it is about something else.
    pub fn read(seen: &Observation) -> Option<CopiedStep> {
        if seen.component != COMPONENT || seen.event != COPIED {
            return None;
        }
        let value = |name: &str| seen.values.get(name)?.parse().ok();
        Some(CopiedStep { attempt: value("attempt")?, step: value("step")? })
    }
}

/// Copies do not keep up with what ranks save.
pub fn behind(why: &str) -> Fact {
    Fact::Observed(Observation {
        component: COMPONENT.to_owned(),
        event: BEHIND.to_owned(),
        weight: Weight::Warning,
        detail: why.to_owned(),
        ..Observation::default()
    })
}

/// Why copies do not keep up, if this says so.
pub fn read_behind(seen: &Observation) -> Option<&str> {
    (seen.component == COMPONENT && seen.event == BEHIND).then_some(&*seen.detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observation(fact: Fact) -> Observation {
        match fact {
            Fact::Observed(seen) => seen,
            other => panic!("an observation, not {other:?}"),
        }
    }

    #[test]
    fn what_the_journal_has_is_read_again() {
        let copied = CopiedStep { attempt: 3, step: 1_200 };
        let seen = observation(copied.fact());
        assert_eq!(CopiedStep::read(&seen), Some(copied));
        assert_eq!(read_behind(&seen), None);
        let other = Observation { event: "interval_advised".to_owned(), ..seen };
        assert_eq!(CopiedStep::read(&other), None);
    }

    #[test]
    fn what_is_behind_is_read_as_its_reason() {
        let seen = observation(behind("saves come faster than copies"));
        assert_eq!(read_behind(&seen), Some("saves come faster than copies"));
        assert_eq!(CopiedStep::read(&seen), None);
    }
}
