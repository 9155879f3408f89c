//! A JSON record on one line that holds several lines of output: `{"message": "[rank5]: Traceback …\\n[rank5]: …"}`, or a list of records.

use std::ops::Range;

use serde_json::Value;

use super::MAX_UNFINISHED_BYTES;

/// The most lines that a record is unfolded to.
const MAX_LINES: usize = 4096;

/// The whole line around `part`, from `least` on, if it may be such a record.
pub(super) fn record(block: &[u8], least: usize, part: &Range<usize>) -> Option<Range<usize>> {
    let from = least.max(part.start.saturating_sub(MAX_UNFINISHED_BYTES));
    let start = memchr::memrchr(b'\n', &block[from..part.start]).map_or(from, |newline| from + newline + 1);
    let opens = |at: usize| block[start..part.end].trim_ascii_start().get(at).copied();
    if !matches!((opens(0), opens(1)), (Some(b'{'), Some(b'"' | b' ')) | (Some(b'['), Some(b'{' | b'"'))) {
        return None;
    }
    let until = block.len().min(part.end + MAX_UNFINISHED_BYTES);
    let end = memchr::memchr(b'\n', &block[part.end..until]).map_or(until, |newline| part.end + newline);
    let line = &block[start..end];
    let folds = |at: usize| line.get(at + 2).is_some_and(|next| *next != b'"');
    let is_list = opens(0) == Some(b'[');
    (is_list || memchr::memmem::find_iter(line, b"\\n").any(folds)).then_some(start..end)
}

/// The lines that the record holds. `None` if it is no JSON or holds one only.
pub(super) fn lines(record: &[u8]) -> Option<String> {
    let value: Value = serde_json::from_slice(record).ok()?;
    let mut text = String::new();
    collect(&value, &mut text);
    (text.lines().count() > 1).then_some(text)
}

/// Appends all texts of several words. Others are names and levels.
fn collect(value: &Value, text: &mut String) {
    match value {
        Value::String(text_value) if text_value.contains([' ', '\n']) && text.lines().count() < MAX_LINES => {
            text.push_str(text_value.trim_end_matches('\n'));
            text.push('\n');
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, text)),
        Value::Object(fields) => fields.values().for_each(|field| collect(field, text)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use crate::attribution::class::Class;
    use crate::attribution::judged;

    const RAISED: &str = r#"[rank5]: Traceback (most recent call last):\n[rank5]:   File \"/home/a/train.py\", line 3, in step\n[rank5]:     x = b\n[rank5]: NameError: name 'b' is not defined\n[rank0]: NCCL WARN Connection closed by remote peer"#;

    #[test]
    fn a_record_of_several_lines_is_read_as_these_lines() {
        let padding = "x".repeat(5000);
        for log in [
            format!("{{\"level\": \"error\", \"message\": \"{RAISED}\"}}\n"),
            format!("step 1\n{{\"pad\":\"{padding}\",\"message\":\"{RAISED}\"}}\nstep 2\n"),
            format!("[{{\"log\": \"all is well\"}}, {{\"log\": \"{RAISED}\"}}]\n"),
        ] {
            let judged = judged(&log);
            assert_eq!((judged.class, judged.root.rank), (Class::UserCode, Some(5)), "{log}");
        }
    }

    #[test]
    fn a_record_of_one_line_and_broken_ones_are_read_as_lines() {
        let one = "{\"log\": \"NameError: name 'b' is not defined\\n\", \"stream\": \"stderr\"}\n";
        assert_eq!(judged(one).class, Class::UserCode);
        let torn = "{\"log\": \"boom\\nNameError: name 'b' is not defined\n";
        assert_eq!(judged(torn).class, Class::UserCode);
    }
}
