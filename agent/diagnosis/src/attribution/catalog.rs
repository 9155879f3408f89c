//! The catalog of log signatures: reads, checks and compiles `agent/catalog/signatures/*.toml`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use super::automaton::Automaton;
use super::lines;
use super::shared::Shared;
pub use super::signature::{Determinism, ExceptionRule, Role, Signature};
use super::signature::{File, of_xid};
use super::xids::{self, XidWeight};
use mainstay_health::hardware::catalog::Catalog as Codes;

/// Why a catalog cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// A file does not match the schema.
    #[error("reading the catalog file {file}: {reason}")]
    Unreadable {
        /// Which file.
        file: String,
        /// The TOML error.
        reason: String,
    },
    /// Two signatures have the same id.
    #[error("the catalog has two signatures with the id {0}; ids are unique")]
    Twice(String),
    /// A word to search for is too short.
    #[error("signature {id}: {word:?} in `any` is too short; four letters are the least")]
    ShortWord {
        /// Which signature.
        id: String,
        /// The word.
        word: String,
    },
    /// The regular expression of a signature cannot be compiled.
    #[error("signature {id}: pattern: {reason}")]
    Pattern {
        /// Which signature.
        id: String,
        /// The error of the regex engine.
        reason: String,
    },
    /// The tables that were built with the program do not match its catalog.
    #[error("the catalog's tables are broken: {0}; build the program again")]
    Tables(String),
}

/// A cause of lower weight only shows where a line comes from (a worker of the loader), not what happened.
const MIN_EXPLAINING_WEIGHT: f64 = 0.8;

/// The indexes of the words that appear in lines of completed steps.
pub(super) const PROGRESS: [usize; 3] = [XID - 3, XID - 2, XID - 1];
/// Words up to this length match only as whole words.
const MAX_SHORT_WORD_BYTES: usize = 6;
/// The signature of an XID whose own line says that the device needs no reset.
const PASSING_XID: &str = "xid.passing";

/// Words that indicate structure rather than a signature.
pub(super) const STRUCTURE: [&str; 15] = [
    "file \"",
    "error:",
    "exception:",
    "error\n",
    "exception\n",
    "interrupt",
    "exception group",
    "timeout:",
    "(local_rank:",
    "exception ignored in",
    "traceback (most recent",
    "loss",
    "it/s",
    "s/it",
    "xid",
];

/// The index of "xid" among them.
pub(super) const XID: usize = STRUCTURE.len() - 1;

/// The catalog, ready to be matched.
#[derive(Clone, Debug)]
pub struct Catalog {
    signatures: Vec<Signature>,
    /// Compiled on first use: a failure needs few of them, and compiling all takes long.
    patterns: Vec<OnceLock<Option<regex::bytes::Regex>>>,
    exceptions: BTreeMap<String, ExceptionRule>,
    /// Rules by a part of an exception's name, in file order.
    parts: Vec<(String, ExceptionRule)>,
    xids: BTreeMap<u32, usize>,
    words: Automaton,
    /// The signatures that search for each word. The first words are those of [`STRUCTURE`].
    signatures_by_word: Vec<Vec<usize>>,
    /// Whether the word matches only if no letter precedes it: "uct_" is no part of "product_".
    starts: Vec<bool>,
    /// The meaning of hardware codes, read on first use. `None` if it cannot be read, which a test rules out.
    codes: OnceLock<Option<Codes>>,
}

/// The files of the catalog that comes with the program.
const FILES: [(&str, &str); 22] = [
    ("xid.toml", include_str!("../../../catalog/signatures/xid.toml")),
    ("gpu.toml", include_str!("../../../catalog/signatures/gpu.toml")),
    ("cuda.toml", include_str!("../../../catalog/signatures/cuda.toml")),
    ("nccl.toml", include_str!("../../../catalog/signatures/nccl.toml")),
    ("fabric.toml", include_str!("../../../catalog/signatures/fabric.toml")),
    ("torch.toml", include_str!("../../../catalog/signatures/torch.toml")),
    ("torch_ops.toml", include_str!("../../../catalog/signatures/torch_ops.toml")),
    ("jax.toml", include_str!("../../../catalog/signatures/jax.toml")),
    ("frameworks.toml", include_str!("../../../catalog/signatures/frameworks.toml")),
    ("libraries.toml", include_str!("../../../catalog/signatures/libraries.toml")),
    ("python.toml", include_str!("../../../catalog/signatures/python.toml")),
    ("platform.toml", include_str!("../../../catalog/signatures/platform.toml")),
    ("data.toml", include_str!("../../../catalog/signatures/data.toml")),
    ("storage.toml", include_str!("../../../catalog/signatures/storage.toml")),
    ("host.toml", include_str!("../../../catalog/signatures/host.toml")),
    ("scheduler.toml", include_str!("../../../catalog/signatures/scheduler.toml")),
    ("slurm.toml", include_str!("../../../catalog/signatures/slurm.toml")),
    ("kubernetes.toml", include_str!("../../../catalog/signatures/kubernetes.toml")),
    ("remote.toml", include_str!("../../../catalog/signatures/remote.toml")),
    ("process.toml", include_str!("../../../catalog/signatures/process.toml")),
    ("families.toml", include_str!("../../../catalog/signatures/families.toml")),
    ("vocabulary.toml", include_str!("../../../catalog/signatures/vocabulary.toml")),
];

