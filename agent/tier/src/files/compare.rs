//! Compares a step with its seal: its files are unchanged, a trainer wrote all of them again and completed them, or they are damaged.
//! What was sealed once is not sealed again just because it looks complete.

use std::collections::BTreeMap;

use mainstay_checkpoint::files::Written;

use super::tree::{Mark, Member};

/// The state of a step after it was sealed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StepChange {
    /// Nothing has changed.
    Unchanged,
    /// All sealed files exist, and more.
    Extended,
    /// All of it was written again, and its framework's mark last: when complete, it is sealed as another step.
    Rewritten,
    /// None of its files exists.
    Missing,
    /// A part of it differs from what was sealed.
    Damaged(String),
}

/// Compares the files `now` with the sealed ones. `trackers`: when the small files that name a step were last written;
/// `went_back`: whether the job has restarted since the step was sealed.
pub(super) fn compare(
    sealed: &[Member],
    now: &[Member],
    trackers: &BTreeMap<String, Written>,
    went_back: bool,
) -> StepChange {
    let now: BTreeMap<&str, Mark> = now.iter().map(|of| (of.path.as_str(), of.mark)).collect();
    let files: Vec<&Member> = sealed.iter().filter(|of| of.words.is_none()).collect();
    let there = |of: &&&Member| now.contains_key(of.path.as_str());
    if files.iter().filter(there).count() == 0 {
        return StepChange::Missing;
    }
    let changed: Vec<&Member> =
        files.iter().copied().filter(|of| now.get(of.path.as_str()) != Some(&of.mark)).collect();
    let Some(first) = changed.first() else {
        return if now.len() == files.len() { StepChange::Unchanged } else { StepChange::Extended };
    };
    let is_whole_set = files.iter().filter(there).count() == files.len();
    if is_whole_set {
        let newest = changed.iter().filter_map(|of| now.get(of.path.as_str())).map(|mark| mark.written).max();
        let reported_again = sealed
            .iter()
            .filter(|of| of.words.is_some())
            .any(|of| trackers.get(&of.path).is_some_and(|at| *at > of.mark.written && Some(*at) >= newest));
        // A single file without its own checksum may also be damaged.
        let is_evident = files.len() > 1 || !first.path.ends_with(".safetensors") || went_back;
        if reported_again || (changed.len() == files.len() && is_evident) {
            return StepChange::Rewritten;
        }
    }
    StepChange::Damaged(match now.get(first.path.as_str()) {
        None => format!("{} is missing", first.path),
        Some(mark) if mark.size != first.mark.size => {
            format!("{} has {} bytes and had {} when it was sealed", first.path, mark.size, first.mark.size)
        }
        Some(_) => format!("{} was written to after it was sealed", first.path),
    })
}

/// Whether two names differ in their numbers only, so that they are from the same writer.
pub(super) fn is_alike(a: &str, b: &str) -> bool {
    let without_numbers = |name: &str| {
        let mut text = String::new();
        for letter in name.chars() {
            match letter.is_ascii_digit() {
                true if text.ends_with('#') => {}
                true => text.push('#'),
                false => text.push(letter),
            }
        }
        text
    };
    without_numbers(a) == without_numbers(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, size: u64, written: i64) -> Member {
        let mark = Mark { ino: 1, size, written: (written, 0) };
        Member { path: path.to_owned(), mode: 0o644, mark, words: None }
    }

    fn tracker(written: i64) -> Member {
        Member { words: Some("10".to_owned()), ..file("latest", 2, written) }
    }

    fn became(sealed: &[Member], now: &[Member], tracker: i64) -> StepChange {
        compare(sealed, now, &BTreeMap::from([("latest".to_owned(), (tracker, 0))]), false)
    }

    #[test]
    fn one_file_that_changed_or_disappeared_is_damage_and_is_named() {
        let sealed = [file("c/model", 9, 10), file("c/state", 5, 11)];
        assert_eq!(became(&sealed, &sealed, 0), StepChange::Unchanged);
        for (now, reported) in [
            (vec![file("c/model", 4, 20), file("c/state", 5, 11)], "c/model has 4 bytes"),
            (vec![file("c/model", 9, 20), file("c/state", 5, 11)], "c/model was written to"),
            (vec![file("c/model", 9, 10), file("c/state", 5, 12)], "c/state was written to"),
            (vec![file("c/model", 9, 10)], "c/state is missing"),
            (vec![file("c/model", 9, 20), file("c/state.tmp", 5, 21)], "c/model was written to"),
        ] {
            let StepChange::Damaged(why) = became(&sealed, &now, 0) else { panic!("{reported}") };
            assert!(why.contains(reported), "{why}");
        }
        assert_eq!(became(&sealed, &[], 0), StepChange::Missing);
        assert_eq!(became(&sealed, &[file("c/other", 1, 1)], 0), StepChange::Missing);
    }

    #[test]
    fn files_that_were_all_written_again_or_named_again_by_their_tracker_are_another_step() {
        let sealed = [file("c/model", 9, 10), file("c/state", 5, 11)];
        assert_eq!(
            became(&sealed, &[file("c/model", 9, 20), file("c/state", 5, 21)], 0),
            StepChange::Rewritten
        );
        let more = [file("c/model", 9, 10), file("c/state", 5, 11), file("c/more", 1, 30)];
        assert_eq!(became(&sealed, &more, 0), StepChange::Extended);
        let sealed = [file("c/model", 9, 10), file("c/state", 5, 10), tracker(11)];
        let now = [file("c/model", 9, 20), file("c/state", 5, 10)];
        assert_eq!(became(&sealed, &now, 21), StepChange::Rewritten);
        assert!(matches!(became(&sealed, &now, 11), StepChange::Damaged(_)), "its tracker is the old one");
    }

    #[test]
    fn a_single_changed_file_without_a_checksum_is_another_step_only_if_the_job_went_back() {
        let (sealed, now) = ([file("m_5.safetensors", 9, 10)], [file("m_5.safetensors", 9, 20)]);
        let none = BTreeMap::new();
        assert!(matches!(compare(&sealed, &now, &none, false), StepChange::Damaged(_)));
        assert_eq!(compare(&sealed, &now, &none, true), StepChange::Rewritten);
        let (sealed, now) = ([file("m_5.pt", 9, 10)], [file("m_5.pt", 9, 20)]);
        assert_eq!(compare(&sealed, &now, &none, false), StepChange::Rewritten, "its checksums are compared");
    }

    #[test]
    fn names_that_differ_in_numbers_only_are_alike() {
        assert!(
            is_alike("checkpoint-9", "checkpoint-120")
                && is_alike("epoch=1-step=5.ckpt", "epoch=10-step=50.ckpt")
        );
        assert!(!is_alike("runs2024", "checkpoint-9"));
    }
}
