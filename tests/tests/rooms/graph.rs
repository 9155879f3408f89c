//! Which file of a crate uses which: read from its `use` declarations and inline paths.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use super::super::{code_only, rust_files};
use super::module_of;

/// The maximum depth of aliases to follow.
const DEEPEST: usize = 6;

/// The files of a crate by their module paths.
pub struct Graph {
    edges: BTreeMap<String, BTreeSet<String>>,
}

impl Graph {
    /// Reads the sources below a folder.
    pub fn read(source: &Path) -> Graph {
        let files: Vec<(String, String)> = rust_files(source)
            .iter()
            .filter_map(|path| {
                let module = module_of(path.strip_prefix(source).ok()?)?;
                Some((module, fs::read_to_string(path).ok()?))
            })
            .collect();
        let files: Vec<(&str, &str)> =
            files.iter().map(|(module, text)| (module.as_str(), text.as_str())).collect();
        Graph::of(&files)
    }

    /// Makes the graph of these modules and their texts.
    pub fn of(files: &[(&str, &str)]) -> Graph {
        let modules: BTreeSet<&str> = files.iter().map(|(module, _)| *module).collect();
        let paths: BTreeMap<&str, Vec<Used>> =
            files.iter().map(|(module, text)| (*module, used(module, &code_only(text), &modules))).collect();
        let mut edges = BTreeMap::new();
        for (module, uses) in &paths {
            let to: BTreeSet<String> = uses
                .iter()
                .map(|of| resolve(&of.path, &modules, &paths, 0))
                .filter(|to| !are_related(module, to))
                .collect();
            edges.insert((*module).to_owned(), to);
        }
        Graph { edges }
    }

    /// Each use of a file by another.
    pub fn edges(&self) -> impl Iterator<Item = (&str, &str)> {
        self.edges.iter().flat_map(|(from, to)| to.iter().map(move |to| (from.as_str(), to.as_str())))
    }

    /// Groups of files each of which reaches all others.
    pub fn cycles(&self) -> Vec<Vec<String>> {
        let reach: BTreeMap<&str, BTreeSet<&str>> =
            self.edges.keys().map(|from| (from.as_str(), self.reach(from))).collect();
        let mut cycles = BTreeSet::new();
        for (from, reached) in &reach {
            if !reached.contains(from) {
                continue;
            }
            let back = reached.iter().filter(|to| reach.get(*to).is_some_and(|back| back.contains(from)));
            cycles.insert(back.map(|of| (*of).to_owned()).collect::<Vec<_>>());
        }
        cycles.into_iter().collect()
    }

    fn reach<'a>(&'a self, from: &str) -> BTreeSet<&'a str> {
        let mut reached = BTreeSet::new();
        let mut next: Vec<&str> = vec![from];
        while let Some(of) = next.pop() {
            for to in self.edges.get(of).into_iter().flatten() {
                if reached.insert(to.as_str()) {
                    next.push(to);
                }
            }
        }
        reached
    }
}

/// A path that a file uses, from the crate's root, and its local name.
struct Used {
    path: Vec<String>,
    name: String,
}

/// Whether one is above the other, or they are the same.
fn are_related(one: &str, other: &str) -> bool {
    let above = |above: &str, below: &str| {
        above.is_empty()
            || below == above
            || below.strip_prefix(above).is_some_and(|rest| rest.starts_with("::"))
    };
    above(one, other) || above(other, one)
}

/// The module that has the item at a path: the deepest module on the path, or the one that it re-exports the name
/// from.
fn resolve(
    path: &[String],
    modules: &BTreeSet<&str>,
    paths: &BTreeMap<&str, Vec<Used>>,
    depth: usize,
) -> String {
    let mut length = path.len();
    while length > 0 && !modules.contains(path[..length].join("::").as_str()) {
        length -= 1;
    }
    let module = path[..length].join("::");
    let (Some(name), true) = (path.get(length), depth < DEEPEST) else { return module };
    let aliased = paths.get(module.as_str()).into_iter().flatten().find(|of| {
        let own: Vec<&str> =
            module.split("::").chain([name.as_str()]).filter(|part| !part.is_empty()).collect();
        of.name == *name && of.path != own
    });
    match aliased {
        Some(of) => resolve(&of.path, modules, paths, depth + 1),
        None => module,
    }
}