/// The same files as parsed by the build script: JSON, which parses ten times as fast.
const READ: &str = include_str!(concat!(env!("OUT_DIR"), "/signatures.json"));

/// Shared by all attributions in progress.
static SHARED: Shared<Catalog> = Shared::new();

impl Catalog {
    /// The built-in catalog, read once and kept. For commands that end soon and for tests. Long-running processes use
    /// [`Catalog::shared`].
    ///
    /// # Errors
    /// None in a tested program: a test compiles the catalog.
    pub fn built_in() -> Result<&'static Catalog, &'static CatalogError> {
        static BUILT_IN: OnceLock<Result<Catalog, CatalogError>> = OnceLock::new();
        BUILT_IN.get_or_init(Catalog::prepared).as_ref()
    }

    /// The built-in catalog, shared. Dropping the last reference frees it together with all patterns that were compiled.
    ///
    /// # Errors
    /// None in a tested program: a test compiles the catalog.
    pub fn shared() -> Result<Arc<Catalog>, CatalogError> {
        SHARED.get(Catalog::prepared)
    }

    pub(super) fn prepared() -> Result<Catalog, CatalogError> {
        let broken = |error: serde_json::Error| CatalogError::Tables(error.to_string());
        let files: Vec<File> = serde_json::from_str(READ).map_err(broken)?;
        Catalog::from_files(files)
    }

