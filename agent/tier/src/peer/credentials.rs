//! Credentials that an agent presents and requires: the token, a certificate, or both.

use super::error::PeerError;
use super::tls::{self, Tls};
use super::token::Token;
use crate::peer::wire::Channel;

/// Which agents may read and write.
#[derive(Clone, Debug)]
pub enum Credentials {
    /// Those that know the token; nothing is encrypted.
    Token(Token),
    /// Those with a certificate and, if there is a token, the token; over TLS.
    Certificate(Tls, Option<Token>),
}

impl From<Token> for Credentials {
    fn from(token: Token) -> Credentials {
        Credentials::Token(token)
    }
}

impl Credentials {
    pub(super) fn tls(&self) -> Option<&Tls> {
        match self {
            Credentials::Token(_) => None,
            Credentials::Certificate(tls, _) => Some(tls),
        }
    }

    /// What both ends of a connection must know. With TLS it is valid for this connection only, so a relayed proof is worthless.
    pub(super) fn session(&self, channel: &Channel, peer: &str) -> Result<Token, PeerError> {
        let secret = || {
            let secret = channel.secret().map_err(|error| tls::stream_error(peer, error))?;
            secret.ok_or_else(|| PeerError::SpeaksPlainly { peer: peer.to_owned() })
        };
        Ok(match self {
            Credentials::Token(token) => token.clone(),
            Credentials::Certificate(_, Some(token)) => token.for_connection(&secret()?),
            Credentials::Certificate(_, None) => Token::for_certificates(&secret()?),
        })
    }
}
