//! What operators have said about components: acknowledgements of faults, and silences. They are observations in the
//! journal, so that they survive a restart and can be audited.

use std::collections::BTreeMap;

use crate::health::{Component, HealthState, RecommendedAction};
use crate::id::BootId;
use crate::observation::{Observation, Weight};
use crate::time::{Stamp, Wall};

/// The event of an acknowledgement.
pub const ACKNOWLEDGED: &str = "operator_acknowledged";
/// The event of an acknowledgement that ended: the fault recurred, got worse or is gone.
pub const ACKNOWLEDGEMENT_OVER: &str = "acknowledgement_over";
/// The event of a silence.
pub const SILENCED: &str = "operator_silenced";
/// The event of a silence that was cancelled.
pub const UNSILENCED: &str = "operator_unsilenced";
/// The event of a silence that expired.
pub const SILENCE_OVER: &str = "silence_over";

/// The organization in the certificates of operators' programs, which call over TLS.
pub const ORGANIZATION: &str = "mainstay-operator";

/// Maximum length of a reason, in characters.
const REASON: usize = 500;

/// An operator's statement that a fault is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acknowledgement {
    /// The user id, as reported by the kernel.
    pub uid: u32,
    /// The operator's reason.
    pub reason: String,
    /// When.
    pub at: Stamp,
    /// The boot: it does not apply to faults of a later boot.
    pub boot: BootId,
    /// The component's state at the time.
    pub state: HealthState,
    /// The recommended action at the time.
    pub action: RecommendedAction,
}

/// An operator's statement that a component does not count for a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Silence {
    /// The user id, as reported by the kernel.
    pub uid: u32,
    /// The operator's reason.
    pub reason: String,
    /// The start.
    pub since: Stamp,
    /// The end.
    pub until: Wall,
}

/// An operator's statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OperatorAction {
    /// The present fault is known.
    Acknowledge {
        /// The reason.
        reason: String,
    },
    /// The component does not count until then.
    Silence {
        /// The reason.
        reason: String,
        /// The end.
        until: Wall,
    },
    /// The component counts again.
    Unsilence,
}

/// All statements of operators that are in effect.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OperatorState {
    acknowledged: BTreeMap<String, Acknowledgement>,
    silenced: BTreeMap<String, Silence>,
}

impl OperatorAction {
    /// The journal observation for the statement.
    pub fn observation(&self, uid: u32, component: &Component) -> Observation {
        let (event, mut values, words) = match self {
            OperatorAction::Acknowledge { reason } => {
                let values = vec![
                    ("reason", cut(reason)),
                    ("state", name(component.state)),
                    ("action", name(component.action)),
                ];
                (ACKNOWLEDGED, values, format!("acknowledged by user {uid}: {}", cut(reason)))
            }
            OperatorAction::Silence { reason, until } => {
                let values = vec![("reason", cut(reason)), ("until", until.0.to_string())];
                (SILENCED, values, format!("silenced by user {uid}: {}", cut(reason)))
            }
            OperatorAction::Unsilence => (UNSILENCED, vec![], format!("silence removed by user {uid}")),
        };
        values.push(("uid", uid.to_string()));
        observation(component, event, words, values)
    }
}

impl OperatorState {
    /// Processes an observation from the journal; other observations are ignored.
    pub fn take_in(&mut self, at: Stamp, boot: &BootId, observation: &Observation) {
        let component = &observation.component;
        let value = |name: &str| observation.values.get(name).cloned().unwrap_or_default();
        let uid = value("uid").parse().unwrap_or(u32::MAX);
        match observation.event.as_str() {
            ACKNOWLEDGED => {
                let state = named(&value("state")).unwrap_or(HealthState::Unhealthy);
                let action = named(&value("action")).unwrap_or_default();
                let known =
                    Acknowledgement { uid, reason: value("reason"), at, boot: boot.clone(), state, action };
                self.acknowledged.insert(component.clone(), known);
            }
            ACKNOWLEDGEMENT_OVER => drop(self.acknowledged.remove(component)),
            SILENCED => {
                if let Ok(until) = value("until").parse() {
                    let silence = Silence { uid, reason: value("reason"), since: at, until: Wall(until) };
                    self.silenced.insert(component.clone(), silence);
                }
            }
            UNSILENCED | SILENCE_OVER => drop(self.silenced.remove(component)),
            _ => {}
        }
    }

