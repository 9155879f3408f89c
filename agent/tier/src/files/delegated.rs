//! Work that an agent that may not act as a user leaves to a process of that user.

use std::time::{Duration, Instant};

use mainstay_checkpoint::archive::Entry;
use mainstay_checkpoint::inventory::StepKey;

use crate::lent_files::RestoredShard;
use crate::peer::Restored;
use crate::peer::sealed::Sealed;

/// A process that has not finished by then is not expected to finish.
const WITHIN: Duration = Duration::from_secs(3600);

/// The result of starting a restore.
#[derive(Debug)]
pub enum Started {
    /// It is done.
    Done(Restored),
    /// This process may not write as the user: a process of the user does this, then calls [`end_restore`](super::FileWatch::end_restore).
    Left(PutBack),
}

/// What a process of the user has to do in a trainer's directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PutBack {
    /// Token with which completion is reported.
    pub token: String,
    /// The step from which the trainer resumes; none if it starts from the beginning.
    pub step: Option<u64>,
    /// The archive with the files of the step, in a file that the process lent; none if the files are already in place.
    pub archive: Option<RestoredShard>,
    /// Names and contents of tracker files.
    pub texts: Vec<(String, String)>,
    /// Names to set aside.
    pub unfit: Vec<Unfit>,
}

/// A name that a trainer would treat as a checkpoint, but that is not whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// Its name in the directory.
    pub name: String,
    /// The step in the name.
    pub step: u64,
    /// Why it is not whole.
    pub why: String,
}

/// Work that was left to a process of the user.
#[derive(Debug)]
pub(super) struct Left {
    pub(super) token: String,
    pub(super) since: Instant,
    pub(super) restored: Restored,
    /// The step that the process unpacks.
    pub(super) step: Option<(StepKey, Sealed, Vec<Entry>)>,
}

impl Left {
    /// Whether the files of this step are being put back. They are not sealed as new ones meanwhile.
    pub(super) fn is_of(&self, step: u64) -> bool {
        self.since.elapsed() < WITHIN && self.step.as_ref().is_some_and(|(key, ..)| key.step == step)
    }
}
