//! Classifies words with a table that is learned at build time (`learn.rs`) and read in place. Its output are calibrated probabilities,
//! also for failures that it has not seen.

use super::common::CLASSES;
use super::fit::{likely, of_one_length};
use super::wording::words;
pub use super::wording::{Word, messages};

/// The learned words of this build.
static BUILT_IN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/words.bin"));

/// The learned words, in the format that `learn.rs` writes.
#[derive(Clone, Copy, Debug)]
pub struct Words<'t> {
    /// The number of texts learned from.
    texts: f32,
    /// The unit of the weights.
    step: f32,
    /// The bias: log-odds before any word is read.
    base: [f32; CLASSES],
    /// The words, ascending.
    words: &'t [[u8; 4]],
    /// The number of texts that contain each word.
    times: &'t [[u8; 2]],
    /// The weights of each word per class.
    says: &'t [[u8; 2]],
}

struct Weight {
    rarity: f32,
    says: [f32; CLASSES],
}

impl Words<'static> {
    /// The table of this build.
    pub fn built_in() -> Words<'static> {
        // A table that cannot be read has no words; a test checks that it can be read.
        Words::read(BUILT_IN).unwrap_or_default()
    }
}

impl Default for Words<'_> {
    fn default() -> Self {
        Words { texts: 0.0, step: 0.0, base: [0.0; CLASSES], words: &[], times: &[], says: &[] }
    }
}

impl<'t> Words<'t> {
    /// Reads the table from bytes. `None` if they are too few.
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

    /// The probability of each class by the words of the line alone. `None` if it has no known word.
    pub fn opinion(&self, line: &str) -> Option<[f64; CLASSES]> {
        self.opinion_of(words(line).iter())
    }

    /// The words of a line that are in the table.
    pub fn known(&self, line: &str) -> impl Iterator<Item = Word> {
        words(line).into_iter().filter(|word| self.place(*word).is_some())
    }

    /// The probability of each class by the words of a text.
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
    use crate::attribution::class::Class;
    use crate::attribution::common::CLASS_NAMES;
    use crate::attribution::learn::learn;
    use crate::attribution::lessons;
    use crate::attribution::wording::words_of_text;

    const FABRIC: usize = Class::Fabric as usize;
    const STORAGE: usize = Class::Storage as usize;

    const LINES: [(usize, &str); 4] = [
        (FABRIC, "port 3 link down"),
        (FABRIC, "link down on port 9"),
        (STORAGE, "disk 3 full"),
        (STORAGE, "the disk is full"),
    ];

    #[test]
    fn words_support_the_class_whose_lines_contain_them() {
        let table = learn(LINES.into_iter(), std::iter::empty()).to_bytes();
        let words = Words::read(&table).expect("a whole table");
        let of = |line, class: usize| words.opinion(line).map(|of| of[class]);
        assert!(of("link of port 88 is down", FABRIC) > of("link of port 88 is down", STORAGE));
        assert!(of("no room: disk full", STORAGE) > of("no room: disk full", FABRIC));
        assert_eq!(words.opinion("nothing that was ever seen"), None);
    }

    #[test]
    fn a_text_and_its_words_yield_the_same_table() {
        let (texts, figures) = LINES.split_at(2);
        let figures = figures.iter().map(|(class, text)| (*class, words_of_text(text)));
        let both = learn(texts.iter().copied(), figures).to_bytes();
        assert_eq!(both, learn(LINES.into_iter(), std::iter::empty()).to_bytes());
    }

    #[test]
    fn the_built_in_table_is_complete_and_a_truncated_one_is_rejected() {
        assert!(Words::read(BUILT_IN).is_some_and(|words| words.words.len() > 5000));
        assert!(Words::read(&BUILT_IN[..BUILT_IN.len() - 1]).is_none());
        assert!(Words::built_in().opinion("CUDA out of memory").is_some());
    }

    #[test]
    fn the_build_script_uses_the_same_class_order() {
        assert_eq!(Class::ALL.map(Class::name), CLASS_NAMES);
    }

    /// The collected lines are split into this many parts. Each part is judged with words learned from the other parts, since accuracy
    /// on training lines would show nothing.
    const PARTS: usize = 5;
    /// Minimum accuracy of the domain on held-out lines, in percent.
    const FLOOR: usize = 82;

    #[test]
    fn words_name_the_domain_of_held_out_lines() {
        const LINES: &str = include_str!("../../../catalog/signatures/lines.tsv");
        const FAILURES: &str = include_str!("../../../catalog/failures/failures.tsv");
        let lines: Vec<(usize, &str)> = lessons::lines(LINES).collect();
        let domain = |class: usize| Class::ALL.get(class).map(|class| class.domain());
        let mut right = 0;
        for part in 0..PARTS {
            let is_held_out = |at: &usize| at % PARTS == part;
            let taught = lines.iter().enumerate().filter(|(at, _)| !is_held_out(at)).map(|(_, line)| *line);
            let figures = lessons::failures(FAILURES).map(|of| (of.class, of.words));
            let table = learn(taught, figures).to_bytes();
            let words = Words::read(&table).expect("a whole table");
            for (_, (class, text)) in lines.iter().enumerate().filter(|(at, _)| is_held_out(at)) {
                let stated = words.opinion_of(words_of_text(text).iter());
                let best = stated.and_then(|of| (0..CLASSES).max_by(|a, b| of[*a].total_cmp(&of[*b])));
                right += usize::from(best.is_some_and(|best| domain(best) == domain(*class)));
            }
        }
        let all = lines.len();
        println!("{right} of {all} lines right");
        assert!(right * 100 >= all * FLOOR, "{right} of {all} lines right");
    }
}