    /// The files of the built-in catalog, by name and text.
    pub fn files() -> &'static [(&'static str, &'static str)] {
        &FILES
    }

    /// Reads catalog files, given as name and text.
    ///
    /// # Errors
    /// If a file does not match the schema, ids are duplicated, or words and patterns cannot be compiled. The message names the file or
    /// the signature.
    pub fn read(files: &[(&str, &str)]) -> Result<Catalog, CatalogError> {
        let read = |(name, text): &(&str, &str)| {
            toml::from_str(text).map_err(|error| CatalogError::Unreadable {
                file: (*name).to_owned(),
                reason: error.to_string(),
            })
        };
        let catalog = Catalog::from_files(files.iter().map(read).collect::<Result<_, _>>()?)?;
        for (signature, ready) in catalog.signatures.iter().zip(&catalog.patterns) {
            let pattern = signature.pattern.as_deref().map(|pattern| compiled(&signature.id, pattern));
            // Nothing else shares the catalog yet.
            let _ = ready.set(pattern.transpose()?);
        }
        Ok(catalog)
    }

    /// Does not compile patterns. A test compiles all patterns of the built-in catalog.
    fn from_files(files: Vec<File>) -> Result<Catalog, CatalogError> {
        let mut signatures = Vec::new();
        let mut exceptions = BTreeMap::new();
        let mut parts = Vec::new();
        let mut xids = BTreeMap::new();
        for file in files {
            for mut signature in file.signature {
                if signature.family.is_empty() {
                    signature.family.clone_from(&file.family);
                }
                if signature.latent.is_none() {
                    signature.latent.clone_from(&file.latent);
                }
                signature.warning |= file.warning;
                if signature.source.is_empty() {
                    signature.source.clone_from(&file.source);
                }
                signatures.push(signature);
            }
            for mut xid in file.xid {
                if xid.latent.is_none() {
                    xid.latent.clone_from(&file.latent);
                }
                for code in &xid.codes {
                    xids.insert(*code, signatures.len());
                    signatures.push(of_xid(&xid, *code, &file.family, &file.source));
                }
            }
            for rule in file.exception {
                for exception in &rule.names {
                    exceptions.insert(exception.clone(), rule.clone());
                }
                parts.extend(rule.parts.iter().map(|part| (part.clone(), rule.clone())));
            }
        }
        Catalog::compile(signatures, exceptions, parts, xids)
    }

    fn compile(
        mut signatures: Vec<Signature>,
        exceptions: BTreeMap<String, ExceptionRule>,
        parts: Vec<(String, ExceptionRule)>,
        xids: BTreeMap<u32, usize>,
    ) -> Result<Catalog, CatalogError> {
        let mut ids = BTreeSet::new();
        let mut patterns = Vec::with_capacity(signatures.len());
        let mut words: Vec<String> = STRUCTURE.map(str::to_owned).into();
        let mut signatures_by_word: Vec<Vec<usize>> = vec![Vec::new(); words.len()];
        let mut index_of: BTreeMap<String, usize> =
            words.iter().enumerate().map(|(at, word)| (word.clone(), at)).collect();
        for (index, signature) in signatures.iter_mut().enumerate() {
            if !ids.insert(signature.id.clone()) {
                return Err(CatalogError::Twice(signature.id.clone()));
            }
            for list in [&mut signature.any, &mut signature.with, &mut signature.without] {
                list.iter_mut().for_each(|word| word.make_ascii_lowercase());
            }
            patterns.push(OnceLock::new());
            for word in signature.any.iter().filter(|_| !signature.fallback) {
                if word.len() < 4 {
                    return Err(CatalogError::ShortWord { id: signature.id.clone(), word: word.clone() });
                }
                let at = *index_of.entry(word.clone()).or_insert_with(|| {
                    words.push(word.clone());
                    signatures_by_word.push(Vec::new());
                    words.len() - 1
                });
                signatures_by_word[at].push(index);
            }
        }
        let starts = words
            .iter()
            .enumerate()
            .map(|(at, word)| {
                at >= STRUCTURE.len()
                    && word.len() <= MAX_SHORT_WORD_BYTES
                    && word.starts_with(|c: char| c.is_ascii_alphabetic())
            })
            .collect();
        let words = Automaton::new(&words).map_err(|error| CatalogError::Tables(error.to_string()))?;
        let codes = OnceLock::new();
        Ok(Catalog {
            signatures,
            patterns,
            exceptions,
            parts,
            xids,
            words,
            signatures_by_word,
            starts,
            codes,
        })
    }

    /// All signatures, including those of XIDs.
    pub fn signatures(&self) -> &[Signature] {
        &self.signatures
    }

    /// The signature with this name.
    pub fn named(&self, id: &str) -> Option<&Signature> {
        self.signatures.iter().find(|signature| signature.id == id)
    }

    /// The XIDs whose signature satisfies `is`.
    pub fn xids_where(&self, is: impl Fn(&Signature) -> bool) -> BTreeSet<u32> {
        let entry = |(code, index): (&u32, &usize)| is(self.signatures.get(*index)?).then_some(*code);
        self.xids.iter().filter_map(entry).collect()
    }

    /// The rule for an exception type, by its name with or without modules: by the whole name, or by a part of it.
    pub fn exception(&self, name: &str) -> Option<&ExceptionRule> {
        let name = name.rsplit('.').next().unwrap_or(name);
        let by_part =
            || self.parts.iter().find(|(part, _)| name.contains(part.as_str())).map(|(_, rule)| rule);
        self.exceptions.get(name).or_else(by_part)
    }

    /// Signatures that match a single line, best first: by weight, then by the length of the words.
    pub fn matches(&self, line: &str) -> Vec<&Signature> {
        let written = lines::clean(line.as_bytes());
        let line = written.to_ascii_lowercase();
        let mut matches_of_line: Vec<usize> = self
            .hits(line.as_bytes())
            .flat_map(|(word, _)| self.signatures_by_word[word].iter().copied())
            .collect();
        matches_of_line.sort_unstable();
        matches_of_line.dedup();
        matches_of_line.retain(|index| self.confirms(*index, &line));
        matches_of_line.extend(self.xids_in(&line));
        self.weigh_xid(&written, &mut matches_of_line);
        if matches_of_line.is_empty() {
            matches_of_line.extend(self.hints(&line));
        }
        let mut matches_of_line: Vec<&Signature> =
            matches_of_line.into_iter().map(|index| &self.signatures[index]).collect();
        matches_of_line.sort_by(|a, b| b.weight.total_cmp(&a.weight).then(longest(b).cmp(&longest(a))));
        matches_of_line
    }

    /// The hints that match a line in lower case.
    pub(super) fn hints<'l>(&'l self, line: &'l str) -> impl Iterator<Item = usize> + 'l {
        (0..self.signatures.len()).filter(|index| {
            let signature = &self.signatures[*index];
            signature.fallback
                && signature.any.iter().any(|word| holds_word(line, word))
                && self.confirms(*index, line)
        })
    }

    /// Whether a signature fully explains a line, so that no other evidence from it is needed.
    pub(super) fn explains(&self, index: usize) -> bool {
        self.signatures.get(index).is_some_and(|signature| {
            !signature.fallback
                && (signature.role != Role::Primary || signature.weight >= MIN_EXPLAINING_WEIGHT)
        })
    }

    /// The words in a text with their offsets: those of signatures and those of [`STRUCTURE`].
    pub(super) fn hits<'t>(&'t self, text: &'t [u8]) -> impl Iterator<Item = (usize, usize)> + 't {
        self.words.find(text).filter_map(|(word, at)| {
            let inside = self.starts[word] && at > 0 && text[at - 1].is_ascii_alphabetic();
            (!inside).then_some((word, at))
        })
    }

    pub(super) fn signatures_by_word(&self, word: usize) -> &[usize] {
        &self.signatures_by_word[word]
    }

    /// Whether a line in lower case that contains one of the signature's words matches the signature.
    pub(super) fn confirms(&self, index: usize, line: &str) -> bool {
        let signature = &self.signatures[index];
        signature.with.iter().all(|word| line.contains(word.as_str()))
            && !signature.without.iter().any(|word| line.contains(word.as_str()))
            && self.pattern(index).is_none_or(|pattern| pattern.is_match(line.as_bytes()))
    }

    /// The pattern of a signature, if it has one. Also `None` if the pattern cannot be compiled, which a test rules out.
    fn pattern(&self, index: usize) -> Option<&regex::bytes::Regex> {
        let signature = &self.signatures[index];
        let compile =
            || signature.pattern.as_deref().and_then(|pattern| compiled(&signature.id, pattern).ok());
        self.patterns[index].get_or_init(compile).as_ref()
    }

    /// Drops the signatures that the line of an XID contradicts: it may be a note, or an error that has passed.
    pub(super) fn weigh_xid(&self, line: &str, candidates: &mut Vec<usize>) {
        match self.weight_of_xid(line) {
            Some(XidWeight::Note) => candidates.clear(),
            Some(XidWeight::Passing) => candidates.retain(|index| self.signatures[*index].id == PASSING_XID),
            Some(XidWeight::Usual) | None => {}
        }
    }

    /// How much a line with an XID counts. `None` for a line that the driver did not write.
    pub(super) fn weight_of_xid(&self, line: &str) -> Option<XidWeight> {
        let codes = self.codes.get_or_init(|| Codes::built_in().ok()).as_ref()?;
        xids::weight(codes, line)
    }

    /// The signatures of the XIDs in a line in lower case: `xid (pci:0000:af:00): 79,`, `xid 79`.
    pub(super) fn xids_in<'l>(&'l self, line: &'l str) -> impl Iterator<Item = usize> + 'l {
        line.match_indices("xid")
            .filter(|(at, _)| *at == 0 || !line.as_bytes()[at - 1].is_ascii_alphanumeric())
            .filter_map(|(at, _)| self.xids.get(&xid_code(&line[at + 3..])?).copied())
    }
}

