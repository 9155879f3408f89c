//! Checks the texts for people: links, code blocks, line lengths, and words that must not come back
//! (`docs/style.md`).

mod blocks;
mod links;
mod literals;
mod markdown;
mod words;

use std::fs;
use std::path::{Path, PathBuf};

use markdown::Page;

/// Columns at which prose wraps.
const COLUMNS: usize = 100;

/// The pages of the repository: README, changelog and everything below `docs/`.
fn pages() -> Vec<Page> {
    let root = super::repository();
    let mut paths = vec![root.join("README.md"), root.join("CHANGELOG.md")];
    collect(&root.join("docs"), &mut paths);
    paths.iter().map(|path| Page::read(&root, path)).collect()
}

/// Adds the Markdown files below a directory, in order of their names.
fn collect(directory: &Path, paths: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(directory).expect("a directory of documents can be listed");
    let mut entries: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry has a name").path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            collect(&path, paths);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            paths.push(path);
        }
    }
}

fn assert_none(what: &str, complaints: &[String]) {
    assert!(complaints.is_empty(), "{what} ({}):\n{}", complaints.len(), complaints.join("\n"));
}

#[test]
fn every_link_of_the_documents_resolves() {
    let pages = pages();
    assert!(pages.len() > 20, "the documents were found");
    assert_none("links", &links::complaints(&super::repository(), &pages));
}

#[test]
fn the_book_lists_every_page_once() {
    assert_none("docs/SUMMARY.md", &links::not_in_the_book(&pages()));
}

#[test]
fn code_blocks_parse_in_their_language() {
    let complaints: Vec<String> = pages().iter().flat_map(blocks::complaints).collect();
    assert_none("code blocks", &complaints);
}

#[test]
fn prose_wraps() {
    let complaints: Vec<String> = pages().iter().flat_map(|page| page.long_lines(COLUMNS)).collect();
    assert_none("lines of more than 100 columns", &complaints);
}

#[test]
fn the_documents_have_none_of_the_words_that_must_not_come_back() {
    let complaints: Vec<String> = pages().iter().flat_map(words::complaints).collect();
    assert_none("words", &complaints);
}

#[test]
fn the_help_texts_have_none_of_them_either() {
    let sources = super::repository().join("agent/src/cli");
    let complaints: Vec<String> = super::rust_files(&sources)
        .iter()
        .flat_map(|path| {
            let text = fs::read_to_string(path).expect("a source file is readable text");
            words::in_help(path, &text)
        })
        .collect();
    assert_none("help texts", &complaints);
}

#[test]
fn the_texts_that_the_program_prints_have_none_of_them_either() {
    let sources = super::repository().join("agent");
    let complaints: Vec<String> = super::rust_files(&sources)
        .iter()
        .filter(|path| is_of_the_program(path))
        .flat_map(|path| {
            let text = fs::read_to_string(path).expect("a source file is readable text");
            words::in_literals(path, &text)
        })
        .collect();
    assert_none("texts", &complaints);
}

#[test]
fn comments_and_the_names_of_tests_have_none_of_them_either() {
    let root = super::repository();
    let mut sources = Vec::new();
    for part in ["agent", "client", "proto", "tests", "xtask", "fuzz/fuzz_targets", "fuzz/src"] {
        sources.extend(super::rust_files(&root.join(part)));
    }
    let lists_them = root.join("tests/tests/prose/words.rs");
    let complaints: Vec<String> = sources
        .iter()
        .filter(|path| **path != lists_them)
        .flat_map(|path| {
            let text = fs::read_to_string(path).expect("a source file is readable text");
            words::in_comments(path, &text)
        })
        .collect();
    assert!(sources.len() > 1000, "the sources were found: {}", sources.len());
    assert_none("comments and names of tests", &complaints);
}

#[test]
fn the_built_in_policy_and_the_catalog_of_hardware_have_none_of_them_either() {
    let agent = super::repository().join("agent");
    let tables = fs::read_dir(agent.join("catalog/hardware")).expect("the catalog is a directory");
    let tables = tables.map(|entry| entry.expect("it can be listed").path());
    let files = tables.chain([agent.join("policy/default.star")]);
    let complaints: Vec<String> = files
        .flat_map(|path| {
            let text = fs::read_to_string(&path).expect("it is readable text");
            words::in_strings(&path, &text)
        })
        .collect();
    assert_none("texts", &complaints);
}

/// Whether a source is part of the released program: no test, no example, and not the simulator.
fn is_of_the_program(path: &Path) -> bool {
    let name = path.to_string_lossy();
    !["/tests/", "/examples/", "/tests.rs", "/sim/"].iter().any(|part| name.contains(part))
}
