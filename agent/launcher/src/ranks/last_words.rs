//! Ranks that are asked to end later than the others after a fault, because they are about to end by themselves and their
//! last output is needed.
//!
//! A rank that raised an exception writes its exit note before its traceback if another hook encloses the client's:
//! `torch.distributed` collects what the inner hook prints, and prints it afterwards. And if one rank shows that the
//! program cannot run, the launcher waits to see how the others end.

use mainstay_diagnosis::unrunnable;
use mainstay_model::entry::{ExitStatus, Note};
use mainstay_model::id::{Attempt, Pid};
use mainstay_model::time::Span;

use crate::output::rank_output::StreamTails;
use crate::ranks::process::RankProcess;
use crate::ranks::stop::Spared;
use crate::run::Launcher;
use mainstay_recovery::protocol::StopWhy;
use mainstay_sys::clock;

/// How long a rank that raised an exception may take to print its traceback.
const TO_PRINT: Span = Span::millis(300);

/// How long the other ranks may take to end in the same way, if the first shows that the program cannot run.
const TO_END_ALIKE: Span = Span::seconds(2);

/// How often to check whether a traceback is printed. Only files of ranks that raised and have not printed are read.
const POLL_INTERVAL: Span = Span::millis(2);

impl Launcher {
    /// The ranks that a stop leaves out at first.
    pub(crate) fn to_spare(&self, why: StopWhy) -> Spared {
        let now = clock::mono();
        let wake_at = now.after(POLL_INTERVAL);
        if why != StopWhy::Fault {
            return Spared::default();
        }
        if self.output.spoken.may_not_run() && !self.output.spoken.has_steps() {
            let ranks = self.ranks.living().map(|rank| rank.pid).collect();
            return Spared { ranks, until: now.after(TO_END_ALIKE), wake_at: now.after(TO_END_ALIKE) };
        }
        Spared { ranks: self.silent(), until: now.after(TO_PRINT), wake_at }
    }

    /// Checks whether spared ranks have printed their tracebacks.
    pub(crate) fn look_at_spared(&mut self) {
        let silent = self.silent();
        let now = clock::mono();
        if let Some(stop) = &mut self.stopping.stop {
            stop.spare_only(&silent, now.after(POLL_INTERVAL), now, &self.ranks.processes);
        }
    }

    /// Ranks that raised and whose traceback is not in their standard error yet.
    fn silent(&self) -> Vec<Pid> {
        let silent = |rank: &&RankProcess| {
            rank.raised
                && rank.exit.is_none()
                && rank.ending.is_none()
                && !self.output.spoken.has_printed(rank.rank, &rank.files)
        };
        self.ranks.processes.iter().filter(silent).map(|rank| rank.pid).collect()
    }

    /// Notes whether a rank's end shows that the program cannot run, before the job acts on it.
    pub(crate) fn note_end(&mut self, note: Option<&Note>, status: Option<ExitStatus>, words: &StreamTails) {
        if self.ranks.attempt == Attempt(0) && unrunnable::may_not_run(note, status, &words.stderr_tail) {
            self.output.spoken.note_that_it_may_not_run();
        }
    }
}
