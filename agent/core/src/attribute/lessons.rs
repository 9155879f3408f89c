//! What words are learned from: lines as the field's programs print them, and the figures of failures that were told in public
//! (`agent/catalog/failures`, whose README tells the form): of these no text is kept.

use std::collections::BTreeSet;

use super::class::Class;
use super::words::Word;

/// Lines: a class, a tab and the text.
pub const LINES: &str = include_str!("../../../catalog/signatures/lines.tsv");

/// Failures, one a line.
const FAILURES: &str = include_str!("../../../catalog/failures/failures.tsv");

/// The figures of one failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Its name.
    pub id: &'static str,
    /// What went wrong.
    pub class: Class,
    /// The batch in which it was gathered.
    pub batch: &'static str,
    /// The signatures that matched its log when it was gathered.
    pub signatures: Vec<&'static str>,
    /// The numbers of the words of its log, in no order.
    pub words: BTreeSet<Word>,
}

/// The lines of the field.
pub fn lines<'t>() -> impl Iterator<Item = (Class, &'t str)> {
    LINES.lines().filter_map(|line| {
        let (class, text) = line.split_once('\t')?;
        Some((Class::named(class)?, text))
    })
}

/// The failures. A line that cannot be read is none; a test holds that there is no such line.
pub fn failures() -> impl Iterator<Item = Failure> {
    FAILURES.lines().filter_map(failure)
}

fn failure(line: &'static str) -> Option<Failure> {
    let mut fields = line.split('\t');
    let (id, class, batch) = (fields.next()?, Class::named(fields.next()?)?, fields.next()?);
    let (_address, signatures, words) = (fields.next()?, fields.next()?, fields.next()?);
    let words: Result<BTreeSet<Word>, _> =
        words.split_ascii_whitespace().map(|word| Word::from_str_radix(word, 16)).collect();
    let signatures = signatures.split_ascii_whitespace().collect();
    Some(Failure { id, class, batch, signatures, words: words.ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_and_every_failure_is_read_and_no_name_comes_twice_in_a_batch() {
        assert_eq!(lines().count(), LINES.lines().filter(|line| !line.is_empty()).count());
        let names: BTreeSet<(&str, &str)> = failures().map(|of| (of.batch, of.id)).collect();
        assert_eq!((failures().count(), names.len()), (FAILURES.lines().count(), FAILURES.lines().count()));
        assert!(failures().all(|of| of.batch.starts_with("batch")));
    }
}
