//! The layout of steps in durable storage: the names of objects, and the record that completes a step.
//!
//! ```text
//! <run id>/step-000000000010.<attempt>.<16 hex digits>/begun
//!                                                      rank-00003.<16 hex digits>.data   the shard as it was sealed
//!                                                      rank-00003.<16 hex digits>.json   its manifest, after its bytes
//!                                                      step.json                         last of all: now it is a step
//! ```
//!
//! The digits after a step are a hash of job, run and world size: launches of one run never share a place. Those
//! after a rank are the start of its root. Any run id is mapped to one plain part of a path.

use serde_json::{Value, json};

use crate::json::canonical;

/// The name of a step's record.
pub const STEP_NAME: &str = "step.json";

/// The name of the object that marks a step as started.
pub const BEGUN_NAME: &str = "begun";

/// A record longer than this is refused: it would be of millions of ranks.
pub const MAX_RECORD_BYTES: usize = 256 << 20;

/// Which step.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepName {
    /// The launch of the job.
    pub job: String,
    /// The run; the part before an `@` is the run id.
    pub run: String,
    /// The attempt that saved it.
    pub attempt: u64,
    /// The training step.
    pub step: u64,
    /// How many ranks it has.
    pub world_size: u32,
}

/// One rank's part in a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepShard {
    /// The root over its manifest, 64 hexadecimal digits.
    pub root: String,
    /// The size in bytes.
    pub bytes: u64,
    /// When it was sealed, seconds since 1970.
    pub created_unix_s: u64,
}

/// The content of a step. It is written when every shard is stored; a step without it does not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepRecord {
    /// Which step.
    pub name: StepName,
    /// The shards by rank.
    pub shards: Vec<StepShard>,
}

/// Why bytes are no record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The bytes are not those of any record.
    #[error("the record of the step has changed since it was written, or is none")]
    Changed,
    /// A field is missing or impossible.
    #[error("the record's {0} is missing or invalid")]
    Field(&'static str),
}

impl StepName {
    /// The run id that the user gave.
    #[must_use]
    pub fn run_id(&self) -> &str {
        self.run.split_once('@').map_or(&self.run, |(run_id, _)| run_id)
    }

    /// The directory of the step below that of its run.
    #[must_use]
    pub fn directory(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for text in [&self.job, &self.run] {
            hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
        }
        let hash = hasher.update(&self.world_size.to_le_bytes()).finalize().to_hex();
        format!("step-{:012}.{}.{}", self.step, self.attempt, &hash[..16])
    }
}

/// The name of a run's directory: every letter that has a meaning in a path or a URL is written as `=` and two
/// digits.
#[must_use]
pub fn run_directory(run_id: &str) -> String {
    let mut name = String::new();
    for (index, byte) in run_id.bytes().enumerate() {
        let plain =
            byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_') || (byte == b'.' && index > 0);
        if plain { name.push(char::from(byte)) } else { name.push_str(&format!("={byte:02x}")) }
    }
    // A run without a name gets a unique name too.
    if name.is_empty() { "=".to_owned() } else { name }
}

/// The step and the attempt in the name of a step's directory; none if it is no such name.
#[must_use]
pub fn step_of_directory(name: &str) -> Option<(u64, u64)> {
    let mut parts = name.strip_prefix("step-")?.split('.');
    let (step, attempt, hash) = (parts.next()?, parts.next()?, parts.next()?);
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_hash = hash.len() == 16 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_ours = parts.next().is_none() && step.len() >= 12 && digits(step) && digits(attempt) && is_hash;
    is_ours.then(|| Some((step.parse().ok()?, attempt.parse().ok()?))).flatten()
}

/// The names of a shard's bytes and of its manifest, in its step's directory. `root`: as in [`StepShard`].
#[must_use]
pub fn shard_names(rank: u32, root: &str) -> (String, String) {
    let start: String = root.chars().take(16).filter(char::is_ascii_hexdigit).collect();
    (format!("rank-{rank:05}.{start}.data"), format!("rank-{rank:05}.{start}.json"))
}

/// The rank in the name of a manifest; none if it is no such name.
#[must_use]
pub fn rank_of_manifest(name: &str) -> Option<u32> {
    let (rank, root) = name.strip_prefix("rank-")?.strip_suffix(".json")?.split_once('.')?;
    let is_ours = rank.len() >= 5 && root.len() == 16 && root.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_ours.then(|| rank.parse().ok()).flatten()
}

impl StepRecord {
    /// When its newest shard was sealed, seconds since 1970.
    #[must_use]
    pub fn created_unix_s(&self) -> u64 {
        self.shards.iter().map(|shard| shard.created_unix_s).max().unwrap_or(0)
    }

