//! Before the hosts of a job come together: asks the agent how often failures implicated this host.

use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_proto::v1::GetNodeRequest;
use mainstay_proto::v1::health_service_client::HealthServiceClient;
use tonic::Status;

use crate::agent_link::checkpoint::channel;

/// How long the agent may take to answer. The job starts without an answer too.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// The number of recent failures, of jobs of all users, that implicated this host. 0 without an agent: a launcher keeps
/// no record of its own.
pub async fn implicated(sockets: &[PathBuf]) -> u32 {
    for socket in sockets.iter().filter(|socket| socket.exists()) {
        match tokio::time::timeout(ANSWER_WITHIN, ask(socket)).await {
            Ok(Ok(implicated)) => return implicated,
            Ok(Err(status)) => tracing::debug!(socket = %socket.display(), %status, "no record of this host"),
            Err(_) => tracing::debug!(socket = %socket.display(), "no record of this host in time"),
        }
    }
    0
}

async fn ask(socket: &Path) -> Result<u32, Status> {
    let mut client = HealthServiceClient::new(channel(socket.to_owned()).await?);
    let node = client.get_node(GetNodeRequest {}).await?.into_inner().node.unwrap_or_default();
    Ok(u32::try_from(node.implicated.len()).unwrap_or(u32::MAX))
}
