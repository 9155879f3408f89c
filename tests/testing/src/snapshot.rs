//! Snapshots: the English text of a surface (a command's output, the errors of the configuration), one file per surface.
//!
//! Tests assert types and numbers; a sentence is only in these files, so that a reworded one breaks nothing else. A file
//! has a section per case, in order of their names. `cargo xtask test --accept` writes them anew.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::Path;

/// If it is set, the files are written and not compared.
pub const ACCEPT: &str = "MAINSTAY_TEST_ACCEPT";

/// The folder of the files, in that of a package.
pub const FOLDER: &str = "tests/snapshots";

/// What begins the header of a section.
const HEADER: &str = "=== ";

/// Compares a text with its section of the file `tests/snapshots/SURFACE.txt` of this package.
#[macro_export]
macro_rules! snapshot {
    ($surface:expr, $case:expr, $text:expr $(,)?) => {
        $crate::snapshot::check(
            env!("CARGO_MANIFEST_DIR").as_ref(),
            $surface,
            &$case.to_string(),
            &$text.to_string(),
        )
    };
}

/// [`snapshot!`] for a package in this folder.
#[track_caller]
pub fn check(package: &Path, surface: &str, case: &str, text: &str) {
    let folder = package.join(FOLDER);
    let path = folder.join(format!("{surface}.txt"));
    let text = text.trim_end_matches('\n');
    assert!(!text.lines().any(|line| line.starts_with(HEADER)), "a line begins as a header does: {text}");
    if std::env::var_os(ACCEPT).is_some() {
        fs::create_dir_all(&folder).expect("a folder for snapshots");
        // Other tests write other sections, in threads and in processes.
        let lock = File::open(&folder).expect("a folder");
        lock.lock().expect("a lock of a folder");
        let mut sections = sections(&fs::read_to_string(&path).unwrap_or_default());
        sections.insert(case.to_owned(), text.to_owned());
        fs::write(&path, written(&sections)).expect("a snapshot can be written");
        return;
    }
    let sections = sections(&fs::read_to_string(&path).unwrap_or_default());
    let accepted = sections.get(case).map_or("", String::as_str);
    assert!(
        sections.contains_key(case) && accepted == text,
        "{}, {case}: if the new text is right, run cargo xtask test --accept\naccepted:\n{accepted}\nnow:\n{text}",
        path.display(),
    );
}

fn sections(file: &str) -> BTreeMap<String, String> {
    let (file, header) = (format!("\n{file}"), format!("\n{HEADER}"));
    let parts = file.split(&header).skip(1);
    let section = |part: &str| {
        let (case, text) = part.split_once('\n').unwrap_or((part, ""));
        (case.to_owned(), text.trim_end_matches('\n').to_owned())
    };
    parts.map(section).collect()
}

fn written(sections: &BTreeMap<String, String>) -> String {
    sections.iter().fold(String::new(), |mut file, (case, text)| {
        let _ = write!(file, "{HEADER}{case}\n{text}\n");
        file
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_as_it_was_written() {
        let text = |case: &str, text: &str| (case.to_owned(), text.to_owned());
        let all = BTreeMap::from([text("a: b", "one\n\ntwo"), text("empty", ""), text("z", " three")]);
        assert_eq!(sections(&written(&all)), all);
        assert_eq!(sections(""), BTreeMap::new());
    }

    #[test]
    fn a_text_that_is_not_accepted_fails() {
        let package = crate::tempdir().expect("a directory");
        let folder = package.path().join(FOLDER);
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join("errors.txt"), "=== known\nno such key\n").expect("a file");
        let fails = |case: &str, text: &str| {
            std::panic::catch_unwind(|| check(package.path(), "errors", case, text)).is_err()
        };
        if std::env::var_os(ACCEPT).is_none() {
            assert!(!fails("known", "no such key\n"));
            assert!(fails("known", "no key") && fails("unknown", "") && fails("known", ""));
        }
    }
}