    /// Drops acknowledgements of boots other than `boot`: faults after a boot are new.
    pub fn only_of(&mut self, boot: &BootId) {
        self.acknowledged.retain(|_, known| known.boot == *boot);
    }

    /// Processes a judged component. Returns the observation for the journal if its acknowledgement ends.
    pub fn component_reported(&mut self, component: &Component) -> Option<Observation> {
        let known = self.acknowledged.get(&component.name)?;
        let again = component.fault_at.is_some_and(|at| at > known.at.mono);
        let worse = component.state > known.state || component.action > known.action;
        let words = match component.state {
            HealthState::Healthy => "the fault is gone".to_owned(),
            _ if again => format!("it happened again: {}", component.reason),
            _ if worse => format!("it got worse: {}", component.reason),
            _ => return None,
        };
        let weight = if component.state == HealthState::Healthy { Weight::Info } else { Weight::Warning };
        self.acknowledged.remove(&component.name);
        let over = observation(component, ACKNOWLEDGEMENT_OVER, words, vec![]);
        Some(Observation { weight, ..over })
    }

    /// Ends the silences that have expired at `now` and returns their observations for the journal.
    pub fn run_out(&mut self, now: Wall) -> Vec<Observation> {
        let over: Vec<String> = self
            .silenced
            .iter()
            .filter(|(_, silence)| silence.until <= now)
            .map(|(name, _)| name.clone())
            .collect();
        let reported = over.into_iter().map(|name| {
            self.silenced.remove(&name);
            let component = Component { name, ..Component::default() };
            observation(&component, SILENCE_OVER, "the silence has run out".to_owned(), vec![])
        });
        reported.collect()
    }

    /// Whether no statement is in effect.
    pub fn is_empty(&self) -> bool {
        self.acknowledged.is_empty() && self.silenced.is_empty()
    }

    /// The journal observations that restore this state, each with its original time.
    pub fn observations(&self) -> Vec<(Stamp, Observation)> {
        let acknowledged = self.acknowledged.iter().map(|(name, known)| {
            let Acknowledgement { state, action, .. } = *known;
            let component = Component { name: name.clone(), state, action, ..Component::default() };
            let word = OperatorAction::Acknowledge { reason: known.reason.clone() };
            (known.at, word.observation(known.uid, &component))
        });
        let silenced = self.silenced.iter().map(|(name, silence)| {
            let component = Component { name: name.clone(), ..Component::default() };
            let word = OperatorAction::Silence { reason: silence.reason.clone(), until: silence.until };
            (silence.since, word.observation(silence.uid, &component))
        });
        acknowledged.chain(silenced).collect()
    }

    /// The acknowledgement of a component.
    pub fn acknowledgement(&self, component: &str) -> Option<&Acknowledgement> {
        self.acknowledged.get(component)
    }

    /// The silence of a component.
    pub fn silence(&self, component: &str) -> Option<&Silence> {
        self.silenced.get(component)
    }

    /// Whether the component counts for the node.
    pub fn counts(&self, component: &str) -> bool {
        !self.acknowledged.contains_key(component) && !self.silenced.contains_key(component)
    }
}

fn observation(
    component: &Component,
    event: &str,
    detail: String,
    values: Vec<(&str, String)>,
) -> Observation {
    Observation {
        component: component.name.clone(),
        event: event.to_owned(),
        weight: Weight::Info,
        detail,
        values: values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
    }
}

fn cut(reason: &str) -> String {
    reason.chars().filter(|letter| !letter.is_control()).take(REASON).collect()
}

