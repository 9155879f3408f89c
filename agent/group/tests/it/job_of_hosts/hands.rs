//! How launchers carry out orders for their ranks.

use std::collections::BTreeSet;

use mainstay_checkpoint::inventory::{Copy, Medium, Shard, StepKey};
use mainstay_group::late_orders::{OnStart, on_start, on_stop};
use mainstay_model::entry::{ExitStatus, Fact};
use mainstay_model::id::{Attempt, Rank};
use mainstay_recovery::protocol::{Command, Event, Seat, StopWhy};

use super::launcher::{Brain, Launcher};
use super::{BUDGET, Happening, MS, World};
use crate::support::cluster::{exited, started};

/// The step of the simulated job's checkpoints.
fn step_key(step: u64, world: u32) -> StepKey {
    StepKey { step, job: "job".into(), run: "run@1".into(), attempt: 0, world }
}

impl Launcher {
    /// Its own ranks' shards of steps 1 to 3. On the first host also a replica of each shard of step 1.
    fn copies(&self) -> Vec<Copy> {
        let Some(Seat { world_size: world, group_rank, .. }) = self.seat else { return Vec::new() };
        let copy = |step, rank, own| Copy {
            holder: format!("h{group_rank}:1").into(),
            medium: Medium::Memory,
            own,
            verified: true,
            shard: Shard {
                key: step_key(step, world),
                rank,
                root: format!("{step}.{rank}"),
                bytes: 1,
                created: 0,
                piece: None,
            },
        };
        let mine = self.ranks().into_iter().filter(|_| self.holds);
        let own = mine.flat_map(|rank| (1..4).map(move |step| (step, rank.0, true)));
        let kept = (0..world).filter(|_| group_rank == 0).map(|rank| (1, rank, false));
        own.chain(kept).map(|(step, rank, own)| copy(step, rank, own)).collect()
    }

    /// The ranks that run and do not wait in their processes.
    fn running(&self) -> Vec<Rank> {
        self.living.keys().copied().filter(|rank| !self.waiting.contains(rank)).collect()
    }
}

impl World {
    /// Carries out a command after its duration and after the earlier ones. `by`: the epoch and the leader that gave
    /// it; `None` if the launcher itself wants it.
    pub fn will_do(&mut self, me: usize, command: Command, by: Option<(u64, usize)>) {
        let long = match command {
            Command::Start { .. } | Command::Stop { .. } => 400,
            Command::Look { .. } => 900,
            _ => 20,
        };
        let took = MS * (1 + self.chance.below(long) as u64);
        if matches!(command, Command::Look { .. }) {
            // No other command waits for it.
            return self
                .at(self.now + took, Happening::Does { launcher: me, command: Box::new(command), by });
        }
        let at = self.now.max(self.launchers[me].busy_until) + took;
        self.launchers[me].busy_until = at;
        self.at(at, Happening::Does { launcher: me, command: Box::new(command), by });
    }

    pub fn does(&mut self, me: usize, command: Command, by: Option<(u64, usize)>) {
        let fails = self.faults && self.chance.one_in(60);
        if !self.launchers[me].runs() {
            return;
        }
        match command {
            Command::Open { attempt } => {
                self.port += 1;
                let port = if fails { Err("no port".to_owned()) } else { Ok(self.port) };
                self.saw(me, Event::Opened { attempt, port });
            }
            Command::Seat { attempt, seat } => {
                // Ranks that wait in their processes have the numbers of the previous world.
                for rank in self.launchers[me].living.clone().into_keys() {
                    self.rank_exits(me, rank, ExitStatus::Signal(9), true);
                }
                let launcher = &mut self.launchers[me];
                launcher.holds &= launcher.seat.as_ref() == Some(&seat);
                launcher.seat = Some(seat.clone());
                if let Brain::Follows(follow) = &mut launcher.brain {
                    follow.sit(&seat);
                }
                self.saw(me, Event::Seated { attempt, seat });
            }
            Command::Gather { attempt, .. } => {
                let copies = self.launchers[me].copies();
                self.saw(me, Event::Holding { attempt, copies });
            }
            Command::Bring { attempt, step } => {
                let error = fails.then(|| "its memory is faulty".to_owned());
                self.launchers[me].brought = error.is_none().then(|| (attempt, step.clone()));
                self.saw(me, Event::Brought { attempt, step, error });
            }
            Command::Start { attempt, in_process, master_port, resume, .. } => {
                self.starts(me, attempt, in_process, (master_port, resume), fails, by);
            }
            Command::Stop { attempt, why, .. } => {
                if on_stop(attempt, self.launchers[me].attempt) {
                    self.launchers[me].attempt = attempt;
                    let gather = why == StopWhy::Fault && self.in_process;
                    for rank in self.launchers[me].living.clone().into_keys() {
                        if gather {
                            self.launchers[me].waiting.insert(rank);
                        } else {
                            self.rank_exits(me, rank, ExitStatus::Signal(15), true);
                        }
                    }
                }
                self.attempt_ends(me, attempt);
            }
            Command::EndRank { attempt, rank } => {
                self.rank_exits(me, rank, ExitStatus::Signal(9), true);
                self.attempt_ends(me, attempt);
            }
            Command::TakeEvidence { .. } | Command::AskToSave { .. } | Command::SaveDue { .. } => {}
            Command::Consult(_) | Command::AskPolicy { .. } | Command::Wake { .. } => {
                unreachable!("it is carried out at once")
            }
            Command::Look { launcher, .. } => {
                let sight = self.sight(me, self.launcher_named(&launcher));
                self.saw(me, Event::Looked { launcher, sight });
            }
            Command::Finish { exit, .. } => {
                let launcher = &mut self.launchers[me];
                assert!(launcher.living.is_empty(), "ranks outlive the job: {:?}", launcher.living);
                if let Brain::Leads(_) = launcher.brain {
                    launcher.exit = Some(exit);
                    self.reports_the_end(me);
                } else {
                    self.ends(me, exit);
                }
            }
        }
    }

