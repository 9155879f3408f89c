//! Connections of a TCP listener, with mutual TLS if the server has a certificate.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use mainstay_tier::peer::tls::Tls;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use super::certificate::{Certificate, TcpCallerInfo};
use super::connection_limits::Placed;
use super::roles;
use super::tcp_connections::TcpConnection;
use mainstay_node::Input;

/// A handshake takes at most this long.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Refused callers are logged, and written to the journal, at most this often.
const REPORT_EVERY: Duration = Duration::from_secs(60);

/// The protocols that callers may choose: those of gRPC need the first.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// A connection before its encryption.
pub(super) type Plain = Placed<TcpStream, TcpConnection>;

/// A connection of a TCP listener.
pub(super) enum TcpCaller {
    Plain(Plain),
    Encrypted(Box<TlsStream<Plain>>, Option<Arc<Certificate>>),
}

/// Makes the connections of one listener encrypted.
#[derive(Clone)]
pub(super) struct Encrypting {
    tls: Tls,
    refused: Arc<Mutex<Refused>>,
    /// The node, which records refused callers.
    inputs: Option<mpsc::Sender<Input>>,
}

/// The callers that were refused.
#[derive(Default)]
struct Refused {
    /// Since the last line.
    count: u64,
    /// When the last line was logged.
    reported: Option<Instant>,
}

impl Encrypting {
    pub(super) fn new(tls: Tls, inputs: Option<mpsc::Sender<Input>>) -> Encrypting {
        Encrypting { tls, refused: Arc::default(), inputs }
    }

    /// The connection if its caller has shown a certificate of a trusted authority. `None` if not: it is closed.
    pub(super) async fn accept(&self, stream: Plain) -> Option<TcpCaller> {
        let caller = stream.connect_info().remote_addr();
        // Replaced files are read again here.
        let mut config = (*self.tls.configurations().1).clone();
        config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).to_vec();
        let handshake = TlsAcceptor::from(Arc::new(config)).accept(stream);
        let why = match tokio::time::timeout(HANDSHAKE, handshake).await {
            Ok(Ok(stream)) => {
                let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
                let certificate = shown.and_then(|der| Certificate::parse(der)).map(Arc::new);
                return Some(TcpCaller::Encrypted(Box::new(stream), certificate));
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("it sent no handshake within {} s", HANDSHAKE.as_secs()),
        };
        self.report(caller, &why);
        None
    }

    /// One line for each flood.
    fn report(&self, caller: Option<SocketAddr>, why: &str) {
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused.count += 1;
        if refused.reported.is_none_or(|reported| reported.elapsed() >= REPORT_EVERY) {
            if let Some(inputs) = &self.inputs {
                let by = TcpCallerInfo { address: caller, certificate: None }.called_by();
                let what = format!("{} since the last entry; {why}", refused.count);
                roles::record(inputs, by, "TLS", &what, true);
            }
            let caller = caller.map_or_else(|| "unknown".to_owned(), |address| address.to_string());
            tracing::warn!(
                caller,
                why,
                count = refused.count,
                "callers of the API over TCP were refused: each needs a certificate of an authority in ca.crt of the key tls (mainstay certs issue)"
            );
            *refused = Refused { count: 0, reported: Some(Instant::now()) };
        }
    }
}

impl Connected for TcpCaller {
    type ConnectInfo = TcpCallerInfo;

    fn connect_info(&self) -> TcpCallerInfo {
        let (plain, certificate) = match self {
            TcpCaller::Plain(stream) => (stream, None),
            TcpCaller::Encrypted(stream, certificate) => (stream.get_ref().0, certificate.clone()),
        };
        TcpCallerInfo { address: plain.connect_info().remote_addr(), certificate }
    }
}

impl AsyncRead for TcpCaller {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            TcpCaller::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            TcpCaller::Encrypted(stream, _) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for TcpCaller {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            TcpCaller::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            TcpCaller::Encrypted(stream, _) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            TcpCaller::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bytes),
            TcpCaller::Encrypted(stream, _) => Pin::new(stream).poll_write_vectored(cx, bytes),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            TcpCaller::Plain(stream) => stream.is_write_vectored(),
            TcpCaller::Encrypted(stream, _) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            TcpCaller::Plain(stream) => Pin::new(stream).poll_flush(cx),
            TcpCaller::Encrypted(stream, _) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            TcpCaller::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            TcpCaller::Encrypted(stream, _) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
