//! Code blocks that claim a language parse in it.

use mainstay_tests::documents::{Block, Page};

/// Blocks of TOML and JSON that do not parse.
pub fn complaints(page: &Page) -> Vec<String> {
    let mut complaints = Vec::new();
    for Block { start, language, text, .. } in page.blocks() {
        let wrong = match language.as_str() {
            "toml" => text.parse::<toml::Table>().err().map(|error| error.to_string()),
            "json" => serde_json::from_str::<serde_json::Value>(&text).err().map(|error| error.to_string()),
            _ => None,
        };
        complaints.extend(wrong.map(|why| format!("{}: no {language}: {why}", page.at(start))));
    }
    complaints
}

#[test]
fn a_block_that_does_not_parse_is_reported() {
    let text =
        "```toml\na = 1\n[b]\nc = 2\n```\n```json\n{\"a\": }\n```\n```toml\na =\n```\n```text\n{\n```\n";
    let found = complaints(&Page::parse(std::path::Path::new("a.md"), text));
    let starts: Vec<&str> = found.iter().map(|line| line.split(": no ").next().unwrap_or_default()).collect();
    assert_eq!(starts, ["a.md:7", "a.md:10"]);
}