    fn starts(
        &mut self,
        me: usize,
        attempt: Attempt,
        in_process: bool,
        (port, resume): (u16, Option<StepKey>),
        fails: bool,
        by: Option<(u64, usize)>,
    ) {
        let (_, leader) = by.expect("a leader orders it");
        let launcher = &mut self.launchers[me];
        let lives = !launcher.living.is_empty();
        match on_start(attempt, launcher.attempt, launcher.had_ranks, lives, in_process) {
            OnStart::Ignore => return,
            OnStart::Refuse => {
                (launcher.attempt, launcher.had_ranks) = (attempt, false);
                let error = "ranks still run here".to_owned();
                return self.saw(me, Event::Fact(Fact::start_failed(attempt, error)));
            }
            OnStart::Start => {}
        }
        let same = self.resumed.entry(attempt).or_insert_with(|| resume.clone());
        assert_eq!(*same, resume, "all hosts resume from the same step in {attempt}");
        if let Some(step) = resume {
            assert_eq!(launcher.brought, Some((attempt, step)), "the shards precede the ranks");
        }
        let by = self.started_by.entry(attempt).or_insert(leader);
        assert_eq!(*by, leader, "{attempt} is started by two leaders");
        assert!(attempt.0 == 0 || self.counted.contains(&attempt), "{attempt} was not counted by any leader");
        assert!(attempt.0 <= BUDGET + self.grown, "{attempt} is beyond the budget");
        let port_of = self.ports.entry(port).or_insert(attempt);
        assert_eq!(*port_of, attempt, "no port is used in two rounds");
        assert!(launcher.running().is_empty(), "a rank that does not wait lives at the start of {attempt}");
        (launcher.attempt, launcher.had_ranks) = (attempt, true);
        if fails {
            let error = "no memory".to_owned();
            return self.saw(me, Event::Fact(Fact::start_failed(attempt, error)));
        }
        let ranks = launcher.ranks();
        launcher.living.extend(ranks.iter().map(|rank| (*rank, attempt)));
        launcher.waiting.clear();
        for rank in &ranks {
            let of = self.given.entry((attempt, *rank)).or_insert(me);
            assert_eq!(*of, me, "{rank:?} of {attempt} was given twice");
        }
        self.saw(me, Event::Fact(started(attempt, port, ranks.into_iter())));
    }

    pub fn rank_exits(&mut self, me: usize, rank: Rank, status: ExitStatus, after_stop: bool) {
        let launcher = &mut self.launchers[me];
        let Some(attempt) = launcher.living.remove(&rank) else { return };
        launcher.waiting.remove(&rank);
        self.saw(me, Event::Fact(exited(attempt, rank, status, after_stop)));
    }

    fn attempt_ends(&mut self, me: usize, attempt: Attempt) {
        let waiting = self.launchers[me].waiting.iter().copied().collect();
        self.saw(me, Event::Fact(Fact::AttemptEnded { attempt, orphans_killed: 0, waiting }));
    }

    /// One running rank dies, chosen at random.
    pub fn rank_dies(&mut self, me: usize) {
        let running = self.launchers[me].running();
        if let Some(rank) = running.get(self.chance.below(running.len())) {
            self.rank_exits(me, *rank, ExitStatus::Signal(9), false);
        }
    }

    /// All running ranks finish.
    pub fn ranks_finish(&mut self) {
        let started: BTreeSet<usize> = (0..self.launchers.len()).collect();
        for me in started {
            for rank in self.launchers[me].running() {
                self.rank_exits(me, rank, ExitStatus::Code(0), false);
            }
        }
    }
}
