//! JSON in one canonical form: keys in order, one space of indent, ASCII, a final newline. If any byte differs from
//! it, the document has changed since it was written. (Python's `json.dumps(document, indent=1, sort_keys=True)`
//! writes the same form.)

use serde_json::Value;

/// The document in its canonical form.
pub fn canonical(document: &Value) -> Vec<u8> {
    let mut out = String::new();
    write(document, 0, &mut out);
    out.push('\n');
    out.into_bytes()
}

fn write(value: &Value, depth: usize, out: &mut String) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            // Sorts the names, because the features of serde_json decide on the kind of map.
            let mut names: Vec<&String> = fields.keys().collect();
            names.sort_unstable();
            out.push('{');
            for (index, name) in names.into_iter().enumerate() {
                begin_item(index, depth, out);
                text(name, out);
                out.push_str(": ");
                write(&fields[name.as_str()], depth + 1, out);
            }
            end(depth, '}', out);
        }
        Value::Array(items) if !items.is_empty() => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                begin_item(index, depth, out);
                write(item, depth + 1, out);
            }
            end(depth, ']', out);
        }
        Value::Object(_) => out.push_str("{}"),
        Value::Array(_) => out.push_str("[]"),
        Value::String(string) => text(string, out),
        Value::Null => out.push_str("null"),
        Value::Bool(truth) => out.push_str(if *truth { "true" } else { "false" }),
        Value::Number(number) => out.push_str(&number.to_string()),
    }
}

fn begin_item(index: usize, depth: usize, out: &mut String) {
    if index > 0 {
        out.push(',');
    }
    line(depth + 1, out);
}

fn end(depth: usize, bracket: char, out: &mut String) {
    line(depth, out);
    out.push(bracket);
}

fn line(depth: usize, out: &mut String) {
    out.push('\n');
    out.extend(std::iter::repeat_n(' ', depth));
}

/// A string with everything beyond ASCII escaped.
pub fn text(text: &str, out: &mut String) {
    out.push('"');
    for letter in text.chars() {
        match letter {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            ' '..='~' => out.push(letter),
            _ => {
                let mut units = [0; 2];
                for unit in letter.encode_utf16(&mut units) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_form_is_that_of_python() {
        let document = json!({"b": [1, "x"], "a": {"é": "\u{1}\n\u{7f}😀"}, "e": [], "o": {}});
        let expected = "{\n \"a\": {\n  \"\\u00e9\": \"\\u0001\\n\\u007f\\ud83d\\ude00\"\n },\n \"b\": [\n  1,\n  \"x\"\n ],\n \"e\": [],\n \"o\": {}\n}\n";
        assert_eq!(String::from_utf8(canonical(&document)).expect("ASCII"), expected);
    }
}
