//! As much of Markdown as the checks need: lines with their kind, headings with their anchors.

use std::fs;
use std::path::{Path, PathBuf};

/// A parsed document.
pub struct Page {
    /// Where it is, from the root of the repository.
    pub name: PathBuf,
    /// Its lines, the first one at index 0.
    pub lines: Vec<Line>,
}

/// A line and what it is.
pub struct Line {
    pub text: String,
    pub kind: Kind,
}

/// What a line is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Kind {
    /// Text of a paragraph, a list or a heading.
    Prose,
    /// A row of a table.
    Table,
    /// Within a fenced block, of this language.
    Code(String),
    /// The first or last line of such a block.
    Fence,
}

impl Page {
    /// Reads a file of the repository.
    pub fn read(root: &Path, path: &Path) -> Self {
        let text = fs::read_to_string(path).expect("a document is readable text");
        let name = path.strip_prefix(root).expect("a document is in the repository");
        Self::parse(name, &text)
    }

    /// Reads text.
    pub fn parse(name: &Path, text: &str) -> Self {
        let mut fence: Option<String> = None;
        let lines = text.lines().map(|line| {
            let kind = match (line.trim_start().strip_prefix("```"), fence.clone()) {
                (Some(language), None) => {
                    fence = Some(language.trim().to_owned());
                    Kind::Fence
                }
                (Some(_), Some(_)) => {
                    fence = None;
                    Kind::Fence
                }
                (None, Some(language)) => Kind::Code(language),
                (None, None) if line.trim_start().starts_with('|') => Kind::Table,
                (None, None) => Kind::Prose,
            };
            Line { text: line.to_owned(), kind }
        });
        Self { name: name.to_owned(), lines: lines.collect() }
    }

    /// Where a line is, for a complaint: name and number from 1.
    pub fn at(&self, index: usize) -> String {
        format!("{}:{}", self.name.display(), index + 1)
    }

    /// The anchors of the headings, as GitHub and mdBook make them.
    pub fn anchors(&self) -> Vec<String> {
        let mut anchors: Vec<String> = Vec::new();
        for line in self.lines.iter().filter(|line| line.kind == Kind::Prose) {
            let Some((_, heading)) =
                line.text.split_once("# ").filter(|(hashes, _)| hashes.chars().all(|c| c == '#'))
            else {
                continue;
            };
            let plain = anchor(heading);
            let again = anchors.iter().filter(|known| **known == plain).count();
            anchors.push(if again == 0 { plain } else { format!("{plain}-{again}") });
        }
        anchors
    }

    /// Lines of prose that are too long. A line without a space to break at (a link) is not one.
    pub fn long_lines(&self, columns: usize) -> Vec<String> {
        let too_long = |line: &Line| {
            line.kind == Kind::Prose
                && line.text.chars().count() > columns
                && line.text.trim_start().split(' ').all(|word| word.chars().count() < columns / 2)
        };
        let lines = self.lines.iter().enumerate().filter(|(_, line)| too_long(line));
        lines
            .map(|(index, line)| format!("{}: {} columns", self.at(index), line.text.chars().count()))
            .collect()
    }
}

/// The anchor of a heading: lower case, spaces as hyphens, without punctuation.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

#[test]
fn headings_get_the_anchors_of_github() {
    let text =
        "# The API\n## `mainstay.dcp`\n## A host: ready?\n## A host: ready?\n```text\n# no heading\n```\n";
    let page = Page::parse(Path::new("a.md"), text);
    assert_eq!(page.anchors(), ["the-api", "mainstaydcp", "a-host-ready", "a-host-ready-1"]);
}

#[test]
fn long_prose_is_reported_and_long_tables_and_code_are_not() {
    let long = "word ".repeat(30);
    let text = format!("{long}\n| {long} |\n```text\n{long}\n```\n[x](https://{})\n", "a".repeat(120));
    let found = Page::parse(Path::new("a.md"), &text).long_lines(100);
    assert_eq!(found, ["a.md:1: 150 columns"]);
}
