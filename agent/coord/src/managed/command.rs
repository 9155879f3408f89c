//! The command line of etcd.

use std::net::{IpAddr, SocketAddr, TcpListener};

use super::ManagedOptions;
use crate::endpoint::Endpoint;
use crate::error::CoordError;

/// Hosts of training jobs are busy, so a little more than etcd's defaults of 100 ms and 1 s. Not much more: a lost
/// host may have had the leaders of the job and of etcd, and followers miss their leader after 2.5 s. Leases are then
/// at least 2 s.
const TIMING: [&str; 2] = ["--heartbeat-interval=120", "--election-timeout=1200"];

/// The options with which a member finds its cluster.
const CLUSTER: &str = "--initial-cluster=";
const STATE: &str = "--initial-cluster-state=";

/// The command line of this host's member.
#[derive(Clone, Debug)]
pub(super) struct MemberCommand {
    pub(super) arguments: Vec<String>,
    /// The index of its endpoint.
    pub(super) index: usize,
    pub(super) name: String,
    /// The URL at which other members reach it.
    pub(super) peer_url: String,
}

impl MemberCommand {
    /// The same for a member that was added to a running cluster.
    pub(super) fn joining(&self, cluster: &str) -> MemberCommand {
        let mut line = self.clone();
        line.arguments.retain(|argument| !argument.starts_with(CLUSTER) && !argument.starts_with(STATE));
        line.arguments.extend([format!("{CLUSTER}{cluster}"), format!("{STATE}existing")]);
        line
    }
}

/// The command line of etcd on this host.
pub(super) fn line(options: &ManagedOptions) -> Result<MemberCommand, CoordError> {
    let wrong = |why: String| CoordError::Setting { what: "managed etcd".to_owned(), why };
    let endpoints = &options.endpoints;
    if !matches!(endpoints.len(), 3 | 5) {
        let why = format!(
            "{} endpoints are given, 3 or 5 are needed; one endpoint has the built-in store",
            endpoints.len()
        );
        return Err(wrong(why));
    }
    let me = options.me.or_else(|| endpoints.iter().position(Endpoint::is_here));
    let (index, me) = me.and_then(|index| Some((index, endpoints.get(index)?))).ok_or_else(|| {
        let all: Vec<String> = endpoints.iter().map(Endpoint::authority).collect();
        wrong(format!("none of {} is this host", all.join(", ")))
    })?;
    let address =
        local_address(me).ok_or_else(|| wrong(format!("{} has no address on this host", me.host)))?;
    let peer_port = |endpoint: &Endpoint| {
        let port = endpoint.port.checked_add(options.peer_offset);
        port.ok_or_else(|| wrong(format!("no port is left above {} for members", endpoint.port)))
    };
    for port in [me.port, peer_port(me)?] {
        // etcd itself would only log it and retry forever.
        TcpListener::bind(SocketAddr::new(address, port)).map_err(|error| {
            CoordError::io(format!("managed etcd on {}", SocketAddr::new(address, port)), error)
        })?;
    }
    let scheme = if options.tls.is_some() { "https" } else { "http" };
    let url = |host: &str, port: u16| {
        let host = Endpoint { tls: options.tls.is_some(), host: host.to_owned(), port };
        format!("{scheme}://{}", host.authority())
    };
    let mut cluster = Vec::new();
    for (number, endpoint) in endpoints.iter().enumerate() {
        cluster.push(format!("mainstay-{number}={}", url(&endpoint.host, peer_port(endpoint)?)));
    }
    let here = address.to_string();
    let name = format!("mainstay-{index}");
    let peer_url = url(&me.host, peer_port(me)?);
    let mut arguments = vec![
        format!("--name={name}"),
        format!("--data-dir={}", options.data().display()),
        format!("--listen-client-urls={}", url(&here, me.port)),
        format!("--advertise-client-urls={}", url(&me.host, me.port)),
        format!("--listen-peer-urls={}", url(&here, peer_port(me)?)),
        format!("--initial-advertise-peer-urls={peer_url}"),
        format!("{CLUSTER}{}", cluster.join(",")),
        format!("--initial-cluster-token=mainstay-{}", options.cluster),
        format!("{STATE}new"),
        "--auto-compaction-mode=revision".to_owned(),
        "--auto-compaction-retention=10000".to_owned(),
        "--logger=zap".to_owned(),
        "--log-level=warn".to_owned(),
    ];
    arguments.extend(TIMING.map(str::to_owned));
    if let Some(tls) = &options.tls {
        for (option, path) in
            [("cert-file", &tls.certificate), ("key-file", &tls.key), ("trusted-ca-file", &tls.authorities)]
        {
            arguments.push(format!("--{option}={}", path.display()));
            arguments.push(format!("--peer-{option}={}", path.display()));
        }
        arguments.extend(["--client-cert-auth", "--peer-client-cert-auth"].map(str::to_owned));
    }
    Ok(MemberCommand { arguments, index, name, peer_url })
}

/// The address of the endpoint that belongs to this host: etcd listens on addresses, not on names.
fn local_address(endpoint: &Endpoint) -> Option<IpAddr> {
    let mut addresses = endpoint.addresses().into_iter();
    addresses.find(|address| TcpListener::bind(SocketAddr::new(*address, 0)).is_ok())
}
