//! What XIDs, SXIDs and kernel lines mean: the types and lookups. The data is in `agent/catalog/hardware/*.toml`, which
//! the agent reads.

mod nvlink5;
mod overrides;
mod registers;

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde::de::DeserializeOwned;

pub use nvlink5::{NvlinkFile, NvlinkMeaning, NvlinkRule};
pub use overrides::OverrideFile;
pub use registers::{RegisterMeaning, RegisterRule};

use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::kernel::{KernelClass, Xid};
use mainstay_model::units::Period;

/// The file of XIDs.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct XidFile {
    /// Its entries.
    pub xid: Vec<CodeMeaning>,
}

/// The file of SXIDs.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SxidFile {
    /// Its entries.
    pub sxid: Vec<CodeMeaning>,
}

/// The file of the host's kernel lines.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelFile {
    /// Its entries.
    pub kernel: Vec<KernelMeaning>,
}

/// Which party a code blames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FaultOrigin {
    /// The program that was running.
    Application,
    /// The GPU.
    Device,
    /// NVLink or a switch.
    Fabric,
    /// The driver or its firmware.
    Driver,
    /// None: the code is informational.
    None,
}

/// What one or more codes mean.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CodeMeaning {
    /// The codes.
    pub ids: Vec<u32>,
    /// A few words: "the GPU has fallen off the bus".
    pub name: String,
    /// One or two sentences.
    pub meaning: String,
    /// Which party is to blame.
    pub blame: FaultOrigin,
    /// The device's state after this code alone.
    pub state: HealthState,
    /// The mildest action that fixes it.
    pub action: RecommendedAction,
    /// Codes that this one can follow as a consequence.
    #[serde(default)]
    pub echo_of: BTreeSet<u32>,
    /// Codes whose fault ends when this one is logged.
    #[serde(default)]
    pub cancels: BTreeSet<u32>,
    /// Whether the severity is in the log line.
    #[serde(default)]
    pub by_line: bool,
    /// The source of the meaning.
    #[serde(default)]
    pub source: String,
    /// Which source disagrees, and how.
    #[serde(default)]
    pub differs: Option<String>,
    /// An example line.
    #[serde(default)]
    pub example: String,
    /// The file of the entry; `None` if it is compiled in.
    #[serde(skip)]
    pub origin: Option<String>,
}

/// What a class of kernel lines means.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelMeaning {
    /// The class.
    pub class: KernelClass,
    /// A few words.
    pub name: String,
    /// One or two sentences.
    pub meaning: String,
    /// The component that shows it; `None` if it is only an event.
    #[serde(default)]
    pub component: Option<String>,
    /// The component's state after it.
    pub state: HealthState,
    /// The mildest action that fixes it.
    pub action: RecommendedAction,
    /// How long it counts after the last such line; `None`: until the next boot.
    #[serde(default)]
    pub window: Option<Period>,
    /// How many lines about one device within the window are needed for it to count.
    #[serde(default = "first")]
    pub count: u64,
    /// The class whose reports about the same device end when this one is logged.
    #[serde(default)]
    pub cancels: Option<KernelClass>,
    /// An example line.
    #[serde(default)]
    pub example: String,
    /// The file of the entry; `None` if it is compiled in.
    #[serde(skip)]
    pub origin: Option<String>,
}

fn first() -> u64 {
    1
}

/// All catalogs.
#[derive(Clone, Debug)]
pub struct Catalog {
    xids: BTreeMap<u32, CodeMeaning>,
    sxids: BTreeMap<u32, CodeMeaning>,
    kernel: BTreeMap<KernelClass, KernelMeaning>,
    nvlink: Vec<NvlinkRule>,
    registers: Vec<RegisterRule>,
}

/// A catalog that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CatalogError {
    /// A file that is compiled in does not match its schema.
    #[error("the catalog that is compiled in is damaged: {0}")]
    Damaged(String),
    /// A code has two meanings.
    #[error("{kind} {code} has two entries: give each code one entry")]
    Twice {
        /// XID or SXID.
        kind: &'static str,
        /// Which.
        code: u32,
    },
    /// A class of kernel lines has no meaning, or two.
    #[error("class {class:?} of kernel lines has {times} entries: give each class one entry")]
    Class {
        /// Which.
        class: &'static str,
        /// How often.
        times: usize,
    },
    /// An entry's example does not parse as the entry's kind.
    #[error("{entry}: its example is not read as one: {example:?}")]
    Example {
        /// Which entry.
        entry: String,
        /// The example.
        example: String,
    },
    /// A register rule names a register or bit that does not exist.
    #[error("register rule {number}: write a register from 1 to 7 and bits from 0 to 31")]
    Register {
        /// Which rule, from 1.
        number: usize,
    },
    /// An intrinfo pattern is not 32 characters of `0`, `1` and `-`.
    #[error("NVLink rule {number}: {pattern:?} is not a pattern: write 32 of 0, 1 and -")]
    Pattern {
        /// Which rule, from 1.
        number: usize,
        /// The pattern.
        pattern: String,
    },
}

