//! The API of a launcher for the other launchers of its job, so that each host answers for the whole job. A caller opens a
//! connection as a follower does, and announces [`Up::Api`] in place of a join. gRPC follows, in both directions.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use mainstay_coord::{CoordError, Group, Leader};
use mainstay_group::wire::Up;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{mpsc, watch};
use tonic::transport::server::{Connected, TcpConnectInfo};
use tonic::transport::{Channel, Endpoint, Uri};

use crate::group::streams::connect::prove;
use crate::group::streams::encrypted::Stream;
use crate::group::streams::{StreamError, Token, send};

/// Connections that wait for the API to accept them. The API of a launcher accepts at once.
const WAITING: usize = 16;

/// What the group of the job's hosts needs of the API.
#[derive(Debug)]
pub struct ApiLinks {
    /// Takes the connections of other launchers.
    pub callers: mpsc::Sender<HostCaller>,
    /// Shows who is there.
    pub known: watch::Sender<Option<KnownHosts>>,
}

/// What the API needs of the group.
#[derive(Debug)]
pub struct OtherHosts {
    /// Connections of other launchers of the job.
    pub callers: mpsc::Receiver<HostCaller>,
    /// Who is there; none before this launcher has its place in the group.
    pub known: watch::Receiver<Option<KnownHosts>>,
}

/// Connects the group with the API.
pub fn links() -> (ApiLinks, OtherHosts) {
    let (callers, accepted) = mpsc::channel(WAITING);
    let (shows, known) = watch::channel(None);
    (ApiLinks { callers, known: shows }, OtherHosts { callers: accepted, known })
}

/// The other launchers of the job.
#[derive(Clone, Debug)]
pub struct KnownHosts {
    /// The one that leads, while it is another one and is known.
    pub leader: Option<HostApi>,
    group: Group,
    me: String,
    token: Token,
}

impl KnownHosts {
    pub(crate) fn new(leader: Option<&Leader>, group: &Group, me: &str, token: &Token) -> KnownHosts {
        let (group, me, token) = (group.clone(), me.to_owned(), token.clone());
        let leader = leader.map(|leader| HostApi {
            host: leader.host.clone(),
            launcher: leader.launch.clone(),
            addresses: leader.addresses.clone(),
            token: token.clone(),
        });
        KnownHosts { leader, group, me, token }
    }

    /// Whether the same launcher leads.
    pub(crate) fn is_as(&self, other: &KnownHosts) -> bool {
        let launcher = |known: &KnownHosts| known.leader.as_ref().map(|leader| leader.launcher.clone());
        launcher(self) == launcher(other)
    }

    /// All of them, as the store knows them now.
    ///
    /// # Errors
    /// The store does not answer.
    pub async fn all(&self) -> Result<Vec<HostApi>, CoordError> {
        let members = self.group.state().await?.members.into_values();
        let others = members.filter(|member| member.launch != self.me).map(|member| HostApi {
            host: member.host,
            launcher: member.launch,
            addresses: member.addresses,
            token: self.token.clone(),
        });
        Ok(others.collect())
    }
}

/// A connection of another launcher, which has proven that it knows the job's token.
pub struct HostCaller {
    stream: Stream,
    peer: SocketAddr,
}

impl HostCaller {
    pub(super) fn new(stream: Stream, peer: SocketAddr) -> HostCaller {
        HostCaller { stream, peer }
    }
}

impl std::fmt::Debug for HostCaller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostCaller({})", self.peer)
    }
}

impl Connected for HostCaller {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        TcpConnectInfo { local_addr: None, remote_addr: Some(self.peer) }
    }
}

impl AsyncRead for HostCaller {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for HostCaller {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

/// The API of a launcher on another host.
#[derive(Clone, Debug)]
pub struct HostApi {
    /// Its host.
    pub host: String,
    launcher: String,
    addresses: Vec<String>,
    token: Token,
}

impl HostApi {
    /// Whether it is the same launcher.
    pub fn is(&self, other: &HostApi) -> bool {
        self.launcher == other.launcher
    }

    /// A channel to its API, at the first of its addresses that answers.
    ///
    /// # Errors
    /// None of them does, or another program does.
    pub async fn connect(&self) -> Result<Channel, tonic::transport::Error> {
        let host = self.clone();
        let connect = tower::service_fn(move |_: Uri| {
            let host = host.clone();
            async move { host.stream().await.map(TokioIo::new) }
        });
        // The address is never resolved: the connector uses those of the launcher.
        Endpoint::from_static("http://launcher").connect_with_connector(connect).await
    }

    async fn stream(&self) -> Result<Stream, StreamError> {
        let mut failed = StreamError::Closed;
        for address in &self.addresses {
            match prove(address, &self.token).await {
                Ok(mut stream) => {
                    send(&mut stream, &Up::Api).await?;
                    return Ok(stream);
                }
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }
}
