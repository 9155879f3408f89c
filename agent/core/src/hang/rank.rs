//! What is known of one rank.

use serde::{Deserialize, Serialize};

use crate::base::time::Mono;
use crate::hang::phase::PhaseId;

/// What a look at a rank's page, or a report about it, told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sight {
    /// Its client connected.
    pub registered: bool,
    /// Its client said goodbye.
    pub closed: bool,
    /// How many processes have claimed the page.
    pub claim: u64,
    /// Beats so far: steps, sections entered and left, and plain beats.
    pub beats: u64,
    /// When it last beat; zero if never.
    pub beat_at: Mono,
    /// The last step that it completed in this attempt.
    pub step: Option<u64>,
    /// What it is at: its innermost open section, or the step.
    #[serde(skip)]
    pub phase: PhaseId,
    /// When that began.
    pub since: Mono,
    /// A section that is long by its name is open, at whatever depth.
    #[serde(skip)]
    pub long: Option<PhaseId>,
    /// It said not to expect progress before this time; [`Mono::NEVER`] for a pause.
    pub quiet_until: Mono,
}

/// Where a rank's process is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Life {
    #[default]
    Lives,
    /// Ended with status 0 while others go on.
    Finished,
}

/// A rank in the judge's memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RankState {
    pub(crate) sight: Sight,
    /// When it was last heard of.
    pub(crate) received: Mono,
    pub(crate) life: Life,
}
