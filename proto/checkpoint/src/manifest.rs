//! The manifest of a shard: its identity and the checksums of its bytes. A shard without an intact manifest does
//! not exist.
//!
//! Format 2 has a table of checksums, one for each chunk of 4 MiB, so that a part can be checked without the rest, and a root
//! over all that makes the shard what it is. Format 1, without them, is still read.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use twox_hash::{XxHash3_64, XxHash3_128};

use crate::json::canonical;
use crate::shared_content::SharedContent;

/// The name of the file next to the shard.
pub const MANIFEST_NAME: &str = "manifest.json";

/// Bytes of a chunk, as it is written.
pub const CHUNK_BYTES: u64 = 4 << 20;

/// A manifest longer than this is refused: it would be of a shard of terabytes.
pub const MAX_MANIFEST_BYTES: usize = 32 << 20;

/// Prefix of the hashed data, so that no other digest of Mainstay can be mistaken for this one.
const ROOT_PREFIX: &[u8] = b"mainstay checkpoint shard 2\n";

/// The identity of a shard. The shards of one step differ only in the rank.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    /// The job's name.
    pub job: String,
    /// The attempt that saved it, which is the round's epoch.
    pub attempt: u64,
    /// The training step.
    pub step: u64,
    /// The rank that saved it.
    pub rank: u32,
    /// The number of shards of the step.
    pub world_size: u32,
}

/// The one file of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealedFile {
    /// Its name, in the manifest's directory.
    pub name: String,
    /// The size in bytes.
    pub size: u64,
    /// The 128-bit XXH3 of the whole file.
    pub xxh3_128: u128,
}

/// The checksums of the chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunks {
    /// The size of each chunk but the last, in bytes.
    pub bytes: u64,
    /// The 64-bit XXH3 of each chunk.
    pub sums: Vec<u64>,
}

/// The content of a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// The identity of the shard.
    pub identity: Identity,
    /// The launch in which it was saved; in format 1 empty if its rank did not know it.
    pub run: String,
    /// When, seconds since 1970.
    pub created_unix_s: u64,
    /// How the state was written: `safetensors`; in format 1 `torch` or `pickle`.
    pub serialisation: String,
    /// What wrote it, by name.
    pub software: BTreeMap<String, String>,
    /// The file.
    pub file: SealedFile,
    /// The checksums of its chunks; none in format 1.
    pub chunks: Option<Chunks>,
    /// The group that should have saved the same, if its rank declared one; none in format 1.
    pub shared_content: Option<SharedContent>,
}

/// Why bytes are not a manifest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// The bytes are not those of any manifest.
    #[error("the manifest has changed since it was written, or is none")]
    Changed,
    /// A newer version wrote it.
    #[error("the manifest has format {0}, and this version of mainstay reads 1 and 2")]
    Format(String),
    /// A field is missing or impossible.
    #[error("the manifest's {0} is missing or invalid")]
    Field(&'static str),
    /// Its root does not match its content.
    #[error("the manifest's root does not match its content")]
    Root,
}

