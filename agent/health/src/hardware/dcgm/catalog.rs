//! What DCGM's error codes mean. The data is in `agent/catalog/hardware/dcgm.toml`.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use mainstay_model::health::{HealthState, RecommendedAction};

/// The file of DCGM's errors.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DcgmFile {
    /// Its entries.
    pub dcgm: Vec<DcgmMeaning>,
}

/// What some error codes mean.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DcgmMeaning {
    /// The codes.
    pub ids: BTreeSet<u32>,
    /// A few words.
    pub name: String,
    /// The error and its consequence.
    pub meaning: String,
    /// The GPU's state, at most.
    pub state: HealthState,
    /// The recommended action.
    pub action: RecommendedAction,
    /// Our own NVML checks that cover the same thing.
    #[serde(default)]
    pub checks: BTreeSet<String>,
    /// The source of the meaning.
    pub source: String,
    /// Which source disagrees, and how.
    #[serde(default)]
    pub differs: Option<String>,
}

/// All meanings by code.
#[derive(Clone, Debug, Default)]
pub struct DcgmCatalog {
    meanings: Vec<DcgmMeaning>,
    by_code: BTreeMap<u32, usize>,
}

impl DcgmCatalog {
    /// The catalog of a file.
    ///
    /// # Errors
    /// Returns a code that has two entries.
    pub fn new(file: DcgmFile) -> Result<DcgmCatalog, u32> {
        let mut by_code = BTreeMap::new();
        for (index, meaning) in file.dcgm.iter().enumerate() {
            for code in &meaning.ids {
                if by_code.insert(*code, index).is_some() {
                    return Err(*code);
                }
            }
        }
        Ok(DcgmCatalog { meanings: file.dcgm, by_code })
    }

    /// What a code means; `None` if it is unknown.
    pub fn meaning(&self, code: u32) -> Option<&DcgmMeaning> {
        self.by_code.get(&code).and_then(|index| self.meanings.get(*index))
    }
}
