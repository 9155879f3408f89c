//! The bill of materials of the program: its crates with their licences and checksums, as CycloneDX.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};
use fs_err as fs;
use serde_json::{Value, json};

use super::VERSION;
use crate::{command, paths};

/// What `cargo tree` prints of a crate: its depth, its name with the version, and its licence.
struct Line<'a> {
    depth: usize,
    name: &'a str,
    version: &'a str,
    licence: &'a str,
}

/// Writes the document of the program that is released for a target.
pub fn write(target: &str, date: &str, to: &Path) -> Result<()> {
    let mut tree = command::cargo("tree --locked --package mainstay-agent --features cloud --prefix depth");
    tree.args(["--target", target, "--edges", "normal,no-proc-macro", "--format", " {p} |{l}"]);
    let lock = fs::read_to_string(paths::root().join("Cargo.lock"))?;
    let document = document(&command::output(&mut tree)?, &lock, date)?;
    Ok(fs::write(to, serde_json::to_string_pretty(&document).context("the document as JSON")? + "\n")?)
}

fn document(tree: &str, lock: &str, date: &str) -> Result<Value> {
    let checksums = checksums(lock);
    let (mut components, mut uses) = (BTreeMap::new(), BTreeMap::<String, BTreeSet<String>>::new());
    let mut above: Vec<String> = Vec::new();
    for line in tree.lines().filter(|line| !line.is_empty()) {
        let Line { depth, name, version, licence } =
            parse(line).with_context(|| format!("cargo tree: {line}"))?;
        let key = format!("pkg:cargo/{name}@{version}");
        above.truncate(depth);
        if let Some(user) = above.last() {
            uses.entry(user.clone()).or_default().insert(key.clone());
        }
        above.push(key.clone());
        uses.entry(key.clone()).or_default();
        let mut component = json!({
            "type": "library", "bom-ref": key, "name": name, "version": version, "purl": key,
            "licenses": [{"expression": licence.replace('/', " OR ")}],
        });
        // A crate of this workspace has none.
        if let Some(checksum) = checksums.get(&(name, version)) {
            component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
        }
        components.insert(key, component);
    }
    let root = format!("pkg:cargo/mainstay-agent@{VERSION}");
    let mut program = components.remove(&root).context("the program is not in its own tree")?;
    program["type"] = "application".into();
    let dependencies: Vec<Value> =
        uses.iter().map(|(user, used)| json!({"ref": user, "dependsOn": used})).collect();
    Ok(json!({
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {"timestamp": date, "component": program},
        "components": components.values().collect::<Vec<_>>(),
        "dependencies": dependencies,
    }))
}

/// `2 tokio v1.54.0 |MIT`; a crate of this workspace has its folder behind the version, and one that was printed
/// before a mark.
fn parse(line: &str) -> Option<Line<'_>> {
    let (package, licence) = line.split_once('|')?;
    let mut words = package.split_whitespace();
    Some(Line {
        depth: words.next()?.parse().ok()?,
        name: words.next()?,
        version: words.next()?.strip_prefix('v')?,
        licence: licence.trim_end_matches("(*)").trim(),
    })
}

/// The checksums of the registry, by name and version.
fn checksums(lock: &str) -> BTreeMap<(&str, &str), &str> {
    let packages = lock.split("[[package]]").skip(1);
    packages
        .filter_map(|package| {
            let field = |name: &str| {
                let line = package.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "));
                Some(line?.trim_matches('"'))
            };
            Some(((field("name")?, field("version")?), field("checksum")?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_each_crate_with_licence_checksum_and_users() {
        let tree = format!(
            "0 mainstay-agent v{VERSION} (/src/agent) |Apache-2.0\n1 mainstay-cli v{VERSION} (/src/agent/cli) |Apache-2.0\n\
             2 tokio v1.54.0 |MIT\n1 tokio v1.54.0 |MIT (*)\n1 libc v0.2.1 |MIT/Apache-2.0\n"
        );
        let lock =
            "[[package]]\nname = \"tokio\"\nversion = \"1.54.0\"\nsource = \"x\"\nchecksum = \"ab12\"\n";
        let document = document(&tree, lock, "2026-01-02T03:04:05Z").expect("a document");
        assert_eq!(document["metadata"]["component"]["type"], "application");
        let names: Vec<&str> = document["components"]
            .as_array()
            .expect("a list")
            .iter()
            .filter_map(|of| of["name"].as_str())
            .collect();
        assert_eq!(names, ["libc", "mainstay-cli", "tokio"]);
        let tokio = &document["components"][2];
        assert_eq!(tokio["hashes"][0]["content"], "ab12");
        assert_eq!(document["components"][0]["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(document["components"][1]["hashes"], Value::Null);
        let uses = document["dependencies"].as_array().expect("a list");
        let of = |name: &str| {
            uses.iter().find(|of| of["ref"] == format!("pkg:cargo/{name}")).map(|of| of["dependsOn"].clone())
        };
        assert_eq!(of(&format!("mainstay-cli@{VERSION}")), Some(json!(["pkg:cargo/tokio@1.54.0"])));
        assert_eq!(of("tokio@1.54.0"), Some(json!([])));
    }

    #[test]
    fn the_program_of_this_repository_has_a_document() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("sbom.json");
        write("x86_64-unknown-linux-gnu", "2026-01-02T03:04:05Z", &file).expect("written");
        let document: Value =
            serde_json::from_str(&fs::read_to_string(file).expect("the file")).expect("JSON");
        let components = document["components"].as_array().expect("a list");
        for of in components {
            assert!(of["licenses"][0]["expression"].as_str().is_some_and(|text| !text.is_empty()), "{of}");
            let ours = of["name"].as_str().is_some_and(|name| name.starts_with("mainstay-"));
            assert_eq!(of["hashes"].is_null(), ours, "{of}");
        }
        // What only tests use is not in the program.
        let has = |name: &str| components.iter().any(|of| of["name"] == name);
        assert!(has("tokio") && has("object_store") && !has("proptest"));
    }
}
