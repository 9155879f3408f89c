//! Relative links: the file exists, and so does the heading.

use std::path::{Component, Path, PathBuf};

use mainstay_tests::documents::{Kind, Page};

/// Links that lead nowhere.
pub fn complaints(root: &Path, pages: &[Page]) -> Vec<String> {
    let mut complaints = Vec::new();
    for page in pages {
        for (index, line) in page.lines.iter().enumerate() {
            if !matches!(line.kind, Kind::Prose | Kind::Table) {
                continue;
            }
            for target in targets(&line.text) {
                if let Some(why) = wrong(root, pages, page, &target) {
                    complaints.push(format!("{}: {target}: {why}", page.at(index)));
                }
            }
        }
    }
    complaints
}

/// Pages below `docs/` that the table of contents does not have exactly once.
pub fn not_in_the_book(pages: &[Page]) -> Vec<String> {
    let summary = Path::new("docs/SUMMARY.md");
    let book = pages.iter().find(|page| page.name == summary).expect("the book has a table of contents");
    let listed: Vec<PathBuf> = book
        .lines
        .iter()
        .flat_map(|line| targets(&line.text))
        .map(|target| resolve(&book.name, &target))
        .collect();
    let pages = pages.iter().filter(|page| page.name.starts_with("docs") && page.name != summary);
    pages
        .map(|page| (page, listed.iter().filter(|name| **name == page.name).count()))
        .filter(|(_, times)| *times != 1)
        .map(|(page, times)| format!("{} is listed {times} times", page.name.display()))
        .collect()
}

/// What is wrong with a link; links to other sites are not checked.
fn wrong(root: &Path, pages: &[Page], from: &Page, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    let name = if file.is_empty() { from.name.clone() } else { resolve(&from.name, file) };
    if !file.is_empty() && !root.join(&name).exists() {
        return Some(format!("there is no {}", name.display()));
    }
    if anchor.is_empty() {
        return None;
    }
    let page = pages.iter().find(|page| page.name == name)?;
    let anchors = page.anchors();
    (!anchors.iter().any(|known| known == anchor)).then(|| format!("{} has no such heading", name.display()))
}

/// The targets of a line's links, without those in code.
fn targets(line: &str) -> Vec<String> {
    let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join("``");
    let ends = prose.split("](").skip(1);
    ends.filter_map(|rest| closed(rest)).map(|target| target.trim().to_owned()).collect()
}

/// The text up to the parenthesis that closes it; parentheses opened within it belong to it.
fn closed(rest: &str) -> Option<&str> {
    let mut open = 0;
    for (at, c) in rest.char_indices() {
        match c {
            '(' => open += 1,
            ')' if open == 0 => return Some(&rest[..at]),
            ')' => open -= 1,
            _ => {}
        }
    }
    None
}

/// A target as a path from the root, `..` resolved.
fn resolve(from: &Path, target: &str) -> PathBuf {
    let mut path = from.parent().map(Path::to_path_buf).unwrap_or_default();
    for part in Path::new(target).components() {
        match part {
            Component::ParentDir => {
                path.pop();
            }
            Component::Normal(name) => path.push(name),
            _ => {}
        }
    }
    path
}

#[test]
fn a_link_to_nowhere_is_reported_and_one_that_resolves_is_not() {
    let text = "# Here\n[a](style.md#words) [c](#here) [d](https://example.org/x)\n`[e](gone.md)`\n";
    let good = Page::parse(Path::new("docs/a.md"), text);
    let style = Page::parse(Path::new("docs/style.md"), "# Style\n## Words\n");
    let bad =
        Page::parse(Path::new("docs/README.md"), "[x](#nowhere)\n[y](gone.md)\n[z](style.md#nowhere)\n");
    let root = super::super::repository();
    let found = complaints(&root, &[good, style, bad]);
    assert_eq!(
        found,
        [
            "docs/README.md:1: #nowhere: docs/README.md has no such heading",
            "docs/README.md:2: gone.md: there is no docs/gone.md",
            "docs/README.md:3: style.md#nowhere: docs/style.md has no such heading",
        ]
    );
}

#[test]
fn a_page_that_the_book_lacks_is_reported() {
    let book = Page::parse(Path::new("docs/SUMMARY.md"), "- [A](a.md)\n- [B](x/b.md)\n- [B](x/b.md)\n");
    let pages = ["docs/a.md", "docs/x/b.md", "docs/c.md", "README.md"];
    let mut pages: Vec<Page> = pages.iter().map(|name| Page::parse(Path::new(name), "")).collect();
    pages.push(book);
    assert_eq!(not_in_the_book(&pages), ["docs/x/b.md is listed 2 times", "docs/c.md is listed 0 times"]);
}
