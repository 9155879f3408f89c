//! Names with their values in a text: `name=value`, `"name": "value"`, `--name value`, or the value on the next line.

use std::ops::Range;

use regex::Regex;

use super::name::{Kind, kind};

/// Quoted values are at most this long, in bytes.
const LONGEST_QUOTED: usize = 4096;

/// What is between a name and its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Separator {
    Equals,
    Colon,
    Blank,
}

/// A name with its value.
#[derive(Clone, Debug)]
pub(super) struct Found<'t> {
    /// Without the dashes of an option.
    pub(super) name: &'t str,
    pub(super) value: &'t str,
    /// Where the value is in the text.
    pub(super) range: Range<usize>,
    pub(super) separator: Separator,
    pub(super) is_option: bool,
    pub(super) is_quoted: bool,
    /// As in `.netrc`: `login NAME password VALUE`.
    pub(super) follows_login: bool,
}

impl<'t> Found<'t> {
    /// A field of a JSON object.
    pub(super) fn field(name: &'t str, value: &'t str) -> Found<'t> {
        Found {
            name,
            value,
            range: 0..value.len(),
            separator: Separator::Colon,
            is_option: false,
            is_quoted: true,
            follows_login: false,
        }
    }
}

/// All names that match, with their values.
pub(super) fn values<'t>(text: &'t str, names: &'t Regex) -> impl Iterator<Item = Found<'t>> {
    names.find_iter(text).filter_map(|name| found(text, name.range()))
}

fn found(text: &str, at: Range<usize>) -> Option<Found<'_>> {
    let bytes = text.as_bytes();
    let written = &text[at.clone()];
    let name = written.trim_start_matches('-');
    let before = text[..at.start].trim_end_matches('-');
    let starts = before.ends_with(|letter: char| letter.is_whitespace() || "\"'[(,`".contains(letter));
    let is_option = written.starts_with('-') && (before.is_empty() || starts);
    let mut next = at.end;
    // `"name": …`, `\"name\": …`, `environ['name'] = …`
    next += usize::from(bytes.get(next) == Some(&b'\\'));
    if matches!(bytes.get(next), Some(b'"' | b'\'')) {
        next += 1 + usize::from(bytes.get(next + 1) == Some(&b']'));
    }
    let after_name = next;
    next = after_blanks(bytes, next);
    let separator = match bytes.get(next)? {
        b'=' => Separator::Equals,
        b':' if bytes.get(next + 1) == Some(&b'=') => Separator::Equals,
        b':' => Separator::Colon,
        _ if next > after_name => Separator::Blank,
        _ => return None,
    };
    if separator != Separator::Blank {
        next += 1;
        next += usize::from(matches!(bytes.get(next), Some(b'=' | b'>')));
        next = after_blanks(bytes, next);
    }
    let is_on_next_line = matches!(bytes.get(next), Some(b'\n' | b'\r'));
    if is_on_next_line {
        if separator == Separator::Blank {
            return None;
        }
        next += usize::from(bytes[next] == b'\r');
        next += usize::from(bytes.get(next) == Some(&b'\n'));
        next = after_blanks(bytes, next);
    }
    let is_header = separator != Separator::Blank && kind(name) == Some(Kind::Header);
    let after_scheme = after_scheme(text, next);
    // The text from which the value is read starts at a character: all before are ASCII.
    let is_of_scheme = after_scheme > next;
    next = after_scheme;
    let rest = &text[next..];
    let (range, is_quoted) = match quoted(rest) {
        Some(inner) => (next + inner.start..next + inner.end, true),
        None => {
            let ends = |letter: char| match letter {
                '"' | '\'' => true,
                letter if is_header && !is_of_scheme => letter.is_control(),
                letter => letter.is_whitespace() || letter.is_control() || ",;&}])\\`".contains(letter),
            };
            let length = rest.find(ends).unwrap_or(rest.len());
            (next..next + rest[..length].trim_end().len(), false)
        }
    };
    if range.is_empty() {
        return None;
    }
    if is_on_next_line {
        // Prose may follow a name and a colon; a value is the only word of its line.
        let line = text[range.end..].split('\n').next().unwrap_or_default();
        let is_alone = line.trim_matches(|letter: char| letter.is_whitespace() || "\"'\\,".contains(letter));
        if !is_alone.is_empty() || range.len() < 6 {
            return None;
        }
    }
    let mut words = before.rsplit(char::is_whitespace).filter(|word| !word.is_empty());
    let follows_login = words.nth(1) == Some("login");
    let value = &text[range.clone()];
    Some(Found { name, value, range, separator, is_option, is_quoted, follows_login })
}

/// The first byte that is neither a blank nor part of a colour for terminals.
fn after_blanks(bytes: &[u8], mut at: usize) -> usize {
    loop {
        match bytes.get(at) {
            Some(b' ' | b'\t') => at += 1,
            Some(0x1b) if bytes.get(at + 1) == Some(&b'[') => {
                let parameters = bytes[at + 2..].iter().take_while(|byte| matches!(byte, b'0'..=b'9' | b';'));
                let end = at + 2 + parameters.count();
                if !bytes.get(end).is_some_and(u8::is_ascii_alphabetic) {
                    return at;
                }
                at = end + 1;
            }
            _ => return at,
        }
    }
}

/// After `Bearer`, `Basic` and the like, with an opening quote before or not.
fn after_scheme(text: &str, at: usize) -> usize {
    const SCHEMES: [&str; 5] = ["bearer", "basic", "token", "negotiate", "apikey"];
    let opening = text[at..].len() - text[at..].trim_start_matches(['\\', '"', '\'']).len();
    let start = at + opening;
    let word = text[start..].find(|letter: char| !letter.is_ascii_alphabetic()).unwrap_or(0);
    let is_scheme = SCHEMES.iter().any(|scheme| text[start..start + word].eq_ignore_ascii_case(scheme));
    let end = after_blanks(text.as_bytes(), start + word);
    if is_scheme && end > start + word { end } else { at }
}

/// What is within the quotes at the start of the text, which may be escaped.
fn quoted(text: &str) -> Option<Range<usize>> {
    let start = usize::from(text.starts_with('\\'));
    let quote = text[start..].chars().next().filter(|letter| matches!(letter, '"' | '\''))?;
    let inner = &text[start + 1..];
    let closing = |(at, letter): &(usize, char)| *letter == quote || *letter == '\n' || *at > LONGEST_QUOTED;
    let (length, last) = inner.char_indices().find(closing)?;
    let value = inner[..length].trim_end_matches('\\');
    (last == quote).then_some(start + 1..start + 1 + value.len())
}
