//! The entries of the catalogue as they stand in its files.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::class::{Class, Restart};
use super::common;
use crate::model::verdict::FaultDomain;

/// What a line says about the failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// It may be where the failure began.
    #[default]
    Primary,
    /// It is what the others print when someone else failed.
    Secondary,
    /// It looks alarming and is no failure.
    Benign,
}

/// Whether the same happens again after a restart in the same place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Determinism {
    /// It will.
    Deterministic,
    /// It need not.
    Transient,
    /// The line does not tell.
    #[default]
    Either,
}

/// One signature as it stands in the catalogue.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Signature {
    /// Its name, unique: `nccl.version_mismatch`.
    pub id: String,
    /// What the line means, in plain words.
    pub meaning: String,
    /// What went wrong when it is seen.
    pub class: Class,
    /// Whether it is a cause or a consequence.
    #[serde(default)]
    pub role: Role,
    /// Log-odds that it adds to its class: 1 a hint, 3 likely, 5 nearly certain.
    pub weight: f64,
    /// Whether it comes again.
    #[serde(default)]
    pub determinism: Determinism,
    /// What to do, where it is not what the class and the determinism say.
    #[serde(default)]
    pub restart: Option<Restart>,
    /// Whose fault it is, where it is not what the class says.
    #[serde(default)]
    pub domain: Option<FaultDomain>,
    /// The rank that prints it tells of another's fault: it is not where the failure began.
    #[serde(default)]
    pub reporter: bool,
    /// It may speak from a warning or a note, and not only from an error: machines warn before they fail.
    #[serde(default)]
    pub warning: bool,
    /// It only repeats that a signal ended a process, and not why.
    #[serde(default)]
    pub signal: bool,
    /// Why it still speaks for a failure when healthy steps came after it: what it reports lies in wait. Without a reason
    /// it does not.
    #[serde(default)]
    pub latent: Option<String>,
    /// Only a hint, looked for in short texts on lines that no other signature explains.
    #[serde(default)]
    pub fallback: bool,
    /// Other classes that the same text can mean, with their log-odds.
    #[serde(default)]
    pub also: BTreeMap<Class, f64>,
    /// Evidence of one family counts once.
    #[serde(default)]
    pub family: String,
    /// The line holds one of these, in any case of letters.
    pub any: Vec<String>,
    /// And all of these.
    #[serde(default)]
    pub with: Vec<String>,
    /// And none of these.
    #[serde(default)]
    pub without: Vec<String>,
    /// And this regular expression, over the line in lower case, ASCII only.
    #[serde(default)]
    pub pattern: Option<String>,
    /// The project, document or source file that it comes from.
    #[serde(default)]
    pub source: String,
    /// A line that it matches.
    pub example: String,
    /// Lines that look alike and must not match.
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

/// What the type of a Python exception tells when nothing better is known about its line.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExceptionRule {
    /// Names without their modules.
    #[serde(default)]
    pub names: Vec<String>,
    /// Parts of names; they count where no rule knows the whole name.
    #[serde(default)]
    pub parts: Vec<String>,
    /// Its type says little: what it says in words counts more.
    #[serde(default)]
    pub general: bool,
    /// Whether it comes again.
    #[serde(default)]
    pub determinism: Determinism,
    /// What it tells.
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

/// A file of the catalogue.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub(super) family: String,
    pub(super) source: String,
    /// Of all entries of the file that name no reason of their own.
    #[serde(default)]
    pub(super) latent: Option<String>,
    /// Of all entries of the file.
    #[serde(default)]
    pub(super) warning: bool,
    #[serde(default)]
    pub(super) signature: Vec<Signature>,
    #[serde(default)]
    pub(super) xid: Vec<Xid>,
    #[serde(default)]
    pub(super) exception: Vec<ExceptionRule>,
}

/// XIDs are found by their number, not by words.
pub(super) fn of_xid(xid: &Xid, code: u32, family: &str, source: &str) -> Signature {
    Signature {
        id: format!("xid.{code}"),
        meaning: common::xid_meaning(code, &xid.meaning),
        class: xid.class,
        role: xid.role,
        weight: xid.weight,
        determinism: xid.determinism,
        restart: xid.restart,
        domain: None,
        reporter: false,
        // The driver writes XIDs at the level of an error.
        warning: true,
        signal: false,
        latent: xid.latent.clone(),
        fallback: false,
        also: xid.also.clone(),
        family: family.to_owned(),
        any: Vec::new(),
        with: Vec::new(),
        without: Vec::new(),
        pattern: None,
        source: source.to_owned(),
        example: common::xid_example(code),
        silent: Vec::new(),
    }
}
