//! The modules of the core are in order, and no two files of a crate depend on each other.
//!
//! A parent lists its children and a child may use items of its parent: edges between a module and its descendants
//! do not count. Paths are followed through `use` to the file that defines the name.

mod graph;

use std::collections::BTreeSet;
use std::path::Path;

use graph::Graph;

/// The modules of the core in the order of `agent/core/src/lib.rs`: each uses only those before it.
const ROOMS: [&str; 11] = [
    "base",
    "model",
    "formats",
    "hardware",
    "host",
    "hang",
    "progress",
    "failure",
    "checkpoint",
    "recovery",
    "view",
];

/// Crates in which no two files depend on each other.
const CRATES: [&str; 8] = [
    "agent",
    "agent/core",
    "agent/durable",
    "agent/policy",
    "agent/tier",
    "client",
    "proto/checkpoint",
    "proto/heartbeat",
];

/// Files that still depend on each other. The list may only get shorter: remove a cycle that no longer exists.
const STILL: [&str; 0] = [];

#[test]
fn a_room_of_the_core_uses_only_the_rooms_before_it() {
    let graph = Graph::read(&super::repository().join("agent/core/src"));
    let place = |room: &str| ROOMS.iter().position(|of| *of == room);
    let mut complaints = BTreeSet::new();
    for (from, to) in graph.edges() {
        let room = |path: &str| path.split("::").next().unwrap_or(path).to_owned();
        let (user, used) = (room(from), room(to));
        let Some(of_user) = place(&user) else {
            complaints.insert(format!("the room `{user}` has no place in tests/tests/rooms/mod.rs"));
            continue;
        };
        if place(&used).is_some_and(|of_used| of_used > of_user) {
            complaints.insert(format!("{from} uses {to}"));
        }
    }
    assert!(complaints.is_empty(), "agent/core/src:\n{}", lines(&complaints));
}

#[test]
fn no_two_files_need_each_other() {
    let mut found = BTreeSet::new();
    for of in CRATES {
        let graph = Graph::read(&super::repository().join(of).join("src"));
        found.extend(graph.cycles().into_iter().map(|cycle| format!("{of}: {}", cycle.join(", "))));
    }
    let still: BTreeSet<String> = STILL.iter().map(|cycle| (*cycle).to_owned()).collect();
    let new: BTreeSet<String> = found.difference(&still).cloned().collect();
    let gone: BTreeSet<String> = still.difference(&found).cloned().collect();
    assert!(new.is_empty(), "files that need each other:\n{}", lines(&new));
    assert!(gone.is_empty(), "no cycles any more, to be taken from the list:\n{}", lines(&gone));
}

#[test]
fn a_cycle_through_a_re_export_is_found() {
    let graph = Graph::of(&[
        ("", "mod a;\nmod b;\npub use b::Thing;\n"),
        ("a", "use crate::Thing;\npub struct Other;\n"),
        ("b", "use super::a::{self, Other};\npub struct Thing;\n"),
        ("c", "use crate::a::Other;\n"),
    ]);
    assert_eq!(graph.cycles(), [vec!["a".to_owned(), "b".to_owned()]]);
}

#[test]
fn a_parent_and_its_child_are_no_cycle() {
    let graph = Graph::of(&[
        ("", "mod job;\n"),
        ("job", "mod deciding;\nuse deciding::decide;\npub struct Job;\n"),
        ("job::deciding", "use super::Job;\npub fn decide() {}\n"),
    ]);
    assert_eq!(graph.cycles(), Vec::<Vec<String>>::new());
}

fn lines(complaints: &BTreeSet<String>) -> String {
    complaints.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
}

/// The module path of a source file below `src`: `hang::watch` for `hang/watch.rs`, nothing for the crate's root.
fn module_of(relative: &Path) -> Option<String> {
    let mut parts: Vec<String> =
        relative.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
    match parts.last().map(String::as_str) {
        Some("tests" | "main") => return None,
        Some("mod" | "lib") => drop(parts.pop()),
        _ => {}
    }
    (!parts.iter().any(|part| part == "tests")).then(|| parts.join("::"))
}
