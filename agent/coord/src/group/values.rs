//! The values of a job's keys: JSON, additive-only. `docs/reference/coordination.md` is the contract.
//!
//! Every value has `version`, the protocol of its writer, and `needs`, the oldest protocol that may read it. Unknown
//! fields are kept, so that rewriting a value loses nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The protocol of this program. From version 2 on, records of large jobs have their seats packed.
pub const VERSION: u32 = 2;
/// The largest member, in bytes; a few hundred are usual.
pub const LARGEST_MEMBER: usize = 64 * 1024;
/// The largest record, round or end, in bytes: below etcd's limit of 1.5 MiB together with other values of the same
/// transaction.
pub const LARGEST_VALUE: usize = 1280 * 1024;

/// A participating launcher, under its lease.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// The writer's protocol.
    #[serde(default = "one")]
    pub version: u32,
    /// The oldest protocol that may read this.
    #[serde(default = "one")]
    pub needs: u32,
    /// The id of this start of the launcher, unique per start.
    pub launch: String,
    /// The name of its host.
    pub host: String,
    /// The addresses at which other launchers reach it, `host:port`, the best one first.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// The number of ranks that it offers.
    #[serde(default)]
    pub ranks: u32,
    /// Its location: switch, NVLink domain, zone and the like.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The boot id of its host.
    #[serde(default)]
    pub boot: String,
    /// The version of mainstay.
    #[serde(default)]
    pub mainstay: String,
    /// The hash of script and arguments; None if there is no script to hash.
    #[serde(default)]
    pub script: Option<String>,
    /// The result of preflight.
    #[serde(default)]
    pub fitness: Fitness,
    /// The newest sealed steps of its checkpoints, newest first.
    #[serde(default)]
    pub newest_steps: Vec<u64>,
    /// Whether it is a spare that waits to replace another host.
    #[serde(default)]
    pub spare: bool,
    /// The node rank that the user gave.
    #[serde(default)]
    pub node_rank: Option<u32>,
    /// Why it is about to leave; None while it is not.
    #[serde(default)]
    pub leaving: Option<String>,
    /// Fields that launchers add.
    #[serde(default)]
    pub body: Value,
    /// Fields of a newer protocol.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

impl Member {
    /// A member with only a launch and a host.
    #[must_use]
    pub fn new(launch: impl Into<String>, host: impl Into<String>) -> Member {
        Member {
            version: VERSION,
            needs: 1,
            launch: launch.into(),
            host: host.into(),
            addresses: Vec::new(),
            ranks: 0,
            labels: BTreeMap::new(),
            boot: String::new(),
            mainstay: String::new(),
            script: None,
            fitness: Fitness::Unknown,
            newest_steps: Vec::new(),
            spare: false,
            node_rank: None,
            leaving: None,
            body: Value::Null,
            more: Map::new(),
        }
    }
}

/// The result of preflight on a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Fitness {
    /// All checks passed.
    Fit,
    /// The host should have no ranks.
    Unfit {
        /// Why.
        #[serde(default)]
        why: String,
    },
    /// Nothing was checked, or the result could not be read.
    #[default]
    #[serde(other)]
    Unknown,
}

/// The leading launcher, under its member's lease. Never rewritten: its revision fences orders.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Leader {
    /// The writer's protocol.
    #[serde(default = "one")]
    pub version: u32,
    /// The oldest protocol that may read this.
    #[serde(default = "one")]
    pub needs: u32,
    /// Its launch.
    pub launch: String,
    /// Its host.
    #[serde(default)]
    pub host: String,
    /// The addresses at which its followers reach it.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// Its epoch: greater than that of every earlier leader.
    pub epoch: u64,
    /// The revision of the key; not part of the value.
    #[serde(skip)]
    pub mod_revision: i64,
}

/// The state that the next leader needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The writer's protocol.
    #[serde(default = "one")]
    pub version: u32,
    /// The oldest protocol that may read this.
    #[serde(default = "one")]
    pub needs: u32,
    /// The epoch of the last leader.
    pub epoch: u64,
    /// Round, attempts, budget, open decision: the state of the leader's decision logic.
    #[serde(default)]
    pub body: Value,
}

/// A record as it is stored. Launchers read the body of few records, and that of a large job is long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredRecord {
    /// The oldest protocol that may read this.
    pub needs: u32,
    /// The epoch of the leader that wrote it.
    pub epoch: u64,
    value: Arc<[u8]>,
}

impl StoredRecord {
    /// Reads a value from the store. Accepts any bytes.
    ///
    /// # Errors
    /// As [`read`]; the body is not parsed.
    pub fn parse_header(value: &[u8]) -> Result<StoredRecord, String> {
        #[derive(Deserialize)]
        struct Head {
            #[serde(default = "one")]
            needs: u32,
            epoch: u64,
        }
        let Head { needs, epoch } = read(value)?;
        Ok(StoredRecord { needs, epoch, value: value.into() })
    }

