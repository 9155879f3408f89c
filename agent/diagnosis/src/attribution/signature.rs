//! The entries of the catalog files.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::class::{Class, Restart};
use mainstay_model::verdict::FaultDomain;

/// The role of a line in the failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A possible cause.
    #[default]
    Primary,
    /// A consequence: other ranks print it after one has failed.
    Secondary,
    /// It looks alarming but is no failure.
    Benign,
}

/// Whether the failure repeats after a restart in the same place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Determinism {
    /// It repeats.
    Deterministic,
    /// It may not repeat.
    Transient,
    /// The line does not show which.
    #[default]
    Either,
}

/// One signature of the catalog.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Signature {
    /// Its name, unique: `nccl.version_mismatch`.
    pub id: String,
    /// What the line means, in plain words.
    pub meaning: String,
    /// What went wrong if the line is seen.
    pub class: Class,
    /// Whether it is a cause or a consequence.
    #[serde(default)]
    pub role: Role,
    /// Log-odds that it adds to its class: 1 is a hint, 3 likely, 5 nearly certain.
    pub weight: f64,
    /// Whether the failure repeats.
    #[serde(default)]
    pub determinism: Determinism,
    /// What to do, if different from the default of the class and the determinism.
    #[serde(default)]
    pub restart: Option<Restart>,
    /// Whose fault it is, if different from the default of the class.
    #[serde(default)]
    pub domain: Option<FaultDomain>,
    /// The rank that prints it reports the fault of another: it is not where the failure started.
    #[serde(default)]
    pub reporter: bool,
    /// It also counts in a warning or a note, and not only in an error: machines warn before they fail.
    #[serde(default)]
    pub warning: bool,
    /// It only repeats that a signal ended a process, without the reason.
    #[serde(default)]
    pub signal: bool,
    /// Why it still counts when healthy steps came after it: the fault that it reports is latent. Without a reason it does not count
    /// then.
    #[serde(default)]
    pub latent: Option<String>,
    /// A phrase, in lower case. A line with it reports a SIGKILL: it counts only if the kernel may have counted an OOM kill.
    #[serde(default)]
    pub needs_oom_kill: Option<String>,
    /// Only a hint, for short texts and lines that no other signature explains.
    #[serde(default)]
    pub fallback: bool,
    /// Other classes that the same text can mean, with their log-odds.
    #[serde(default)]
    pub also: BTreeMap<Class, f64>,
    /// Evidence of one family counts once.
    #[serde(default)]
    pub family: String,
    /// The line contains one of these, in any case.
    pub any: Vec<String>,
    /// The line contains all of these.
    #[serde(default)]
    pub with: Vec<String>,
    /// The line contains none of these.
    #[serde(default)]
    pub without: Vec<String>,
    /// The line in lower case matches this regular expression, ASCII only.
    #[serde(default)]
    pub pattern: Option<String>,
    /// The project, document or source file that it comes from.
    #[serde(default)]
    pub source: String,
    /// A line that matches.
    pub example: String,
    /// Similar lines that must not match.
    #[serde(default)]
    pub silent: Vec<String>,
}

/// An NVIDIA XID.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Xid {
    pub(super) codes: Vec<u32>,
    pub(super) meaning: String,
    pub(super) class: Class,
    #[serde(default)]
    pub(super) role: Role,
    pub(super) weight: f64,
    #[serde(default)]
    pub(super) determinism: Determinism,
    #[serde(default)]
    pub(super) restart: Option<Restart>,
    #[serde(default)]
    pub(super) latent: Option<String>,
    #[serde(default)]
    pub(super) also: BTreeMap<Class, f64>,
}

/// The meaning of a Python exception's type, used when there is no better evidence about its line.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExceptionRule {
    /// Names without their modules.
    #[serde(default)]
    pub names: Vec<String>,
    /// Parts of names, used if no rule has the whole name.
    #[serde(default)]
    pub parts: Vec<String>,
    /// The type is too general: its message counts more.
    #[serde(default)]
    pub general: bool,
    /// Whether the failure repeats.
    #[serde(default)]
    pub determinism: Determinism,
    /// The class it supports.
    pub class: Class,
    /// Whether it is a cause or a consequence.
    #[serde(default)]
    pub role: Role,
    /// Log-odds.
    pub weight: f64,
    /// Other classes that it can mean, with their log-odds.
    #[serde(default)]
    pub also: BTreeMap<Class, f64>,
}

/// A file of the catalog.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub(super) family: String,
    pub(super) source: String,
    /// Default for entries of the file without their own reason.
    #[serde(default)]
    pub(super) latent: Option<String>,
    /// Default for all entries of the file.
    #[serde(default)]
    pub(super) warning: bool,
    #[serde(default)]
    pub(super) signature: Vec<Signature>,
    #[serde(default)]
    pub(super) xid: Vec<Xid>,
    #[serde(default)]
    pub(super) exception: Vec<ExceptionRule>,
}

/// Creates the signature of an XID. XIDs are found by number, not by words.
pub(super) fn of_xid(xid: &Xid, code: u32, family: &str, source: &str) -> Signature {
    Signature {
        id: format!("xid.{code}"),
        meaning: format!("XID {code}: {}", xid.meaning),
        class: xid.class,
        role: xid.role,
        weight: xid.weight,
        determinism: xid.determinism,
        restart: xid.restart,
        domain: None,
        reporter: false,
        // The driver logs XIDs at the level of an error.
        warning: true,
        signal: false,
        latent: xid.latent.clone(),
        needs_oom_kill: None,
        fallback: false,
        also: xid.also.clone(),
        family: family.to_owned(),
        any: Vec::new(),
        with: Vec::new(),
        without: Vec::new(),
        pattern: None,
        source: source.to_owned(),
        example: format!("NVRM: Xid (PCI:0000:af:00): {code}, pid=1234, name=python"),
        silent: Vec::new(),
    }
}