/// The name of a state or an action in the journal.
pub fn name(of: impl serde::Serialize) -> String {
    serde_json::to_value(of).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

/// Parses a name from the journal.
pub fn named<T: serde::de::DeserializeOwned>(name: &str) -> Option<T> {
    serde_json::from_value(serde_json::Value::String(name.to_owned())).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Mono;

    const NAME: &str = "gpu.0000:3b:00";

    fn stamp(seconds: u64) -> Stamp {
        Stamp { mono: Mono(seconds * 1_000_000_000), wall: Wall(seconds as i64 * 1_000_000_000) }
    }

    fn boot() -> BootId {
        BootId("this".into())
    }

    fn ill(state: HealthState, fault_at: u64) -> Component {
        Component { name: NAME.into(), state, fault_at: Some(stamp(fault_at).mono), ..Component::default() }
    }

    fn act(acknowledgements: &mut OperatorState, at: u64, word: &OperatorAction, component: &Component) {
        acknowledgements.take_in(stamp(at), &boot(), &word.observation(1000, component));
    }

    fn acknowledge() -> OperatorAction {
        OperatorAction::Acknowledge { reason: "ticket 7".into() }
    }

    #[test]
    fn an_acknowledged_fault_does_not_count_until_it_recurs() {
        let mut acknowledgements = OperatorState::default();
        let component = ill(HealthState::Unhealthy, 10);
        act(&mut acknowledgements, 20, &acknowledge(), &component);
        assert!(!acknowledgements.counts(NAME));
        let known = acknowledgements.acknowledgement(NAME).unwrap();
        assert_eq!(
            (known.uid, known.reason.as_str(), known.state),
            (1000, "ticket 7", HealthState::Unhealthy)
        );
        assert_eq!(acknowledgements.component_reported(&component), None);
        let over = acknowledgements.component_reported(&ill(HealthState::Unhealthy, 30)).unwrap();
        assert_eq!((over.event.as_str(), over.weight), (ACKNOWLEDGEMENT_OVER, Weight::Warning));
        assert!(acknowledgements.counts(NAME));
    }

    #[test]
    fn an_acknowledgement_ends_when_the_fault_gets_worse_or_is_gone() {
        for (state, weight) in
            [(HealthState::Unhealthy, Weight::Warning), (HealthState::Healthy, Weight::Info)]
        {
            let mut acknowledgements = OperatorState::default();
            act(&mut acknowledgements, 20, &acknowledge(), &ill(HealthState::Degraded, 10));
            assert_eq!(acknowledgements.component_reported(&ill(HealthState::Degraded, 10)), None);
            assert_eq!(acknowledgements.component_reported(&ill(state, 10)).unwrap().weight, weight);
        }
    }

    #[test]
    fn a_silence_expires_or_is_cancelled() {
        let mut acknowledgements = OperatorState::default();
        let component = ill(HealthState::Unhealthy, 10);
        let silence = OperatorAction::Silence { reason: "bench".into(), until: stamp(100).wall };
        act(&mut acknowledgements, 20, &silence, &component);
        assert!(!acknowledgements.counts(NAME));
        assert_eq!(acknowledgements.run_out(stamp(99).wall), []);
        assert_eq!(acknowledgements.run_out(stamp(100).wall).len(), 1);
        assert!(acknowledgements.counts(NAME));
        act(&mut acknowledgements, 120, &silence, &component);
        act(&mut acknowledgements, 121, &OperatorAction::Unsilence, &component);
        assert!(acknowledgements.counts(NAME) && acknowledgements.silence(NAME).is_none());
    }

    #[test]
    fn the_observations_of_a_state_restore_it() {
        let mut before = OperatorState::default();
        act(&mut before, 20, &acknowledge(), &ill(HealthState::Degraded, 10));
        let silence = OperatorAction::Silence { reason: "bench".into(), until: stamp(100).wall };
        act(&mut before, 30, &silence, &ill(HealthState::Unhealthy, 10));
        let mut after = OperatorState::default();
        assert!(after.is_empty() && !before.is_empty());
        for (at, observation) in before.observations() {
            after.take_in(at, &boot(), &observation);
        }
        assert_eq!(after, before);
    }

    #[test]
    fn acknowledgements_do_not_apply_to_another_boot() {
        let mut acknowledgements = OperatorState::default();
        act(&mut acknowledgements, 20, &acknowledge(), &ill(HealthState::Unhealthy, 10));
        acknowledgements.only_of(&boot());
        assert!(!acknowledgements.counts(NAME));
        acknowledgements.only_of(&BootId("next".into()));
        assert!(acknowledgements.counts(NAME));
    }
}
