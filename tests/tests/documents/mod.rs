//! Checks the documents: links, code blocks, commands, line lengths.

mod blocks;
mod commands;
mod links;

use mainstay_tests::documents::{self, Page};

/// Columns at which prose wraps.
const COLUMNS: usize = 100;

fn pages() -> Vec<Page> {
    documents::pages(&super::repository())
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
fn each_block_of_commands_is_run_or_says_why_not() {
    let complaints =
        pages().iter().flat_map(|page| commands::unchecked(&super::repository(), page)).collect::<Vec<_>>();
    assert_none("blocks of commands", &complaints);
}

#[test]
fn the_program_accepts_each_command_of_the_documents() {
    let complaints: Vec<String> = pages().iter().flat_map(commands::refused).collect();
    assert_none("command lines", &complaints);
}

#[test]
fn prose_wraps() {
    let complaints: Vec<String> = pages().iter().flat_map(|page| page.long_lines(COLUMNS)).collect();
    assert_none("lines of more than 100 columns", &complaints);
}
