//! A module uses only modules on the floors below its own.
//!
//! The agent's crate has many modules, and the compiler lets any of them use any other. This test reads the
//! sources, finds each `crate::room` and compares it with the table below. It also checks the crate boundaries: the
//! core stays pure, and no heavy dependency is linked into training.

#![allow(clippy::expect_used, clippy::panic, reason = "in a test, a panic is the report")]

#[path = "prose/mod.rs"]
mod prose;

#[path = "rooms/mod.rs"]
mod rooms;

use std::fs;
use std::path::{Path, PathBuf};

/// Every top-level module of the agent and its floor. Modules use lower floors only, except where `SHARED` allows
/// it.
const FLOORS: &[(&str, u8)] = &[
    ("os", 1),
    ("http", 1),
    ("probe", 2),
    ("source", 2),
    ("coord", 2),
    ("store", 2),
    ("tier", 2),
    ("act", 2),
    ("launcher_link", 2),
    ("hosts", 2),
    ("state", 3),
    ("node", 3),
    ("launch", 3),
    ("api", 4),
    ("config", 5),
    ("app", 5),
    ("cli", 6),
    ("main", 6),
];

/// Floors whose modules may use each other. Floor 2 is not among them: a source does not know the store, and
/// modules that act do not know those that read; the node above connects them.
const SHARED: &[u8] = &[3, 5, 6];

/// What the core may depend on; anything else could bring in a clock, a file or a thread.
const CORE_DEPENDENCIES: &[&str] =
    &["aho-corasick", "memchr", "postcard", "smol_str", "regex", "serde", "serde_json", "thiserror", "toml"];

/// What policies in Starlark may depend on: they are as pure as the core.
const POLICY_DEPENDENCIES: &[&str] = &["mainstay-core", "serde", "toml"];

/// What may be linked into training, by crate.
const CLIENT_DEPENDENCIES: &[(&str, &[&str])] = &[
    ("proto/heartbeat", &[]),
    ("proto/checkpoint", &["blake3", "serde_json", "thiserror", "twox-hash"]),
    ("client", &["mainstay-heartbeat", "nix"]),
    (
        "client/python",
        &["mainstay-checkpoint", "mainstay-client", "mainstay-heartbeat", "nix", "pyo3", "twox-hash"],
    ),
];

/// What the checkpoint tier may depend on: files and threads, and no runtime.
const TIER_DEPENDENCIES: &[&str] = &[
    "mainstay-checkpoint",
    "mainstay-core",
    "mainstay-guarded",
    "nix",
    "reed-solomon-simd",
    "rustix",
    "rustls",
    "serde",
    "serde_json",
    "socket2",
    "thiserror",
    "tracing",
    "twox-hash",
    "blake3",
];

/// What coordination may depend on: a runtime and gRPC, and nothing of the agent.
const COORD_DEPENDENCIES: &[&str] = &[
    "nix",
    "prost",
    "protox",
    "rustls-native-certs",
    "serde",
    "serde_json",
    "thiserror",
    "tokio",
    "tokio-rustls",
    "tokio-stream",
    "tonic",
    "tonic-prost",
    "tonic-prost-build",
    "tracing",
    "twox-hash",
];

/// What durable storage may depend on: it has its own runtime, and none of the agent's modules.
const DURABLE_DEPENDENCIES: &[&str] = &[
    "mainstay-checkpoint",
    "mainstay-core",
    "mainstay-tier",
    "object_store",
    "reqwest",
    "rustls",
    "serde",
    "serde_json",
    "thiserror",
    "tokio",
    "tokio-stream",
    "tracing",
];

/// Test executables next to `tests/it` of each crate, and why each needs a separate process: every executable is
/// linked again after each change.
const TEST_EXECUTABLES: &[(&str, &str)] = &[
    ("client/tests/no_allocations.rs", "it has an allocator of its own"),
    ("client/tests/processes.rs", "it forks"),
    ("tests/tests/floors.rs", "it needs nothing but the sources"),
];

/// Words that must not appear in the core's code, whatever the linter allows.
const NOT_IN_CORE: &[&str] = &[
    "tokio::",
    "std::fs",
    "std::net",
    "std::env",
    "std::thread",
    "std::process",
    "std::io",
    "Instant",
    "SystemTime",
    "HashMap",
    "HashSet",
];

#[test]
fn rooms_use_only_the_floors_below_them() {
    let source = repository().join("agent/src");
    let mut complaints = Vec::new();
    for path in rust_files(&source) {
        let relative = path.strip_prefix(&source).expect("found below it").to_path_buf();
        let text = fs::read_to_string(&path).expect("a source file is readable text");
        complaints.extend(floor_complaints(&relative, &text));
    }
    assert!(complaints.is_empty(), "agent/src:\n{}", complaints.join("\n"));
}

