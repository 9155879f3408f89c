//! `mainstay.v1.LauncherService`: launchers of this host report to the agent. On the Unix socket only, where the
//! kernel says who calls.

use std::pin::Pin;
use std::sync::Arc;

use mainstay_core::base::id::{JobId, Pid};
use mainstay_proto::v1::from_agent::Message as AgentMessage;
use mainstay_proto::v1::from_launcher::Message as LauncherMessage;
use mainstay_proto::v1::launcher_service_server::LauncherService;
use mainstay_proto::v1::{FromAgent, FromLauncher, Welcome};
use mainstay_tier::peer::Service;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::{Stream, StreamExt, wrappers::ReceiverStream};
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Response, Status, Streaming};

use crate::link::wire;
use crate::node::{Attached, Hello, Input, Session, ToLauncher};
use crate::os::processes;

/// Messages that may wait for a launcher.
const QUEUE: usize = 64;

/// Who may attach a launcher, besides root, the agent's own user and the members of its group.
#[derive(Clone, Debug, Default)]
pub struct Allowed {
    /// Users.
    pub uids: Vec<u32>,
    /// Groups, of which the caller's process is in one.
    pub gids: Vec<u32>,
}

impl Allowed {
    /// Whether a process of this user and group may.
    pub(super) fn admits(&self, uid: u32, gid: u32, pid: Pid) -> bool {
        let own = nix::unistd::getegid().as_raw();
        let admitted = |group: &u32| *group == own || self.gids.contains(group);
        uid == 0
            || uid == nix::unistd::geteuid().as_raw()
            || self.uids.contains(&uid)
            || admitted(&gid)
            || processes::supplementary_groups(pid).iter().any(admitted)
    }
}

/// The service.
#[derive(Clone, Debug)]
pub struct Launchers {
    inputs: mpsc::Sender<Input>,
    allowed: Allowed,
    /// Whoever replicates what these jobs save.
    peers: Option<Arc<Service>>,
}

impl Launchers {
    /// A service that tells the node through `inputs`, and `peers` what steps take.
    pub fn new(inputs: mpsc::Sender<Input>, allowed: Allowed, peers: Option<Arc<Service>>) -> Launchers {
        Launchers { inputs, allowed, peers }
    }

    fn caller<T>(&self, request: &Request<T>) -> Result<(Pid, u32), Status> {
        let connection = request.extensions().get::<UdsConnectInfo>();
        let credentials = connection
            .and_then(|connection| connection.peer_cred)
            .ok_or_else(|| Status::permission_denied("launchers attach on the Unix socket only"))?;
        let (uid, gid, pid) = (credentials.uid(), credentials.gid(), Pid(credentials.pid().unwrap_or(0)));
        if !self.allowed.admits(uid, gid, pid) {
            return Err(Status::permission_denied(format!(
                "user {uid} (group {gid}) may not attach launchers to this agent: put the user into the agent's \
                 group, or into allow_uids or allow_gids of the agent's configuration"
            )));
        }
        Ok((pid, uid))
    }

    async fn introduce(&self, hello: Hello, orders: mpsc::Sender<ToLauncher>) -> Result<Attached, Status> {
        let (answer, answered) = oneshot::channel();
        let gone = || Status::unavailable("the agent is stopping");
        self.inputs.send(Input::Attach { hello, orders, answer }).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?.map_err(Status::already_exists)
    }
}

#[tonic::async_trait]
impl LauncherService for Launchers {
    type AttachStream = Pin<Box<dyn Stream<Item = Result<FromAgent, Status>> + Send>>;

    async fn attach(
        &self,
        request: Request<Streaming<FromLauncher>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let (pid, uid) = self.caller(&request)?;
        let mut incoming = request.into_inner();
        let Some(LauncherMessage::Hello(hello)) = incoming.message().await?.and_then(|first| first.message)
        else {
            return Err(Status::invalid_argument("the first message must be Hello"));
        };
        let pid = if pid == Pid(0) { Pid(hello.pid) } else { pid };
        let (orders, rulings) = mpsc::channel(QUEUE);
        let attached = self.introduce(Hello { job: JobId(hello.job), pid, uid }, orders).await?;
        let welcome = FromAgent {
            message: Some(AgentMessage::Welcome(Welcome {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                have_sequence: attached.have_seq,
            })),
        };
        tokio::spawn(listen(incoming, attached.session, self.inputs.clone(), self.peers.clone()));
        let rulings = ReceiverStream::new(rulings).map(|order| to_wire(&order));
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(welcome)).chain(rulings))))
    }
}

/// Passes on what a launcher says until it goes.
async fn listen(
    mut incoming: Streaming<FromLauncher>,
    session: Session,
    inputs: mpsc::Sender<Input>,
    peers: Option<Arc<Service>>,
) {
    while let Ok(Some(message)) = incoming.message().await {
        if let (Some(peers), Some(LauncherMessage::Beats(sample))) = (&peers, &message.message) {
            peers.stepped(&session.job.0, &wire::steps_in(sample));
        }
        let input = match from_wire(message, &session) {
            Ok(Some(input)) => input,
            // A later launcher may say more than we understand.
            Ok(None) => continue,
            Err(error) => {
                tracing::warn!(job = %session.job, %error, "a launcher's message is left out");
                continue;
            }
        };
        if inputs.send(input).await.is_err() {
            return;
        }
    }
    let _ = inputs.send(Input::Detached(session)).await;
}

fn from_wire(message: FromLauncher, session: &Session) -> Result<Option<Input>, wire::WireError> {
    Ok(match message.message {
        Some(LauncherMessage::Entry(entry)) => {
            Some(Input::Entry(session.clone(), Box::new(wire::entry_in(&entry)?)))
        }
        Some(LauncherMessage::Beats(sample)) => {
            let (attempt, beats) = wire::beats_in(sample);
            Some(Input::Beats(session.clone(), attempt, beats))
        }
        Some(LauncherMessage::Proposal(proposal)) => {
            Some(Input::Proposal(session.clone(), Box::new(wire::proposal_in(&proposal)?)))
        }
        Some(LauncherMessage::Hello(_)) | None => None,
    })
}

fn to_wire(order: &ToLauncher) -> Result<FromAgent, Status> {
    let message = match order {
        ToLauncher::Ruling(incident, testimony) => {
            wire::ruling_out(*incident, testimony).map(AgentMessage::Ruling)
        }
        ToLauncher::Late(incident, testimony) => {
            wire::ruling_out(*incident, testimony).map(AgentMessage::Late)
        }
        ToLauncher::Surroundings(known) => wire::surroundings_out(known).map(AgentMessage::Surroundings),
        ToLauncher::Leave(leave) => Ok(AgentMessage::Leave(wire::leave_out(leave))),
    };
    Ok(FromAgent { message: Some(message.map_err(|error| Status::internal(error.to_string()))?) })
}
