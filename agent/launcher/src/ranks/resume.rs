//! Starts that wait until it is decided which of the trainer's own checkpoints the job resumes from. The loop goes on meanwhile.

use mainstay_model::id::Attempt;
use tokio::sync::mpsc;

use crate::checkpoints::sealing::{NotToStart, Stage, Starting};
use crate::run::{Ended, Launcher};

impl Launcher {
    /// Starts the ranks of an attempt, at once or when the checkpoint to resume from is known.
    pub(crate) async fn start(
        &mut self,
        attempt: Attempt,
        port: Result<u16, String>,
        in_process: bool,
        ended: &mpsc::UnboundedSender<Ended>,
    ) {
        // A spare has not checked yet what it resumes from.
        let again = attempt.0 > 0 || self.was_spare();
        let Some(sealing) = self.checkpoints.sealing.clone().filter(|_| again && port.is_ok()) else {
            return self.start_at_once(attempt, port, in_process, ended).await;
        };
        let (reported, lines) = mpsc::unbounded_channel();
        let task = tokio::spawn(async move {
            let print = move |line: String| {
                let _ = reported.send(line);
            };
            sealing.go_back(true, &print).await.map(drop).map_err(NotToStart::words)
        });
        self.checkpoints.starting = Some(Starting { attempt, in_process, port, task, lines });
    }

    pub(crate) async fn stage(&mut self, stage: Stage, ended: &mpsc::UnboundedSender<Ended>) {
        match stage {
            Stage::Line(line) => self.output.terminal.print(line),
            Stage::Done(done) => {
                let Some(mut starting) = self.checkpoints.starting.take() else { return };
                while let Ok(line) = starting.lines.try_recv() {
                    self.output.terminal.print(line);
                }
                let port = done.and_then(|()| starting.port.clone());
                self.start_at_once(starting.attempt, port, starting.in_process, ended).await;
            }
        }
    }

    async fn start_at_once(
        &mut self,
        attempt: Attempt,
        port: Result<u16, String>,
        in_process: bool,
        ended: &mpsc::UnboundedSender<Ended>,
    ) {
        match in_process {
            true => self.start_round(attempt, port, ended).await,
            false => self.start_ranks(attempt, port, ended),
        }
    }

    /// Cancels a start that still waits, because the job is about to end.
    pub(crate) fn give_up_start(&mut self) -> Option<Attempt> {
        self.checkpoints.starting.take().map(|starting| starting.attempt)
    }
}
