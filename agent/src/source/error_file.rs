//! `TORCHELASTIC_ERROR_FILE`: what torch's `@record` writes of an uncaught exception. It has no better time than
//! whole seconds and is missing after a signal; it serves where the heartbeat client is not used.

use std::io::Read;
use std::path::Path;

use mainstay_core::base::time::Mono;
use mainstay_core::formats::parse::error_file;
use mainstay_core::model::entry::Note;

/// No error file is as long as this.
const LONGEST: u64 = 1 << 20;

/// Reads the file, if there is one and it holds what torch writes. `at` stands in for the time.
pub fn read(path: &Path, at: Mono) -> Option<Note> {
    let mut text = String::new();
    std::fs::File::open(path).ok()?.take(LONGEST).read_to_string(&mut text).ok()?;
    let note = error_file::parse(&text, at)?;
    Some(Note { file: Some(path.display().to_string()), ..note })
}
