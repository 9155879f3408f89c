//! The last output of a rank: the lines kept of it, and the exception in its traceback on standard error if it left no exit note.

use crate::attribution::traceback;
use mainstay_model::entry::Note;
use mainstay_model::time::Mono;

/// Maximum number of lines and bytes kept per stream.
const MAX_LINES: usize = 60;
const MAX_BYTES: usize = 16 * 1024;

/// The same if they would start inside a traceback.
const MAX_TRACEBACK_LINES: usize = 400;
const MAX_TRACEBACK_BYTES: usize = 64 * 1024;

/// A line of the end of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Without its newline.
    pub text: String,
    /// The offset of its end in the file, including its newline.
    pub end: u64,
}

/// The last lines of a file whose end is `bytes`, from offset `start` on: 60 lines and 16 KiB. A traceback is kept from its start,
/// together with those that led to it, up to 400 lines and 64 KiB.
pub fn kept(bytes: &[u8], start: u64) -> Vec<Line> {
    let mut lines: Vec<&[u8]> = Vec::new();
    let (mut size, mut whole) = (0, 0);
    for line in bytes.split_inclusive(|byte| *byte == b'\n').rev().take(MAX_TRACEBACK_LINES) {
        if lines.len() < MAX_LINES && size < MAX_BYTES {
            let room = MAX_BYTES - size;
            lines.push(&line[line.len().saturating_sub(room)..]);
            whole = lines.len();
        } else if size + line.len() <= MAX_TRACEBACK_BYTES
            && lines.last().is_some_and(|line| is_of_traceback(line))
        {
            lines.push(line);
        } else {
            break;
        }
        size += line.len();
    }
    // Lines beyond the usual limit are kept only from the start of a traceback.
    let starts = |line: &&[u8]| String::from_utf8_lossy(line).contains(TRACEBACK);
    let from = lines[whole..].iter().rposition(starts).map_or(whole, |at| whole + at + 1);
    lines.truncate(from);
    let mut end = start + bytes.len() as u64;
    let mut kept: Vec<Line> = Vec::with_capacity(lines.len());
    for line in lines {
        let text = String::from_utf8_lossy(line);
        let text = text.strip_suffix('\n').unwrap_or(&text);
        kept.push(Line { text: text.strip_suffix('\r').unwrap_or(text).to_owned(), end });
        end -= line.len() as u64;
    }
    kept.reverse();
    kept
}

/// Whether a line may be part of a traceback: indented lines, lines that start and link tracebacks, and exceptions.
fn is_of_traceback(line: &[u8]) -> bool {
    let line = String::from_utf8_lossy(line);
    let text = without_rank(&line);
    const LINKS: [&str; 2] = ["During handling of the above", "The above exception was"];
    text.trim().is_empty()
        || text.starts_with([' ', '\t', '|', '+'])
        || text.contains(TRACEBACK)
        || LINKS.iter().any(|link| text.starts_with(link))
        || traceback::raised(text).is_some_and(|raised| !raised.embedded)
}

/// The line without the `[rank0]: ` that PyTorch adds to each line of a traceback once there is a process group.
fn without_rank(line: &str) -> &str {
    let numbered = line.strip_prefix("[rank").and_then(|rest| rest.split_once("]:"));
    match numbered {
        Some((rank, text)) if rank.bytes().all(|byte| byte.is_ascii_digit()) => {
            text.strip_prefix(' ').unwrap_or(text)
        }
        _ => line,
    }
}

const TRACEBACK: &str = "Traceback (most recent call last):";

/// The exception of the last traceback in `lines`, with the time `at` of the rank's end. `None` if there is no complete one.
pub fn exception(lines: &[String], at: Mono) -> Option<Note> {
    let begin = lines.iter().rposition(|line| line.trim_end().ends_with(TRACEBACK))?;
    let unlabelled: Vec<&str> = lines[begin..].iter().map(|line| without_rank(line)).collect();
    // Frames, their source lines and carets are indented. The first unindented line names the exception.
    let named = |line: &&&str| !line.starts_with(char::is_whitespace) && !line.is_empty();
    let last = unlabelled[1..].iter().find(named)?;
    let (exception, message) = last.split_once(": ").unwrap_or((last.trim_end(), ""));
    if !is_name(exception) {
        return None;
    }
    Some(Note {
        exception: exception.to_owned(),
        message: message.trim_end().to_owned(),
        traceback: unlabelled.join("\n"),
        at,
        ..Note::default()
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

    fn texts(lines: &[Line]) -> Vec<&str> {
        lines.iter().map(|line| line.text.as_str()).collect()
    }

    #[test]
    fn the_last_lines_are_kept_with_their_places() {
        let kept_of = kept(b"one\r\n\ntwo\nunended", 100);
        assert_eq!(texts(&kept_of), ["one", "", "two", "unended"]);
        assert_eq!(kept_of.iter().map(|line| line.end).collect::<Vec<u64>>(), [105, 106, 110, 117]);
        let many = "line\n".repeat(500);
        assert_eq!(kept(many.as_bytes(), 0).len(), MAX_LINES);
        let long = format!("{}end\n", "x".repeat(40_000));
        let kept_of = kept(long.as_bytes(), 7);
        assert_eq!((kept_of.len(), kept_of[0].text.len()), (1, MAX_BYTES - 1));
        assert_eq!(kept(b"", 0), []);
    }

    #[test]
    fn a_traceback_is_kept_from_its_start() {
        for prefix in ["", "[rank1]: "] {
            let frames = |count: usize| {
                let frame = format!("{prefix}  File \"a.py\", line 1, in f\n{prefix}    f()\n");
                format!("{prefix}{TRACEBACK}\n{}{prefix}ValueError: deep\n", frame.repeat(count))
            };
            let chain = format!(
                "start\n  indented\n{}{prefix}\n{prefix}During handling of the above exception, another exception occurred:\n{prefix}\n{}",
                frames(60),
                frames(60)
            );
            let kept_of = kept(chain.as_bytes(), 0);
            assert_eq!(kept_of.len(), 2 * 122 + 3, "{prefix}");
            assert_eq!(kept_of[0].text, format!("{prefix}{TRACEBACK}"));
            // A traceback longer than all limits keeps its last lines.
            assert_eq!(kept(frames(900).as_bytes(), 0).len(), MAX_LINES);
        }
        // Merely indented lines are no traceback.
        let indented = "  option: 1\n".repeat(300);
        assert_eq!(kept(indented.as_bytes(), 0).len(), MAX_LINES);
    }

    #[test]
    fn the_last_of_several_tracebacks_counts() {
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
    fn a_traceback_with_the_rank_before_each_line_is_one() {
        let text = "[rank1]: Traceback (most recent call last):\n[rank1]:   File \"a.py\", line 1, in f\n[rank1]:     f()\n\
                    [rank1]: RuntimeError: [pair.cc:544] Connection closed by peer [10.0.0.2]:7\n";
        let note = exception(&lines(text), Mono(5)).expect("an exception");
        assert_eq!(note.exception, "RuntimeError");
        assert_eq!(note.message, "[pair.cc:544] Connection closed by peer [10.0.0.2]:7");
        assert!(note.traceback.contains("\n  File \"a.py\""), "{}", note.traceback);
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
