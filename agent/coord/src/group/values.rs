//! What is stored under a job's keys: JSON, additive-only. `docs/reference/coordination.md` is the contract.
//!
//! Every value has `version`, the protocol of its writer, and `needs`, the oldest protocol that may read it. Unknown
//! fields are kept, so that a value that is written back loses nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The protocol that this program speaks. With 2, records of large jobs have their seats packed.
pub const VERSION: u32 = 2;
/// The largest member, in bytes; a few hundred are usual.
pub const LARGEST_MEMBER: usize = 64 * 1024;
/// The largest record, round or end, in bytes: below etcd's own limit of 1.5 MiB together with what is written in the same step.
pub const LARGEST_VALUE: usize = 1280 * 1024;

/// A launcher that takes part, under its lease.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// The writer's protocol.
    #[serde(default = "one")]
    pub version: u32,
    /// The oldest protocol that may read this.
    #[serde(default = "one")]
    pub needs: u32,
    /// This start of the launcher: different after each one.
    pub launch: String,
    /// The name of its host.
    pub host: String,
    /// Where other launchers reach it, `host:port`, the best one first.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// How many ranks it offers.
    #[serde(default)]
    pub ranks: u32,
    /// Its place: switch, NVLink domain, zone and the like.
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
    /// What preflight found.
    #[serde(default)]
    pub fitness: Fitness,
    /// Newest sealed steps of its checkpoints, newest first.
    #[serde(default)]
    pub newest_steps: Vec<u64>,
    /// Whether it waits to replace another host.
    #[serde(default)]
    pub spare: bool,
    /// The node rank that the user gave.
    #[serde(default)]
    pub node_rank: Option<u32>,
    /// Why it is about to leave; None while it is not.
    #[serde(default)]
    pub leaving: Option<String>,
    /// What launchers add.
    #[serde(default)]
    pub body: Value,
    /// Fields of a newer protocol.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

impl Member {
    /// A member of which nothing more is known.
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

/// What preflight found on a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Fitness {
    /// All checks passed.
    Fit,
    /// It should have no ranks.
    Unfit {
        /// Why.
        #[serde(default)]
        why: String,
    },
    /// Nothing was checked, or it could not be read.
    #[default]
    #[serde(other)]
    Unknown,
}

/// The launcher that leads, under its member's lease. Never written again: its revision is what fences orders.
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
    /// Where its followers reach it.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// Its epoch: greater than that of every leader before.
    pub epoch: u64,
    /// Revision of the key; not part of the value.
    #[serde(skip)]
    pub mod_revision: i64,
}

/// What the next leader has to know.
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
    /// Round, attempts, budget, open decision: what the leader's brain keeps.
    #[serde(default)]
    pub body: Value,
}

/// A record as it is stored. Launchers look into few of those that they are given, and that of a large job is long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredRecord {
    /// The oldest protocol that may read this.
    pub needs: u32,
    /// The epoch of the leader that wrote it.
    pub epoch: u64,
    value: Arc<[u8]>,
}

impl StoredRecord {
    /// A value from the store. Takes any bytes.
    ///
    /// # Errors
    /// As [`read`]; the body is not looked into.
    pub fn of(value: &[u8]) -> Result<StoredRecord, String> {
        #[derive(Deserialize)]
        struct Head {
            #[serde(default = "one")]
            needs: u32,
            epoch: u64,
        }
        let Head { needs, epoch } = read(value)?;
        Ok(StoredRecord { needs, epoch, value: value.into() })
    }

    /// What the leader kept in it.
    ///
    /// # Errors
    /// It is not of this kind.
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
    /// Its number, which only grows within a job.
    pub round: u64,
    /// Who has which ranks, and all else of it.
    #[serde(default)]
    pub body: Value,
}

/// The job has ended; kept for some minutes, so that every launcher learns of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    /// The writer's protocol.
    #[serde(default = "one")]
    pub version: u32,
    /// The oldest protocol that may read this.
    #[serde(default = "one")]
    pub needs: u32,
    /// The epoch of the leader that ended it.
    pub epoch: u64,
    /// Why, for people.
    pub why: String,
    /// What launchers add.
    #[serde(default)]
    pub body: Value,
}

fn one() -> u32 {
    1
}

/// A value from the store. Takes any bytes.
///
/// # Errors
/// It is no such value, or one that only newer versions may read.
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

/// A value for the store.
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
    fn a_value_for_newer_protocols_only_is_refused_by_name() {
        let error = read::<Round>(br#"{"version": 3, "needs": 3, "epoch": 1, "round": 1}"#).unwrap_err();
        assert_eq!(error, "protocol 3 is needed to read it, and this is protocol 2");
        assert!(
            read::<Round>(b"[]").is_err()
                && read::<Round>(b"{}").is_err()
                && read::<Leader>(b"\xff").is_err()
        );
    }

    #[test]
    fn a_stored_record_gives_its_body_when_it_is_asked_for_it() {
        let record = Record { version: 2, needs: 2, epoch: 7, body: json!({"attempts": [1, 2]}) };
        let stored = StoredRecord::of(&write(&record, LARGEST_VALUE).unwrap()).unwrap();
        assert_eq!((stored.needs, stored.epoch), (2, 7));
        assert_eq!(stored.body::<Value>().unwrap(), record.body);
        assert!(stored.body::<Vec<u8>>().is_err());
        let bare = StoredRecord::of(br#"{"epoch": 3}"#).unwrap();
        assert!((bare.needs, bare.epoch) == (1, 3) && bare.body::<BTreeMap<String, Value>>().is_err());
        assert!(StoredRecord::of(br#"{"epoch": 3, "needs": 9}"#).is_err(), "of a newer protocol only");
        assert!(StoredRecord::of(br#"{"epoch": 3, "body": {"#).is_err(), "half of one");
    }

    #[test]
    fn what_is_too_large_is_not_written() {
        let mut member = Member::new("l", "h");
        member.body = json!("x".repeat(LARGEST_MEMBER));
        assert!(write(&member, LARGEST_MEMBER).unwrap_err().contains("at most 65536"));
    }
}
