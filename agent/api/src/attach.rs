//! `mainstay.v1.LauncherService`: launchers of this host report to the agent. Served only on the Unix socket, where
//! the kernel reports the caller's user.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use mainstay_model::id::{Incident, JobId};
use mainstay_proto::v1::from_agent::Message as AgentMessage;
use mainstay_proto::v1::from_launcher::Message as LauncherMessage;
use mainstay_proto::v1::launcher_service_server::LauncherService;
use mainstay_proto::v1::{FromAgent, FromLauncher, Welcome};
use mainstay_tier::peer::Service;
use prost::Message as _;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::{Stream, StreamExt, wrappers::ReceiverStream};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status, Streaming};

use super::budget::{Budgets, Share};
use super::refusal::{Reason, invalid};
use super::roles::Roles;
use mainstay_launcher::agent_link::wire;
use mainstay_node::{Attached, Hello, Input, Session, ToLauncher};
use mainstay_sys::clock;
use mainstay_view::convert::{evidence, failure};

/// Messages that may wait for a launcher.
const MAX_QUEUED_MESSAGES: usize = 64;

/// How long a launcher may take to send its first message.
const FIRST: Duration = Duration::from_secs(10);

/// The service.
#[derive(Clone, Debug)]
pub struct Launchers {
    /// For new launchers. They do not queue behind the reports of others.
    introductions: mpsc::Sender<Input>,
    /// For reports of launchers.
    inputs: mpsc::Sender<Input>,
    roles: Roles,
    budgets: Budgets,
    /// Replicates what these jobs save.
    peers: Option<Arc<Service>>,
}

impl Launchers {
    /// A service that introduces launchers to the node through `introductions`, passes their reports on through
    /// `inputs` and reports step times to `peers`.
    pub fn new(
        introductions: mpsc::Sender<Input>,
        inputs: mpsc::Sender<Input>,
        roles: Roles,
        peers: Option<Arc<Service>>,
    ) -> Launchers {
        Launchers { introductions, inputs, roles, budgets: Budgets::default(), peers }
    }

    async fn introduce(&self, hello: Hello, orders: mpsc::Sender<ToLauncher>) -> Result<Attached, Status> {
        let first = ask(&self.introductions, hello.clone(), orders.clone()).await?;
        match first {
            Ok(attached) => Ok(attached),
            // The end of the previous launcher may still be queued in `inputs`: ask again behind it.
            Err(_) => ask(&self.inputs, hello, orders).await?.map_err(|why| Reason::JOB_ATTACHED.refuse(why)),
        }
    }
}

/// Asks the node whether a launcher may attach.
async fn ask(
    node: &mpsc::Sender<Input>,
    hello: Hello,
    orders: mpsc::Sender<ToLauncher>,
) -> Result<Result<Attached, String>, Status> {
    let (answer, answered) = oneshot::channel();
    let gone = || Reason::SERVER_STOPPING.refuse("the agent is stopping");
    node.send(Input::Attach { hello, orders, answer }).await.map_err(|_| gone())?;
    answered.await.map_err(|_| gone())
}

#[tonic::async_trait]
impl LauncherService for Launchers {
    type AttachStream = Pin<Box<dyn Stream<Item = Result<FromAgent, Status>> + Send>>;

    async fn attach(
        &self,
        request: Request<Streaming<FromLauncher>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let caller = self.roles.user(&request, "Attach")?;
        let (pid, uid) = (caller.pid, caller.user.uid);
        let share = self.budgets.attach(uid).ok_or_else(|| {
            Reason::TOO_MANY_LAUNCHERS.refuse(format!(
                "user {uid} has the most launchers that may be attached to this agent: end some of them"
            ))
        })?;
        let mut incoming = request.into_inner();
        let first = tokio::time::timeout(FIRST, incoming.message()).await;
        let first = first.map_err(|_| Reason::NO_HELLO.refuse("no Hello came"))?;
        let Some(LauncherMessage::Hello(hello)) = first?.and_then(|first| first.message) else {
            return Err(invalid("hello", "the first message must be Hello"));
        };
        if let Some(problem) = JobId::problem(&hello.job) {
            return Err(invalid("job", format!("{problem}; choose another --rdzv-id")));
        }
        let (orders, ordered) = mpsc::channel(MAX_QUEUED_MESSAGES);
        let refusals = orders.downgrade();
        // The pid that a launcher reports is not used: in another PID namespace it is a different process here.
        let attached = self.introduce(Hello { job: JobId(hello.job), pid, uid }, orders).await?;
        let welcome = FromAgent {
            message: Some(AgentMessage::Welcome(Welcome {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                have_sequence: attached.have_seq,
            })),
        };
        // The answer is dropped when the launcher's connection ends.
        let left = CancellationToken::new();
        let here = left.clone().drop_guard();
        let listening = Listening { share, session: attached.session, left, refusals };
        tokio::spawn(listening.listen(incoming, self.inputs.clone(), self.peers.clone()));
        let ordered = ReceiverStream::new(ordered).map(move |order| {
            let _ = &here;
            to_wire(&order)
        });
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(welcome)).chain(ordered))))
    }
}

