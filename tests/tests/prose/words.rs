//! Words and phrases that must not come back: they read like a translation, and each has a standard term
//! (`docs/style.md`). Chosen so that next to no sentence needs one of them.

use std::path::Path;

use super::literals;
use super::markdown::{Kind, Page};

/// What must not be in documents and help texts, in lower case, between word boundaries, and what to write.
const BANNED: &[(&str, &str)] = &[
    ("mend", "fix, repair"),
    ("mends", "fixes, repairs"),
    ("mended", "fixed, repaired"),
    ("anew", "again"),
    ("hears", "receives, reads"),
    ("is heard", "is received"),
    ("are heard", "are received"),
    ("tells apart", "distinguishes"),
    ("told apart", "distinguished"),
    ("is told", "is reported"),
    ("are told", "are reported"),
    ("was told", "was reported"),
    ("tells of", "reports"),
    ("tell of", "report"),
    ("told of", "reported"),
    ("cannot be told", "is unknown"),
    ("it is said", "name who reports it"),
    ("stands in", "is in; replaces"),
    ("stand in", "are in; replace"),
    ("stands by", "is on standby"),
    ("stand back", "yield"),
    ("lies in", "is in"),
    ("lies on", "is on"),
    ("lie on", "are on"),
    ("rests on", "is based on"),
    ("rest on", "are based on"),
    ("not known", "unknown"),
    ("is known of", "name what is unknown"),
    ("passed over", "skipped"),
    ("passes over", "skips"),
    ("goes by", "follows"),
    ("gives way", "yields"),
    ("give way", "yield"),
    ("given up", "abandoned"),
    ("brings about", "causes"),
    ("bring about", "cause"),
    ("brought about", "caused"),
    ("comes of it", "the outcome"),
    ("came of it", "the outcome"),
    ("comes again", "repeats, recurs"),
    ("come again", "repeat, recur"),
    ("begun", "started"),
    ("begins", "starts"),
    ("nobody", "no one, no process"),
    ("whoever", "anyone who"),
    ("whomever", "anyone"),
    ("otherwise than", "different from"),
    ("in so many words", "explicitly"),
    ("of yours", "your"),
    ("of one's own", "your own"),
    ("one's own", "your own"),
    ("so many-th", "every N"),
    ("for ever", "forever"),
    ("to be had", "available"),
    ("beside the", "next to the, in addition to the"),
    ("whatever comes", "the result"),
    ("on end", "in a row"),
    ("sick", "unhealthy"),
    ("healthy lines", "lines of runs without a failure"),
    ("is at rest", "is idle"),
    ("at rest", "on an idle machine"),
    ("the house", "the program"),
    ("lemons", "faulty hosts"),
    ("hands for", "name what is supported"),
    ("last words", "exit note, last lines"),
    ("keeps quiet", "reports nothing"),
    ("it had better", "the advised interval"),
    ("had better", "should"),
    ("not there yet", "not implemented"),
    ("stumbles", "fails"),
    ("the books", "time accounting"),
];

/// The page that lists such words as examples.
const EXAMPLES: &str = "docs/style.md";

/// Banned words in the prose and tables of a document.
pub fn complaints(page: &Page) -> Vec<String> {
    let name = page.name.to_string_lossy();
    if name == EXAMPLES {
        return Vec::new();
    }
    let mut complaints = Vec::new();
    for (index, line) in page.lines.iter().enumerate() {
        if !matches!(line.kind, Kind::Prose | Kind::Table) {
            continue;
        }
        for (word, instead) in found(&without_code(&line.text)) {
            complaints.push(format!("{}: {word:?}: {instead}", page.at(index)));
        }
    }
    complaints
}

/// Banned words in a command's help: doc comments of what clap reads, and the texts after the options.
pub fn in_help(path: &Path, source: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let arguments = source.split_once("#[cfg(test)]").map_or(source, |(before, _)| before);
    for (index, line) in help_lines(arguments) {
        for (word, instead) in found(&without_code(line)) {
            complaints.push(format!("{}:{}: {word:?}: {instead}", path.display(), index + 1));
        }
    }
    complaints
}

