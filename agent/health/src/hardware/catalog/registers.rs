//! What the NVLink registers printed by XID 74 mean. The line itself only says whether the error was fatal.

use serde::Deserialize;

use super::CatalogError;
use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::kernel::LinkRegisters;

/// What some bits of one register mean.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegisterRule {
    /// The register, from 1, in the order of the line.
    pub register: usize,
    /// The bits, from 0.
    pub bits: Vec<u32>,
    /// A few words.
    pub name: String,
    /// The GPU's state after it.
    pub state: HealthState,
    /// The mildest action that fixes it.
    pub action: RecommendedAction,
    /// After how many times on the same link support is needed; `None`: never.
    #[serde(default)]
    pub support_from: Option<u32>,
}

/// What the registers of a line mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegisterMeaning {
    /// A few words each, most severe first.
    pub names: Vec<String>,
    /// The most severe state.
    pub state: HealthState,
    /// The most severe action.
    pub action: RecommendedAction,
    /// After how many times on the same link support is needed.
    pub support_from: Option<u32>,
}

impl RegisterMeaning {
    /// Applies `rules` to a line; `None` if no rule matches a set bit.
    pub fn from_rules(rules: &[RegisterRule], line: &LinkRegisters) -> Option<RegisterMeaning> {
        let set = |rule: &&RegisterRule| {
            let value = rule.register.checked_sub(1).and_then(|index| line.registers.get(index)).copied();
            value.is_some_and(|value| {
                rule.bits.iter().any(|bit| value.checked_shr(*bit).unwrap_or(0) & 1 == 1)
            })
        };
        let mut matching: Vec<&RegisterRule> = rules.iter().filter(set).collect();
        matching.sort_by_key(|rule| std::cmp::Reverse((rule.state, rule.action)));
        let heaviest = matching.first()?;
        Some(RegisterMeaning {
            state: heaviest.state,
            action: heaviest.action,
            support_from: matching.iter().filter_map(|rule| rule.support_from).min(),
            names: matching.iter().map(|rule| rule.name.clone()).collect(),
        })
    }
}

pub(super) fn checked(rules: Vec<RegisterRule>) -> Result<Vec<RegisterRule>, CatalogError> {
    for (index, rule) in rules.iter().enumerate() {
        let right = (1..=7).contains(&rule.register) && rule.bits.iter().all(|bit| *bit < 32);
        if !right || rule.bits.is_empty() {
            return Err(CatalogError::Register { number: index + 1 });
        }
    }
    Ok(rules)
}
