//! The states of the roles of a job (`mainstay run --role NAME=N:COMMAND`): one file for each role, which the ranks of all
//! roles of the host read (`mainstay.roles()`). The launcher of a role writes the file while it runs, and the process above
//! it before and after.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use mainstay_sys::clock;
use mainstay_view::node::{JobPhase, JobView};
use serde::{Deserialize, Serialize};

/// The variable with the directory of the files.
pub const VARIABLE: &str = "MAINSTAY_ROLES";

/// The state of a role that has ended and is started again after a while.
pub const WAITING: &str = "WAITING";

/// The state of a role.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoleState {
    /// The phase of the role's job, or [`WAITING`].
    pub state: String,
    /// How many times its ranks have been started, over all its launchers.
    pub incarnation: u32,
    /// Since when it is in this state, in seconds since 1970.
    pub since: f64,
    /// The exit status of its last launcher, while none runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<i32>,
}

/// The file of a role.
#[derive(Clone, Debug)]
pub struct RoleFile(PathBuf);

impl RoleFile {
    /// That of a role, in the directory of its job.
    pub fn of(directory: &Path, role: &str) -> RoleFile {
        RoleFile(directory.join(format!("{role}.json")))
    }

    /// What it says; none if it does not exist.
    pub fn read(&self) -> Option<RoleState> {
        serde_json::from_slice(&fs::read(&self.0).ok()?).ok()
    }

    /// Replaces it in one step: readers see the old state or the new one.
    ///
    /// # Errors
    /// The directory cannot be written to.
    pub fn write(&self, state: &str, incarnation: u32, exit: Option<i32>) -> io::Result<()> {
        let since = clock::now().wall.0 as f64 / 1e9;
        let text = serde_json::to_vec(&RoleState { state: state.to_owned(), incarnation, since, exit })?;
        let part = self.0.with_extension("part");
        fs::write(&part, text)?;
        fs::rename(&part, &self.0)
    }
}

/// Keeps the file of the role whose launcher this is.
#[derive(Debug)]
pub(crate) struct RoleReport {
    file: RoleFile,
    /// How many times earlier launchers of the role have started its ranks.
    before: u32,
    reported: Option<(JobPhase, u32)>,
}

impl RoleReport {
    /// None if the process above, which makes the file, is not there: the variable may come from a rank of a role that
    /// started this launcher.
    pub(crate) fn new(directory: &Path, role: &str) -> Option<RoleReport> {
        let file = RoleFile::of(directory, role);
        let before = file.read()?.incarnation;
        Some(RoleReport { file, before, reported: None })
    }

    /// Writes the state if it is another one. Whether the role has ended is known only above.
    pub(crate) fn update(&mut self, job: &JobView) {
        if matches!(job.phase, JobPhase::Ended(_) | JobPhase::Lost) {
            return;
        }
        let started = if job.ranks.is_empty() { 0 } else { job.attempt.0.saturating_add(1) };
        let now = (job.phase, self.before.saturating_add(started));
        if self.reported.replace(now) == Some(now) {
            return;
        }
        if let Err(error) = self.file.write(job.phase.name(), now.1, None) {
            tracing::warn!(%error, file = %self.file.0.display(), "other roles do not see the state of this one");
        }
    }
}