impl Manifest {
    /// The bytes to write.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut body = self.body();
        let seal = digits(XxHash3_128::oneshot(&canonical(&body)));
        body["seal"] = Value::String(seal);
        canonical(&body)
    }

    fn body(&self) -> Value {
        let Identity { job, attempt, step, rank, world_size } = &self.identity;
        let file = json!({"size": self.file.size, "xxh3_128": digits(self.file.xxh3_128)});
        let mut body = json!({
            "format": if self.chunks.is_some() { 2 } else { 1 },
            "job": job, "attempt": attempt, "step": step, "rank": rank, "world_size": world_size,
            "created_unix_s": self.created_unix_s,
            "serialisation": self.serialisation,
            "software": self.software,
            "files": {self.file.name.clone(): file},
        });
        if self.chunks.is_some() || !self.run.is_empty() {
            body["run"] = json!(self.run);
        }
        if let (Some(chunks), Some(root)) = (&self.chunks, self.root()) {
            body["chunk_bytes"] = json!(chunks.bytes);
            body["chunks"] = chunks.sums.iter().map(|sum| Value::String(format!("{sum:016x}"))).collect();
            body["root"] = Value::String(hex(&root));
        }
        if let Some(SharedContent { group, root }) = &self.shared_content {
            body["alike"] = json!({"group": group, "root": root});
        }
        body
    }

    /// BLAKE3 over identity, size and checksums: two manifests with one root describe the same bytes of the same
    /// rank, whatever the name of the file. None in format 1.
    #[must_use]
    pub fn root(&self) -> Option<[u8; 32]> {
        let chunks = self.chunks.as_ref()?;
        let Identity { job, attempt, step, rank, world_size } = &self.identity;
        let mut hasher = blake3::Hasher::new();
        hasher.update(ROOT_PREFIX);
        for words in [job, &self.run, &self.serialisation] {
            hasher.update(&(words.len() as u64).to_le_bytes()).update(words.as_bytes());
        }
        for number in [*attempt, *step, u64::from(*rank), u64::from(*world_size), self.file.size] {
            hasher.update(&number.to_le_bytes());
        }
        hasher.update(&self.file.xxh3_128.to_le_bytes());
        hasher.update(&chunks.bytes.to_le_bytes()).update(&(chunks.sums.len() as u64).to_le_bytes());
        for sum in &chunks.sums {
            hasher.update(&sum.to_le_bytes());
        }
        Some(*hasher.finalize().as_bytes())
    }

    /// Reads a manifest.
    ///
    /// # Errors
    /// The bytes are not exactly what [`Manifest::encode`] (or the writer of format 1) writes for their content.
    pub fn decode(content: &[u8]) -> Result<Manifest, ManifestError> {
        if content.len() > MAX_MANIFEST_BYTES {
            return Err(ManifestError::Changed);
        }
        let document: Value = serde_json::from_slice(content).map_err(|_| ManifestError::Changed)?;
        let Value::Object(mut fields) = document else { return Err(ManifestError::Changed) };
        let Some(Value::String(seal)) = fields.remove("seal") else { return Err(ManifestError::Changed) };
        let body = Value::Object(fields);
        if digits(XxHash3_128::oneshot(&canonical(&body))) != seal {
            return Err(ManifestError::Changed);
        }
        let Value::Object(mut fields) = body else { return Err(ManifestError::Changed) };
        let manifest = Manifest::of(&fields)?;
        // Compared as bytes: a flipped bit that JSON would forgive counts too.
        fields.insert("seal".to_owned(), Value::String(seal));
        if canonical(&Value::Object(fields)) != content { Err(ManifestError::Changed) } else { Ok(manifest) }
    }

    fn of(fields: &Map<String, Value>) -> Result<Manifest, ManifestError> {
        let format = fields.get("format").and_then(Value::as_u64);
        if !matches!(format, Some(1 | 2)) {
            return Err(ManifestError::Format(
                fields.get("format").map_or_else(String::new, Value::to_string),
            ));
        }
        let text = |name| {
            let found = fields.get(name).and_then(Value::as_str).map(str::to_owned);
            found.ok_or(ManifestError::Field(name))
        };
        let number = |name| fields.get(name).and_then(Value::as_u64).ok_or(ManifestError::Field(name));
        let small =
            |name| number(name).and_then(|n| u32::try_from(n).map_err(|_| ManifestError::Field(name)));
        let identity = Identity {
            job: text("job")?,
            attempt: number("attempt")?,
            step: number("step")?,
            rank: small("rank")?,
            world_size: small("world_size")?,
        };
        if identity.rank >= identity.world_size {
            return Err(ManifestError::Field("rank"));
        }
        let software = fields.get("software").and_then(Value::as_object);
        let software = software
            .into_iter()
            .flatten()
            .filter_map(|(name, version)| Some((name.clone(), version.as_str()?.to_owned())));
        let mut manifest = Manifest {
            identity,
            run: text("run").unwrap_or_default(),
            created_unix_s: number("created_unix_s").unwrap_or(0),
            serialisation: text("serialisation")?,
            software: software.collect(),
            file: file_of(fields)?,
            chunks: None,
            shared_content: None,
        };
        if format == Some(2) {
            manifest.run = text("run")?;
            manifest.chunks = Some(chunks_of(fields, manifest.file.size)?);
            let root = manifest.root().map(|root| hex(&root));
            if root.as_deref() != fields.get("root").and_then(Value::as_str) {
                return Err(ManifestError::Root);
            }
            manifest.shared_content = shared_content_of(fields)?;
        }
        Ok(manifest)
    }
}

fn shared_content_of(fields: &Map<String, Value>) -> Result<Option<SharedContent>, ManifestError> {
    let Some(reported) = fields.get("alike") else { return Ok(None) };
    let word = |name| reported.get(name).and_then(Value::as_str).unwrap_or_default();
    SharedContent::read(word("group"), word("root")).map(Some).ok_or(ManifestError::Field("alike"))
}

fn file_of(fields: &Map<String, Value>) -> Result<SealedFile, ManifestError> {
    let wrong = ManifestError::Field("files");
    let files = fields.get("files").and_then(Value::as_object).ok_or(wrong.clone())?;
    let (Some((name, file)), 1) = (files.iter().next(), files.len()) else { return Err(wrong) };
    // A plain name without a path: it must not point outside the directory.
    if name.is_empty() || name.starts_with('.') || name.contains(['/', '\0']) || name == MANIFEST_NAME {
        return Err(wrong);
    }
    let size = file.get("size").and_then(Value::as_u64).ok_or(wrong.clone())?;
    let sum = file.get("xxh3_128").and_then(Value::as_str).filter(|sum| sum.len() == 32);
    let sum = sum.and_then(|sum| u128::from_str_radix(sum, 16).ok()).ok_or(wrong)?;
    Ok(SealedFile { name: name.clone(), size, xxh3_128: sum })
}

fn chunks_of(fields: &Map<String, Value>, size: u64) -> Result<Chunks, ManifestError> {
    let wrong = ManifestError::Field("chunks");
    let bytes = fields.get("chunk_bytes").and_then(Value::as_u64).filter(|bytes| *bytes > 0);
    let bytes = bytes.ok_or(ManifestError::Field("chunk_bytes"))?;
    let listed = fields.get("chunks").and_then(Value::as_array).ok_or(wrong.clone())?;
    if listed.len() as u64 != size.div_ceil(bytes) {
        return Err(wrong);
    }
    let one = |sum: &Value| {
        let digits = sum.as_str().filter(|digits| digits.len() == 16)?;
        u64::from_str_radix(digits, 16).ok()
    };
    let sums: Option<Vec<u64>> = listed.iter().map(one).collect();
    Ok(Chunks { bytes, sums: sums.ok_or(wrong)? })
}

/// The checksum of one chunk.
#[must_use]
pub fn chunk_sum(chunk: &[u8]) -> u64 {
    XxHash3_64::oneshot(chunk)
}

/// A checksum of 128 bits as it is written: 32 hexadecimal digits, most significant first.
#[must_use]
pub fn digits(sum: u128) -> String {
    format!("{sum:032x}")
}

/// Bytes as hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
