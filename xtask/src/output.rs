//! Standard output of checks. If several rows of them run at once, each line starts with the name of its row.

use std::cell::Cell;
use std::io::{self, Write};

thread_local! {
    static NAME: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Starts each line that this thread writes from now on with this name.
pub fn named(name: &'static str) {
    NAME.set(Some(name));
}

/// Writes lines, the last of which may be incomplete.
pub fn write(text: &str) {
    let mut out = io::stdout().lock();
    let written = match NAME.get() {
        None => out.write_all(text.as_bytes()),
        Some(name) => text.split_inclusive('\n').try_for_each(|line| write!(out, "{name}| {line}")),
    };
    // A closed terminal must not end the tests.
    let _ = written.and_then(|()| out.flush());
}

pub fn line(text: &str) {
    write(&format!("{text}\n"));
}
