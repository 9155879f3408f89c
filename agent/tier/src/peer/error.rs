//! Errors between agents, each with the peer.

use std::io;

use serde::{Deserialize, Serialize};

use super::frame::{FrameError, Kind};

/// An error between two agents.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// The peer does not answer.
    #[error("{peer} cannot be reached: {source}")]
    Unreachable {
        /// The peer.
        peer: String,
        /// The error.
        source: io::Error,
    },
    /// The connection broke or stalled.
    #[error("the connection to {peer} was lost: {source}")]
    Lost {
        /// The peer.
        peer: String,
        /// The error.
        source: io::Error,
    },
    /// It does not accept our token.
    #[error("{peer} refused our token: the token files of both hosts must have the same text")]
    Refused {
        /// The peer.
        peer: String,
    },
    /// It has a different token, or none.
    #[error("{peer} does not know the token")]
    WrongToken {
        /// The peer.
        peer: String,
    },
    /// It accepted our token without knowing it.
    #[error("{peer} takes our token but cannot show that it knows it: it is not one of our agents")]
    Impostor {
        /// The peer.
        peer: String,
    },
    /// It uses no TLS, and this agent does.
    #[error(
        "{peer} does not use TLS and this agent does: checkpoint.tls_certificate, tls_key and tls_authorities must be set on all hosts or on none"
    )]
    SpeaksPlainly {
        /// The peer.
        peer: String,
    },
    /// It uses TLS, and this agent does not.
    #[error(
        "{peer} uses TLS and this agent does not: set checkpoint.tls_certificate, tls_key and tls_authorities here as well"
    )]
    SpeaksTls {
        /// The peer.
        peer: String,
    },
    /// This agent does not accept its certificate.
    #[error(
        "the certificate of {peer} is not accepted: {why} (checkpoint.tls_authorities here, checkpoint.tls_certificate there)"
    )]
    BadCertificate {
        /// The peer.
        peer: String,
        /// The problem.
        why: String,
    },
    /// It does not accept our certificate.
    #[error(
        "{peer} refused our certificate: {why} (checkpoint.tls_certificate here, checkpoint.tls_authorities there)"
    )]
    CertificateRefused {
        /// The peer.
        peer: String,
        /// The peer's message.
        why: String,
    },
    /// The TLS handshake failed for another reason.
    #[error("TLS with {peer}: {why}")]
    Tls {
        /// The peer.
        peer: String,
        /// The error.
        why: String,
    },
    /// A header that is not of this protocol.
    #[error("{peer}: {error}")]
    Frame {
        /// The peer.
        peer: String,
        /// The problem.
        error: FrameError,
    },
    /// A frame without a valid code of the other side.
    #[error("what came from {peer} was changed on the way: its code does not match")]
    Forged {
        /// The peer.
        peer: String,
    },
    /// A frame at the wrong time.
    #[error("{peer} sent {got:?} where {wanted:?} was due")]
    Unexpected {
        /// The peer.
        peer: String,
        /// The received kind.
        got: Kind,
        /// The expected kind.
        wanted: Kind,
    },
    /// A message that cannot be read.
    #[error("{peer} sent what cannot be read: {error}")]
    Unreadable {
        /// The peer.
        peer: String,
        /// The problem.
        error: String,
    },
    /// Bytes do not match the manifest.
    #[error("chunk {chunk} from {peer} is not what the manifest says")]
    Corrupt {
        /// The peer.
        peer: String,
        /// The index of the chunk.
        chunk: u32,
    },
    /// The other side reports an error.
    #[error("{peer} says: {text}")]
    Reported {
        /// The peer.
        peer: String,
        /// The kind of error.
        reason: Reason,
        /// The peer's message.
        text: String,
    },
    /// It is too slow.
    #[error("{peer} is too slow: {bytes} bytes of a shard went in {seconds} s")]
    Slow {
        /// The peer.
        peer: String,
        /// Transferred bytes.
        bytes: u64,
        /// Elapsed time in seconds.
        seconds: u64,
    },
    /// A message that is too long.
    #[error("a message of {bytes} bytes is longer than the limit")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// An error on this host.
    #[error("{0}")]
    Local(String),
    /// This process may not write as the user, and the user lent no files.
    #[error("{0}")]
    NoFiles(String),
}

/// Why a peer refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Its store is full.
    Full,
    /// It does not have the shard.
    NotHere,
    /// The sent bytes do not match the manifest.
    Corrupt,
    /// The request is not valid.
    Bad,
    /// Its disk failed.
    Disk,
    /// Any other reason, including those of later versions.
    #[serde(other)]
    Other,
}

/// The message of an error frame.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) reason: Reason,
    pub(crate) text: String,
}

impl PeerError {
    pub(crate) fn unreachable(peer: &str, source: io::Error) -> PeerError {
        PeerError::Unreachable { peer: peer.to_owned(), source }
    }

    pub(crate) fn lost(peer: &str, source: io::Error) -> PeerError {
        // The error of a socket timeout is hard to understand.
        let stalled = matches!(source.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        let source = if stalled {
            io::Error::new(io::ErrorKind::TimedOut, "nothing moved for too long")
        } else {
            source
        };
        PeerError::Lost { peer: peer.to_owned(), source }
    }

    pub(crate) fn refused(peer: &str) -> PeerError {
        PeerError::Refused { peer: peer.to_owned() }
    }

    pub(crate) fn frame(peer: &str, error: FrameError) -> PeerError {
        PeerError::Frame { peer: peer.to_owned(), error }
    }

    pub(crate) fn reported(peer: &str, message: &[u8]) -> PeerError {
        match serde_json::from_slice::<Report>(message) {
            Ok(report) => {
                // Text of other agents goes into logs and onto terminals.
                let text = report.text.chars().filter(|c| !c.is_control()).take(500).collect();
                PeerError::Reported { peer: peer.to_owned(), reason: report.reason, text }
            }
            Err(error) => PeerError::Unreadable { peer: peer.to_owned(), error: error.to_string() },
        }
    }

    /// Whether a peer was refused because it lacks or cannot prove access rights.
    pub(crate) fn is_refusal(&self) -> bool {
        use PeerError as Of;
        matches!(
            self,
            Of::WrongToken { .. }
                | Of::SpeaksPlainly { .. }
                | Of::SpeaksTls { .. }
                | Of::BadCertificate { .. }
                | Of::CertificateRefused { .. }
                | Of::Tls { .. }
        )
    }

    /// Whether the peer itself works and only this request failed.
    pub fn is_about_the_request(&self) -> bool {
        matches!(
            self,
            PeerError::Reported { .. }
                | PeerError::TooLong { .. }
                | PeerError::Local(_)
                | PeerError::NoFiles(_)
        )
    }
}
