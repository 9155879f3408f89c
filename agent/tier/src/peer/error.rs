//! What can go wrong between agents, each with who it was.

use std::io;

use serde::{Deserialize, Serialize};

use super::frame::{FrameError, Kind};

/// Something went wrong between two agents.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// Nobody answers.
    #[error("{peer} cannot be reached: {source}")]
    Unreachable {
        /// Who.
        peer: String,
        /// What was seen.
        source: io::Error,
    },
    /// The connection broke or stalled.
    #[error("the connection to {peer} was lost: {source}")]
    Lost {
        /// Who.
        peer: String,
        /// What was seen.
        source: io::Error,
    },
    /// It does not take our token.
    #[error("{peer} refused our token: the token files of both hosts must have the same text")]
    Refused {
        /// Who.
        peer: String,
    },
    /// It has another token, or none.
    #[error("{peer} does not know the token")]
    WrongToken {
        /// Who.
        peer: String,
    },
    /// It took our token without knowing it.
    #[error("{peer} takes our token but cannot show that it knows it: it is not one of our agents")]
    Impostor {
        /// Who.
        peer: String,
    },
    /// It uses no TLS, and this agent does.
    #[error(
        "{peer} does not use TLS and this agent does: checkpoint.tls_certificate, tls_key and tls_authorities must be set on all hosts or on none"
    )]
    SpeaksPlainly {
        /// Who.
        peer: String,
    },
    /// It uses TLS, and this agent does not.
    #[error(
        "{peer} uses TLS and this agent does not: set checkpoint.tls_certificate, tls_key and tls_authorities here as well"
    )]
    SpeaksTls {
        /// Who.
        peer: String,
    },
    /// Its certificate is not taken here.
    #[error(
        "the certificate of {peer} is not taken: {why} (checkpoint.tls_authorities here, checkpoint.tls_certificate there)"
    )]
    BadCertificate {
        /// Who.
        peer: String,
        /// What is wrong with it.
        why: String,
    },
    /// Our certificate is not taken there.
    #[error(
        "{peer} refused our certificate: {why} (checkpoint.tls_certificate here, checkpoint.tls_authorities there)"
    )]
    CertificateRefused {
        /// Who.
        peer: String,
        /// In its words.
        why: String,
    },
    /// TLS came to no end, for another reason.
    #[error("TLS with {peer}: {why}")]
    Tls {
        /// Who.
        peer: String,
        /// What was seen.
        why: String,
    },
    /// A header that is none of ours.
    #[error("{peer}: {error}")]
    Frame {
        /// Who.
        peer: String,
        /// What is wrong with it.
        error: FrameError,
    },
    /// A frame that the other side did not sign.
    #[error("what came from {peer} was changed on the way: its code does not match")]
    Forged {
        /// Who.
        peer: String,
    },
    /// A frame at the wrong time.
    #[error("{peer} sent {got:?} where {wanted:?} was due")]
    Unexpected {
        /// Who.
        peer: String,
        /// What came.
        got: Kind,
        /// What should have come.
        wanted: Kind,
    },
    /// A message that cannot be read.
    #[error("{peer} sent what cannot be read: {error}")]
    Unreadable {
        /// Who.
        peer: String,
        /// What is wrong with it.
        error: String,
    },
    /// Bytes are not what the manifest says.
    #[error("chunk {chunk} from {peer} is not what the manifest says")]
    Corrupt {
        /// Who.
        peer: String,
        /// Which chunk.
        chunk: u32,
    },
    /// The other side reports what went wrong there.
    #[error("{peer} says: {text}")]
    Reported {
        /// Who.
        peer: String,
        /// What kind of thing.
        reason: Reason,
        /// In its words.
        text: String,
    },
    /// It is too slow.
    #[error("{peer} is too slow: {bytes} bytes of a shard went in {seconds} s")]
    Slow {
        /// Who.
        peer: String,
        /// What went.
        bytes: u64,
        /// In which time.
        seconds: u64,
    },
    /// Too long for a message.
    #[error("a message of {bytes} bytes is longer than the limit")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// Something on this host.
    #[error("{0}")]
    Local(String),
    /// This process may not write as the user, who lent no files.
    #[error("{0}")]
    NoFiles(String),
}

/// Why a peer refused something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Its store is full.
    Full,
    /// It does not have it.
    NotHere,
    /// What was sent is not what the manifest says.
    Corrupt,
    /// The request makes no sense.
    Bad,
    /// Its disk failed.
    Disk,
    /// Anything else, also what later versions say.
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
        // What a socket's timeout looks like says little to a reader.
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
                // Text of others goes into logs and onto terminals.
                let text = report.text.chars().filter(|c| !c.is_control()).take(500).collect();
                PeerError::Reported { peer: peer.to_owned(), reason: report.reason, text }
            }
            Err(error) => PeerError::Unreadable { peer: peer.to_owned(), error: error.to_string() },
        }
    }

    /// Whether somebody was turned away who may not read and write, or does not show it as he should.
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

    /// Whether the peer itself is well and only this one thing could not be done.
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
