//! Progress bars in tqdm's form: ` 10%|█         | 10/100 [00:05<00:45,  2.0it/s, loss=2.31]`.

use super::words::{Number, Words, leading_number, number_after};

/// First words of bars that do not count training steps.
const NO_STEPS: [&str; 30] = [
    "loading",
    "downloading",
    "uploading",
    "map",
    "filter",
    "tokeniz",
    "tokenis",
    "fetching",
    "generating",
    "running tokenizer",
    "grouping",
    "casting",
    "flattening",
    "saving",
    "writing",
    "reading",
    "resolving",
    "computing",
    "extracting",
    "preparing",
    "preprocess",
    "creating",
    "building",
    "capturing",
    "materializing",
    "converting",
    "sanity check",
    "validat",
    "test",
    "predict",
];

/// The newest completed step among the bar states of a line. `None` if the line has no bar; `Some(None)` if none of its bars shows a
/// step.
pub(super) fn read(line: &[u8]) -> Option<Option<u64>> {
    // Most lines cost only this search for one byte.
    memchr::memchr(b'|', line)?;
    let mut any = false;
    let mut end = line.len();
    // The newest state first.
    while let Some(at) = memchr::memmem::rfind(&line[..end], b"%|") {
        any = true;
        let before = &line[..at];
        let name = name(before);
        if let Some(step) = state(&line[at + 2..end], name) {
            return Some(Some(step));
        }
        end = at;
    }
    any.then_some(None)
}

/// The completed steps of one state. `state` starts after `%|`.
fn state(state: &[u8], name: &[u8]) -> Option<u64> {
    // The bar itself has no `|`; the text after it starts with `| 10/100 [`.
    let bar = memchr::memchr(b'|', state)?;
    let (done, rest) = leading_number(state[bar + 1..].trim_ascii_start())?;
    let (total, rest) = leading_number(rest.strip_prefix(b"/")?)?;
    let rest = rest.strip_prefix(b" [")?;
    // `548M/548M [00:05<00:00, 100MB/s]` has letters after its numbers and fails earlier; `3/3 [… 12kB/s]` does not.
    let counts_bytes = memchr::memmem::find(rest, b"B/s").is_some();
    let completed = done > 0 && done <= total && !counts_bytes;
    let loss = loss(rest).or(loss(name));
    let is_training = match loss {
        Some(finite) => finite,
        None => !is_named_otherwise(name),
    };
    (completed && is_training).then_some(done)
}

/// Whether the loss in the text is finite. `None` if it has no loss.
fn loss(text: &[u8]) -> Option<bool> {
    let mut words = Words::new(text);
    let mut found = None;
    while let Some((word, end)) = words.next_word() {
        if word.len() >= 4 && word[word.len() - 4..].eq_ignore_ascii_case(b"loss") {
            match number_after(text, end) {
                Number::Finite => found = found.or(Some(true)),
                Number::NotFinite => return Some(false),
                Number::None => {}
            }
        }
    }
    found
}

/// The text before a bar: between the previous state and the percentage.
fn name(before: &[u8]) -> &[u8] {
    let percent = before.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
    let before = &before[..before.len() - percent];
    let start = memchr::memrchr2(b'\r', b'\n', before).map_or(0, |at| at + 1);
    // `clean` replaces a carriage return with a space; the previous state then ends with `]`.
    let state_before = memchr::memmem::rfind(&before[start..], b"%|").and_then(|bar| {
        let bar = start + bar;
        memchr::memchr(b']', &before[bar..]).map(|at| bar + at + 1)
    });
    before[state_before.unwrap_or(start)..].trim_ascii()
}

fn is_named_otherwise(name: &[u8]) -> bool {
    let Ok(name) = std::str::from_utf8(name) else { return false };
    let message = name[super::super::lines::prefix(name).len..].trim_start();
    let starts = |with: &&str| message.get(..with.len()).is_some_and(|head| head.eq_ignore_ascii_case(with));
    // `model.safetensors:`, `tokenizer.json:`: downloads.
    let is_file = message.split(':').next().is_some_and(|name| {
        [".json", ".safetensors", ".bin", ".pt", ".txt", ".parquet", ".model"]
            .iter()
            .any(|end| name.ends_with(end))
    });
    NO_STEPS.iter().any(starts) || is_file
}