/// Banned words in the texts that a source prints: its string literals of several words.
pub fn in_literals(path: &Path, source: &str) -> Vec<String> {
    let prose = literals::of_rust(source).into_iter().filter(|(_, text)| text.contains(' '));
    let complain = |(line, text): (usize, String)| {
        let complain = |(word, instead)| format!("{}:{line}: {word:?}: {instead}", path.display());
        found(&without_code(&text)).into_iter().map(complain).collect::<Vec<_>>()
    };
    prose.flat_map(complain).collect()
}

/// Banned words in the comments of a Rust source, and in the names of its tests.
pub fn in_comments(path: &Path, source: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let (mut is_test, mut is_code) = (false, false);
    for (index, line) in source.lines().enumerate() {
        let trimmed = line.trim_start();
        let is_fence = trimmed.trim_start_matches(['/', '!', ' ']).starts_with("```");
        is_code = trimmed.starts_with("//") && (is_code ^ is_fence);
        let text = match test_name(trimmed).filter(|_| is_test) {
            Some(name) => name.replace('_', " "),
            None if trimmed.starts_with("//") && !is_code => without_code(trimmed),
            None => String::new(),
        };
        is_test = trimmed.starts_with("#[test]")
            || trimmed.starts_with("#[tokio::test")
            || (is_test && trimmed.starts_with("#["));
        for (word, instead) in found(&text) {
            complaints.push(format!("{}:{}: {word:?}: {instead}", path.display(), index + 1));
        }
    }
    complaints
}

/// The name of the function that a line declares.
fn test_name(line: &str) -> Option<&str> {
    let name = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ")?;
    name.split('(').next()
}

/// The same of a file whose comments start with `#`: policies and catalogs.
pub fn in_strings(path: &Path, source: &str) -> Vec<String> {
    let is_comment = |line: &&str| line.trim_start().starts_with('#');
    let without: Vec<&str> = source.lines().map(|line| if is_comment(&line) { "" } else { line }).collect();
    in_literals(path, &without.join("\n"))
}

/// The lines of a source that clap shows: doc comments and what is added below the options.
fn help_lines(source: &str) -> Vec<(usize, &str)> {
    let mut lines = Vec::new();
    let mut constant = false;
    for (index, line) in source.lines().enumerate() {
        let trimmed = line.trim_start();
        constant |= trimmed.starts_with("const EXAMPLES: &str") || trimmed.starts_with("const EXAMPLE: &str");
        if constant || trimmed.starts_with("/// ") {
            lines.push((index, trimmed));
        }
        constant &= !trimmed.ends_with("\";");
    }
    lines
}

/// The banned words of a line, each once.
fn found(line: &str) -> Vec<(&'static str, &'static str)> {
    let lower = line.to_lowercase();
    BANNED.iter().filter(|(word, _)| has_word(&lower, word)).copied().collect()
}

/// Whether a word or phrase is in a line, with no letter before or behind it.
fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let behind = line[at + word.len()..].chars().next();
        let apart = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric() && c != '_' && c != '-');
        apart(before) && apart(behind)
    })
}

/// The line without what is between backquotes: names are not prose.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

#[test]
fn a_banned_word_is_reported_with_what_to_write() {
    let page = Page::parse(Path::new("a.md"), "It is Mended\nby hand.\n```text\nmended\n```\n| begun |\n");
    let found = complaints(&page);
    assert_eq!(found, ["a.md:1: \"mended\": fixed, repaired", "a.md:6: \"begun\": started"]);
}

#[test]
fn parts_of_words_and_names_are_no_banned_words() {
    let page =
        Page::parse(Path::new("a.md"), "A recommended amendment; `begun` and not_begun.\nHomesickness.\n");
    assert_eq!(complaints(&page), Vec::<String>::new());
}

#[test]
fn help_is_read_and_other_code_is_not() {
    let source =
        "/// Mend it\nfn a() { let mend = 1; }\nconst EXAMPLES: &str = \"\\\nanew\";\nlet s = \"anew\";\n";
    let found = in_help(Path::new("a.rs"), source);
    assert_eq!(found.len(), 2, "{found:?}");
}

#[test]
fn comments_and_names_of_tests_are_read_and_other_names_are_not() {
    let source = "//! Begins here\n//! ```text\n//! begun\n//! ```\nfn not_known() {} // begun\n#[test]\n#[ignore]\nfn it_is_not_known() {}\n    // `begun`\n";
    let found = in_comments(Path::new("a.rs"), source);
    assert_eq!(found, ["a.rs:1: \"begins\": starts", "a.rs:8: \"not known\": unknown"]);
}