/// The paths that a text uses: `use` trees taken apart, and inline paths that start at the crate's root.
fn used(module: &str, code: &str, modules: &BTreeSet<&str>) -> Vec<Used> {
    let mut found = Vec::new();
    for statement in code.split(';') {
        let Some(at) = statement.rfind("use ").filter(|at| is_a_use(&statement[..*at])) else { continue };
        let mut tree = Vec::new();
        open(&[], &statement[at + "use ".len()..], &mut tree);
        found.extend(
            tree.into_iter()
                .filter_map(|(path, name)| Some(Used { path: from_root(module, &path, modules)?, name })),
        );
    }
    for (at, _) in code.match_indices("crate::") {
        let path: String =
            code[at..].chars().take_while(|c| c.is_alphanumeric() || *c == '_' || *c == ':').collect();
        let path: Vec<String> = path.split("::").map(str::to_owned).filter(|part| !part.is_empty()).collect();
        if let Some(path) = from_root(module, &path, modules) {
            found.push(Used { path, name: String::new() });
        }
    }
    found
}

/// Whether the text before `use` makes it a declaration: the end of another item, attributes, a visibility.
fn is_a_use(before: &str) -> bool {
    let line = before.rsplit('\n').next().unwrap_or("").trim();
    line.is_empty() || line == "pub" || (line.starts_with("pub(") && line.ends_with(')'))
}

/// Takes a `use` tree apart: each leaf's path, and its local name.
fn open(before: &[String], tree: &str, leaves: &mut Vec<(Vec<String>, String)>) {
    let tree = tree.trim();
    let Some(at) = tree.find('{') else {
        let (path, name) = match tree.split_once(" as ") {
            Some((path, name)) => (path, Some(name.trim().to_owned())),
            None => (tree, None),
        };
        let mut full = before.to_vec();
        full.extend(path.split("::").map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()));
        if full.last().is_some_and(|last| last == "self" && full.len() > 1) {
            full.pop();
        }
        if full.last().is_some_and(|last| last == "*") {
            full.pop();
        }
        let name = name.or_else(|| full.last().cloned()).unwrap_or_default();
        leaves.push((full, name));
        return;
    };
    let mut head = before.to_vec();
    head.extend(tree[..at].split("::").map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()));
    let inner = tree[at + 1..].trim_end().strip_suffix('}').unwrap_or(&tree[at + 1..]);
    let (mut depth, mut member) = (0_usize, String::new());
    for c in inner.chars().chain([',']) {
        match c {
            ',' if depth == 0 => {
                if !member.trim().is_empty() {
                    open(&head, &member, leaves);
                }
                member.clear();
                continue;
            }
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        member.push(c);
    }
}

/// The path from the crate's root; none for items of other crates.
fn from_root(module: &str, path: &[String], modules: &BTreeSet<&str>) -> Option<Vec<String>> {
    let own: Vec<String> = module.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect();
    let mut rest = path;
    let mut base = match path.first().map(String::as_str)? {
        "crate" => {
            rest = &rest[1..];
            Vec::new()
        }
        "self" => {
            rest = &rest[1..];
            own
        }
        "super" => {
            let mut base = own;
            while rest.first().is_some_and(|part| part == "super") {
                base.pop();
                rest = &rest[1..];
            }
            base
        }
        // A child of this module, named without `self::`.
        first => {
            let child: Vec<&str> = own.iter().map(String::as_str).chain([first]).collect();
            if !modules.contains(child.join("::").as_str()) {
                return None;
            }
            own
        }
    };
    base.extend(rest.iter().cloned());
    Some(base)
}
