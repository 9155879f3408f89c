//! The error file in which torch stores an uncaught exception: the note is no longer than the file and survives the
//! journal.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_model::entry::Note;
use mainstay_health::parse::error_file;
use mainstay_model::time::Mono;
use mainstay_fuzz::{survives_json, text};

fuzz_target!(|bytes: &[u8]| {
    let text = text(bytes);
    if let Some(note) = error_file::parse(&text, Mono(7)) {
        assert!(note.exception.len() + note.message.len() + note.traceback.len() <= text.len());
        let written = serde_json::to_vec(&note).expect("a note can be written");
        assert_eq!(survives_json::<Note>(&written), Some(note));
    }
});
