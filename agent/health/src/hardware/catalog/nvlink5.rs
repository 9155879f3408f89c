//! NVLink of the fifth generation: unit, sub-code and status of XID 144 to 150 give the severity.

use serde::Deserialize;

use super::{CatalogError, RegisterRule, registers};
use mainstay_model::health::RecommendedAction;
use mainstay_model::kernel::NvlinkError;

/// The file of rules.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvlinkFile {
    /// Its rules.
    #[serde(default)]
    pub rule: Vec<NvlinkRule>,
    /// What the registers of links of earlier generations mean.
    #[serde(default)]
    pub register: Vec<RegisterRule>,
}

/// What one unit with one status means.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvlinkRule {
    /// The XID.
    pub xid: u32,
    /// The unit's names, separated by `/`.
    pub unit: String,
    /// Intrinfo in the first layout: 32 characters of `0`, `1` and `-`, most significant bit first.
    pub v1: String,
    /// Intrinfo in the second layout.
    pub v2: String,
    /// The status, or its bit.
    pub status: u32,
    /// Whether it is fatal.
    pub fatal: bool,
    /// The mildest action that fixes it.
    pub action: RecommendedAction,
    /// Whether the XID 154 logged with it decides.
    #[serde(default)]
    pub ask154: bool,
}

/// What the rules return for a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvlinkMeaning {
    /// Whether it is fatal: from the line if it says so, else from the rule.
    pub fatal: bool,
    /// The mildest action that fixes it.
    pub action: RecommendedAction,
    /// Whether a rule matched.
    pub known: bool,
}

impl NvlinkFile {
    pub(super) fn checked(self) -> Result<(Vec<NvlinkRule>, Vec<RegisterRule>), CatalogError> {
        for (index, rule) in self.rule.iter().enumerate() {
            for pattern in [&rule.v1, &rule.v2] {
                let right = pattern.len() == 32 && pattern.bytes().all(|bit| b"01-".contains(&bit));
                if !right {
                    return Err(CatalogError::Pattern { number: index + 1, pattern: pattern.clone() });
                }
            }
        }
        Ok((self.rule, registers::checked(self.register)?))
    }
}

impl NvlinkMeaning {
    /// Applies `rules` to an error. An error that no rule matches is as severe as its line says.
    pub fn from_rules(rules: &[NvlinkRule], xid: u32, error: &NvlinkError) -> NvlinkMeaning {
        let of_layout = |layout: fn(&NvlinkRule) -> &str| {
            let fits = |rule: &&NvlinkRule| rule.xid == xid && bits_fit(layout(rule), error.intrinfo);
            let of_unit = || rules.iter().filter(fits);
            // The status of some units is a number: a rule with this very number is the one. If several bits are set, the most severe
            // one counts.
            of_unit().find(|rule| rule.status == error.status).or_else(|| {
                of_unit()
                    .filter(|rule| rule.status.is_power_of_two() && rule.status & error.status != 0)
                    .max_by_key(|rule| (rule.fatal, rule.action))
            })
        };
        // The first layout has the XID in its lowest bits, so a match is certain; the second leaves more bits open.
        match of_layout(|rule| &rule.v1).or_else(|| of_layout(|rule| &rule.v2)) {
            Some(rule) => {
                let fatal = error.fatal.unwrap_or(rule.fatal);
                // A line that says "not fatal" needs no reset, whatever the table lists for its code.
                let action =
                    if fatal { rule.action } else { rule.action.min(RecommendedAction::RestartProcess) };
                NvlinkMeaning { fatal, action, known: true }
            }
            None => {
                let fatal = error.fatal.unwrap_or(true);
                let action = if fatal { RecommendedAction::ResetDevice } else { RecommendedAction::None };
                NvlinkMeaning { fatal, action, known: false }
            }
        }
    }
}

fn bits_fit(pattern: &str, word: u32) -> bool {
    pattern.bytes().rev().enumerate().all(|(index, bit)| {
        let set = word.checked_shr(index as u32).unwrap_or(0) & 1 == 1;
        match bit {
            b'0' => !set,
            b'1' => set,
            _ => true,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_that_is_a_number_is_not_read_as_bits() {
        let rule = |status, fatal, action| NvlinkRule {
            xid: 149,
            unit: "UNIT".to_owned(),
            v1: "-".repeat(32),
            v2: "-".repeat(32),
            status,
            fatal,
            action,
            ask154: false,
        };
        let rules = [rule(1, true, RecommendedAction::ResetDevice), rule(3, false, RecommendedAction::None)];
        let reads_status = |status| {
            let error = NvlinkError { unit: "UNIT".to_owned(), fatal: None, link: None, intrinfo: 0, status };
            NvlinkMeaning::from_rules(&rules, 149, &error)
        };
        assert_eq!((reads_status(3).fatal, reads_status(3).action), (false, RecommendedAction::None));
        assert_eq!((reads_status(1).fatal, reads_status(5).fatal), (true, true));
    }

    #[test]
    fn patterns_read_from_the_most_significant_bit() {
        let pattern = "------000100----------0111000110";
        assert!(bits_fit(pattern, 0x0045_05c6));
        assert!(!bits_fit(pattern, 0x0005_05c6), "another sub-code");
        assert!(!bits_fit(pattern, 0x0045_05c7));
    }
}
