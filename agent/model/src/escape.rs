//! Escapes foreign text for terminals and Markdown, so that it is shown as it is and controls nothing.

use std::borrow::Cow;
use std::fmt::Write;

/// Whether a character has no form of its own and changes what a reader sees: it has no width, or changes the
/// direction of the text. It is shown by its code.
fn is_hidden(letter: char) -> bool {
    matches!(
        letter,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
            | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}'
            | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}'
    )
}

/// Puts the text on one line: blanks in place of control characters, and codes in place of hidden ones.
pub fn clean(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            letter if letter.is_control() => out.push(' '),
            letter if is_hidden(letter) => push_code(&mut out, letter),
            letter => out.push(letter),
        }
    }
    out
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

/// A whole output, of which parts may be foreign: lines and colours stay, all other control characters and hidden
/// characters are shown by their codes. Within a string of JSON the codes mean the same characters.
pub fn printable(text: &str) -> Cow<'_, str> {
    let is_plain =
        |letter: char| !(is_hidden(letter) || letter.is_control() && letter != '\n' && letter != '\t');
    if text.chars().all(is_plain) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        let length = colour(rest).unwrap_or(letter.len_utf8());
        match length > letter.len_utf8() || is_plain(letter) {
            true => out.push_str(&rest[..length]),
            false => push_code(&mut out, letter),
        }
        rest = &rest[length..];
    }
    Cow::Owned(out)
}

/// The length of a sequence at the start that sets colours, `ESC [ … m`.
fn colour(text: &str) -> Option<usize> {
    let parameters = text.strip_prefix("\x1b[")?;
    let end = parameters.find(|letter: char| !letter.is_ascii_digit() && letter != ';')?;
    parameters[end..].starts_with('m').then_some(2 + end + 1)
}

/// `\u202e`, as JSON has it: two codes beyond the first 65,536 characters.
fn push_code(out: &mut String, letter: char) {
    for code in letter.encode_utf16(&mut [0; 2]) {
        // Writing into a string cannot fail.
        let _ = write!(out, "\\u{code:04x}");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn foreign_text_cannot_format() {
        assert_eq!(escaped("a|b*c\n#"), "a\\|b\\*c \\#");
        assert_eq!(clean("a\x1b[2J\tb|c\u{9b}d"), "a [2J b|c d");
    }

    #[test]
    fn text_that_is_not_seen_or_turns_others_around_is_shown_by_its_code() {
        assert_eq!(
            clean("user\u{202e}toor\u{2066}x\u{200b}y\u{feff}"),
            "user\\u202etoor\\u2066x\\u200by\\ufeff"
        );
        assert_eq!(clean("a\u{e0041}"), "a\\udb40\\udc41");
        assert_eq!(clean("größe 温度 ✓ é"), "größe 温度 ✓ é");
    }

    #[test]
    fn outputs_keep_lines_and_colours_only() {
        let text = "\x1b[1;32mgood\x1b[0m\t1\nbad";
        assert_eq!(printable(text), text);
        assert_eq!(
            printable("\x1b[2J\x1b]0;t\x07\u{9b}2J\u{7f}\r"),
            "\\u001b[2J\\u001b]0;t\\u0007\\u009b2J\\u007f\\u000d"
        );
        assert_eq!(printable("\x1b[31"), "\\u001b[31");
    }

    proptest! {
        #[test]
        fn an_output_of_json_stays_the_same_value(text in "[\\PC\\u{80}-\\u{9f}\\u{200b}-\\u{206f}\\u{e0000}-\\u{e0100}\x1b\x7f\n]{0,40}") {
            let json = serde_json::Value::String(text).to_string();
            let shown = printable(&json);
            prop_assert!(shown.chars().all(|letter| !letter.is_control() && !is_hidden(letter)));
            let read: serde_json::Value = serde_json::from_str(&shown).unwrap();
            prop_assert_eq!(read.to_string(), json);
        }
    }
}
