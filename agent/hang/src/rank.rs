//! The state of one rank.

use serde::{Deserialize, Serialize};

use crate::phase::PhaseId;
use mainstay_model::time::Mono;

/// The contents of a rank's page at one look, or of a report about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RankSample {
    /// Its client has connected.
    pub registered: bool,
    /// Its client has disconnected in order.
    pub closed: bool,
    /// How many processes have claimed the page.
    pub claim: u64,
    /// Beats so far: steps, sections entered and left, and plain beats.
    pub beats: u64,
    /// When it last beat; zero if never.
    pub beat_at: Mono,
    /// The last step that it completed in this attempt.
    pub step: Option<u64>,
    /// What it is doing: its innermost open section, or the step.
    #[serde(skip)]
    pub phase: PhaseId,
    /// When that started.
    pub since: Mono,
    /// An open section, at any depth, that is long by its name.
    #[serde(skip)]
    pub long: Option<PhaseId>,
    /// The rank announced that it makes no progress before this time; [`Mono::NEVER`] for a pause.
    pub quiet_until: Mono,
}

/// Whether a rank's process runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Life {
    #[default]
    Lives,
    /// Ended with status 0 while others continue.
    Finished,
}

/// A rank as the judge stores it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RankState {
    pub(crate) sample: RankSample,
    /// When its page was last read or a report about it last received.
    pub(crate) received: Mono,
    pub(crate) life: Life,
}