impl Catalog {
    /// The catalog that is compiled in.
    ///
    /// # Errors
    /// None in a tested program: tests read the same files.
    pub fn built_in() -> Result<Catalog, CatalogError> {
        Catalog::new(
            compiled_in(include_str!("../../../catalog/hardware/xid.toml"))?,
            compiled_in(include_str!("../../../catalog/hardware/sxid.toml"))?,
            compiled_in(include_str!("../../../catalog/hardware/kernel.toml"))?,
            compiled_in(include_str!("../../../catalog/hardware/nvlink.toml"))?,
        )
    }

    /// Combines the files.
    ///
    /// # Errors
    /// The files contradict each other or themselves.
    pub fn new(
        xids: XidFile,
        sxids: SxidFile,
        kernel: KernelFile,
        nvlink: NvlinkFile,
    ) -> Result<Catalog, CatalogError> {
        for &class in KernelClass::ALL {
            let times = kernel.kernel.iter().filter(|meaning| meaning.class == class).count();
            if times != 1 {
                return Err(CatalogError::Class { class: class.name(), times });
            }
        }
        let (rules, registers) = nvlink.checked()?;
        Ok(Catalog {
            xids: by_code("XID", xids.xid)?,
            sxids: by_code("SXID", sxids.sxid)?,
            kernel: kernel.kernel.into_iter().map(|meaning| (meaning.class, meaning)).collect(),
            nvlink: rules,
            registers,
        })
    }

    /// What an XID means; `None` if it is unknown.
    pub fn xid(&self, code: u32) -> Option<&CodeMeaning> {
        self.xids.get(&code)
    }

    /// The severity of an XID: from its line if the line has it, otherwise from the catalog.
    pub fn severity(&self, xid: &Xid) -> (HealthState, RecommendedAction) {
        let Some(meaning) = self.xid(xid.code) else {
            return (HealthState::Degraded, RecommendedAction::ContactSupport);
        };
        if let Some(error) = &xid.nvlink {
            let NvlinkMeaning { fatal, action, .. } =
                NvlinkMeaning::from_rules(&self.nvlink, xid.code, error);
            let state = match (fatal, action) {
                // A link is down, though nothing has to be done to the GPU.
                (true, RecommendedAction::None) => HealthState::Degraded,
                (false, RecommendedAction::None) => HealthState::Healthy,
                (true, _) => HealthState::Unhealthy,
                (false, _) => HealthState::Degraded,
            };
            return (state, action);
        }
        let registers = xid.link_registers.as_ref();
        if let Some(decoded) = registers.and_then(|line| RegisterMeaning::from_rules(&self.registers, line)) {
            return (decoded.state, decoded.action);
        }
        if Catalog::is_known_by_number_alone(xid) {
            // The severity is in the log line, which was not read.
            return (HealthState::Degraded, RecommendedAction::ContactSupport);
        }
        // Lines of 94 and 95 say whether the GPU must be reset; a 95 without that statement always needs a reset.
        let reset = xid.reset_needed == Some(true) || xid.drain_and_reset_needed == Some(true);
        let action = if reset { meaning.action.max(RecommendedAction::ResetDevice) } else { meaning.action };
        (meaning.state, action)
    }

    /// Whether it is an NVLink XID whose severity is in its log line, which was not read.
    pub fn is_known_by_number_alone(xid: &Xid) -> bool {
        xid.by_event && (144..=150).contains(&xid.code)
    }

    /// The XIDs that can follow `code` as a consequence.
    pub fn echoes_of(&self, code: u32) -> BTreeSet<u32> {
        let echoes = self.xids.iter().filter(|(_, meaning)| meaning.echo_of.contains(&code));
        echoes.map(|(echo, _)| *echo).collect()
    }

    /// What an SXID means; `None` if it is unknown.
    pub fn sxid(&self, code: u32) -> Option<&CodeMeaning> {
        self.sxids.get(&code)
    }

    /// What a class of kernel lines means.
    pub fn kernel(&self, class: KernelClass) -> Option<&KernelMeaning> {
        self.kernel.get(&class)
    }

    /// All meanings of kernel lines.
    pub fn kernel_meanings(&self) -> impl Iterator<Item = &KernelMeaning> {
        self.kernel.values()
    }

    /// What the link registers printed by XID 74 mean.
    pub fn register_rules(&self) -> &[RegisterRule] {
        &self.registers
    }

    /// The rules for NVLink 5.
    pub fn nvlink_rules(&self) -> &[NvlinkRule] {
        &self.nvlink
    }
}

fn compiled_in<T: DeserializeOwned>(text: &str) -> Result<T, CatalogError> {
    toml::from_str(text).map_err(|error| CatalogError::Damaged(error.to_string()))
}

fn by_code(
    kind: &'static str,
    meanings: Vec<CodeMeaning>,
) -> Result<BTreeMap<u32, CodeMeaning>, CatalogError> {
    let mut codes = BTreeMap::new();
    for meaning in meanings {
        for &code in &meaning.ids {
            if codes.insert(code, meaning.clone()).is_some() {
                return Err(CatalogError::Twice { kind, code });
            }
        }
    }
    Ok(codes)
}
