//! What XIDs, SXIDs and kernel lines mean. The words are data (`agent/catalog/hardware/*.toml`, read by the shell); here are
//! their types and how they are looked up.

mod nvlink5;
mod overrides;
mod registers;

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

pub use nvlink5::{NvlinkFile, NvlinkMeaning, NvlinkRule};
pub use overrides::OverrideFile;
pub use registers::{RegisterMeaning, RegisterRule};

use crate::base::units::Period;
use crate::model::health::{HealthState, RecommendedAction};
use crate::model::kernel::KernelClass;

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

/// Whose fault a code speaks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FaultOrigin {
    /// The program that ran.
    Application,
    /// The GPU.
    Device,
    /// NVLink or a switch.
    Fabric,
    /// The driver or its firmware.
    Driver,
    /// Nobody's: it only informs.
    None,
}

/// What one or more codes mean.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CodeMeaning {
    /// The codes.
    pub ids: Vec<u32>,
    /// In a few words: "the GPU has fallen off the bus".
    pub name: String,
    /// In a sentence or two.
    pub meaning: String,
    /// Whose fault.
    pub blame: FaultOrigin,
    /// What the device is after it, on its own.
    pub state: HealthState,
    /// The mildest thing that mends it.
    pub action: RecommendedAction,
    /// Codes in whose wake it follows.
    #[serde(default)]
    pub echo_of: BTreeSet<u32>,
    /// Codes whose fault is over when this one comes.
    #[serde(default)]
    pub cancels: BTreeSet<u32>,
    /// Whether the line tells how bad it is.
    #[serde(default)]
    pub by_line: bool,
    /// Where the meaning is from.
    #[serde(default)]
    pub source: String,
    /// Who sees it otherwise.
    #[serde(default)]
    pub differs: Option<String>,
    /// A line of it.
    #[serde(default)]
    pub example: String,
    /// The file that the entry came from; none if it is compiled in.
    #[serde(skip)]
    pub origin: Option<String>,
}

/// What a class of kernel lines means.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelMeaning {
    /// The class.
    pub class: KernelClass,
    /// In a few words.
    pub name: String,
    /// In a sentence or two.
    pub meaning: String,
    /// The component that shows it; none for what is only an event.
    #[serde(default)]
    pub component: Option<String>,
    /// What that component is after it.
    pub state: HealthState,
    /// The mildest thing that mends it.
    pub action: RecommendedAction,
    /// How long it counts after the last such line; until the next boot if none.
    #[serde(default)]
    pub window: Option<Period>,
    /// Lines about one device within the window from which it counts.
    #[serde(default = "first")]
    pub count: u64,
    /// The class whose reports about the same device are over when this one comes.
    #[serde(default)]
    pub cancels: Option<KernelClass>,
    /// A line of it.
    #[serde(default)]
    pub example: String,
    /// The file that the entry came from; none if it is compiled in.
    #[serde(skip)]
    pub origin: Option<String>,
}

fn first() -> u64 {
    1
}

/// The catalogues together.
#[derive(Clone, Debug)]
pub struct Catalog {
    xids: BTreeMap<u32, CodeMeaning>,
    sxids: BTreeMap<u32, CodeMeaning>,
    kernel: BTreeMap<KernelClass, KernelMeaning>,
    nvlink: Vec<NvlinkRule>,
    registers: Vec<RegisterRule>,
}

/// A catalogue that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CatalogError {
    /// A code has two meanings.
    #[error("{kind} {code} is there twice: give each code one entry")]
    Twice {
        /// XID or SXID.
        kind: &'static str,
        /// Which.
        code: u32,
    },
    /// A class of kernel lines has no meaning, or two.
    #[error("class {class:?} of kernel lines is there {times} times: give each class one entry")]
    Class {
        /// Which.
        class: &'static str,
        /// How often.
        times: usize,
    },
    /// An entry's example is not read as what it is an example of.
    #[error("{entry}: its example is not read as one: {example:?}")]
    Example {
        /// Which entry.
        entry: String,
        /// What stands there.
        example: String,
    },
    /// A rule for registers has no register or bit that there is.
    #[error("register rule {number}: write a register from 1 to 7 and bits from 0 to 31")]
    Register {
        /// Which rule, from 1.
        number: usize,
    },
    /// A pattern of intrinfo is not 32 of `0`, `1` and `-`.
    #[error("NVLink rule {number}: {pattern:?} is no pattern: write 32 of 0, 1 and -")]
    Pattern {
        /// Which rule, from 1.
        number: usize,
        /// What stands there.
        pattern: String,
    },
}

impl Catalog {
    /// Puts the files together.
    ///
    /// # Errors
    /// They contradict themselves.
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

    /// What an XID means; none if it is not known.
    pub fn xid(&self, code: u32) -> Option<&CodeMeaning> {
        self.xids.get(&code)
    }

    /// The XIDs that come in the wake of one.
    pub fn echoes_of(&self, code: u32) -> BTreeSet<u32> {
        let echoes = self.xids.iter().filter(|(_, meaning)| meaning.echo_of.contains(&code));
        echoes.map(|(echo, _)| *echo).collect()
    }

    /// What an SXID means; none if it is not known.
    pub fn sxid(&self, code: u32) -> Option<&CodeMeaning> {
        self.sxids.get(&code)
    }

    /// What a class of kernel lines means.
    pub fn kernel(&self, class: KernelClass) -> Option<&KernelMeaning> {
        self.kernel.get(&class)
    }

    /// All that is known of kernel lines.
    pub fn kernel_meanings(&self) -> impl Iterator<Item = &KernelMeaning> {
        self.kernel.values()
    }

    /// What the registers of links mean that XID 74 prints.
    pub fn register_rules(&self) -> &[RegisterRule] {
        &self.registers
    }

    /// The rules of NVLink 5.
    pub fn nvlink_rules(&self) -> &[NvlinkRule] {
        &self.nvlink
    }
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
