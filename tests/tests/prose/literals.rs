//! The texts that the program prints: string literals of its sources that are prose. Tests and comments are left
//! out.

/// The string literals of a Rust source before its tests, each with the number of the line on which it starts (from 1).
pub fn of_rust(source: &str) -> Vec<(usize, String)> {
    let source = source.split_once("#[cfg(test)]\nmod tests {").map_or(source, |(before, _)| before);
    let mut found = Vec::new();
    let mut line = 1;
    let mut rest = source;
    while let Some(next) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if let Some(open) = raw_string(rest) {
            let close = format!("\"{}", "#".repeat(open - 2));
            rest[open..].find(&close).map_or(rest.len(), |end| open + end + close.len())
        } else if next == '"' {
            let end = end_of_string(&rest[1..]);
            found.push((line, unfolded(&rest[1..=end])));
            end + 2
        } else {
            character(rest).unwrap_or(next.len_utf8())
        };
        let length = length.min(rest.len());
        line += rest[..length].matches('\n').count();
        rest = &rest[length..];
    }
    found
}

/// The length of `r#"` in bytes, if the text starts with it. Raw strings hold patterns, scripts and samples, not
/// prose.
fn raw_string(text: &str) -> Option<usize> {
    let marks = text.strip_prefix('r')?.chars().take_while(|mark| *mark == '#').count();
    text[1 + marks..].starts_with('"').then_some(marks + 2)
}

/// The position of the quotation mark that ends the string with this first byte.
fn end_of_string(text: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'"' if !escaped => return at,
            b'\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    text.len().saturating_sub(1)
}

/// The length of a character literal, whose quotation mark starts no string; none for a lifetime.
fn character(text: &str) -> Option<usize> {
    let inside = text.strip_prefix('\'')?;
    let length = if inside.starts_with('\\') { 2 } else { inside.chars().next()?.len_utf8() };
    inside[length..].starts_with('\'').then_some(length + 2)
}

/// A literal without the folds of its lines.
fn unfolded(literal: &str) -> String {
    let mut lines = literal.split("\\\n");
    let first = lines.next().unwrap_or_default().to_owned();
    lines.fold(first, |all, line| all + line.trim_start())
}

#[test]
fn literals_are_found_and_comments_characters_patterns_and_tests_are_not() {
    let source = "// \"a comment\"\nlet a = \"one \\\"two\\\" \\\n    three\"; let b = '\"';\nlet c = r#\"a pattern\"#;\n\
        fn d<'a>(e: &'a str) { say(\"four\"); }\n#[cfg(test)]\nmod tests {\n \"five\" }";
    let found = of_rust(source);
    assert_eq!(found, [(2, "one \\\"two\\\" three".to_owned()), (5, "four".to_owned())]);
}
