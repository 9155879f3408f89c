//! Fingerprints of exceptions: equal for the same bug, regardless of the numbers in its message.

use mainstay_model::entry::Note;

use mainstay_progress::memory::Fnv;

/// The number of innermost frames used.
const MAX_FRAMES: usize = 5;

/// Hashes the exception type, the message with numbers, addresses and paths masked, and the innermost frames by file and function. Line
/// numbers are left out, so that an edit above the faulty line does not hide a repetition.
pub fn fingerprint(note: &Note) -> String {
    let frames = innermost_frames(&note.traceback);
    format!("{}: {} @ {}", note.exception, masked(&note.message), frames.join(" < "))
}

/// Hashes a job's program: its command and the files of its program, by name and content, in any order.
pub fn program(command: &[String], files: &std::collections::BTreeMap<String, Vec<u8>>) -> String {
    let mut hash = Fnv::default();
    command.iter().for_each(|word| hash.update(word.as_bytes()));
    for (name, content) in files {
        hash.update(name.as_bytes());
        hash.update(content);
    }
    hash.to_string()
}

/// The message with every run of digits, every hexadecimal number and every directory masked.
fn masked(message: &str) -> String {
    let first_line = message.lines().next().unwrap_or_default();
    first_line.split_inclusive(char::is_whitespace).map(masked_word).collect()
}

fn masked_word(word: &str) -> String {
    let (body, space) = match word.find(char::is_whitespace) {
        Some(end) => word.split_at(end),
        None => (word, ""),
    };
    let name = body.rsplit('/').next().unwrap_or(body);
    let mut out = String::with_capacity(name.len());
    let mut in_number = false;
    let hexadecimal = name.trim_start_matches(['(', '[', '\'', '"']).starts_with("0x");
    for letter in name.chars() {
        let of_number =
            letter.is_ascii_digit() || (hexadecimal && (letter.is_ascii_hexdigit() || letter == 'x'));
        if !of_number {
            out.push(letter);
        } else if !in_number {
            out.push('#');
        }
        in_number = of_number;
    }
    out.push_str(space);
    out
}

/// `file:function` of the innermost frames of a Python traceback, innermost first.
fn innermost_frames(traceback: &str) -> Vec<String> {
    let mut frames: Vec<String> = traceback.lines().filter_map(frame).collect();
    frames.reverse();
    frames.truncate(MAX_FRAMES);
    frames
}

/// Parses a line such as `  File "/home/a/train.py", line 12, in main`.
fn frame(line: &str) -> Option<String> {
    let rest = line.trim_start().strip_prefix("File \"")?;
    let (path, rest) = rest.split_once('"')?;
    let file = path.rsplit('/').next().unwrap_or(path);
    let function = rest.rsplit_once(", in ").map_or("?", |(_, function)| function.trim());
    Some(format!("{file}:{function}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(message: &str, line: u32) -> Note {
        Note {
            exception: "builtins.ValueError".into(),
            message: message.into(),
            traceback: format!(
                "Traceback (most recent call last):\n  File \"/a/train.py\", line {line}, in main\n    x()\n"
            ),
            ..Note::default()
        }
    }

    #[test]
    fn numbers_addresses_paths_and_lines_do_not_count() {
        let first = fingerprint(&note("bad 17 0x7ffe12 /home/a/data.bin", 3));
        let second = fingerprint(&note("bad 4 0x1234ab /mnt/b/data.bin", 9));
        assert_eq!(first, second);
        assert_eq!(first, "builtins.ValueError: bad # # data.bin @ train.py:main");
    }

    #[test]
    fn another_message_is_another_bug() {
        assert_ne!(fingerprint(&note("bad value 17", 3)), fingerprint(&note("worse value 17", 3)));
    }
}
