//! What an agent that may not act as a user leaves to that user's process.

use std::time::{Duration, Instant};

use mainstay_core::checkpoint::archive::Entry;
use mainstay_core::checkpoint::inventory::StepKey;

use crate::lent_files::Landed;
use crate::peer::Restored;
use crate::peer::sealed::Sealed;

/// A process that has not done it by then does not do it any more.
const WITHIN: Duration = Duration::from_secs(3600);

/// What came of the begin of a restore.
#[derive(Debug)]
pub enum Started {
    /// It is done.
    Done(Restored),
    /// This process may not write as the user: a process of the user's does this, and [`end_restore`](super::FileWatch::end_restore) is called then.
    Left(PutBack),
}

/// What a process of the user's is to do in a directory of a trainer's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PutBack {
    /// By which it is said to be done.
    pub token: String,
    /// The step from which the trainer goes on; none where it begins.
    pub step: Option<u64>,
    /// The archive with the files of the step, in a file that the process lent; none where they are there.
    pub archive: Option<Landed>,
    /// Names and contents of trackers.
    pub texts: Vec<(String, String)>,
    /// What gets another name.
    pub unfit: Vec<Unfit>,
}

/// What a trainer would take for a checkpoint, and is not whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// Its name in the directory.
    pub name: String,
    /// The step that the name tells.
    pub step: u64,
    /// Why it is not whole.
    pub why: String,
}

/// What was left to a process of the user's.
#[derive(Debug)]
pub(super) struct Left {
    pub(super) token: String,
    pub(super) since: Instant,
    pub(super) restored: Restored,
    /// The step that it unpacks.
    pub(super) step: Option<(StepKey, Sealed, Vec<Entry>)>,
}

impl Left {
    /// Whether the files of this step are being put back: until then they are not sealed as new ones.
    pub(super) fn is_of(&self, step: u64) -> bool {
        self.since.elapsed() < WITHIN && self.step.as_ref().is_some_and(|(key, ..)| key.step == step)
    }
}
