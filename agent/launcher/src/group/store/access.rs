//! Which store launchers meet in, which process runs it, and how this launcher connects to it.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::Path;

use anyhow::Context;
use mainstay_coord::{CoordError, Endpoint, JobId, Managed, ManagedOptions, Server, ServerOptions, Settings};
use mainstay_group::wire::Join;

use crate::group::plan::{HostsPlan, StoreKind, TOKEN_VARIABLE};

/// Starts the built-in store, if this host has the endpoint.
pub(super) async fn builtin(
    plan: &HostsPlan,
    join: &Join,
    print: &impl Fn(String),
) -> anyhow::Result<Option<Server>> {
    let Some(endpoint) = plan.endpoints.first().filter(|endpoint| is_here(plan, endpoint)) else {
        return Ok(None);
    };
    let start = |listen| {
        let options = ServerOptions { token: Some(token(plan, join)), ..ServerOptions::new(listen) };
        Server::start(options)
    };
    // Both families where there is IPv6.
    let started = match start(SocketAddr::from((Ipv6Addr::UNSPECIFIED, endpoint.port))).await {
        Err(error) if !in_use(&error) => {
            start(SocketAddr::from((Ipv4Addr::UNSPECIFIED, endpoint.port))).await
        }
        started => started,
    };
    match started {
        Ok(server) => {
            print(format!(
                "this host coordinates the job at port {}; if it is lost, the job is: the other hosts then exit with \
                 status 75. Three or five endpoints, or --rdzv-backend etcd, survive the loss of a host",
                endpoint.port
            ));
            report_open(plan, &format!("port {} and knows the job's id", endpoint.port), print);
            Ok(Some(server))
        }
        // Another launcher of this host has the port: it coordinates.
        Err(error) if in_use(&error) && plan.node_rank.is_none() => Ok(None),
        Err(error) => Err(error).with_context(|| {
            format!(
                "listening on port {} for the other hosts (--master-port, or the port of --rdzv-endpoint)",
                endpoint.port
            )
        }),
    }
}

/// Reports who can take part in a job without a secret: whoever reaches `this`.
fn report_open(plan: &HostsPlan, this: &str, print: &impl Fn(String)) {
    if plan.token.is_none() {
        print(format!(
            "who reaches {this} can read what the hosts write there, and end the job: give all hosts one \
             {TOKEN_VARIABLE}, or --rdzv-conf token_file=FILE in a directory that they share"
        ));
    }
}

/// Starts this host's member of etcd, if one of the endpoints is here. Several hosts may be on one machine: this one takes
/// the first endpoint whose ports are free.
pub(super) async fn managed(
    plan: &HostsPlan,
    join: &Join,
    directory: &Path,
    print: &impl Fn(String),
) -> anyhow::Result<Option<Managed>> {
    let mut taken = None;
    for (index, _) in plan.endpoints.iter().enumerate().filter(|(_, endpoint)| endpoint.is_here()) {
        let options = ManagedOptions {
            me: Some(index),
            ..ManagedOptions::new(
                plan.endpoints.clone(),
                job_id(&join.run_id)?.to_string(),
                directory.join("etcd"),
            )
        };
        match Managed::start(options).await {
            Ok(managed) => {
                print(format!(
                    "coordination: etcd runs on this host for the job, as {} of {}; the job survives the loss of {}",
                    index + 1,
                    plan.endpoints.len(),
                    if plan.endpoints.len() == 5 { "two of them" } else { "one of them" }
                ));
                report_open(plan, &format!("port {}", plan.endpoints[index].port), print);
                return Ok(Some(managed));
            }
            Err(error) if in_use(&error) => taken = Some(error),
            Err(error) => return Err(error.into()),
        }
    }
    if let Some(error) = taken {
        print(format!(
            "coordination: no etcd is run by this launcher, since another program has its ports ({error})"
        ));
    }
    Ok(None)
}

/// Whether this host has the endpoint's address.
fn is_here(plan: &HostsPlan, endpoint: &Endpoint) -> bool {
    match (plan.node_rank, plan.is_host) {
        (Some(rank), _) => rank == 0,
        (None, Some(is_host)) => is_host,
        (None, None) => endpoint.is_here(),
    }
}

fn in_use(error: &CoordError) -> bool {
    matches!(error, CoordError::Io { source, .. } if source.kind() == std::io::ErrorKind::AddrInUse)
}

/// The token for clients of the built-in store, derived from the user's secret, which is not sent itself.
fn token(plan: &HostsPlan, join: &Join) -> String {
    let secret = format!("{}\0{}", plan.token.as_deref().unwrap_or_default(), join.run_id);
    let key = blake3::derive_key("mainstay 2026-11 built-in coordination store", secret.as_bytes());
    blake3::Hash::from_bytes(key).to_hex().to_string()
}

/// The settings for requests to the store.
pub(crate) fn settings(plan: &HostsPlan, join: &Join, server: Option<&Server>) -> Settings {
    let here = |server: &Server| Endpoint {
        tls: false,
        host: Ipv4Addr::LOCALHOST.to_string(),
        port: server.address().port(),
    };
    let endpoints = server.map_or_else(|| plan.endpoints.clone(), |server| vec![here(server)]);
    let settings = Settings::new(endpoints);
    match &plan.store {
        StoreKind::Builtin => Settings { token: Some(token(plan, join)), ..settings },
        StoreKind::Managed => settings,
        StoreKind::Etcd { user, tls } => Settings { user: user.clone(), tls: tls.clone(), ..settings },
    }
}

/// The name of the job in the store: the run id, or its hash if it has letters that keys must not have.
///
/// # Errors
/// None in practice: a hash is a valid name.
pub(crate) fn job_id(run_id: &str) -> anyhow::Result<JobId> {
    let hashed = || format!("id-{}", blake3::hash(run_id.as_bytes()).to_hex());
    Ok(run_id.parse().or_else(|_| hashed().parse())?)
}

/// A host as it is written before a port.
pub(crate) fn bracketed(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}

/// What to check when the store does not answer.
pub(crate) fn not_met(plan: &HostsPlan, error: &CoordError) -> String {
    let check = match plan.store {
        StoreKind::Builtin => {
            "Check that `mainstay run` is running on the endpoint's host with the same --nnodes and --rdzv-id"
        }
        StoreKind::Managed => {
            "Check that `mainstay run` is running on most of these hosts with the same endpoints"
        }
        StoreKind::Etcd { .. } => "Check that etcd is running there",
    };
    format!(
        "this host did not get into the job at {} within {} ({error}). {check}, and that the port is open in the \
         firewall",
        plan.endpoint(),
        plan.join_timeout
    )
}

/// The address at which other hosts reach this one: the user's, else the endpoint's if it is this host, else the one from
/// which the store is reached.
pub(crate) fn address(plan: &HostsPlan, join: &Join) -> String {
    if !join.address.is_empty() {
        return join.address.clone();
    }
    let endpoint = plan.endpoints.first().filter(|endpoint| is_here(plan, endpoint));
    if let (StoreKind::Builtin, Some(endpoint)) = (&plan.store, endpoint) {
        return endpoint.host.clone();
    }
    let way = |endpoint: &Endpoint| -> Option<String> {
        let store = endpoint.addresses().first().map(|address| SocketAddr::new(*address, endpoint.port))?;
        let any = if store.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        // Sends nothing: the kernel only reports which of its addresses it would use.
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect(store).ok()?;
        socket.local_addr().ok().map(|here| here.ip().to_canonical().to_string())
    };
    plan.endpoints.iter().find_map(way).unwrap_or_else(|| join.host.clone())
}
