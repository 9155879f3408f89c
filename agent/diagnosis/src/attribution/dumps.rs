//! Evidence from the flight records of PyTorch's collectives: the rank that the others wait for, and the class that this supports.

use std::collections::BTreeSet;

use super::class::Class;
use super::explain::{EvidenceSummary, Quote};
use super::{Evidence, Observation};
use mainstay_hang::HangKind;
use mainstay_hang::flight::BlockedCollective;

/// The id of this evidence.
pub const ID: &str = "torch.flight_record";

/// Log-odds when ranks entered different operations under one sequence number of a group: the program's branches differ. The same as
/// for watchdog lines that show it.
const DIFFERENT_OPERATIONS_LOG_ODDS: f64 = 3.4;
/// Log-odds when all ranks entered an operation and none left it: the network, though other causes remain.
const NONE_LEFT_LOG_ODDS: f64 = 1.2;
/// The maximum number of files named.
const MAX_FILES: usize = 3;

/// The flight records that were found next to the logs.
#[derive(Clone, Debug, Default)]
pub struct Dumps {
    /// Each file with its rank.
    pub files: Vec<(String, u32)>,
    /// What they show, if ranks are blocked.
    pub held_up: Option<BlockedCollective>,
}

impl Evidence {
    /// Adds the flight records and the classes that they support.
    pub fn add_dumps(&mut self, dumps: Dumps) {
        self.observations.extend(dumps.observation());
        self.dumps = dumps;
    }
}

impl Dumps {
    /// The class that they support. A rank that did not enter an operation supports none: data, storage, a device and the program
    /// itself can all be the reason.
    fn observation(&self) -> Option<Observation> {
        let held_up = self.held_up.as_ref()?;
        let (class, weight) = match held_up.kind? {
            HangKind::Mismatch => (Class::UserCode, DIFFERENT_OPERATIONS_LOG_ODDS),
            HangKind::Network => (Class::Fabric, NONE_LEFT_LOG_ODDS),
            _ => return None,
        };
        // The same family as the watchdog's lines about it, so that it counts once.
        let (family, text) = ("nccl".to_owned(), held_up.summary.clone());
        Some(Observation { family, text, class, weight, also: Vec::new() })
    }

    /// The one rank that the others wait for.
    pub(super) fn culprit(&self) -> Option<u32> {
        match self.held_up.as_ref()?.culprits.as_slice() {
            [rank] => Some(rank.0),
            _ => None,
        }
    }

    /// The ranks that wait for it.
    pub(super) fn waiting(&self) -> BTreeSet<u32> {
        let held_up = self.held_up.iter().filter(|held_up| !held_up.culprits.is_empty());
        held_up.flat_map(|held_up| &held_up.waiting).map(|rank| rank.0).collect()
    }

    /// The same as a piece of evidence, with the files that show it, the culprit's first.
    pub(super) fn ground(&self, class: Class) -> Option<EvidenceSummary> {
        let held_up = self.held_up.as_ref()?;
        let is_culprit = |rank: u32| held_up.culprits.iter().any(|culprit| culprit.0 == rank);
        let first = self.files.iter().filter(|(_, rank)| is_culprit(*rank));
        let rest = self.files.iter().filter(|(_, rank)| !is_culprit(*rank));
        let quote = |(file, rank): &(String, u32)| Quote {
            source: file.clone(),
            line: 0,
            rank: Some(*rank),
            text: match is_culprit(*rank) {
                true => "flight record of the rank that the others wait for".to_owned(),
                false => "flight record of a rank that waits".to_owned(),
            },
        };
        let waits = |(_, rank): &&(String, u32)| held_up.waiting.iter().any(|other| other.0 == *rank);
        Some(EvidenceSummary {
            signature: ID.to_owned(),
            meaning: held_up.summary.clone(),
            class,
            weight: self.observation().map_or(0.0, |observation| observation.weight),
            count: 1,
            quotes: first.chain(rest.filter(waits)).take(MAX_FILES).map(quote).collect(),
        })
    }
}
