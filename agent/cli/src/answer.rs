//! The result of asking one server, as `status` and the screen show it.

use mainstay_proto::v1::{Job, JobPhase};

use super::client::{AskError, Snapshot};
use super::find::SocketAt;

/// The result of asking one server.
pub(super) struct ServerReply {
    pub(super) place: SocketAt,
    pub(super) result: Result<Snapshot, AskError>,
}

pub(super) fn is_over(job: &Job) -> bool {
    matches!(job.phase(), JobPhase::Ended | JobPhase::Lost)
}
