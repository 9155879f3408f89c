//! `TORCHELASTIC_ERROR_FILE`: the record that torch's `@record` writes for an uncaught exception.

use serde_json::Value;

use mainstay_model::entry::Note;
use mainstay_model::time::Mono;

/// Parses both forms: `{"message": {"message": …, "extraInfo": {"py_callstack": …}}}` and `{"message": "…"}`.
pub fn parse(text: &str, at: Mono) -> Option<Note> {
    let file: Value = serde_json::from_str(text).ok()?;
    let message = &file["message"];
    let line = message.as_str().or_else(|| message["message"].as_str())?;
    let traceback = message["extraInfo"]["py_callstack"].as_str().unwrap_or_default();
    let (exception, text) = line.split_once(": ").unwrap_or((line, ""));
    Some(Note {
        exception: exception.to_owned(),
        message: text.to_owned(),
        traceback: traceback.to_owned(),
        at,
        ..Note::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_read() {
        let new = r#"{"message": {"message": "ValueError: bad: 3", "extraInfo": {"py_callstack": "Trace", "timestamp": "17"}}}"#;
        let note = parse(new, Mono(5)).expect("a note");
        assert_eq!((note.exception.as_str(), note.message.as_str()), ("ValueError", "bad: 3"));
        assert_eq!((note.traceback.as_str(), note.at), ("Trace", Mono(5)));
        let old = parse(r#"{"message": "KeyError: 'x'", "timestamp": 3}"#, Mono(5)).expect("a note");
        assert_eq!(old.exception, "KeyError");
    }

    #[test]
    fn other_content_is_rejected() {
        for text in ["", "{", "[]", "{}", "{\"message\": 3}", "{\"message\": {\"extraInfo\": 1}}", "\u{0}"] {
            assert_eq!(parse(text, Mono(0)), None, "{text}");
        }
    }
}
