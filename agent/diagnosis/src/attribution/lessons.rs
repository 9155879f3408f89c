//! What words are learned from at build time: lines that common programs print, and the figures of publicly reported failures
//! (`agent/catalog/failures`, whose README describes the format). The texts of these failures are not stored.

use std::collections::BTreeSet;

use super::common::CLASS_NAMES;
use super::wording::Word;

/// The figures of one failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure<'t> {
    /// Its name.
    pub id: &'t str,
    /// What went wrong: the index of the class.
    pub class: usize,
    /// The batch in which it was collected.
    pub batch: &'t str,
    /// The signatures that matched its log when it was collected.
    pub signatures: Vec<&'t str>,
    /// The numbers of the words in its log, unordered.
    pub words: BTreeSet<Word>,
}

/// The collected lines: a class, a tab and the text.
pub fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().filter_map(|line| {
        let (class, text) = line.split_once('\t')?;
        Some((class_named(class)?, text))
    })
}

/// The failures, one per line. Skips lines that cannot be parsed; a test checks that there are none.
pub fn failures(text: &str) -> impl Iterator<Item = Failure<'_>> {
    text.lines().filter_map(failure)
}

/// The index of the class with this name.
pub fn class_named(name: &str) -> Option<usize> {
    CLASS_NAMES.iter().position(|of| *of == name)
}

fn failure(line: &str) -> Option<Failure<'_>> {
    let mut fields = line.split('\t');
    let (id, class, batch) = (fields.next()?, class_named(fields.next()?)?, fields.next()?);
    let (_address, signatures, words) = (fields.next()?, fields.next()?, fields.next()?);
    let words: Result<BTreeSet<Word>, _> =
        words.split_ascii_whitespace().map(|word| Word::from_str_radix(word, 16)).collect();
    let signatures = signatures.split_ascii_whitespace().collect();
    Some(Failure { id, class, batch, signatures, words: words.ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = include_str!("../../../catalog/signatures/lines.tsv");
    const FAILURES: &str = include_str!("../../../catalog/failures/failures.tsv");

    #[test]
    fn every_line_and_failure_is_read_and_names_are_unique_in_a_batch() {
        assert_eq!(lines(LINES).count(), LINES.lines().filter(|line| !line.is_empty()).count());
        let names: BTreeSet<(&str, &str)> = failures(FAILURES).map(|of| (of.batch, of.id)).collect();
        let count = FAILURES.lines().count();
        assert_eq!((failures(FAILURES).count(), names.len()), (count, count));
        assert!(failures(FAILURES).all(|of| of.batch.starts_with("batch")));
    }
}
