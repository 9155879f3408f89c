//! What Cargo does not hold of the sources: no heavy dependency is linked into training, each test file is compiled, and
//! the documents' links and blocks are right.

#![allow(clippy::expect_used, clippy::panic, reason = "in a test, a panic is the report")]

#[path = "documents/mod.rs"]
mod documents;

use std::fs;
use std::path::{Path, PathBuf};

/// What may be linked into training, by crate.
const CLIENT_DEPENDENCIES: &[(&str, &[&str])] = &[
    ("proto/heartbeat", &[]),
    ("proto/checkpoint", &["blake3", "serde_json", "thiserror", "twox-hash"]),
    ("client", &["mainstay-heartbeat", "nix"]),
    (
        "client/python",
        &["mainstay-checkpoint-format", "mainstay-client", "mainstay-heartbeat", "nix", "pyo3", "twox-hash"],
    ),
];

/// Test executables next to `tests/it` of each crate, and why each needs a separate process: every executable is
/// linked again after each change.
const TEST_EXECUTABLES: &[(&str, &str)] = &[
    ("client/tests/no_allocations.rs", "it has an allocator of its own"),
    ("client/tests/processes.rs", "it forks"),
    ("tests/tests/sources.rs", "it needs nothing but the sources"),
];

#[test]
fn nothing_heavy_is_linked_into_training() {
    for (package, allowed) in CLIENT_DEPENDENCIES {
        let path = repository().join(package).join("Cargo.toml");
        let manifest = fs::read_to_string(&path).expect("a package has a manifest");
        assert_eq!(unexpected_dependencies(&manifest, allowed), Vec::<String>::new(), "{package}");
    }
}

#[test]
fn each_crate_has_one_test_executable_and_no_test_file_is_left_out() {
    let folders = test_folders(&repository());
    assert!(folders.len() > 8, "{folders:?}");
    let complaints: Vec<String> = folders.iter().flat_map(|folder| test_complaints(folder)).collect();
    assert!(complaints.is_empty(), "tests:\n{}", complaints.join("\n"));
}

#[test]
fn a_heavy_dependency_is_reported() {
    let planted = "[package]\nname = \"x\"\n[dependencies]\nnix.workspace = true\ntokio = \"1\"\n\
                   [target.'cfg(unix)'.dependencies]\nlibc = \"1\"\n[dev-dependencies]\ntempfile = \"3\"\n\
                   [dependencies.tonic]\nversion = \"0.14\"\n";
    assert_eq!(unexpected_dependencies(planted, &["nix"]), ["tokio", "libc", "tonic"]);
}

/// The names under any `[…dependencies]` of a manifest that are not on the list. Test dependencies are free.
fn unexpected_dependencies(manifest: &str, allowed: &[&str]) -> Vec<String> {
    let mut unexpected = Vec::new();
    let mut inside = false;
    for line in manifest.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            let section = section.rsplit_once("'.").map_or(section, |(_, last)| last);
            inside = section == "dependencies";
            if let Some(name) = section.strip_prefix("dependencies.") {
                unexpected.push(name.to_string());
            }
        } else if inside && !line.is_empty() && !line.starts_with('#') {
            let end = line.find(['.', ' ', '=']).unwrap_or(line.len());
            unexpected.push(line[..end].to_string());
        }
    }
    unexpected.retain(|name| !allowed.contains(&name.as_str()));
    unexpected
}

/// The `tests` folders of the packages.
fn test_folders(root: &Path) -> Vec<PathBuf> {
    let manifest = fs::read_to_string(root.join("Cargo.toml")).expect("the workspace has a manifest");
    let members = manifest.lines().find(|line| line.starts_with("members = ")).expect("it has members");
    let packages = members.split('"').skip(1).step_by(2);
    packages.map(|package| root.join(package).join("tests")).filter(|folder| folder.is_dir()).collect()
}

/// Executables that are on no list, and files in `it` that are not among its modules: cargo compiles none of these.
fn test_complaints(folder: &Path) -> Vec<String> {
    let root = repository();
    let named = |path: &Path| path.strip_prefix(&root).unwrap_or(path).display().to_string();
    let mut complaints = Vec::new();
    for file in rust_files(folder) {
        let above = file.parent().expect("a file is in a folder");
        let stem = file.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        if above == folder {
            if !TEST_EXECUTABLES.iter().any(|(path, _)| named(&file) == *path) {
                complaints.push(format!("{}: make it a module of tests/it/main.rs", named(&file)));
            }
        } else if file.starts_with(folder.join("it")) && !(stem == "main" && above == folder.join("it")) {
            let (module, of) = match stem.as_str() {
                "mod" => (file_name(above), above.parent().expect("below `it`")),
                _ => (stem, above),
            };
            let parent = ["main.rs", "mod.rs"].map(|name| of.join(name)).into_iter().find(|of| of.exists());
            let text = parent.map(|of| fs::read_to_string(of).expect("a source file is readable text"));
            if !text.is_some_and(|text| text.contains(&format!("mod {module};"))) {
                complaints
                    .push(format!("{}: it is a module of nothing, so no test of it is run", named(&file)));
            }
        }
    }
    complaints
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.expect("a folder can be listed").path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort();
    files
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests live in the repository").to_path_buf()
}
