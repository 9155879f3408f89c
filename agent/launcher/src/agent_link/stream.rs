//! The launcher's end: connects to the host's agent, reports to it, and connects again when it is gone. Nothing here ever
//! blocks the launcher: its queue is bounded, and a full queue breaks the link instead of waiting.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use hyper_util::rt::TokioIo;
use mainstay_checkpoint::replication_cost::StepTime;
use mainstay_health::host::cloud::leave::Leave;
use mainstay_health::host::contention::SlowdownHints;
use mainstay_model::entry::Entry;
use mainstay_model::id::{Attempt, JobId, Rank};
use mainstay_model::verdict::Verdict;
use mainstay_proto::v1;
use mainstay_proto::v1::from_agent::Message as AgentMessage;
use mainstay_proto::v1::from_launcher::Message as LauncherMessage;
use mainstay_proto::v1::launcher_service_client::LauncherServiceClient;
use mainstay_recovery::protocol::AgentEvidence;
use mainstay_sys::clock;
use mainstay_view::convert::{evidence, failure};
use mainstay_view::node::BeatView;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;
use tonic::transport::{Endpoint, Uri};

use crate::agent_link::absence::{self, Absence};
use crate::agent_link::{handover, trust, wire};

/// How often to look for an agent while there is none.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// How long an agent may take to answer the first message.
const WELCOME_WITHIN: Duration = Duration::from_secs(2);

/// How long an agent may take to close the link; the launcher waits for that at its end.
pub const LEAVE_WITHIN: Duration = Duration::from_secs(1);

/// Messages that may wait for the agent.
const MAX_QUEUED_MESSAGES: usize = 4096;

/// Events from the agent.
#[derive(Debug)]
pub enum LinkEvent {
    /// An agent is there. Reports to it go to `orders`; dropping that breaks the link.
    Found {
        /// Where it is.
        socket: PathBuf,
        /// Its version.
        version: String,
        /// The newest entry of this job that it has.
        have_seq: u64,
        /// The channel to it.
        orders: mpsc::Sender<LinkOrder>,
    },
    /// There is none so far. Sent once.
    Absent {
        /// Why, and what to do, as a sentence.
        why: String,
    },
    /// The agent is gone.
    Lost {
        /// What was observed.
        reason: String,
    },
    /// Its evidence about a failure.
    AgentEvidence(AgentEvidence),
    /// Evidence that it received about a failure after it ruled on it.
    Late(AgentEvidence),
    /// The state of the host that may explain why ranks are slow.
    RankContext(SlowdownHints),
    /// The machine is about to be taken away.
    Leave(Leave),
}

/// Reports to the agent.
#[derive(Debug)]
pub enum LinkOrder {
    /// An entry of the launcher's journal.
    Entry(Box<Entry>),
    /// A sample of the pages.
    Beats {
        /// The attempt they belong to.
        attempt: Attempt,
        /// By rank.
        beats: Vec<(Rank, BeatView)>,
        /// How long steps of one of them took since the last sample, oldest first.
        steps: Vec<StepTime>,
    },
    /// A failure, for which the agent is asked for its evidence.
    Verdict(Box<Verdict>),
}

/// Looks for an agent at `sockets`, in their order, while `events` has a receiver. Hands `directories` over to each.
pub async fn keep(
    sockets: Vec<PathBuf>,
    job: JobId,
    directories: Vec<PathBuf>,
    events: mpsc::Sender<LinkEvent>,
) {
    let mut is_reported = sockets.is_empty();
    while !events.is_closed() {
        let mut tried = Vec::new();
        for socket in &sockets {
            if let Some(absence) = Absence::if_missing(socket) {
                tried.push((socket.clone(), absence));
                continue;
            }
            let (to, handed) = (socket.clone(), directories.clone());
            // Nothing waits for it: a restarted agent reads the directories when it has them.
            tokio::task::spawn_blocking(move || {
                if let Err(error) = handover::hand_over(&to, &handed) {
                    tracing::debug!(socket = %to.display(), %error, "no directory was handed over");
                }
            });
            match attach(socket.clone(), &job, &events).await {
                Ok(()) => is_reported = true,
                Err(Broken::BeforeWelcome(error)) => {
                    tracing::debug!(socket = %socket.display(), "no agent: {error:#}");
                    tried.push((socket.clone(), Absence::from_error(socket, &error)));
                }
                Err(Broken::After(error)) => {
                    is_reported = true;
                    let reason = format!("{error:#}");
                    if events.send(LinkEvent::Lost { reason }).await.is_err() {
                        return;
                    }
                }
            }
        }
        if !is_reported {
            is_reported = true;
            let why = absence::describe(&tried);
            if events.send(LinkEvent::Absent { why }).await.is_err() {
                return;
            }
        }
        tokio::select! {
            () = events.closed() => return,
            () = tokio::time::sleep(POLL_INTERVAL) => {}
        }
    }
}

/// How a link ended.
enum Broken {
    /// There was no agent.
    BeforeWelcome(anyhow::Error),
    /// There was one.
    After(anyhow::Error),
}

