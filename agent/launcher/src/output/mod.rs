//! What the launcher and its ranks print.

mod growth;
pub(crate) mod prefix;
pub(crate) mod rank_output;
mod screen;
mod sink;
mod terminal;

use std::path::Path;

use mainstay_diagnosis::unrunnable;
use mainstay_model::entry::{ExitStatus, Note};
use mainstay_model::id::Attempt;
use mainstay_view::step_rate::StepRate;

use crate::ranks::process::RankProcess;
use crate::settings::Shown;
use rank_output::{RankOutput, StreamTails};
pub(crate) use terminal::{Duplicate, FollowedFile, Stream, Tail, tail};
pub use terminal::{LineStyle, Terminal, UndisplayedOutput};

/// What the launcher and its ranks print.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) terminal: Terminal,
    /// What ranks write, and when.
    pub(crate) spoken: RankOutput,
    /// The speed of the job, for people.
    pub(crate) rate: StepRate,
    shown: Shown,
    /// `ROLE_NAME`.
    role: String,
}

impl Output {
    pub(crate) fn new(terminal: Terminal, shown: Shown, role: String) -> Output {
        Output { terminal, spoken: RankOutput::start(), rate: StepRate::default(), shown, role }
    }

    /// Watches the output of a new process, and shows it.
    pub(crate) fn watch(&self, rank: &RankProcess) {
        let (files, shown) = (&rank.files, &self.shown);
        self.spoken.watch(files);
        let (stdout, stderr) = shown.streams_of(rank.local_rank);
        let prefix = shown.prefix_of(&self.role, rank.rank.0, rank.local_rank);
        let streams = [
            (stdout, &files.stdout, Stream::Stdout, &shown.duplicate_stdout, "filtered_stdout.log"),
            (stderr, &files.stderr, Stream::Stderr, &shown.duplicate_stderr, "filtered_stderr.log"),
        ];
        for (on_terminal, path, stream, filters, name) in streams {
            // Next to the directories of the ranks: the lines of all ranks are in one file.
            let attempt = path.parent().and_then(Path::parent).filter(|_| !filters.is_empty());
            let duplicate =
                attempt.map(|attempt| Duplicate { path: attempt.join(name), filters: filters.clone() });
            if on_terminal || duplicate.is_some() {
                let (path, prefix) = (path.clone(), prefix.clone());
                self.terminal.follow(FollowedFile { path, prefix, stream, on_terminal, duplicate });
            }
        }
    }

    /// Notes whether a rank's end shows that the program cannot run, before the job acts on it.
    pub(crate) fn note_end(
        &mut self,
        attempt: Attempt,
        note: Option<&Note>,
        status: Option<ExitStatus>,
        tails: &StreamTails,
    ) {
        if attempt == Attempt(0) && unrunnable::may_not_run(note, status, &tails.stderr_tail) {
            self.spoken.may_not_run = true;
        }
    }
}
