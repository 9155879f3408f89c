//! Authorization to delete a replica: only the agent that sent it can.
//!
//! Each agent has its own key. A secret is derived from the key and the root of a shard, and the hash of that secret is the lock that is
//! sent with the shard to its holders. A holder deletes a replica for a peer that presents the secret for its lock. A holder that copies
//! a replica to another one passes the lock on, so that the agent that sent a shard first can withdraw all copies of it.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use crate::aside::write_at_once;

/// Name of the key file in an agent's store.
const KEY_NAME: &str = "withdrawal-key";

/// Prefix of the file next to a replica that has the lock in its name.
const LOCK_PREFIX: &str = "lock.";

/// The key from which an agent derives its secrets.
#[derive(Clone)]
pub struct WithdrawalKey([u8; 32]);

impl std::fmt::Debug for WithdrawalKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WithdrawalKey(…)")
    }
}

impl WithdrawalKey {
    /// Reads the key of the store at `root`; creates it if there is none. What was sent with a lost key cannot be withdrawn.
    pub fn at(root: &Path) -> io::Result<WithdrawalKey> {
        match fs::read(root.join(KEY_NAME)).map(<[u8; 32]>::try_from) {
            Ok(Ok(key)) => return Ok(WithdrawalKey(key)),
            Ok(Err(other)) => tracing::warn!(
                file = %root.join(KEY_NAME).display(),
                bytes = other.len(),
                "the file must have 32 bytes; a new key is made, and replicas at peers without TLS stay until retention deletes them"
            ),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let mut key = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut key)?;
        write_at_once(root, KEY_NAME, &key)?;
        Ok(WithdrawalKey(key))
    }

    /// The secret for the lock of the shard with this root.
    pub fn secret(&self, root: &str) -> String {
        blake3::keyed_hash(&self.0, root.as_bytes()).to_hex().to_string()
    }

    /// The lock of the shard with this root.
    pub fn lock(&self, root: &str) -> WithdrawalLock {
        WithdrawalLock::of(&self.secret(root))
    }
}

/// The first half of the hash of a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WithdrawalLock([u8; 16]);

impl WithdrawalLock {
    fn of(secret: &str) -> WithdrawalLock {
        let mut half = [0; 16];
        half.copy_from_slice(&blake3::hash(secret.as_bytes()).as_bytes()[..16]);
        WithdrawalLock(half)
    }

    /// Whether this secret opens the lock. The comparison may leak timing: a secret cannot be guessed from a part of its hash.
    pub fn is_opened_by(&self, secret: &str) -> bool {
        WithdrawalLock::of(secret) == *self
    }

    /// The lock from two words of a header; none if the agent sends none.
    pub fn from_header(halves: (u64, u64)) -> Option<WithdrawalLock> {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&halves.0.to_le_bytes());
        bytes[8..].copy_from_slice(&halves.1.to_le_bytes());
        (bytes != [0; 16]).then_some(WithdrawalLock(bytes))
    }

    /// The lock as two words of a header.
    pub fn to_header(&self) -> (u64, u64) {
        let half =
            |at: usize| self.0[at..at + 8].iter().rev().fold(0, |half, byte| half << 8 | u64::from(*byte));
        (half(0), half(8))
    }

    /// The name of an empty file that records the lock of the shard with this key: a name is on disk with its directory,
    /// without a file to sync.
    pub fn file_name(&self, key: u64) -> String {
        format!("{LOCK_PREFIX}{key:016x}.{:032x}", u128::from_be_bytes(self.0))
    }

    /// The lock in a file name, and the key of its shard.
    pub fn from_file_name(name: &str) -> Option<(u64, WithdrawalLock)> {
        let (key, lock) = name.strip_prefix(LOCK_PREFIX)?.split_once('.')?;
        let is_number =
            |text: &str, digits| text.len() == digits && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        if !is_number(key, 16) || !is_number(lock, 32) {
            return None;
        }
        let lock = u128::from_str_radix(lock, 16).ok()?.to_be_bytes();
        Some((u64::from_str_radix(key, 16).ok()?, WithdrawalLock(lock)))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic in a test is its report")]

    use super::*;

    #[test]
    fn only_the_agent_that_made_a_lock_has_its_secret_also_after_a_restart() {
        let (home, other) = (testing::tempdir().unwrap(), testing::tempdir().unwrap());
        let key = WithdrawalKey::at(home.path()).unwrap();
        let lock = key.lock("root");
        assert!(lock.is_opened_by(&WithdrawalKey::at(home.path()).unwrap().secret("root")));
        for secret in
            [key.secret("another"), WithdrawalKey::at(other.path()).unwrap().secret("root"), String::new()]
        {
            assert!(!lock.is_opened_by(&secret), "{secret}");
        }
    }

    #[test]
    fn a_lock_survives_headers_and_file_names() {
        let home = testing::tempdir().unwrap();
        let lock = WithdrawalKey::at(home.path()).unwrap().lock("root");
        assert_eq!(WithdrawalLock::from_header(lock.to_header()), Some(lock));
        assert_eq!(WithdrawalLock::from_file_name(&lock.file_name(7)), Some((7, lock)));
        assert_eq!(WithdrawalLock::from_header((0, 0)), None);
        for name in ["lock.", "lock.12", "shard", "lock.0000000000000007.+1234567812345678123456781234567"] {
            assert_eq!(WithdrawalLock::from_file_name(name), None, "{name}");
        }
    }

    #[test]
    fn a_truncated_key_is_created_again() {
        let home = testing::tempdir().unwrap();
        fs::write(home.path().join(KEY_NAME), [1; 5]).unwrap();
        let made = WithdrawalKey::at(home.path()).unwrap();
        assert_eq!(WithdrawalKey::at(home.path()).unwrap().secret("root"), made.secret("root"));
    }
}
