//! The exit note: what a process had to say before it ended. It stays when the process is gone.

use crate::layout::*;
use crate::page::Page;
use crate::words::Words;

/// How a process ended, as it reported itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExitKind {
    /// An uncaught exception.
    Exception,
    /// The program ran to its end.
    Clean,
    /// Another end, described in the message.
    Other,
}

/// What to note.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Note<'a> {
    /// How it ended.
    pub kind: ExitKind,
    /// The exception's type; its first [`EXCEPTION_BYTES`] are kept.
    pub exception: &'a str,
    /// The message; its first [`MESSAGE_BYTES`] are kept.
    pub message: &'a str,
    /// The traceback; its last [`TRACEBACK_BYTES`] are kept, because the innermost frames are at its end.
    pub traceback: &'a str,
}

/// A note as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExitNote {
    /// The claim it belongs to.
    pub claim: u64,
    /// How it ended.
    pub kind: ExitKind,
    /// When, `CLOCK_MONOTONIC` in ns.
    pub mono_ns: u64,
    /// The last step completed before, if any.
    pub step: Option<u64>,
    /// The exception's type.
    pub exception: String,
    /// The message.
    pub message: String,
    /// Whether the type or the message lost its end.
    pub message_cut: bool,
    /// The traceback.
    pub traceback: String,
    /// Whether the start of the traceback was cut off.
    pub traceback_cut: bool,
}

impl Page<'_> {
    /// The note this claim has left, once it is complete.
    #[must_use]
    pub fn exit_note(&self) -> Option<ExitNote> {
        let words = self.words;
        // The state moves only forward within a claim, so it serves as the sequence word.
        words.read_under(NOTE_STATE, note_state::PUBLISHED, || {
            let flags = words.load(NOTE_FLAGS);
            ExitNote {
                claim: words.load(NOTE_CLAIM),
                kind: match words.load(NOTE_KIND) {
                    1 => ExitKind::Exception,
                    2 => ExitKind::Clean,
                    _ => ExitKind::Other,
                },
                mono_ns: words.load(NOTE_NS),
                step: (flags & note_flag::STEP_GIVEN != 0).then(|| words.load(NOTE_STEP)),
                exception: words.load_text(
                    NOTE_EXCEPTION,
                    words.load(NOTE_EXCEPTION_LENGTH),
                    EXCEPTION_BYTES,
                ),
                message: words.load_text(NOTE_MESSAGE, words.load(NOTE_MESSAGE_LENGTH), MESSAGE_BYTES),
                message_cut: flags & (note_flag::EXCEPTION_CUT | note_flag::MESSAGE_CUT) != 0,
                traceback: words.load_text(
                    NOTE_TRACEBACK,
                    words.load(NOTE_TRACEBACK_LENGTH),
                    TRACEBACK_BYTES,
                ),
                traceback_cut: flags & note_flag::TRACEBACK_CUT != 0,
            }
        })
    }
}

/// Leaves the note unless this claim has left one; returns whether it did. Needs no lock.
pub(crate) fn write(words: Words<'_>, now_ns: u64, note: &Note<'_>) -> bool {
    if words.exchange(NOTE_STATE, note_state::NONE, note_state::WRITING).is_err() {
        return false;
    }
    let exception = first_of(note.exception, EXCEPTION_BYTES);
    let message = first_of(note.message, MESSAGE_BYTES);
    let traceback = last_of(note.traceback, TRACEBACK_BYTES);
    let has_step = words.load(DRAFT + slot::FLAGS) & given::STEP != 0;
    let flag = |on: bool, flag: u64| if on { flag } else { 0 };

    words.store(NOTE_KIND, kind_code(note.kind));
    words.store(NOTE_NS, now_ns);
    words.store(NOTE_STEP, words.load(DRAFT + slot::STEP));
    words.store(NOTE_CLAIM, words.load(CLAIMS));
    words.store(
        NOTE_FLAGS,
        flag(exception.len() < note.exception.len(), note_flag::EXCEPTION_CUT)
            | flag(message.len() < note.message.len(), note_flag::MESSAGE_CUT)
            | flag(traceback.len() < note.traceback.len(), note_flag::TRACEBACK_CUT)
            | flag(has_step, note_flag::STEP_GIVEN),
    );
    words.store(NOTE_EXCEPTION_LENGTH, exception.len() as u64);
    words.store(NOTE_MESSAGE_LENGTH, message.len() as u64);
    words.store(NOTE_TRACEBACK_LENGTH, traceback.len() as u64);
    words.store_bytes(NOTE_EXCEPTION, exception.as_bytes());
    words.store_bytes(NOTE_MESSAGE, message.as_bytes());
    words.store_bytes(NOTE_TRACEBACK, traceback.as_bytes());
    words.store_release(NOTE_STATE, note_state::PUBLISHED);
    true
}

fn kind_code(kind: ExitKind) -> u64 {
    match kind {
        ExitKind::Exception => 1,
        ExitKind::Clean => 2,
        ExitKind::Other => 3,
    }
}

fn first_of(text: &str, room: usize) -> &str {
    &text[..text.floor_char_boundary(room)]
}

fn last_of(text: &str, room: usize) -> &str {
    &text[text.ceil_char_boundary(text.len().saturating_sub(room))..]
}
