//! What a rank printed last, where it left no exit note: a Python traceback on its standard error.

use crate::entry::Note;
use crate::time::Mono;

const TRACEBACK: &str = "Traceback (most recent call last):";

/// The exception of the last traceback in `lines`, which ended at `at`; none if there is no whole one.
pub fn exception(lines: &[String], at: Mono) -> Option<Note> {
    let begin = lines.iter().rposition(|line| line.trim_end().ends_with(TRACEBACK))?;
    let mut said = lines[begin + 1..].iter();
    // Frames, their source lines and carets are indented; the first line that is not names the exception.
    let last = said.find(|line| !line.starts_with(char::is_whitespace) && !line.is_empty())?;
    let (exception, message) = last.split_once(": ").unwrap_or((last.trim_end(), ""));
    if !is_name(exception) {
        return None;
    }
    Some(Note {
        exception: exception.to_owned(),
        message: message.trim_end().to_owned(),
        traceback: lines[begin..].join("\n"),
        step: None,
        at,
    })
}

/// Whether it can be the name of a Python type: dotted identifiers.
fn is_name(text: &str) -> bool {
    let identifier = |part: &str| {
        part.starts_with(|first: char| first.is_alphabetic() || first == '_')
            && part.chars().all(|letter| letter.is_alphanumeric() || letter == '_')
    };
    !text.is_empty() && text.split('.').all(identifier)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn the_last_of_several_tracebacks_tells() {
        let text = "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nKeyError: 'x'\n\nDuring handling of \
                    the above exception, another exception occurred:\n\nTraceback (most recent call last):\n  File \
                    \"a.py\", line 9, in main\n    g()\n    ^^^\nmy.errors.BadBatch: batch 7 is bad\n";
        let note = exception(&lines(text), Mono(5)).expect("an exception");
        assert_eq!(
            (note.exception.as_str(), note.message.as_str()),
            ("my.errors.BadBatch", "batch 7 is bad")
        );
        assert!(note.traceback.contains("in main") && !note.traceback.contains("in f\n"));
    }

    #[test]
    fn other_text_is_no_exception() {
        for text in [
            "",
            "ValueError: no traceback before it",
            "Traceback (most recent call last):",
            "Traceback (most recent call last):\n  File \"a.py\", line 1, in f",
            "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nsome other line",
        ] {
            assert_eq!(exception(&lines(text), Mono(0)), None, "{text}");
        }
    }
}