/// Parses the code after the word: `(pci:0000:af:00): 79,`, ` error 79`, `s: 79`.
fn xid_code(rest: &str) -> Option<u32> {
    let separators = ['s', ' ', ':', '=', '#', '-'];
    let rest = rest.trim_start_matches(separators);
    let rest = rest.strip_prefix("error").or_else(|| rest.strip_prefix("code")).unwrap_or(rest);
    let rest = rest.trim_start_matches(separators);
    let rest = match rest.strip_prefix('(') {
        Some(device) => device.split_once(')')?.1,
        None => rest,
    };
    let rest = rest.trim_start_matches([':', ' ']);
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    rest[..digits].parse().ok()
}

/// Whether a line contains a word by itself or in the plural, not inside another: "npu", but not "input".
fn holds_word(line: &str, word: &str) -> bool {
    let bytes = line.as_bytes();
    let inside = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_alphabetic);
    line.match_indices(word).any(|(at, _)| {
        let end = at + word.len();
        let end = if bytes.get(end) == Some(&b's') { end + 1 } else { end };
        !(inside(end) || at > 0 && inside(at - 1))
    })
}

fn longest(signature: &Signature) -> usize {
    signature.any.iter().chain(&signature.with).map(String::len).max().unwrap_or(0)
}

fn compiled(id: &str, pattern: &str) -> Result<regex::bytes::Regex, CatalogError> {
    regex::bytes::RegexBuilder::new(pattern)
        .unicode(false)
        .build()
        .map_err(|error| CatalogError::Pattern { id: id.to_owned(), reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_build_script_reads_the_files_of_the_catalog() {
        assert_eq!(FILES.map(|(name, _)| name), super::super::files::NAMES);
        let (made, read) = (Catalog::prepared().expect("tables"), Catalog::read(&FILES).expect("files"));
        assert_eq!(format!("{:?}", made.signatures), format!("{:?}", read.signatures));
        assert_eq!(format!("{:?}", made.exceptions), format!("{:?}", read.exceptions));
        assert_eq!(format!("{:?}", made.parts), format!("{:?}", read.parts));
    }
}
