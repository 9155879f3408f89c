//! The start of a connection between two agents: both authenticate.
//!
//! With certificates, TLS comes first (`tls`). Then both sides send a nonce and prove over both nonces that they know the token
//! (`token`). Everything has a deadline: a client that connects and sends nothing, or sends slowly, occupies a connection for seconds only.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Instant;

use super::channel::Channel;
use super::credentials::Credentials;
use super::error::PeerError;
use super::frame::{FrameError, MAGIC, VERSION};
use super::tls;
use super::token::{NONCE_BYTES, Signer, nonce};
use super::wire::{Timeouts, Wire};

/// Size of the first message of both sides: magic, version, three bytes of zero, nonce.
const GREETING_BYTES: usize = 8 + NONCE_BYTES;

/// Maximum number of unsent bytes in a connection's send queue. Bytes that wait there longer have left the CPU caches when they are sent,
/// and are late when the rate limit is lowered (`TCP_NOTSENT_LOWAT`, tcp(7); it does not limit bytes in flight).
const WAITING: u32 = 64 << 10;

/// Time limit of the whole greeting, as a multiple of the limit of one step.
const STEPS: u32 = 3;

impl Wire {
    /// Connects to `address`, a host name or IP address with a port.
    ///
    /// # Errors
    /// Nothing answers, it is not an agent, has another protocol version, or authentication fails.
    pub fn connect(address: &str, pass: &Credentials, patience: Timeouts) -> Result<Wire, PeerError> {
        let gone = |source| PeerError::unreachable(address, source);
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for resolved in address.to_socket_addrs().map_err(gone)? {
            match TcpStream::connect_timeout(&resolved, patience.connect) {
                Ok(stream) => return greet(stream, address, pass, patience),
                Err(error) => last = error,
            }
        }
        Err(gone(last))
    }

    /// Accepts an incoming connection.
    pub fn accept(stream: TcpStream, pass: &Credentials, patience: Timeouts) -> Result<Wire, PeerError> {
        let peer = stream
            .peer_addr()
            .map_or_else(|_| "a peer".to_owned(), |address: SocketAddr| address.to_string());
        let lost = |source| tls::reported(&peer, source);
        let mut channel = begin(stream, patience).map_err(lost)?;
        let own = nonce().map_err(lost)?;
        let is_tls = channel.peek().map_err(lost)? == HANDSHAKE;
        match pass.tls() {
            Some(tls) if is_tls => {
                if let Err((first, error)) = channel.secure(tls.from(&peer)?) {
                    channel.part();
                    return Err(tls::failed(&peer, first, error));
                }
            }
            // Our greeting shows the client that this agent has no TLS.
            None if is_tls => {
                let _ = channel.write_all(&greeting(&own));
                channel.part();
                return Err(PeerError::SpeaksTls { peer });
            }
            _ => {}
        }
        let mut bytes = [0; GREETING_BYTES];
        channel.read_exact(&mut bytes).map_err(lost)?;
        // Send our version even if the client's differs, so that its operator sees both.
        channel.write_all(&greeting(&own)).map_err(lost)?;
        let theirs = parse_greeting(&bytes, &peer)?;
        let mut proof = [0; 32];
        channel.read_exact(&mut proof).map_err(lost)?;
        if pass.tls().is_some() && !is_tls {
            let _ = channel.write_all(&[BY_TLS]);
            return Err(PeerError::SpeaksPlainly { peer });
        }
        let token = pass.session(&channel, &peer)?;
        if token.prove("client", &theirs, &own) != blake3::Hash::from(proof) {
            let _ = channel.write_all(&[REFUSED]);
            return Err(PeerError::WrongToken { peer });
        }
        let mut answer = [TAKEN; 33];
        answer[1..].copy_from_slice(token.prove("server", &theirs, &own).as_bytes());
        channel.write_all(&answer).map_err(lost)?;
        channel.settle(patience.stall).map_err(lost)?;
        let outgoing = Signer::new(token.prove("server's frames", &theirs, &own));
        let incoming = Signer::new(token.prove("client's frames", &theirs, &own));
        Ok(Wire::over(channel, peer, outgoing, incoming))
    }
}

/// Answer to a proof: wrong.
const REFUSED: u8 = 0;

/// Answer to a proof: correct.
const TAKEN: u8 = 1;

/// Answer to a proof: not checked because this agent requires TLS.
const BY_TLS: u8 = 2;

/// First byte of a TLS handshake.
const HANDSHAKE: u8 = 0x16;

fn greet(stream: TcpStream, peer: &str, pass: &Credentials, patience: Timeouts) -> Result<Wire, PeerError> {
    let lost = |source| tls::reported(peer, source);
    let mut channel = begin(stream, patience).map_err(lost)?;
    if let Some(tls) = pass.tls() {
        channel.secure(tls.to(peer)?).map_err(|(first, error)| tls::failed(peer, first, error))?;
    }
    let token = pass.session(&channel, peer)?;
    let own = nonce().map_err(lost)?;
    channel.write_all(&greeting(&own)).map_err(lost)?;
    let mut bytes = [0; GREETING_BYTES];
    channel.read_exact(&mut bytes).map_err(lost)?;
    let theirs = parse_greeting(&bytes, peer)?;
    channel.write_all(token.prove("client", &own, &theirs).as_bytes()).map_err(lost)?;
    let mut answer = [0; 33];
    // On refusal the peer closes the connection or sends a code for it.
    channel.read_exact(&mut answer[..1]).map_err(|_| PeerError::refused(peer))?;
    match answer[0] {
        TAKEN => {}
        BY_TLS => return Err(PeerError::SpeaksTls { peer: peer.to_owned() }),
        _ => return Err(PeerError::refused(peer)),
    }
    channel.read_exact(&mut answer[1..]).map_err(lost)?;
    if token.prove("server", &own, &theirs)
        != blake3::Hash::from_slice(&answer[1..]).unwrap_or_else(|_| [0; 32].into())
    {
        return Err(PeerError::Impostor { peer: peer.to_owned() });
    }
    channel.settle(patience.stall).map_err(lost)?;
    let outgoing = Signer::new(token.prove("client's frames", &own, &theirs));
    let incoming = Signer::new(token.prove("server's frames", &own, &theirs));
    Ok(Wire::over(channel, peer.to_owned(), outgoing, incoming))
}

fn begin(stream: TcpStream, patience: Timeouts) -> io::Result<Channel> {
    stream.set_nodelay(true)?;
    socket2::SockRef::from(&stream).set_tcp_notsent_lowat(WAITING)?;
    Ok(Channel::new(stream, patience.connect, Instant::now() + patience.connect * STEPS))
}

fn greeting(nonce: &[u8; NONCE_BYTES]) -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4] = VERSION;
    bytes[8..].copy_from_slice(nonce);
    bytes
}

fn parse_greeting(bytes: &[u8; GREETING_BYTES], peer: &str) -> Result<[u8; NONCE_BYTES], PeerError> {
    let magic = [bytes[0], bytes[1], bytes[2], bytes[3]];
    if magic != MAGIC {
        return Err(PeerError::frame(peer, FrameError::Magic(magic)));
    }
    if bytes[4] != VERSION {
        return Err(PeerError::frame(peer, FrameError::Version(bytes[4])));
    }
    let mut nonce = [0; NONCE_BYTES];
    nonce.copy_from_slice(&bytes[8..]);
    Ok(nonce)
}
