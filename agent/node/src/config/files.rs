//! Directories of others' files, as written in the configuration: a table each, or one line of text.

use std::fmt;
use std::path::PathBuf;

use mainstay_checkpoint::files::pattern::Pattern;
use mainstay_checkpoint::files::{Kind, Proof, Rule};
use mainstay_model::units::Bytes;
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// A directory into which a trainer writes checkpoints in its own format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WatchConfig(pub WatchTable);

/// As a table: `[[checkpoint.watch]]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WatchTable {
    /// The run id of what is in it, the same on each host.
    pub run: String,
    /// Where.
    pub directory: PathBuf,
    /// The kind of trainer whose format is expected.
    #[serde(default = "auto")]
    pub kind: String,
    /// Names of checkpoints, with `{step}`; replaces the names of the kind.
    #[serde(default)]
    pub pattern: String,
    /// A file that is written last into a checkpoint's directory.
    #[serde(default)]
    pub marker: String,
    /// Seconds without a change that replace such a file; 0: never.
    #[serde(default)]
    pub quiet_s: u64,
    /// Number of files or directories that make a step on one host; 0: any number.
    #[serde(default)]
    pub expect: usize,
    /// The hosts that hold a part of each step; none: all of `peers`.
    #[serde(default)]
    pub hosts: Vec<String>,
    /// Whether all hosts see the same files; if unset, the file system decides.
    #[serde(default)]
    pub shared: Option<bool>,
}

/// A cache of compiled programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CacheConfig(pub CacheTable);

/// As a table: `[[checkpoint.cache]]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheTable {
    /// Its name on all hosts.
    pub name: String,
    /// Where compilers write it.
    pub directory: PathBuf,
    /// Maximum size in bytes: the newest files are kept.
    #[serde(default = "cache_quota")]
    pub quota: Bytes,
    /// How long a file must be unchanged, in seconds.
    #[serde(default = "cache_quiet")]
    pub quiet_s: u64,
}

fn auto() -> String {
    "auto".to_owned()
}

fn cache_quota() -> Bytes {
    Bytes(8 << 30)
}

fn cache_quiet() -> u64 {
    30
}

impl WatchTable {
    fn of_text(text: &str) -> Result<WatchTable, String> {
        let wrong = || format!("{text:?}: write \"RUN=DIRECTORY\" or \"RUN=KIND:DIRECTORY\", or a table");
        let (run, place) = text.split_once('=').ok_or_else(wrong)?;
        let (kind, directory) = match place.split_once(':') {
            Some((kind, directory)) if !kind.contains('/') => (kind, directory),
            _ => ("auto", place),
        };
        let (pattern, marker) = (String::new(), String::new());
        let (run, kind, directory) = (run.to_owned(), kind.to_owned(), directory.into());
        let hosts = Vec::new();
        Ok(WatchTable { run, directory, kind, pattern, marker, quiet_s: 0, expect: 0, hosts, shared: None })
    }

    fn checked(self) -> Result<WatchTable, String> {
        if self.run.is_empty() || self.run.contains('@') || !self.directory.is_absolute() {
            return Err(format!(
                "{}: it needs a run without @ and an absolute directory",
                self.directory.display()
            ));
        }
        self.rules()?;
        Ok(self)
    }

    /// How checkpoints are found in it.
    ///
    /// # Errors
    /// The kind or the pattern is invalid.
    pub fn rules(&self) -> Result<Vec<Rule>, String> {
        if self.pattern.is_empty() {
            return Kind::parse(&self.kind).map(Kind::rules);
        }
        let pattern = Pattern::parse(&self.pattern)?;
        let proof = match (self.marker.as_str(), self.quiet_s) {
            ("", 0) => Proof::Container,
            ("", quiet) => Proof::Quiet(quiet),
            (marker, _) => Proof::Marker(vec![marker.to_owned()]),
        };
        let is_directory = [true, false].into_iter().filter(|is| *is || self.marker.is_empty());
        Ok(is_directory
            .map(|is_directory| Rule { pattern: pattern.clone(), is_directory, proof: proof.clone() })
            .collect())
    }
}

impl CacheTable {
    fn of_text(text: &str) -> Result<CacheTable, String> {
        let (name, directory) =
            text.split_once('=').ok_or_else(|| format!("{text:?}: write \"NAME=DIRECTORY\", or a table"))?;
        let (name, directory) = (name.to_owned(), directory.into());
        Ok(CacheTable { name, directory, quota: cache_quota(), quiet_s: cache_quiet() })
    }

    fn checked(self) -> Result<CacheTable, String> {
        if self.name.is_empty() || self.name.contains('@') || !self.directory.is_absolute() {
            return Err(format!(
                "{}: it needs a name without @ and an absolute directory",
                self.directory.display()
            ));
        }
        Ok(self)
    }
}

/// Text or a table.
struct Either<T> {
    what: &'static str,
    of_text: fn(&str) -> Result<T, String>,
}

impl<'de, T: DeserializeOwned> Visitor<'de> for Either<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.what)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        (self.of_text)(text).map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map))
    }
}

impl<'de> Deserialize<'de> for WatchConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<WatchConfig, D::Error> {
        let either = Either { what: "a watched directory", of_text: WatchTable::of_text };
        deserializer.deserialize_any(either)?.checked().map(WatchConfig).map_err(D::Error::custom)
    }
}

impl<'de> Deserialize<'de> for CacheConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<CacheConfig, D::Error> {
        let either = Either { what: "a cache", of_text: CacheTable::of_text };
        deserializer.deserialize_any(either)?.checked().map(CacheConfig).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Read {
        watch: Vec<WatchConfig>,
        #[serde(default)]
        cache: Vec<CacheConfig>,
    }

    #[test]
    fn tables_and_lines_are_equivalent() {
        let text = "watch = [\"llama=megatron:/ckpt\", {run = \"llama\", directory = \"/ckpt\", kind = \"megatron\"}]\n\
                    cache = [\"xla=/var/cache/xla\", {name = \"xla\", directory = \"/var/cache/xla\", quota = \"8GiB\"}]";
        let read: Read = toml::from_str(text).unwrap();
        assert_eq!(read.watch[0], read.watch[1]);
        assert_eq!(read.cache[0], read.cache[1]);
        assert_eq!(read.watch[0].0.rules(), Ok(Kind::Megatron.rules()));
        let again = toml::Value::try_from(&read.watch[0]).unwrap();
        assert_eq!(again.try_into::<WatchConfig>().unwrap(), read.watch[0]);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_reason() {
        for (line, reported) in [
            ("watch = [\"/ckpt\"]", "RUN=DIRECTORY"),
            ("watch = [\"r=megatrom:/ckpt\"]", "known are"),
            ("watch = [\"r=ckpt\"]", "absolute"),
            ("watch = [{run = \"r\", directory = \"/c\", patern = \"x\"}]", "patern"),
            ("watch = [{run = \"r\", directory = \"/c\", pattern = \"x\"}]", "{step}"),
        ] {
            let error = toml::from_str::<Read>(line).unwrap_err().to_string();
            assert!(error.contains(reported), "{line}: {error}");
        }
    }
}
