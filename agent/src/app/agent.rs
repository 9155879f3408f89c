//! The agent: one per host, as root or as a user.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use mainstay_core::id::JobId;
use mainstay_proto::v1::launcher_service_server::LauncherServiceServer;
use sd_notify::NotifyState;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::act::page_files::private_directory;
use crate::api::attach::{Allowed, Launchers};
use crate::api::{self, Listeners, Mode, UnixSocket};
use crate::app::about;
use crate::app::host::sense;
use crate::board::Board;
use crate::config::Config;
use crate::node::{Input, Node};
use crate::os::clock;
use crate::source::host::{HostSource, Roots, standard_paths};
use crate::store::journal::Journal;

/// Inputs that may wait for the node.
const QUEUE: usize = 4096;

/// Runs the agent until it is told to stop.
///
/// # Errors
/// It could not begin: a directory, the journal or a socket; or the API ended by itself.
pub async fn run_agent(config: Config) -> anyhow::Result<()> {
    let stop = CancellationToken::new();
    stop_on_signals(&stop).context("catching signals")?;
    let (board, origins) = open_board(&config)?;
    let listeners = listen(&config).await?;
    let (inputs, node_inputs) = mpsc::channel(QUEUE);
    let allowed = Allowed { uids: config.allow_uids.clone(), gids: config.allow_gids.clone() };
    let launchers = Launchers::new(inputs.clone(), allowed);
    let routes = Routes::new(LauncherServiceServer::new(launchers));
    let reader = board.reader();
    let sensing = start_sensing(&config, inputs.clone())?;

    let node = Node::new(board, origins, inputs);
    let node = tokio::spawn(node.run(node_inputs, watchdog, stop.clone()));
    tracing::info!(socket = %config.socket.display(), state = %config.state_dir.display(), "the agent is ready");
    notify(&[NotifyState::Ready, NotifyState::Status("watching the host")]);
    let served =
        api::serve(listeners, reader, about(Mode::Agent), Arc::new(clock::now), routes, stop.clone()).await;
    notify(&[NotifyState::Stopping]);
    stop.cancel();
    sensing.abort();
    node.await.context("the node ended in disorder")?;
    served.context("serving the API")
}

fn open_board(config: &Config) -> anyhow::Result<(Board, BTreeMap<JobId, u64>)> {
    std::fs::create_dir_all(&config.state_dir)
        .with_context(|| format!("making the state directory {} (state_dir)", config.state_dir.display()))?;
    let journal = Journal::open(&config.journal_dir(), config.journal_limits(), clock::boot_id())?;
    let mut origins = BTreeMap::new();
    journal.replay(|entry| {
        if let (Some(job), Some(seq)) = (entry.job, entry.origin_seq) {
            origins.insert(job, seq);
        }
    })?;
    Ok((Board::open(journal)?, origins))
}

async fn listen(config: &Config) -> anyhow::Result<Listeners> {
    if let Some(directory) = config.socket.parent().filter(|directory| !directory.exists()) {
        make_socket_directory(directory)
            .with_context(|| format!("making the socket's directory {} (socket)", directory.display()))?;
    }
    let tcp = async |address: Option<SocketAddr>, key: &str| -> anyhow::Result<Option<TcpListener>> {
        match address {
            Some(address) => {
                Ok(Some(api::tcp(&address.to_string()).await.with_context(|| format!("key `{key}`"))?))
            }
            None => Ok(None),
        }
    };
    Ok(Listeners {
        unix: Some(UnixSocket::bind(&config.socket, 0o660)?),
        grpc: tcp(config.listen, "listen").await?,
        http: tcp(config.http, "http").await?,
    })
}

/// Root's socket is for everyone whom its mode lets in; a user's own directory is the user's alone.
fn make_socket_directory(directory: &Path) -> std::io::Result<()> {
    if nix::unistd::geteuid().is_root() {
        std::fs::create_dir_all(directory)
    } else {
        private_directory(directory)
    }
}

fn start_sensing(
    config: &Config,
    inputs: mpsc::Sender<Input>,
) -> anyhow::Result<tokio::task::JoinHandle<()>> {
    let mut named: Vec<&Path> = vec![&config.state_dir];
    named.extend(config.host.watch_paths.iter().map(|path| path.as_path()));
    let roots = Roots {
        proc: config.host.proc_root.clone(),
        sys: config.host.sys_root.clone(),
        fstab: config.host.fstab.clone(),
    };
    let source = HostSource::new(roots, standard_paths(&named));
    let interval = Duration::from_nanos(config.host.interval.0.0);
    let (sensing, mut reports) = sense(source, config.host.limits.clone(), interval)
        .context("starting the thread that looks at the host")?;
    Ok(tokio::spawn(async move {
        while let Some(judged) = reports.recv().await {
            if inputs.send(Input::Host(judged)).await.is_err() {
                break;
            }
        }
        drop(sensing);
    }))
}

fn stop_on_signals(stop: &CancellationToken) -> std::io::Result<()> {
    for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
        let mut arrivals = signal(kind)?;
        let stop = stop.clone();
        tokio::spawn(async move {
            arrivals.recv().await;
            stop.cancel();
        });
    }
    // A terminal that goes away is no reason for a daemon to go.
    let mut hangups = signal(SignalKind::hangup())?;
    tokio::spawn(async move { while hangups.recv().await.is_some() {} });
    Ok(())
}

fn watchdog() {
    notify(&[NotifyState::Watchdog]);
}

/// Tells systemd; without it there is nobody to tell.
fn notify(states: &[NotifyState<'_>]) {
    let _ = sd_notify::notify(states);
}
