//! The progress of the agent's replicas of a job's checkpoints, for jobs whose launchers keep no copies for each
//! other.

use std::path::{Path, PathBuf};

use mainstay_proto::v1::{CopiedStep, Job};
use mainstay_tier::peer::{Lag, Service};
use prost_types::Timestamp;

/// The state at one moment, with the directories that it describes.
pub(super) struct Replicas(Vec<(PathBuf, Lag)>);

impl Replicas {
    /// Of all runs of this host.
    pub(super) fn from_service(checkpoints: Option<&Service>) -> Replicas {
        let Some(service) = checkpoints else { return Replicas(Vec::new()) };
        let watched = service.watched();
        let of_run = |lag: Lag| {
            let places = watched
                .iter()
                .filter(|watched| watched.run == lag.copies.run)
                .map(|watched| watched.directory.clone());
            places.map(|place| (place, lag.clone())).collect::<Vec<_>>()
        };
        Replicas(service.lags().into_iter().flat_map(of_run).collect())
    }

    /// Adds it to the report of a job. The job's own journal has precedence.
    pub(super) fn add_to(&self, job: &mut Job) {
        let of_job = |(place, _): &&(PathBuf, Lag)| place == Path::new(&job.checkpoint_dir);
        let Some((_, lag)) = self.0.iter().find(of_job) else { return };
        if let Some((of, sealed)) = lag.copies.copied.as_ref().filter(|_| job.copied_step.is_none()) {
            let time = Some(Timestamp { seconds: *sealed, nanos: 0 });
            job.copied_step = Some(CopiedStep { step: of.step, attempt: of.attempt, time });
        }
        if let Some(sentence) = lag.sentence().filter(|_| job.copies_behind.is_empty()) {
            job.copies_behind = sentence;
        }
    }
}
