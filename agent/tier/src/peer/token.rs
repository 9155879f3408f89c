//! Authentication by the job token, a secret in a file on each host.
//!
//! Both sides prove that they know it over nonces of both (a recorded proof cannot be replayed), and sign every header with a key of
//! the session. Data is encrypted only with TLS (`tls`).

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Length of a nonce, bytes.
pub const NONCE_BYTES: usize = 32;

/// Minimum length of a token, bytes.
const MIN_TOKEN_BYTES: usize = 16;

/// Maximum length of a token, bytes.
const MAX_TOKEN_BYTES: u64 = 4096;

/// The shared secret.
#[derive(Clone)]
pub struct Token {
    key: [u8; 32],
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

/// A token that cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message of each says it")]
pub enum TokenError {
    #[error("reading the token file {path}: {source}")]
    File { path: String, source: std::io::Error },
    #[error("the token file {path} may be read by others (mode {mode:o}): make it 0600")]
    Open { path: String, mode: u32 },
    #[error(
        "a token of {0} bytes; it must have at least {MIN_TOKEN_BYTES}: write one with `head -c 32 /dev/urandom | base64`"
    )]
    Short(usize),
}

impl Token {
    /// A random token that no other agent knows: an agent with it can serve no peer and ask no peer.
    pub fn random() -> std::io::Result<Token> {
        let mut key = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut key)?;
        Ok(Token { key })
    }

    /// Reads the token from a file that only its owner may read. White space at both ends is ignored.
    pub fn read(path: &Path) -> Result<Token, TokenError> {
        let shown = || path.display().to_string();
        let io_error = |source| TokenError::File { path: shown(), source };
        let file = File::open(path).map_err(io_error)?;
        let mode = file.metadata().map_err(io_error)?.mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(TokenError::Open { path: shown(), mode });
        }
        let mut bytes = Vec::new();
        file.take(MAX_TOKEN_BYTES).read_to_end(&mut bytes).map_err(io_error)?;
        Token::new(bytes.trim_ascii())
    }

    /// The token of these bytes.
    pub fn new(bytes: &[u8]) -> Result<Token, TokenError> {
        if bytes.len() < MIN_TOKEN_BYTES {
            return Err(TokenError::Short(bytes.len()));
        }
        Ok(Token { key: blake3::derive_key("mainstay peers: job token, version 1", bytes) })
    }

    /// A token for one connection only, whose two ends share `secret`.
    pub(crate) fn for_connection(&self, secret: &[u8; 32]) -> Token {
        Token { key: *blake3::keyed_hash(&self.key, secret).as_bytes() }
    }

    /// Replaces the token for a connection whose ends have presented certificates.
    pub(crate) fn for_certificates(secret: &[u8; 32]) -> Token {
        Token { key: blake3::derive_key("mainstay peers: certificates and no token, version 1", secret) }
    }

    /// The proof of one side of a connection; with another label, its session key.
    pub(crate) fn prove(
        &self,
        label: &str,
        client: &[u8; NONCE_BYTES],
        server: &[u8; NONCE_BYTES],
    ) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(label.as_bytes()).update(&[0, super::frame::VERSION]).update(client).update(server);
        hasher.finalize()
    }
}

/// Signs or verifies the frames of one direction. The sequence number makes each code valid for one frame only.
pub(crate) struct Signer {
    key: [u8; 32],
    sequence: u64,
}

impl Signer {
    pub(crate) fn new(key: blake3::Hash) -> Signer {
        Signer { key: *key.as_bytes(), sequence: 0 }
    }

    /// The code for the next frame.
    pub(crate) fn sign(&mut self, header: &[u8], message: &[u8]) -> blake3::Hash {
        self.begin(header).update(message).finalize()
    }

    /// The code for what follows a header, computed incrementally.
    pub(crate) fn begin(&mut self, header: &[u8]) -> blake3::Hasher {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&self.sequence.to_le_bytes()).update(header);
        self.sequence += 1;
        hasher
    }
}

/// A random number that cannot be guessed and never repeats.
pub(crate) fn nonce() -> std::io::Result<[u8; NONCE_BYTES]> {
    let mut bytes = [0; NONCE_BYTES];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}