/// The connection of a launcher.
struct Listening {
    share: Share,
    session: Session,
    /// Cancelled when the connection ends.
    left: CancellationToken,
    /// Not kept open by this: the node ends a connection by dropping the other end.
    refusals: mpsc::WeakSender<ToLauncher>,
}

impl Listening {
    /// Passes on the reports of a launcher until it disconnects.
    async fn listen(
        self,
        mut incoming: Streaming<FromLauncher>,
        inputs: mpsc::Sender<Input>,
        peers: Option<Arc<Service>>,
    ) {
        loop {
            let message = match incoming.message().await {
                Ok(Some(message)) => message,
                Ok(None) => break,
                Err(status) => {
                    self.refuse(&status);
                    break;
                }
            };
            tokio::select! {
                biased;
                () = self.share.spend(message.encoded_len()) => {}
                // No message of a launcher that has left waits for the budget of its user.
                () = self.left.cancelled() => break,
            }
            if let (Some(peers), Some(LauncherMessage::Beats(sample))) = (&peers, &message.message) {
                peers.record_steps(&self.session.job.0, &wire::steps_in(sample));
            }
            let input = match from_wire(message, &self.session) {
                Ok(Some(input)) => input,
                // A later launcher may send messages that this version does not know.
                Ok(None) => continue,
                Err(error) => {
                    tracing::warn!(job = %self.session.job, %error, "a launcher's message is left out");
                    continue;
                }
            };
            if inputs.send(input).await.is_err() {
                return;
            }
        }
        let _ = inputs.send(Input::Detached(self.session)).await;
    }

    /// Ends the connection with the reason for which a message was not received.
    fn refuse(&self, status: &Status) {
        if status.code() == Code::ResourceExhausted
            && let Some(refusals) = self.refusals.upgrade()
        {
            let _ = refusals.try_send(ToLauncher::Refused(status.message().to_owned()));
        }
    }
}

fn from_wire(
    message: FromLauncher,
    session: &Session,
) -> Result<Option<Input>, Box<dyn std::error::Error + Send + Sync>> {
    Ok(match message.message {
        Some(LauncherMessage::Entry(entry)) => {
            Some(Input::Entry(session.clone(), Box::new(serde_json::from_str(&entry.line)?)))
        }
        Some(LauncherMessage::Beats(sample)) => {
            let (attempt, beats) = wire::beats_in(sample);
            Some(Input::Beats(session.clone(), attempt, beats))
        }
        Some(LauncherMessage::Failure(verdict)) => {
            Some(Input::Failure(session.clone(), Box::new(failure::verdict_in(verdict)?)))
        }
        _ => None,
    })
}

fn to_wire(order: &ToLauncher) -> Result<FromAgent, Status> {
    let evidence_out = |incident: &Incident, of| evidence::host_evidence(*incident, of, clock::now());
    let message = match order {
        ToLauncher::AgentEvidence(incident, of) => AgentMessage::Evidence(evidence_out(incident, of)),
        ToLauncher::Late(incident, of) => AgentMessage::LateEvidence(evidence_out(incident, of)),
        ToLauncher::RankContext(known) => AgentMessage::RankContext(evidence::rank_context(known)),
        ToLauncher::Leave(leave) => AgentMessage::Leave(wire::leave_out(leave)),
        ToLauncher::Refused(reason) => return Err(Reason::TOO_MANY_REPORTS.refuse(reason)),
    };
    Ok(FromAgent { message: Some(message) })
}