    /// The body that the leader wrote.
    ///
    /// # Errors
    /// The body has another type.
    pub fn body<T: DeserializeOwned>(&self) -> Result<T, String> {
        #[derive(Deserialize)]
        struct Body<T> {
            body: T,
        }
        let Body { body } = serde_json::from_slice(&self.value).map_err(|error| error.to_string())?;
        Ok(body)
    }
}

/// The newest round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// The writer's protocol.
    #[serde(default = "one")]
    pub version: u32,
    /// The oldest protocol that may read this.
    #[serde(default = "one")]
    pub needs: u32,
    /// The epoch in which it was published.
    pub epoch: u64,
    /// Its number, which only increases within a job.
    pub round: u64,
    /// The assignment of ranks, and everything else of the round.
    #[serde(default)]
    pub body: Value,
}

/// The note that the job has ended; kept for some minutes, so that every launcher reads it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobEndedNote {
    /// The writer's protocol.
    #[serde(default = "one")]
    pub version: u32,
    /// The oldest protocol that may read this.
    #[serde(default = "one")]
    pub needs: u32,
    /// The epoch of the leader that ended it.
    pub epoch: u64,
    /// The reason, as readable text.
    pub why: String,
    /// Fields that launchers add.
    #[serde(default)]
    pub body: Value,
}

fn one() -> u32 {
    1
}

/// Reads a value from the store. Accepts any bytes.
///
/// # Errors
/// The value is invalid, or only newer versions may read it.
pub fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    if bytes.len() > LARGEST_VALUE {
        return Err(format!("{} bytes, at most {LARGEST_VALUE} are read", bytes.len()));
    }
    #[derive(Deserialize)]
    struct Header {
        #[serde(default = "one")]
        needs: u32,
    }
    let header: Header = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if header.needs > VERSION {
        return Err(format!(
            "protocol {} is needed to read it, and this is protocol {VERSION}",
            header.needs
        ));
    }
    serde_json::from_slice(bytes).map_err(|error| error.to_string())
}

/// Encodes a value for the store.
///
/// # Errors
/// It is larger than `largest`.
pub(crate) fn write<T: Serialize>(value: &T, largest: usize) -> Result<Vec<u8>, String> {
    let bytes = serde_json::to_vec(value).map_err(|error| error.to_string())?;
    if bytes.len() > largest {
        return Err(format!("{} bytes, at most {largest} are stored", bytes.len()));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "in a test, a panic is the report")]

    use super::*;
    use serde_json::json;

    #[test]
    fn a_member_of_an_older_or_newer_protocol_is_read() {
        let old = read::<Member>(br#"{"launch": "l", "host": "h"}"#).unwrap();
        assert_eq!((old.version, old.fitness, old.ranks), (1, Fitness::Unknown, 0));
        let new = json!({"version": 9, "needs": 1, "launch": "l", "host": "h", "warp": [1], "fitness": {"state": "odd", "x": 1}});
        let new = read::<Member>(new.to_string().as_bytes()).unwrap();
        assert_eq!(new.fitness, Fitness::Unknown);
        let again: Value = serde_json::from_slice(&write(&new, LARGEST_MEMBER).unwrap()).unwrap();
        assert_eq!((&again["warp"], &again["version"]), (&json!([1]), &json!(9)));
    }

    #[test]
    fn a_value_for_newer_protocols_is_refused_with_the_reason() {
        let error = read::<Round>(br#"{"version": 3, "needs": 3, "epoch": 1, "round": 1}"#).unwrap_err();
        testing::snapshot!("errors", "a value of a newer protocol", error);
        assert!(
            read::<Round>(b"[]").is_err()
                && read::<Round>(b"{}").is_err()
                && read::<Leader>(b"\xff").is_err()
        );
    }

    #[test]
    fn a_stored_record_returns_its_body_on_request() {
        let record = Record { version: 2, needs: 2, epoch: 7, body: json!({"attempts": [1, 2]}) };
        let stored = StoredRecord::parse_header(&write(&record, LARGEST_VALUE).unwrap()).unwrap();
        assert_eq!((stored.needs, stored.epoch), (2, 7));
        assert_eq!(stored.body::<Value>().unwrap(), record.body);
        assert!(stored.body::<Vec<u8>>().is_err());
        let bare = StoredRecord::parse_header(br#"{"epoch": 3}"#).unwrap();
        assert!((bare.needs, bare.epoch) == (1, 3) && bare.body::<BTreeMap<String, Value>>().is_err());
        assert!(
            StoredRecord::parse_header(br#"{"epoch": 3, "needs": 9}"#).is_err(),
            "for a newer protocol only"
        );
        assert!(StoredRecord::parse_header(br#"{"epoch": 3, "body": {"#).is_err(), "a truncated record");
    }

    #[test]
    fn a_value_that_is_too_large_is_not_written() {
        let mut member = Member::new("l", "h");
        member.body = json!("x".repeat(LARGEST_MEMBER));
        assert!(write(&member, LARGEST_MEMBER).unwrap_err().contains("at most 65536"));
    }
}