#[test]
fn the_core_is_pure() {
    let core = repository().join("agent/core");
    let manifest = fs::read_to_string(core.join("Cargo.toml")).expect("the core has a manifest");
    assert_eq!(unexpected_dependencies(&manifest, CORE_DEPENDENCIES), Vec::<String>::new(), "agent/core");

    let policy = repository().join("agent/policy");
    let manifest = fs::read_to_string(policy.join("Cargo.toml")).expect("policies have a manifest");
    assert_eq!(unexpected_dependencies(&manifest, POLICY_DEPENDENCIES), Vec::<String>::new(), "agent/policy");

    let mut complaints = Vec::new();
    for path in rust_files(&core.join("src")).into_iter().chain(rust_files(&policy.join("src"))) {
        let text = fs::read_to_string(&path).expect("a source file is readable text");
        complaints.extend(impurities(&path, &text));
    }
    assert!(
        complaints.is_empty(),
        "the core has no I/O, clock, thread or hash order:\n{}",
        complaints.join("\n")
    );
}

#[test]
fn nothing_heavy_is_linked_into_training() {
    for (package, allowed) in CLIENT_DEPENDENCIES {
        let path = repository().join(package).join("Cargo.toml");
        let manifest = fs::read_to_string(&path).expect("a package has a manifest");
        assert_eq!(unexpected_dependencies(&manifest, allowed), Vec::<String>::new(), "{package}");
    }
}

#[test]
fn the_checkpoint_tier_needs_no_runtime_and_knows_nothing_of_the_agent() {
    let manifest = fs::read_to_string(repository().join("agent/tier/Cargo.toml")).expect("a manifest");
    assert_eq!(unexpected_dependencies(&manifest, TIER_DEPENDENCIES), Vec::<String>::new(), "agent/tier");
}

#[test]
fn coordination_knows_nothing_of_the_agent() {
    let manifest = fs::read_to_string(repository().join("agent/coord/Cargo.toml")).expect("a manifest");
    assert_eq!(unexpected_dependencies(&manifest, COORD_DEPENDENCIES), Vec::<String>::new(), "agent/coord");
}

#[test]
fn each_crate_has_one_test_executable_and_no_test_file_is_left_out() {
    let folders = test_folders(&repository());
    assert!(folders.len() > 8, "{folders:?}");
    let complaints: Vec<String> = folders.iter().flat_map(|folder| test_complaints(folder)).collect();
    assert!(complaints.is_empty(), "tests:\n{}", complaints.join("\n"));
}

#[test]
fn durable_storage_knows_the_tier_and_nothing_of_the_agent() {
    let manifest = fs::read_to_string(repository().join("agent/durable/Cargo.toml")).expect("a manifest");
    assert_eq!(
        unexpected_dependencies(&manifest, DURABLE_DEPENDENCIES),
        Vec::<String>::new(),
        "agent/durable"
    );
}

#[test]
fn a_look_upwards_is_reported() {
    let planted = "use crate::os::pidfd;\nuse crate::app::App;\n";
    let found = floor_complaints(Path::new("source/heartbeat.rs"), planted);
    assert_eq!(found, ["source/heartbeat.rs:2: source (floor 2) uses app (floor 5)"]);
}

#[test]
fn a_look_sideways_is_reported_on_floor_two_only() {
    let sideways = floor_complaints(Path::new("act/signal.rs"), "fn f() { crate::store::append() }\n");
    assert_eq!(sideways, ["act/signal.rs:1: act (floor 2) uses store (floor 2)"]);
    assert!(floor_complaints(Path::new("app.rs"), "use crate::config::Config;\n").is_empty());
}

#[test]
fn a_grouped_use_is_read_too() {
    let planted = "use crate::{os::clock, cli::Args};\nuse crate::{\n    os::{pidfd, map},\n    api,\n};\n";
    let found = floor_complaints(Path::new("store/mod.rs"), planted);
    assert_eq!(
        found,
        [
            "store/mod.rs:1: store (floor 2) uses cli (floor 6)",
            "store/mod.rs:2: store (floor 2) uses api (floor 4)"
        ]
    );
}

#[test]
fn an_unlisted_room_must_choose_its_floor() {
    let found = floor_complaints(Path::new("attic/mod.rs"), "");
    assert_eq!(found.len(), 1);
    assert!(found[0].contains("choose its floor in tests/tests/floors.rs"), "{}", found[0]);
}

