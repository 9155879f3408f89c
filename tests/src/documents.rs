//! The documents, with as much of Markdown as the checks need: lines with their kind, headings with their anchors, blocks
//! of commands.

use std::fs;
use std::path::{Path, PathBuf};

/// The languages of blocks with commands.
const SHELLS: [&str; 3] = ["console", "sh", "bash"];

/// A parsed document.
pub struct Page {
    /// Where it is, from the root of the repository.
    pub name: PathBuf,
    /// Its lines, the first one at index 0.
    pub lines: Vec<Line>,
}

/// A line and what it is.
pub struct Line {
    /// As it is in the file.
    pub text: String,
    /// What it is.
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

/// A fenced block.
pub struct Block {
    /// The index of its first line.
    pub start: usize,
    /// What its fence says.
    pub language: String,
    /// Its lines.
    pub text: String,
    /// The line before its fence.
    pub above: String,
}

/// How it is known that the commands of a block work.
#[derive(Debug, Eq, PartialEq)]
pub enum Checked {
    /// `<!-- run -->`: `it::documents` runs it as it is.
    Run,
    /// `<!-- run by FILE FUNCTION -->`: this test does what it says.
    RunBy {
        /// Its file, from the root of the repository.
        file: PathBuf,
        /// Its name there.
        function: String,
    },
    /// `<!-- not run: REASON -->`.
    NotRun,
}

impl Block {
    /// Whether it has commands.
    pub fn is_of_commands(&self) -> bool {
        SHELLS.contains(&self.language.as_str())
    }

    /// How its commands are checked; none if the line above does not say so.
    pub fn checked(&self) -> Option<Checked> {
        let said = self.above.trim().strip_prefix("<!--")?.strip_suffix("-->")?.trim();
        if said == "run" {
            return Some(Checked::Run);
        }
        if said.strip_prefix("not run: ").is_some_and(|reason| !reason.is_empty()) {
            return Some(Checked::NotRun);
        }
        let (file, function) = said.strip_prefix("run by ")?.split_once(' ')?;
        Some(Checked::RunBy { file: file.into(), function: function.to_owned() })
    }

    /// Its commands: the lines after a prompt of a `console` block, with the lines that continue them; all of a script.
    pub fn commands(&self) -> Vec<String> {
        let whole = self.text.replace("\\\n", " ");
        let lines = whole.lines().map(str::trim_start);
        match self.language.as_str() {
            "console" => lines.filter_map(after_prompt).map(ToOwned::to_owned).collect(),
            _ => lines.map(ToOwned::to_owned).collect(),
        }
    }
}

/// What follows a prompt: `$ `, or with a host, `a$ `.
fn after_prompt(line: &str) -> Option<&str> {
    let (host, command) = line.split_once("$ ")?;
    host.chars().all(char::is_alphanumeric).then_some(command)
}

/// The pages of the repository: README, changelog and everything below `docs/`.
pub fn pages(root: &Path) -> Vec<Page> {
    let mut paths = vec![root.join("README.md"), root.join("CHANGELOG.md")];
    collect(&root.join("docs"), &mut paths);
    paths.iter().map(|path| Page::read(root, path)).collect()
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

    /// Its fenced blocks.
    pub fn blocks(&self) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        let mut is_open = false;
        for (index, line) in self.lines.iter().enumerate() {
            let Kind::Code(language) = &line.kind else {
                is_open = false;
                continue;
            };
            if !is_open {
                let above =
                    index.checked_sub(2).map(|above| self.lines[above].text.clone()).unwrap_or_default();
                blocks.push(Block { start: index, language: language.clone(), text: String::new(), above });
                is_open = true;
            }
            if let Some(block) = blocks.last_mut() {
                block.text.push_str(&line.text);
                block.text.push('\n');
            }
        }
        blocks
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
            let is_comment = line.text.trim_start().starts_with("<!--");
            line.kind == Kind::Prose
                && !is_comment
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

#[test]
fn a_block_of_commands_says_how_it_is_checked() {
    let text = "<!-- run -->\n```console\n$ mainstay run \\\n    a.py\na$ true\noutput\n```\n\
                <!-- run by tests/a.rs it_works -->\n```sh\necho\n```\n<!-- not run:  -->\n```console\n$ x\n```\n\
                <!-- not run: it has no end -->\n```bash\ny\n```\n";
    let blocks = Page::parse(Path::new("a.md"), text).blocks();
    let checked: Vec<Option<Checked>> = blocks.iter().map(Block::checked).collect();
    let by = Checked::RunBy { file: "tests/a.rs".into(), function: "it_works".to_owned() };
    assert_eq!(checked, [Some(Checked::Run), Some(by), None, Some(Checked::NotRun)]);
    assert_eq!(blocks[0].commands(), ["mainstay run      a.py", "true"]);
    assert_eq!(blocks[1].commands(), ["echo"]);
}
