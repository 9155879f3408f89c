//! What DCGM's error codes mean. The words are data: `agent/catalog/hardware/dcgm.toml`.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::model::health::{HealthState, RecommendedAction};

/// The file of DCGM's errors.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DcgmFile {
    /// Its entries.
    pub dcgm: Vec<DcgmMeaning>,
}

/// What some codes mean.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DcgmMeaning {
    /// The codes.
    pub ids: BTreeSet<u32>,
    /// In a few words.
    pub name: String,
    /// What it is and what follows.
    pub meaning: String,
    /// What it makes of a GPU, at most.
    pub state: HealthState,
    /// What is needed.
    pub action: RecommendedAction,
    /// Checks of ours that look at the same thing by NVML.
    #[serde(default)]
    pub checks: BTreeSet<String>,
    /// Where that is from.
    pub source: String,
    /// Who sees it otherwise.
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
    /// The catalogue of a file.
    ///
    /// # Errors
    /// A code stands in two entries; which.
    pub fn new(file: DcgmFile) -> Result<DcgmCatalog, u32> {
        let mut by_code = BTreeMap::new();
        for (place, meaning) in file.dcgm.iter().enumerate() {
            for code in &meaning.ids {
                if by_code.insert(*code, place).is_some() {
                    return Err(*code);
                }
            }
        }
        Ok(DcgmCatalog { meanings: file.dcgm, by_code })
    }

    /// What a code means; none for one that is not known.
    pub fn meaning(&self, code: u32) -> Option<&DcgmMeaning> {
        self.by_code.get(&code).and_then(|place| self.meanings.get(*place))
    }
}
