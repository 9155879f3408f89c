//! Errors between agents, each with the peer.

use std::io;

use serde::{Deserialize, Serialize};

use super::frame::{FrameError, Kind};

/// An error between two agents.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message of each says it")]
pub enum PeerError {
    #[error("{peer} cannot be reached: {source}")]
    Unreachable { peer: String, source: io::Error },
    #[error("the connection to {peer} was lost: {source}")]
    Lost { peer: String, source: io::Error },
    #[error("{peer} refused our token: the token files of both hosts must have the same text")]
    Refused { peer: String },
    #[error("{peer} does not know the token")]
    WrongToken { peer: String },
    #[error("{peer} takes our token but cannot show that it knows it: it is not one of our agents")]
    Impostor { peer: String },
    #[error(
        "{peer} does not use TLS and this agent does: checkpoint.tls must be set on all hosts or on none"
    )]
    SpeaksPlainly { peer: String },
    #[error("{peer} uses TLS and this agent does not: set checkpoint.tls here as well")]
    SpeaksTls { peer: String },
    #[error(
        "the certificate of {peer} is not accepted: {why} (ca.crt of checkpoint.tls here, tls.crt there)"
    )]
    BadCertificate { peer: String, why: String },
    #[error("{peer} refused our certificate: {why} (tls.crt of checkpoint.tls here, ca.crt there)")]
    CertificateRefused { peer: String, why: String },
    #[error("TLS with {peer}: {why}")]
    Tls { peer: String, why: String },
    #[error("{peer}: {error}")]
    Frame { peer: String, error: FrameError },
    #[error("what came from {peer} was changed on the way: its code does not match")]
    Forged { peer: String },
    #[error("{peer} sent {got:?} where {wanted:?} was due")]
    Unexpected { peer: String, got: Kind, wanted: Kind },
    #[error("{peer} sent what cannot be read: {error}")]
    Unreadable { peer: String, error: String },
    #[error("chunk {chunk} from {peer} is not what the manifest says")]
    Corrupt { peer: String, chunk: u32 },
    #[error("{peer} says: {text}")]
    Reported { peer: String, reason: Reason, text: String },
    #[error("{peer} is too slow: {bytes} bytes of a shard went in {seconds} s")]
    Slow { peer: String, bytes: u64, seconds: u64 },
    #[error("a message of {bytes} bytes is longer than the limit")]
    TooLong { bytes: usize },
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

    pub(crate) fn from_report(peer: &str, message: &[u8]) -> PeerError {
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
}
