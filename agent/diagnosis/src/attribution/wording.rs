//! Maps the text of a log to word numbers. The build script uses this file too, so that training and inference use the same numbers.

use std::collections::BTreeSet;

use super::traceback;

/// A word or a pair of words as a hash. The word itself is never needed.
pub type Word = u32;

/// The words of message lines. A traceback's frames and the source text below them occur with any program.
pub fn words_of_text(text: &str) -> BTreeSet<Word> {
    messages(text.lines()).flat_map(words).collect()
}

/// The lines of a text without traceback frames and the source text below them.
pub fn messages<'t>(lines: impl Iterator<Item = &'t str>) -> impl Iterator<Item = &'t str> {
    let mut below = false;
    lines.filter(move |line| {
        let frame = traceback::frame(line).is_some();
        let program = below && traceback::raised(line).is_none();
        below = frame;
        !frame && !program
    })
}

/// Words in lower case without numbers, the parts of joined words, their stems, and pairs of neighbours.
pub fn words(line: &str) -> BTreeSet<Word> {
    let mut found: Vec<Word> = Vec::new();
    let mut stems: Vec<Word> = Vec::new();
    for word in line.split_whitespace().map(without_path).flat_map(letters) {
        let word = word.trim_matches('_');
        if word.len() < 2 {
            continue;
        }
        let parts = word.split('_').flat_map(humps).filter(|part| part.len() > 2 && *part != word);
        for word in std::iter::once(word).chain(parts) {
            found.push(number(word.bytes()));
            stems.push(number(b"~".iter().copied().chain(stem(word).bytes())));
        }
    }
    let pairs = found.windows(2).map(|pair| pair[0].rotate_left(13) ^ pair[1]);
    found.iter().copied().chain(pairs).chain(stems).collect()
}

/// A URL up to its host: the path is not informative.
fn without_path(word: &str) -> &str {
    let Some((scheme, rest)) = word.split_once("://") else { return word };
    let host = rest.find('/').unwrap_or(rest.len());
    &word[..scheme.len() + "://".len() + host]
}

fn letters(word: &str) -> impl Iterator<Item = &str> {
    word.split(|letter: char| !(letter.is_ascii_alphabetic() || letter == '_'))
}

/// `OutOfMemoryError` yields its parts.
fn humps(word: &str) -> impl Iterator<Item = &str> {
    let bytes = word.as_bytes();
    let starts = |at: &usize| {
        let before = bytes[at - 1].is_ascii_lowercase();
        let after = bytes.get(at + 1).is_some_and(u8::is_ascii_lowercase);
        bytes[*at].is_ascii_uppercase() && (before || after)
    };
    let mut ends: Vec<usize> = (1..bytes.len()).filter(starts).collect();
    ends.push(bytes.len());
    let mut from = 0;
    ends.into_iter().filter_map(move |end| word.get(std::mem::replace(&mut from, end)..end))
}

/// A word without common endings.
fn stem(word: &str) -> &str {
    const ENDINGS: [&str; 8] = ["ing", "ed", "es", "s", "ion", "ions", "ment", "able"];
    let cut =
        ENDINGS.iter().filter(|ending| word.len() > ending.len() + 3).find_map(|end| word.strip_suffix(end));
    cut.unwrap_or(word)
}

/// FNV-1a of a word in lower case, its halves folded.
fn number(word: impl Iterator<Item = u8>) -> Word {
    let number = word.fold(0xcbf2_9ce4_8422_2325_u64, |number, byte| {
        (number ^ u64::from(byte.to_ascii_lowercase())).wrapping_mul(0x0100_0000_01b3)
    });
    (number >> 32) as Word ^ number as Word
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word_numbers_are_stable() {
        // The stored figures of failures depend on these numbers.
        let numbers: Vec<String> = words("disk full").iter().map(|of| format!("{of:08x}")).collect();
        assert_eq!(numbers, ["3867e1bd", "5d5b9204", "9dcb29e3", "f5dc67e5", "fc60e4a4"]);
    }

    #[test]
    fn frames_and_source_text_are_no_messages() {
        let log = "boom\n  File \"/a/train.py\", line 3, in step\n    loss.backward()\nValueError: x\n  File \"b.py\", line 1\nKeyError: 'y'";
        assert_eq!(messages(log.lines()).collect::<Vec<_>>(), ["boom", "ValueError: x", "KeyError: 'y'"]);
    }
}