async fn attach(socket: PathBuf, job: &JobId, events: &mpsc::Sender<LinkEvent>) -> Result<(), Broken> {
    let (to_agent, outgoing) = mpsc::channel(MAX_QUEUED_MESSAGES);
    let greeted = tokio::time::timeout(WELCOME_WITHIN, greet(socket.clone(), job, &to_agent, outgoing))
        .await
        .unwrap_or_else(|_| Err(anyhow::anyhow!("it does not answer")));
    let (mut incoming, welcome) = greeted.map_err(Broken::BeforeWelcome)?;
    let (orders, mut to_report) = mpsc::channel(MAX_QUEUED_MESSAGES);
    let found =
        LinkEvent::Found { socket, version: welcome.version, have_seq: welcome.have_sequence, orders };
    if events.send(found).await.is_err() {
        return Ok(());
    }
    loop {
        tokio::select! {
            order = to_report.recv() => match order {
                // The launcher dropped the sender and its queue is empty: it is done, or its queue was full.
                None => {
                    take_leave(to_agent, incoming).await;
                    let done = events.is_closed();
                    return if done { Ok(()) } else { Err(Broken::After(anyhow::anyhow!("it did not keep up"))) };
                }
                Some(order) => send(&to_agent, order).map_err(Broken::After)?,
            },
            message = incoming.message() => match message {
                Ok(Some(message)) => receive(message, events).await,
                Ok(None) => return Err(Broken::After(anyhow::anyhow!("it closed the connection"))),
                Err(status) if status.code() == Code::ResourceExhausted => {
                    return Err(Broken::After(anyhow::anyhow!("it refuses: {}", status.message())));
                }
                Err(_) => return Err(Broken::After(anyhow::anyhow!("its connection broke"))),
            },
        }
    }
}

/// Ends the link in order: all messages arrive before the agent closes its side.
async fn take_leave(to_agent: mpsc::Sender<v1::FromLauncher>, mut incoming: tonic::Streaming<v1::FromAgent>) {
    drop(to_agent);
    let closed = async { while let Ok(Some(_)) = incoming.message().await {} };
    let _ = tokio::time::timeout(LEAVE_WITHIN, closed).await;
}

async fn greet(
    socket: PathBuf,
    job: &JobId,
    to_agent: &mpsc::Sender<v1::FromLauncher>,
    outgoing: mpsc::Receiver<v1::FromLauncher>,
) -> anyhow::Result<(tonic::Streaming<v1::FromAgent>, v1::Welcome)> {
    // The address is never resolved: the connector uses the socket.
    let endpoint = Endpoint::from_static("http://agent.local");
    let channel = endpoint
        .connect_with_connector(tower::service_fn(move |_: Uri| connect(socket.clone())))
        .await
        .context("connecting")?;
    let hello = v1::Hello {
        job: job.0.clone(),
        pid: i32::try_from(std::process::id()).unwrap_or(0),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    to_agent.send(v1::FromLauncher { message: Some(LauncherMessage::Hello(hello)) }).await?;
    let mut client = LauncherServiceClient::new(channel);
    let mut incoming = client.attach(ReceiverStream::new(outgoing)).await?.into_inner();
    match incoming.message().await?.and_then(|first| first.message) {
        Some(AgentMessage::Welcome(welcome)) => Ok((incoming, welcome)),
        _ => bail!("its first message is not a welcome"),
    }
}

/// Connects, and trusts only an agent of root or of this user, or at a socket that only root could have provided: the agent
/// can end the job.
pub(crate) async fn connect(socket: PathBuf) -> std::io::Result<TokioIo<UnixStream>> {
    let stream = UnixStream::connect(&socket).await?;
    let owner = stream.peer_cred()?.uid();
    if !trust::is_trusted(&socket, owner) {
        let message = format!(
            "it is served by user {owner}, who is neither root nor this user, and an agent could end the job: have root \
             create its directory for user {owner} (as RuntimeDirectory= of the unit does), or name the user with \
             --trust-agent-uid or {}",
            trust::VARIABLE
        );
        return Err(std::io::Error::new(std::io::ErrorKind::PermissionDenied, message));
    }
    Ok(TokioIo::new(stream))
}

fn send(to_agent: &mpsc::Sender<v1::FromLauncher>, order: LinkOrder) -> anyhow::Result<()> {
    let message = match order {
        LinkOrder::Entry(entry) => {
            LauncherMessage::Entry(v1::ForwardedEntry { line: serde_json::to_string(&entry)? })
        }
        LinkOrder::Beats { attempt, beats, steps } => {
            LauncherMessage::Beats(wire::beats_out(attempt, &beats, &steps))
        }
        LinkOrder::Verdict(verdict) => LauncherMessage::Failure(failure::verdict(&verdict, clock::now())),
    };
    to_agent
        .try_send(v1::FromLauncher { message: Some(message) })
        .map_err(|_| anyhow::anyhow!("it does not accept messages"))
}

async fn receive(message: v1::FromAgent, events: &mpsc::Sender<LinkEvent>) {
    let event = match message.message {
        Some(AgentMessage::Evidence(sent)) => LinkEvent::AgentEvidence(evidence_in(sent)),
        Some(AgentMessage::LateEvidence(sent)) => LinkEvent::Late(evidence_in(sent)),
        Some(AgentMessage::RankContext(known)) => LinkEvent::RankContext(evidence::rank_context_in(known)),
        Some(AgentMessage::Leave(leave)) => LinkEvent::Leave(wire::leave_in(leave)),
        // An agent of another version may send messages that we do not know.
        _ => return,
    };
    let _ = events.send(event).await;
}

fn evidence_in(sent: v1::HostEvidence) -> AgentEvidence {
    let (incident, host_evidence) = evidence::host_evidence_in(sent);
    AgentEvidence { incident, instead: None, host_evidence }
}
