//! Text of others in a place that understands signs: on a terminal or in Markdown it must say what it says and do nothing.

/// On one line and without control characters.
pub fn clean(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

/// The same, and Markdown sees no commands in it.
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
