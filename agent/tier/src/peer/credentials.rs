//! Credentials that an agent presents and requires: the token, a certificate, or both.

use super::channel::Channel;
use super::error::PeerError;
use super::tls::{self, Tls};
use super::token::Token;

/// Which agents may read and write.
#[derive(Clone, Debug)]
pub enum Pass {
    /// Those that know the token; nothing is encrypted.
    Token(Token),
    /// Those with a certificate and, if there is a token, the token; over TLS.
    Certificate(Tls, Option<Token>),
}

impl From<Token> for Pass {
    fn from(token: Token) -> Pass {
        Pass::Token(token)
    }
}

impl Pass {
    pub(super) fn tls(&self) -> Option<&Tls> {
        match self {
            Pass::Token(_) => None,
            Pass::Certificate(tls, _) => Some(tls),
        }
    }

    /// What both ends of a connection must know. With TLS it is valid for this connection only, so a relayed proof is worthless.
    pub(super) fn session(&self, channel: &Channel, peer: &str) -> Result<Token, PeerError> {
        let secret = || {
            let secret = channel.secret().map_err(|error| tls::reported(peer, error))?;
            secret.ok_or_else(|| PeerError::SpeaksPlainly { peer: peer.to_owned() })
        };
        Ok(match self {
            Pass::Token(token) => token.clone(),
            Pass::Certificate(_, Some(token)) => token.over(&secret()?),
            Pass::Certificate(_, None) => Token::of_session(&secret()?),
        })
    }
}
