//! What the command line asks for when a job has several hosts.

use mainstay_core::base::time::Span;

/// Where the hosts of a job meet.
#[derive(Clone, Debug)]
pub struct HostsPlan {
    /// Hosts at least and at most.
    pub hosts: (u32, u32),
    /// Host and port at which the leader listens.
    pub endpoint: (String, u16),
    /// `--node-rank`, where hosts are numbered.
    pub node_rank: Option<u32>,
    /// The address of this host for others, if the user gave one.
    pub local_addr: Option<String>,
    /// The secret of the job, if the user gave one.
    pub token: Option<String>,
    /// Whether the endpoint is this host, if the user said so.
    pub is_host: Option<bool>,
    /// How long hosts wait for each other.
    pub join_timeout: Span,
    /// How long is waited for more hosts once there are enough.
    pub last_call: Span,
}

impl HostsPlan {
    /// Port that torchrun takes when none is given.
    pub const PORT: u16 = 29_400;

    /// `HOST:PORT`.
    pub fn endpoint(&self) -> String {
        format!("{}:{}", self.endpoint.0, self.endpoint.1)
    }
}
