//! Methods of strings.

use super::super::value::{Heap, Made, Value};
use super::Arguments;

pub(super) fn method(heap: &mut Heap<'_>, text: &str, name: &str, given: Arguments) -> Made<Value> {
    heap.work(text.len() as u64 / 16)?;
    match name {
        "format" => return format(heap, text, given),
        "join" => {
            let [over] = given.only::<1>(name)?;
            let mut whole = String::new();
            for (index, part) in heap.iterate(&over)?.iter().enumerate() {
                let Value::Text(part) = part else {
                    return Err(format!("join(): {} is not a string", part.kind()));
                };
                heap.room(part.len() + text.len())?;
                whole.push_str(if index > 0 { text } else { "" });
                whole.push_str(part);
            }
            return heap.text(&whole);
        }
        _ => {}
    }
    let mut words = Vec::new();
    for value in &given.plain {
        match value {
            Value::Text(word) => words.push(word.clone()),
            other => return Err(format!("{name}(): {} is not a string", other.kind())),
        }
    }
    match (name, &words[..]) {
        ("startswith", [word]) => Ok(Value::Bool(text.starts_with(&**word))),
        ("endswith", [word]) => Ok(Value::Bool(text.ends_with(&**word))),
        ("find", [word]) => {
            let at = text.find(&**word).map_or(-1, |at| text[..at].chars().count() as i64);
            Ok(Value::Int(at))
        }
        ("lower", []) => heap.text(&text.to_lowercase()),
        ("upper", []) => heap.text(&text.to_uppercase()),
        ("strip", []) => heap.text(text.trim()),
        ("replace", [from, to]) => {
            let times = if from.is_empty() { text.len() + 1 } else { text.len() / from.len() };
            heap.room(text.len().saturating_add(times.saturating_mul(to.len())))?;
            heap.text(&text.replace(&**from, to))
        }
        ("split", [] | [_]) => {
            heap.room(text.len().saturating_mul(32))?;
            let parts: Vec<&str> = match words.first() {
                None => text.split_whitespace().collect(),
                Some(word) if word.is_empty() => return Err("split(): the separator is empty".to_owned()),
                Some(word) => text.split(&**word).collect(),
            };
            let parts: Made<Vec<Value>> = parts.into_iter().map(|part| heap.text(part)).collect();
            heap.list(parts?)
        }
        _ => Err(format!(
            "a string has no {name}() with {} argument(s); it has endswith, find, format, join, lower, replace, split, \
             startswith, strip, upper",
            words.len()
        )),
    }
}

/// `{}`, `{0}` and `{name}`, and `{{` for a brace.
fn format(heap: &mut Heap<'_>, text: &str, given: Arguments) -> Made<Value> {
    let mut whole = String::new();
    let mut rest = text;
    let mut next = 0;
    while let Some(at) = rest.find(['{', '}']) {
        whole.push_str(&rest[..at]);
        heap.room(at)?;
        let bracket = &rest[at..=at];
        rest = &rest[at + 1..];
        if rest.starts_with(bracket) {
            whole.push_str(bracket);
            rest = &rest[1..];
            continue;
        }
        let end = rest.find('}').filter(|_| bracket == "{");
        let Some(end) = end else {
            return Err("format(): unmatched brace; write {{ or }} for a literal brace".to_owned());
        };
        let field = &rest[..end];
        rest = &rest[end + 1..];
        let value = if field.is_empty() {
            next += 1;
            given.plain.get(next - 1)
        } else if let Ok(number) = field.parse::<usize>() {
            given.plain.get(number)
        } else {
            given.named.iter().find(|(name, _)| **name == *field).map(|(_, value)| value)
        };
        let value = value.ok_or_else(|| format!("format(): there is no argument for {{{field}}}"))?;
        let words = heap.write(value)?;
        heap.room(words.len())?;
        whole.push_str(&words);
    }
    whole.push_str(rest);
    heap.text(&whole)
}
