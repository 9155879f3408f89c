//! Splits a line into words and the numbers after them, without a regular expression.

/// Separators between a name and its number: `loss: 2`, `'loss': '2'`, `step=1`, `Epoch: [0]`, `iteration       10`.
const SEPARATORS: &[u8] = b" \t:='\"[(#";
/// The maximum number of separators in practice.
const MAX_SEPARATORS: usize = 24;

/// The words of a line: letters, digits and `_`, starting with a letter.
pub(super) struct Words<'a> {
    line: &'a [u8],
    at: usize,
}

impl<'a> Words<'a> {
    pub(super) fn new(line: &'a [u8]) -> Words<'a> {
        Words { line, at: 0 }
    }

    /// The next word and its end offset.
    pub(super) fn next_word(&mut self) -> Option<(&'a [u8], usize)> {
        let line = self.line;
        let mut start = self.at;
        loop {
            start += line[start..].iter().position(|byte| is_of_word(*byte))?;
            let rest = &line[start..];
            let length = rest.iter().position(|byte| !is_of_word(*byte)).unwrap_or(rest.len());
            self.at = start + length;
            if !rest[0].is_ascii_digit() {
                return Some((&line[start..self.at], self.at));
            }
            start = self.at;
        }
    }
}

fn is_of_word(byte: u8) -> bool {
    OF_WORD[usize::from(byte)]
}

/// A table costs half as much as comparisons, and this runs for every byte of a log.
const OF_WORD: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0;
    while byte < 256 {
        let letter = byte as u8;
        table[byte] = letter.is_ascii_alphanumeric() || letter == b'_';
        byte += 1;
    }
    table
};

/// The value at a position where a number may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Number {
    Finite,
    /// NaN or infinite.
    NotFinite,
    None,
}

/// The number after the word that ends at `end`.
pub(super) fn number_after(line: &[u8], end: usize) -> Number {
    let rest = value_at(line, end);
    // `tensor(2.3, device='cuda:0')`, `Array(2.3, dtype=float32)`.
    let wrapped = ["tensor(", "Array("].iter().find_map(|name| rest.strip_prefix(name.as_bytes()));
    let rest = wrapped.unwrap_or(rest);
    let unsigned = match rest {
        [b'-' | b'+', unsigned @ ..] => unsigned,
        unsigned => unsigned,
    };
    match unsigned {
        [b'0'..=b'9', ..] | [b'.', b'0'..=b'9', ..] => Number::Finite,
        [a, b, c, ..] if is_not_finite([*a, *b, *c]) => Number::NotFinite,
        _ => Number::None,
    }
}

fn is_not_finite(letters: [u8; 3]) -> bool {
    matches!(&letters.map(|letter| letter.to_ascii_lowercase()), b"nan" | b"inf")
}

/// Whether a number follows the word that ends at `end`.
pub(super) fn is_number_at(line: &[u8], end: usize) -> bool {
    number_after(line, end) == Number::Finite
}

/// The whole number after the word that ends at `end`.
pub(super) fn whole_number_after(line: &[u8], end: usize) -> Option<u64> {
    // A number attached to a word belongs to it: `step10` is one word and never gets here.
    let rest = value_at(line, end);
    let (number, rest) = leading_number(rest)?;
    let is_fraction = matches!(rest, [b'.', b'0'..=b'9', ..]);
    (!is_fraction).then_some(number)
}

fn value_at(line: &[u8], end: usize) -> &[u8] {
    let rest = &line[end..];
    let separators = rest.iter().take(MAX_SEPARATORS).take_while(|byte| SEPARATORS.contains(byte)).count();
    &rest[separators..]
}

/// The decimal digits at the start and what follows them.
pub(super) fn leading_number(text: &[u8]) -> Option<(u64, &[u8])> {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let number = std::str::from_utf8(&text[..digits]).ok()?.parse().ok()?;
    Some((number, &text[digits..]))
}

/// The position in `[64/60000]`, `[0][ 10/5005]`, `[1,  2000]`, Keras' `10/100 [===>`, or a line that starts with `[10] `. The inner
/// value is the number of the step or batch, if it is one.
pub(super) fn place_in_brackets(line: &[u8]) -> Option<Option<u64>> {
    for at in memchr::memchr2_iter(b'/', b',', line) {
        let Some((before, start)) = number_before(line, at) else { continue };
        let after = line[at + 1..].trim_ascii_start();
        let Some((_, rest)) = leading_number(after).filter(|(number, _)| *number > 0) else { continue };
        let opened = line[..start].trim_ascii_end().last() == Some(&b'[');
        match (line[at], rest) {
            (b'/', [b']', ..]) if opened => return Some(Some(before)),
            // `[640/60000 (1%)]` counts samples.
            (b'/', [b' ', b'(', ..]) if opened => return Some(None),
            (b'/', [b' ', b'[', ..]) if before > 0 => return Some(Some(before)),
            (b'/', [b' ', 0xe2, 0x94, 0x81, ..]) if before > 0 => return Some(Some(before)),
            (b',', [b']', ..]) if opened => {
                return Some(leading_number(after).map(|(second, _)| second));
            }
            _ => {}
        }
    }
    let message = std::str::from_utf8(line).ok().map(|text| &line[super::super::lines::prefix(text).len..]);
    let (number, rest) = leading_number(message?.strip_prefix(b"[")?)?;
    rest.starts_with(b"] ").then_some(Some(number))
}

/// The number that ends before `end`, and where it starts.
fn number_before(line: &[u8], end: usize) -> Option<(u64, usize)> {
    let digits = line[..end].iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
    let start = end - digits;
    let (number, _) = leading_number(&line[start..end])?;
    Some((number, start))
}
