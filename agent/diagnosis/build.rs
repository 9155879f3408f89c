//! Builds the tables of attribution from the catalog: which classes words indicate, and the signatures in a form
//! that is parsed quickly. The program contains only these results.

#![allow(clippy::disallowed_methods, reason = "a build script reads and writes files; the core does neither")]

use std::collections::BTreeSet;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};

use serde_json::Value;

#[path = "src/attribution/common.rs"]
#[allow(dead_code, reason = "the program uses the other half")]
mod common;
#[path = "src/attribution/fit.rs"]
mod fit;
#[path = "src/attribution/learn.rs"]
mod learn;
#[path = "src/attribution/lessons.rs"]
mod lessons;
#[path = "src/attribution/traceback.rs"]
#[allow(dead_code, reason = "the program uses the other half")]
mod traceback;
#[path = "src/attribution/wording.rs"]
#[allow(dead_code, reason = "the program uses the other half")]
mod wording;

const CATALOG: &str = "../catalog";

fn main() -> Result<(), Box<dyn Error>> {
    let catalog = Path::new(CATALOG);
    for input in ["signatures", "failures/failures.tsv"] {
        println!("cargo::rerun-if-changed={}", catalog.join(input).display());
    }
    println!("cargo::rerun-if-changed=build.rs");
    for module in ["common", "fit", "learn", "lessons", "traceback", "wording"] {
        println!("cargo::rerun-if-changed=src/attribution/{module}.rs");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo names no OUT_DIR")?);
    let lines = read(&catalog.join("signatures/lines.tsv"))?;
    let failures = read(&catalog.join("failures/failures.tsv"))?;
    let files = common::FILE_NAMES.iter().map(|name| signatures_of(&catalog.join("signatures").join(name)));
    let files: Vec<Value> = files.collect::<Result<_, _>>()?;

    let reported = reported(&files);
    let texts = reported.iter().map(|(class, text)| (*class, text.as_str())).chain(lessons::lines(&lines));
    let figures = lessons::failures(&failures).map(|of| (of.class, of.words));
    fs::write(out.join("words.bin"), learn::learn(texts, figures).to_bytes())?;
    fs::write(out.join("signatures.json"), serde_json::to_string(&files)?)?;
    let borne_out: BTreeSet<&str> = lessons::failures(&failures).flat_map(|of| of.signatures).collect();
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

/// The texts of known class in the catalog: the example and the meaning of each signature and XID that counts as
/// evidence.
fn reported(files: &[Value]) -> Vec<(usize, String)> {
    let mut reported = Vec::new();
    for file in files {
        for signature in
            entries(file, "signature").filter(|of| text(of, "role") != "benign" && !is_set(of, "fallback"))
        {
            // An invalid class is reported when the catalog is loaded.
            let Some(class) = lessons::class_named(text(signature, "class")) else { continue };
            reported.push((class, text(signature, "example").to_owned()));
            reported.push((class, text(signature, "meaning").to_owned()));
        }
        for xid in entries(file, "xid").filter(|of| text(of, "role") != "benign") {
            let Some(class) = lessons::class_named(text(xid, "class")) else { continue };
            let codes =
                entries(xid, "codes").filter_map(Value::as_u64).filter_map(|code| u32::try_from(code).ok());
            for code in codes {
                reported.push((class, common::xid_example(code)));
                reported.push((class, common::xid_meaning(code, text(xid, "meaning"))));
            }
        }
    }
    reported
}

fn entries<'v>(of: &'v Value, name: &str) -> impl Iterator<Item = &'v Value> {
    of.get(name).and_then(Value::as_array).into_iter().flatten()
}

fn text<'v>(of: &'v Value, name: &str) -> &'v str {
    of.get(name).and_then(Value::as_str).unwrap_or_default()
}

fn is_set(of: &Value, name: &str) -> bool {
    of.get(name).and_then(Value::as_bool).unwrap_or_default()
}
