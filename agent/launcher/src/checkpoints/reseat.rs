//! Another seat for this host while the job runs: its ranks get other numbers, or the total number of ranks changes. No
//! rank runs meanwhile.
//!
//! What the former ranks have in memory goes to the disk, which may take a while. It happens outside the loop, and the
//! leader waits for it. Copies that are kept for other hosts stay.

use mainstay_model::id::{Attempt, Rank};
use mainstay_progress::memory::Learned;

use crate::checkpoints::moving::{Moved, Moving};
use crate::hang::Judge;
use crate::run::Launcher;
use mainstay_recovery::protocol::{Event, Seat};
use mainstay_sys::clock;

impl Launcher {
    /// The leader gives this host other ranks.
    pub(crate) async fn take_seat(&mut self, attempt: Attempt, seat: Seat) {
        self.finish_moving().await;
        self.end_those_that_wait().await;
        if seat == self.rank_spec.seat {
            if let (Some(replicas), Some(pool_owner)) =
                (&mut self.checkpoints.replicas, &self.checkpoints.pool_owner)
                && replicas.waits()
            {
                replicas.take_over(pool_owner, &self.rank_spec);
            }
            return self.step(clock::mono(), Event::Seated { attempt, seat });
        }
        self.ranks.pages.clear();
        self.ranks.monitors.clear();
        self.rank_spec.seat = seat.clone();
        if let Some(following) = self.group.follower_mut() {
            following.sit(&seat);
        }
        self.judge_other_ranks();
        let ranks = seat.first_rank..seat.first_rank + self.rank_spec.local_world_size;
        if let Some(replicas) = &mut self.checkpoints.replicas {
            replicas.leave();
        }
        match self.checkpoints.pool_owner.take() {
            None => self.step(clock::mono(), Event::Seated { attempt, seat }),
            Some(pool_owner) => {
                self.checkpoints.moving = Some(Moving::begin(attempt, seat, pool_owner, ranks));
            }
        }
    }

    /// The memory for checkpoints belongs to the new ranks.
    pub(crate) fn moved(&mut self, moved: Moved) {
        self.checkpoints.moving = None;
        let Moved { attempt, seat, pool_owner, messages } = moved;
        messages.into_iter().for_each(|line| self.output.terminal.print(line));
        match pool_owner {
            Ok(pool_owner) => {
                if let Some(replicas) = &mut self.checkpoints.replicas {
                    replicas.take_over(&pool_owner, &self.rank_spec);
                }
                self.checkpoints.pool_owner = Some(pool_owner);
            }
            Err(error) => {
                self.output.terminal.print(format!(
                    "memory for checkpoints is no longer available: {error}; ranks write them to the disk themselves"
                ));
                (self.checkpoints.replicas, self.rank_spec.checkpoint_pool) = (None, None);
            }
        }
        self.step(clock::mono(), Event::Seated { attempt, seat });
    }

    /// Waits until nothing moves.
    pub(crate) async fn finish_moving(&mut self) {
        if let Some(mut moving) = self.checkpoints.moving.take() {
            let moved = moving.done().await;
            self.moved(moved);
        }
    }

    /// Ends ranks that wait in their processes: they have the numbers and memory of the former world, and get new processes.
    async fn end_those_that_wait(&mut self) {
        let waiting: Vec<Rank> = self.ranks.living().map(|rank| rank.rank).collect();
        if waiting.is_empty() {
            return;
        }
        self.output
            .terminal
            .print("ranks that wait in their processes get new ones: their numbers may change".to_owned());
        for rank in waiting {
            self.end_rank(rank).await;
        }
    }

    /// Updates which ranks are judged here, which depends on the seats.
    fn judge_other_ranks(&mut self) {
        let now = clock::mono();
        let mut learned = Learned::default();
        self.hang.judge.remember(&mut learned);
        let first = Rank(self.rank_spec.seat.first_rank);
        self.hang.judge =
            Judge::new(&self.settings.hang, first, self.settings.local_world_size as usize, now);
        self.hang.judge.recall(&learned);
        self.group.judge_hangs_with(&mut self.hang.judge, now);
    }
}
