//! What words speak for: a table that was learned when the program was built (`learn.rs`) and is read in place. What it says are
//! probabilities that hold: of failures that it has not seen, as many are of a class as it says.

use super::common::CLASSES;
use super::fit::{likely, of_one_length};
use super::wording::words;
pub use super::wording::{Word, messages};

/// The learned words of this build.
static BUILT_IN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/words.bin"));

/// The learned words, in the form that `learn.rs` writes.
#[derive(Clone, Copy, Debug)]
pub struct Words<'t> {
    /// Texts that were learned from.
    texts: f32,
    /// The unit of the weights.
    step: f32,
    /// What is held likely before any word is read.
    base: [f32; CLASSES],
    /// The words, ascending.
    words: &'t [[u8; 4]],
    /// In how many texts each word stands.
    times: &'t [[u8; 2]],
    /// What each word says of each class.
    says: &'t [[u8; 2]],
}

struct Weight {
    rarity: f32,
    says: [f32; CLASSES],
}

impl Words<'static> {
    /// Those that the program was built with.
    pub fn built_in() -> Words<'static> {
        // A table that cannot be read knows no word; a test holds that it can.
        Words::read(BUILT_IN).unwrap_or_default()
    }
}

impl Default for Words<'_> {
    fn default() -> Self {
        Words { texts: 0.0, step: 0.0, base: [0.0; CLASSES], words: &[], times: &[], says: &[] }
    }
}

impl<'t> Words<'t> {
    /// The table in these bytes; none if they are too few.
    pub fn read(table: &'t [u8]) -> Option<Words<'t>> {
        let (texts, rest) = table.split_first_chunk()?;
        let (count, rest) = rest.split_first_chunk()?;
        let (step, rest) = rest.split_first_chunk()?;
        let (base, rest) = rest.split_at_checked(4 * CLASSES)?;
        let count = u32::from_le_bytes(*count) as usize;
        let (words, rest) = rest.split_at_checked(4 * count)?;
        let (times, says) = rest.split_at_checked(2 * count)?;
        let mut bases = [0.0; CLASSES];
        let read = base.as_chunks().0.iter().map(|base| f32::from_le_bytes(*base));
        bases.iter_mut().zip(read).for_each(|(base, read)| *base = read);
        let says = says.as_chunks().0;
        (says.len() == count * CLASSES).then_some(Words {
            texts: u32::from_le_bytes(*texts) as f32,
            step: f32::from_le_bytes(*step),
            base: bases,
            words: words.as_chunks().0,
            times: times.as_chunks().0,
            says,
        })
    }

    /// How likely each class is by the words of the line alone; none if no word is known.
    pub fn opinion(&self, line: &str) -> Option<[f64; CLASSES]> {
        self.opinion_of(words(line).iter())
    }

    /// The words of a line that say something.
    pub fn known(&self, line: &str) -> impl Iterator<Item = Word> {
        words(line).into_iter().filter(|word| self.place(*word).is_some())
    }

    /// How likely each class is by the words of a text.
    pub fn opinion_of<'w>(&self, words: impl Iterator<Item = &'w Word>) -> Option<[f64; CLASSES]> {
        let known: Vec<Weight> = words.filter_map(|word| self.weight(*word)).collect();
        if known.is_empty() {
            return None;
        }
        let text = of_one_length(known.iter().map(|weight| (&weight.says, weight.rarity)).collect());
        Some(likely(&self.base, text.into_iter()).map(f64::from))
    }

    fn place(&self, word: Word) -> Option<usize> {
        self.words.binary_search_by_key(&word, |of| u32::from_le_bytes(*of)).ok()
    }

    fn weight(&self, word: Word) -> Option<Weight> {
        let at = self.place(word)?;
        let times = f32::from(u16::from_le_bytes(*self.times.get(at)?));
        let mut says = [0.0; CLASSES];
        let of_word = self.says.get(at * CLASSES..)?.iter();
        says.iter_mut()
            .zip(of_word)
            .for_each(|(says, of)| *says = self.step * f32::from(i16::from_le_bytes(*of)));
        Some(Weight { rarity: (self.texts / times).ln(), says })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::attribution::class::Class;
    use crate::failure::attribution::common::CLASS_NAMES;
    use crate::failure::attribution::learn::learn;
    use crate::failure::attribution::wording::words_of_text;

    const FABRIC: usize = Class::Fabric as usize;
    const STORAGE: usize = Class::Storage as usize;

    const LINES: [(usize, &str); 4] = [
        (FABRIC, "port 3 link down"),
        (FABRIC, "link down on port 9"),
        (STORAGE, "disk 3 full"),
        (STORAGE, "the disk is full"),
    ];

    #[test]
    fn words_speak_for_the_class_in_whose_lines_they_stand() {
        let table = learn(LINES.into_iter(), std::iter::empty()).to_bytes();
        let words = Words::read(&table).expect("a whole table");
        let of = |line, class: usize| words.opinion(line).map(|of| of[class]);
        assert!(of("link of port 88 is down", FABRIC) > of("link of port 88 is down", STORAGE));
        assert!(of("no room: disk full", STORAGE) > of("no room: disk full", FABRIC));
        assert_eq!(words.opinion("nothing that was ever seen"), None);
    }

    #[test]
    fn a_text_and_its_words_teach_the_same() {
        let (texts, figures) = LINES.split_at(2);
        let figures = figures.iter().map(|(class, text)| (*class, words_of_text(text)));
        let both = learn(texts.iter().copied(), figures).to_bytes();
        assert_eq!(both, learn(LINES.into_iter(), std::iter::empty()).to_bytes());
    }

    #[test]
    fn the_words_of_the_build_are_whole_and_a_torn_table_is_none() {
        assert!(Words::read(BUILT_IN).is_some_and(|words| words.words.len() > 5000));
        assert!(Words::read(&BUILT_IN[..BUILT_IN.len() - 1]).is_none());
        assert!(Words::built_in().opinion("CUDA out of memory").is_some());
    }

    #[test]
    fn the_build_knows_the_classes_by_the_same_places() {
        assert_eq!(Class::ALL.map(Class::name), CLASS_NAMES);
    }
}
