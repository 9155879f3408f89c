//! What a waiting spare has ready, as recorded in its host's journal.

use mainstay_model::entry::Fact;
use mainstay_model::observation::Observation;

/// The component and the event in the journal.
const COMPONENT: &str = "spare";
const READY: &str = "spare_ready";

/// What a spare has ready.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpareReady {
    /// Whether the imports of its ranks are done. `None` if ranks are started without a template.
    pub imports: Option<bool>,
    /// The newest step of which it has copies.
    pub copy: Option<SpareCopy>,
}

/// Copies of a step on a spare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpareCopy {
    /// The attempt that saved it.
    pub attempt: u64,
    /// The step.
    pub step: u64,
    /// The number of ranks with a shard.
    pub shards: usize,
    /// The number of ranks that saved the step.
    pub ranks: u32,
}

impl SpareReady {
    /// Whether anything is ready.
    pub fn has_something(&self) -> bool {
        self.imports == Some(true) || self.copy.is_some()
    }

    /// A sentence: "waiting as a spare: imports are done; has a copy of step 40".
    pub fn describe(&self) -> String {
        let imports = self.imports.map(|done| match done {
            true => "imports are done".to_owned(),
            false => "imports are not done yet".to_owned(),
        });
        let copy = match self.copy {
            Some(SpareCopy { step, shards, ranks, .. }) if shards < ranks as usize => {
                format!("has {shards} of the {ranks} shards of step {step}")
            }
            Some(SpareCopy { step, .. }) => format!("has a copy of step {step}"),
            None => "has no copy of a checkpoint yet".to_owned(),
        };
        let parts: Vec<String> = imports.into_iter().chain([copy]).collect();
        format!("waiting as a spare: {}", parts.join("; "))
    }

    /// The fact for the journal.
    pub fn fact(&self) -> Fact {
        let text = |name: &str, value: String| (name.to_owned(), value);
        let copy = self.copy.iter().flat_map(|copy| {
            [text("attempt", copy.attempt.to_string()), text("step", copy.step.to_string())]
        });
        let imports = self.imports.map(|done| text("imports", done.to_string()));
        Fact::Observed(Observation {
            component: COMPONENT.to_owned(),
            event: READY.to_owned(),
            detail: self.describe(),
            values: copy.chain(imports).collect(),
            ..Observation::default()
        })
    }

    /// The text of a fact that [`fact`](Self::fact) made. `None` for other facts.
    pub fn read(seen: &Observation) -> Option<&str> {
        (seen.component == COMPONENT && seen.event == READY).then_some(&*seen.detail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_states_what_is_ready_and_what_is_not() {
        let copy = SpareCopy { attempt: 0, step: 40, shards: 4, ranks: 4 };
        let text = |imports, copy| SpareReady { imports, copy }.describe();
        testing::snapshot!("spares", "ready", text(Some(true), Some(copy)));
        testing::snapshot!("spares", "not ready", text(Some(false), None));
        let some = SpareCopy { shards: 2, ..copy };
        testing::snapshot!("spares", "half of its copies", text(None, Some(some)));
        let ready = SpareReady { imports: Some(true), copy: Some(copy) };
        let Fact::Observed(seen) = ready.fact() else { panic!("an observation") };
        assert_eq!(SpareReady::read(&seen), Some(&*ready.describe()));
    }
}
