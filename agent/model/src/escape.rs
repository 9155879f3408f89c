//! Escapes foreign text for terminals and Markdown, so that it is shown as it is and controls nothing.

/// Replaces control characters, so that the text stays on one line.
pub fn clean(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

/// Like [`clean`], and also escapes Markdown.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in clean(text).chars() {
        if matches!(letter, '\\' | '`' | '*' | '_' | '<' | '>' | '[' | ']' | '|' | '#') {
            out.push('\\');
        }
        out.push(letter);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_cannot_format() {
        assert_eq!(escaped("a|b*c\n#"), "a\\|b\\*c \\#");
        assert_eq!(clean("a\x1b[2J\tb|"), "a [2J b|");
    }
}
