//! Checks the documents: links, code blocks, line lengths.

mod blocks;
mod links;
mod markdown;

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