#[test]
fn comments_and_the_tests_of_a_room_do_not_count() {
    let text =
        "//! See crate::cli.\n// crate::app\nuse crate::os;\n#[cfg(test)]\nmod tests { use crate::cli; }\n";
    assert!(floor_complaints(Path::new("store/mod.rs"), text).is_empty());
}

#[test]
fn a_heavy_dependency_is_reported() {
    let planted = "[package]\nname = \"x\"\n[dependencies]\nnix.workspace = true\ntokio = \"1\"\n\
                   [target.'cfg(unix)'.dependencies]\nlibc = \"1\"\n[dev-dependencies]\ntempfile = \"3\"\n\
                   [dependencies.tonic]\nversion = \"0.14\"\n";
    assert_eq!(unexpected_dependencies(planted, &["nix"]), ["tokio", "libc", "tonic"]);
}

#[test]
fn a_clock_in_the_core_is_reported() {
    let found = impurities(Path::new("hang.rs"), "// Instant in words is fine\nlet now = Instant::now();\n");
    assert_eq!(found, ["hang.rs:2: Instant"]);
}

/// Each use of a room that the user's floor does not allow, as `file:line: user uses used`.
fn floor_complaints(relative: &Path, text: &str) -> Vec<String> {
    let room = room_of(relative);
    // The crate's root only lists the modules; it is on no floor.
    if room == "lib" {
        return Vec::new();
    }
    let Some(floor) = floor_of(&room) else {
        return vec![format!("{}: {}", relative.display(), unlisted(&room))];
    };
    let mut complaints = Vec::new();
    for (line, used) in rooms_used(text) {
        // A name that is no module is an item of the crate's root; the compiler checks that it exists.
        let Some(below) = floor_of(&used) else { continue };
        let allowed = used == room || below < floor || (below == floor && SHARED.contains(&floor));
        if !allowed {
            let at = relative.display();
            complaints.push(format!("{at}:{line}: {room} (floor {floor}) uses {used} (floor {below})"));
        }
    }
    complaints
}

fn unlisted(room: &str) -> String {
    format!("the room `{room}` is on no floor; let it choose its floor in tests/tests/floors.rs")
}

fn floor_of(room: &str) -> Option<u8> {
    FLOORS.iter().find(|(name, _)| *name == room).map(|(_, floor)| *floor)
}

/// The top-level module that a file below `agent/src` belongs to.
fn room_of(relative: &Path) -> String {
    let first = relative.components().next().expect("a file has a name");
    Path::new(first.as_os_str()).with_extension("").to_string_lossy().into_owned()
}

/// The line and the first segment of every `crate::…` path, in the order of the text; groups are opened.
fn rooms_used(text: &str) -> Vec<(usize, String)> {
    let code = code_only(text);
    let mut used = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let line = code[..at].matches('\n').count() + 1;
        let rest = &code[at + "crate::".len()..];
        let names = match rest.strip_prefix('{') {
            Some(group) => heads_of_group(group),
            None => vec![identifier(rest)],
        };
        used.extend(names.into_iter().filter(|name| !name.is_empty()).map(|name| (line, name)));
    }
    used
}

/// The first segment of each member of a `{…}` group; inner groups belong to their head.
fn heads_of_group(group: &str) -> Vec<String> {
    let mut heads = Vec::new();
    let mut depth = 0_usize;
    let mut member = String::new();
    for c in group.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => heads.push(identifier(std::mem::take(&mut member).trim())),
            _ if depth == 0 => member.push(c),
            _ => {}
        }
    }
    heads.push(identifier(member.trim()));
    heads
}

fn identifier(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// The text without line comments, and without the code after the first `#[cfg(test)] mod`: a module's own tests
/// may use any floor. Lines keep their numbers.
fn code_only(text: &str) -> String {
    let mut code = String::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let tests_begin = line.trim() == "#[cfg(test)]"
            && lines.peek().is_some_and(|next| next.trim_start().starts_with("mod "));
        if tests_begin {
            break;
        }
        let comment = line.find("//").unwrap_or(line.len());
        code.push_str(&line[..comment]);
        code.push('\n');
    }
    code
}

/// Forbidden words in the code of the core, as `file:line: word`.
fn impurities(path: &Path, text: &str) -> Vec<String> {
    let code = code_only(text);
    let mut found = Vec::new();
    for (index, line) in code.lines().enumerate() {
        for word in NOT_IN_CORE.iter().filter(|word| line.contains(**word)) {
            found.push(format!("{}:{}: {word}", path.display(), index + 1));
        }
    }
    found
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
