//! Another seat for this host while the job runs: its ranks get other numbers, or there is another number of ranks in all. No
//! rank runs meanwhile.
//!
//! What lies in memory of the ranks that were goes to the disk, which may take a while: beside the loop, and the leader waits for
//! it. Copies that are kept for other hosts stay.

use mainstay_core::base::id::{Attempt, Rank};
use mainstay_core::progress::memory::Learned;
use mainstay_core::recovery::hosts::wire::{Report, Seat};

use crate::act::rank_processes::RankProcess;
use crate::launch::brain::Brain;
use crate::launch::hang::Judge;
use crate::launch::moving::{Moved, Moving};
use crate::launch::shell::Launcher;
use crate::os::clock;

impl Launcher {
    /// The leader gives this host other ranks.
    pub(super) async fn take_seat(&mut self, attempt: Attempt, seat: Seat) {
        self.finish_moving().await;
        self.end_those_that_wait().await;
        if seat == self.crew.seat {
            if let (Some(replicas), Some(keeper)) = (&mut self.replicas, &self.keeper)
                && replicas.waits()
            {
                replicas.take_over(keeper, &self.crew);
            }
            return self.report(clock::mono(), Report::Seated { attempt, seat });
        }
        self.pages.clear();
        self.monitors.clear();
        self.crew.seat = seat.clone();
        if let Brain::Following(following) = &mut self.brain {
            following.sit(&seat);
        }
        self.judge_other_ranks();
        let ranks = seat.first_rank..seat.first_rank + self.crew.local_world_size;
        if let Some(replicas) = &mut self.replicas {
            replicas.leave();
        }
        match self.keeper.take() {
            None => self.report(clock::mono(), Report::Seated { attempt, seat }),
            Some(keeper) => {
                self.moving = Some(Moving::begin(attempt, seat, keeper, ranks));
            }
        }
    }

    /// The memory for checkpoints is that of the new ranks.
    pub(super) fn moved(&mut self, moved: Moved) {
        self.moving = None;
        let Moved { attempt, seat, keeper, said } = moved;
        said.into_iter().for_each(|line| self.terminal.say(line));
        match keeper {
            Ok(keeper) => {
                if let Some(replicas) = &mut self.replicas {
                    replicas.take_over(&keeper, &self.crew);
                }
                self.keeper = Some(keeper);
            }
            Err(error) => {
                self.terminal.say(format!(
                    "no memory for checkpoints any more: {error}; ranks write them to the disk themselves"
                ));
                (self.replicas, self.crew.checkpoint_pool) = (None, None);
            }
        }
        self.report(clock::mono(), Report::Seated { attempt, seat });
    }

    /// Waits until nothing moves.
    pub(super) async fn finish_moving(&mut self) {
        if let Some(mut moving) = self.moving.take() {
            let moved = moving.done().await;
            self.moved(moved);
        }
    }

    /// Ranks that wait in their processes have numbers and memory of the world that was: they get new processes.
    async fn end_those_that_wait(&mut self) {
        let living = |rank: &&RankProcess| rank.exit.is_none();
        let waiting: Vec<Rank> = self.ranks.iter().filter(living).map(|rank| rank.rank).collect();
        if waiting.is_empty() {
            return;
        }
        self.terminal
            .say("ranks that wait in their processes get new ones: their numbers may change".to_owned());
        for rank in waiting {
            self.end_rank(rank).await;
        }
    }

    /// Who is judged, and where, follows from the seats.
    fn judge_other_ranks(&mut self) {
        let now = clock::mono();
        let mut learned = Learned::default();
        self.hangs.remember(&mut learned);
        let first = Rank(self.crew.seat.first_rank);
        self.hangs = Judge::new(&self.settings.hang, first, self.settings.local_world_size as usize, now);
        self.hangs.recall(&learned);
        match &self.brain {
            Brain::Leading(leading) => self.hangs.judge_all(leading.lead.seats(), now),
            Brain::Following(following) => {
                self.hangs.judged_elsewhere(following.follow.seat().group_world_size);
            }
            Brain::Alone(_) | Brain::Gone => {}
        }
    }
}