    /// The bytes to write.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut body = self.body();
        let seal = blake3::hash(&canonical(&body)).to_hex();
        body["seal"] = Value::String(seal.to_string());
        canonical(&body)
    }

    fn body(&self) -> Value {
        let StepName { job, run, attempt, step, world_size } = &self.name;
        let shard = |shard: &StepShard| json!([shard.root.clone(), shard.bytes, shard.created_unix_s]);
        let shards: Vec<Value> = self.shards.iter().map(shard).collect();
        json!({
            "format": 1, "job": job, "run": run, "attempt": attempt, "step": step, "world_size": world_size,
            "shards": shards,
        })
    }

    /// Reads a record.
    ///
    /// # Errors
    /// The bytes are not exactly the [`StepRecord::encode`] of their content, or a rank is missing.
    pub fn decode(content: &[u8]) -> Result<StepRecord, RecordError> {
        if content.len() > MAX_RECORD_BYTES {
            return Err(RecordError::Changed);
        }
        let body: Value = serde_json::from_slice(content).map_err(|_| RecordError::Changed)?;
        let number = |name| body.get(name).and_then(Value::as_u64).ok_or(RecordError::Field(name));
        let text = |name| {
            let found = body.get(name).and_then(Value::as_str).map(str::to_owned);
            found.ok_or(RecordError::Field(name))
        };
        if number("format")? != 1 {
            return Err(RecordError::Field("format"));
        }
        let world = u32::try_from(number("world_size")?).map_err(|_| RecordError::Field("world_size"))?;
        let listed = body.get("shards").and_then(Value::as_array).ok_or(RecordError::Field("shards"))?;
        let shards: Option<Vec<StepShard>> = listed.iter().map(shard_of).collect();
        let record = StepRecord {
            name: StepName {
                job: text("job")?,
                run: text("run")?,
                attempt: number("attempt")?,
                step: number("step")?,
                world_size: world,
            },
            shards: shards.ok_or(RecordError::Field("shards"))?,
        };
        if world == 0 || record.shards.len() != world as usize {
            return Err(RecordError::Field("shards"));
        }
        if record.encode() == content { Ok(record) } else { Err(RecordError::Changed) }
    }
}

fn shard_of(value: &Value) -> Option<StepShard> {
    let [root, bytes, created] = value.as_array()?.as_slice() else { return None };
    let root = root.as_str().filter(|root| {
        root.len() == 64 && root.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    })?;
    Some(StepShard { root: root.to_owned(), bytes: bytes.as_u64()?, created_unix_s: created.as_u64()? })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "in a test, a panic is the report")]

    use super::*;
    use proptest::prelude::*;

    fn record(world_size: u32) -> StepRecord {
        let name = StepName { job: "j".into(), run: "r@1".into(), attempt: 2, step: 7, world_size };
        let shard = |rank| StepShard { root: format!("{rank:064x}"), bytes: 9, created_unix_s: 5 };
        StepRecord { name, shards: (0..world_size).map(shard).collect() }
    }

    #[test]
    fn what_was_written_is_read_and_every_flipped_bit_is_found() {
        let bytes = record(2).encode();
        assert_eq!(StepRecord::decode(&bytes).unwrap(), record(2));
        for at in 0..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[at / 8] ^= 1 << (at % 8);
            assert!(StepRecord::decode(&changed).is_err(), "bit {at}");
        }
        assert!(StepRecord::decode(&bytes[..bytes.len() - 1]).is_err());
    }

    #[test]
    fn a_record_without_every_rank_is_refused() {
        let mut short = record(3);
        short.shards.pop();
        assert_eq!(StepRecord::decode(&short.encode()), Err(RecordError::Field("shards")));
        assert_eq!(StepRecord::decode(&record(0).encode()), Err(RecordError::Field("shards")));
    }

    #[test]
    fn names_are_read_back_and_others_are_none() {
        let name = record(2).name;
        assert_eq!(step_of_directory(&name.directory()), Some((7, 2)));
        assert_ne!(name.directory(), StepName { run: "r@2".into(), ..name.clone() }.directory());
        for other in [
            "step-7",
            "step-000000000007",
            "step-000000000007.1.xyz",
            "x",
            "step-000000000007.1.0123456789abcdef.2",
        ] {
            assert_eq!(step_of_directory(other), None, "{other}");
        }
        let (_, manifest) = shard_names(3, &"ab".repeat(32));
        assert_eq!(rank_of_manifest(&manifest), Some(3));
        assert_eq!(rank_of_manifest("step.json"), None);
    }

    proptest! {
        #[test]
        fn a_run_id_becomes_one_plain_and_unique_part_of_a_path(a in ".*", b in ".*") {
            let name = run_directory(&a);
            prop_assert!(!name.is_empty() && !name.starts_with('.'));
            prop_assert!(name.bytes().all(|c| c.is_ascii_alphanumeric() || b"-_.=".contains(&c)));
            prop_assert!(a == b || name != run_directory(&b));
        }

        #[test]
        fn no_bytes_cause_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = StepRecord::decode(&bytes);
        }
    }
}
