//! `TORCHELASTIC_ERROR_FILE`: what torch's `@record` writes about an uncaught exception. Its time has a resolution of one
//! second, and a signal leaves no file. It is used for ranks without the heartbeat client.

use std::io::Read;
use std::path::Path;

use mainstay_health::parse::error_file;
use mainstay_model::entry::Note;
use mainstay_model::time::Mono;

use mainstay_sys::foreign_files;

/// No error file is as long as this.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Reads the file, if it exists and has torch's format. `at` is used as the time.
pub fn read(path: &Path, at: Mono) -> Option<Note> {
    let mut text = String::new();
    foreign_files::open(path, None).ok()?.take(MAX_FILE_BYTES).read_to_string(&mut text).ok()?;
    let note = error_file::parse(&text, at)?;
    Some(Note { file: Some(path.display().to_string()), ..note })
}
