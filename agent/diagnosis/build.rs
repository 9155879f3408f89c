//! Builds the tables of attribution from the catalog: the signatures in a form that is parsed quickly, and the names of those that a
//! collected failure has confirmed. The program contains only these results.

#![allow(clippy::disallowed_methods, reason = "a build script reads and writes files; the core does neither")]

use std::collections::BTreeSet;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};

use serde_json::Value;

#[path = "src/attribution/files.rs"]
mod files;

const CATALOG: &str = "../catalog";
/// The field of a collected failure that lists the signatures which matched its log.
const SIGNATURES: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let catalog = Path::new(CATALOG);
    for input in ["signatures", "failures/failures.tsv"] {
        println!("cargo::rerun-if-changed={}", catalog.join(input).display());
    }
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/attribution/files.rs");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo names no OUT_DIR")?);
    let failures = read(&catalog.join("failures/failures.tsv"))?;
    let files = files::NAMES.iter().map(|name| signatures_of(&catalog.join("signatures").join(name)));
    let files: Vec<Value> = files.collect::<Result<_, _>>()?;
    fs::write(out.join("signatures.json"), serde_json::to_string(&files)?)?;
    let names = failures.lines().filter_map(|failure| failure.split('\t').nth(SIGNATURES));
    let borne_out: BTreeSet<&str> = names.flat_map(str::split_ascii_whitespace).collect();
    fs::write(out.join("borne_out.txt"), borne_out.into_iter().collect::<Vec<_>>().join("\n"))?;
    Ok(())
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("reading {}: {error}", path.display()))
}

fn signatures_of(path: &Path) -> Result<Value, String> {
    toml::from_str(&read(path)?)
        .map_err(|error| format!("reading the catalog file {}: {error}", path.display()))
}
