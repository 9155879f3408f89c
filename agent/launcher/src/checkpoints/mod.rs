//! Checkpoints of the ranks of this host: the memory for them, copies on other hosts, and the trainer's own files.

mod copied_step;
pub(crate) mod doubtful;
pub mod lineage;
pub mod replicas;
pub mod sealing;

use std::collections::BTreeMap;

use mainstay_checkpoint::copied_step as entries;
use mainstay_checkpoint::inventory::StepKey;
use mainstay_checkpoint::replication_cost::StepTime;
use mainstay_group::spare_ready::SpareCopy;
use mainstay_health::parse::mounts::{mount_of, parse_mounts};
use mainstay_model::entry::Fact;
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::observation::{Observation, Weight};
use mainstay_recovery::job::{FILE_SYSTEM_ANSWERS, FILE_SYSTEM_SILENT};
use mainstay_recovery::protocol::{Event, Seat};
use mainstay_sys::clock;
use mainstay_tier::peer::FetchedShards;
use mainstay_tier::pool::{PoolError, PoolOwner, WholeStep};
use tokio::task::JoinHandle;

use crate::group::Group;
use crate::output::Terminal;
use crate::ranks::{RankSpec, Ranks, Start};
use copied_step::CopyNews;
use replicas::{FromReplicas, Replicas};
use sealing::{Sealing, StartProgress, Starting};

/// Checkpoints of the ranks of this host.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    /// Keeps the checkpoints that ranks copy to memory.
    pub(crate) pool_owner: Option<PoolOwner>,
    /// Copies of checkpoints on the job's other hosts; none for a job of one host.
    pub(crate) replicas: Option<Replicas>,
    /// The trainer's own checkpoints; none where none are watched.
    sealing: Option<Sealing>,
    /// The start that waits for a decision about them.
    pub(crate) starting: Option<Starting>,
    /// The memory for checkpoints, while this host gets other ranks.
    pub(crate) moving: Option<Moving>,
    /// The attempt in which a silent file system of the checkpoints was reported.
    silence_reported: Option<Attempt>,
}

impl Checkpoints {
    pub(crate) fn new(
        pool_owner: Option<PoolOwner>,
        replicas: Option<Replicas>,
        sealing: Option<Sealing>,
    ) -> Checkpoints {
        Checkpoints { pool_owner, replicas, sealing, starting: None, moving: None, silence_reported: None }
    }

    /// What ranks of earlier attempts have written completely counts. They are gone by now, or wait.
    pub(crate) fn begin_attempt(&self, attempt: Attempt) {
        if let Some(pool_owner) = &self.pool_owner {
            pool_owner.begin_attempt(attempt.0.into());
        }
    }

    /// Before the ranks of several hosts start, each host reports which checkpoints it holds. The leader names the others.
    pub(crate) fn gather(&self, attempt: Attempt, peers: Vec<String>, group: &mut Group) {
        self.begin_attempt(attempt);
        match &self.replicas {
            Some(replicas) => replicas.gather(attempt, peers),
            None => group.step(clock::mono(), Event::Holding { attempt, copies: Vec::new() }),
        }
    }

    /// The leader wants the shards of a step where the ranks of this host look for them.
    pub(crate) fn bring(&self, attempt: Attempt, step: StepKey, world: u32, group: &mut Group) {
        match &self.replicas {
            Some(replicas) => replicas.bring(attempt, step, world),
            None => {
                let error = Some("no memory is kept for checkpoints there".to_owned());
                group.step(clock::mono(), Event::Brought { attempt, step, error });
            }
        }
    }

    /// Takes in news of the copies.
    pub(crate) fn news(&mut self, news: FromReplicas, world: u32, group: &mut Group, terminal: &Terminal) {
        let now = clock::mono();
        match news {
            FromReplicas::Line(line) => terminal.print(line),
            // A spare reports itself what it has.
            FromReplicas::Copies(_) if group.waiting().is_some() => {}
            FromReplicas::Copies(CopyNews::First(step)) => {
                terminal.print(format!("checkpoint: each shard of step {step} has a copy on another host"));
            }
            // All launchers see the same copies; the leader records them for all.
            FromReplicas::Copies(CopyNews::Newest(step)) => {
                if group.lead().is_some() {
                    group.fact(step.fact());
                }
            }
            FromReplicas::Copies(CopyNews::Behind(why)) => {
                if group.lead().is_some() {
                    group.fact(entries::behind(&why));
                }
                terminal.print(why);
            }
            FromReplicas::Holding(attempt, copies) => group.step(now, Event::Holding { attempt, copies }),
            FromReplicas::Brought(attempt, step, brought) => {
                let (error, roots) = match brought {
                    Ok(brought) => {
                        terminal.print(came(&brought, &step, world));
                        (None, Some(brought.roots))
                    }
                    Err(error) => (Some(error), None),
                };
                if let Some(replicas) = &mut self.replicas {
                    replicas.brought = roots.map(|roots| (step.clone(), roots));
                }
                group.step(now, Event::Brought { attempt, step, error });
            }
        }
    }

    /// The step that each rank loads, as the leader orders, with the root of the rank's shard.
    pub(crate) fn to_resume(&self, step: Option<&StepKey>) -> Result<BTreeMap<u32, String>, String> {
        let Some(step) = step else { return Ok(BTreeMap::new()) };
        let brought = self.replicas.as_ref().and_then(|replicas| replicas.brought.as_ref());
        let (_, roots) = brought
            .filter(|(of, _)| of == step)
            .ok_or_else(|| format!("the shards of step {} are not on this host", step.step))?;
        Ok(roots.iter().map(|(rank, root)| (*rank, format!("{} {root}", step.step))).collect())
    }

    /// Has a start wait until it is decided which of the trainer's own checkpoints the job resumes from, if any are watched.
    /// Returns it if it need not wait. `again`: the job may have run before.
    pub(crate) fn hold(&mut self, start: Start, again: bool) -> Option<Start> {
        match &self.sealing {
            Some(sealing) if again && start.port.is_ok() => {
                self.starting = Some(sealing.begin(start));
                None
            }
            _ => Some(start),
        }
    }

    /// Takes in the progress of a start that waits. Returns it when the step is known.
    pub(crate) fn start_progress(&mut self, progress: StartProgress, terminal: &Terminal) -> Option<Start> {
        let done = match progress {
            StartProgress::Line(line) => {
                terminal.print(line);
                return None;
            }
            StartProgress::Done(done) => done,
        };
        let Starting { start, mut lines, .. } = self.starting.take()?;
        while let Ok(line) = lines.try_recv() {
            terminal.print(line);
        }
        Some(Start { port: done.and(start.port), ..start })
    }

    /// Cancels a start that still waits, because the job is about to end.
    pub(crate) fn give_up_start(&mut self) -> Option<Attempt> {
        self.starting.take().map(|starting| starting.start.attempt)
    }

    /// This host gets the ranks that it had.
    pub(crate) fn keep_seat(&mut self, spec: &RankSpec) {
        if let (Some(replicas), Some(pool_owner)) = (&mut self.replicas, &self.pool_owner)
            && replicas.waits()
        {
            replicas.take_over(pool_owner, spec);
        }
    }

    /// This host gets other ranks. What the former ones have in memory goes to the disk, which may take a while. It happens
    /// outside the loop, and the leader waits for it. Copies that are kept for other hosts stay.
    pub(crate) fn change_seat(&mut self, attempt: Attempt, seat: Seat, spec: &RankSpec, group: &mut Group) {
        if let Some(replicas) = &mut self.replicas {
            replicas.leave();
        }
        match self.pool_owner.take() {
            None => group.step(clock::mono(), Event::Seated { attempt, seat }),
            Some(pool_owner) => {
                // What the former ranks have in memory goes to the disk.
                let (world, ranks) = (seat.world_size, spec.own_ranks());
                let task = tokio::task::spawn_blocking(move || pool_owner.move_to(world, ranks));
                self.moving = Some(Moving { attempt, seat, task });
            }
        }
    }

    /// The memory for checkpoints belongs to the new ranks.
    pub(crate) fn moved(
        &mut self,
        (pool_owner, messages): Moved,
        spec: &mut RankSpec,
        group: &mut Group,
        terminal: &Terminal,
    ) {
        let Some(Moving { attempt, seat, .. }) = self.moving.take() else { return };
        messages.into_iter().for_each(|line| terminal.print(line));
        match pool_owner {
            Ok(pool_owner) => {
                if let Some(replicas) = &mut self.replicas {
                    replicas.take_over(&pool_owner, spec);
                }
                self.pool_owner = Some(pool_owner);
            }
            Err(error) => {
                terminal.print(format!(
                    "memory for checkpoints is no longer available: {error}; ranks write them to the disk themselves"
                ));
                (self.replicas, spec.checkpoint_pool) = (None, None);
            }
        }
        group.step(clock::mono(), Event::Seated { attempt, seat });
    }

    /// Ranks of this host completed steps. Their times show what copying costs training.
    pub(crate) fn stepped(&self, times: &[StepTime]) {
        if let Some(replicas) = self.replicas.as_ref().filter(|_| !times.is_empty()) {
            replicas.stepped(times);
        }
    }

    /// Compares what ranks saved of a step, once all have saved.
    pub(crate) fn compare(&self, first_rank: u32, group: &mut Group) {
        let whole = self.pool_owner.as_ref().map(PoolOwner::whole_steps).unwrap_or_default();
        for WholeStep { attempt, step, chunks } in whole {
            let Ok(attempt) = u32::try_from(attempt).map(Attempt) else { continue };
            let shards = (first_rank..).map(Rank).zip(chunks).collect();
            group.step(clock::mono(), Event::Saved { attempt, step, shards });
        }
    }

    /// Has the pool owner preserve the step that can be resumed from.
    pub(crate) fn vouch(&self, attempt: Attempt, step: u64) {
        if let Some(pool_owner) = &self.pool_owner {
            pool_owner.vouch(attempt.0.into(), step);
        }
    }

    /// Reports that the file system of the checkpoints does not answer, in each attempt, and that it answers again.
    pub(crate) fn report_a_silent_directory(&mut self, ranks: &Ranks, group: &mut Group) {
        let silent = self.pool_owner.as_ref().is_some_and(PoolOwner::is_directory_silent);
        let (event, what) = match (silent, self.silence_reported) {
            (true, reported) if ranks.are_at_work() && reported != Some(ranks.attempt) => {
                (FILE_SYSTEM_SILENT, "does not answer: steps stay in memory, and training goes on")
            }
            (false, Some(_)) => (FILE_SYSTEM_ANSWERS, "answers again"),
            _ => return,
        };
        self.silence_reported = silent.then_some(ranks.attempt);
        let directory = &ranks.spec.checkpoint_dir;
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let mounts = parse_mounts(&table);
        let named = mount_of(&mounts, directory).map_or_else(String::new, |mount| {
            format!("{} file system at {} ({}), with ", mount.kind, mount.point.display(), mount.from)
        });
        let detail = format!("the {named}the checkpoint directory {}, {what}", directory.display());
        group.fact(Fact::Observed(Observation {
            component: "job".to_owned(),
            event: event.to_owned(),
            weight: if silent { Weight::Error } else { Weight::Info },
            detail,
            ..Observation::default()
        }));
    }

    /// What a spare keeps for the hosts with ranks.
    pub(crate) fn kept_for_others(&self) -> Option<SpareCopy> {
        let (of, shards) = self.replicas.as_ref()?.kept()?;
        Some(SpareCopy { attempt: of.attempt, step: of.step, shards, ranks: of.world })
    }
}

/// The memory for checkpoints on its way to other ranks.
#[derive(Debug)]
pub(crate) struct Moving {
    attempt: Attempt,
    seat: Seat,
    task: JoinHandle<(Result<PoolOwner, PoolError>, Vec<String>)>,
}

/// The new pool owner, and messages for people about the old one.
pub(crate) type Moved = (Result<PoolOwner, String>, Vec<String>);

impl Moving {
    pub(crate) async fn done(&mut self) -> Moved {
        match (&mut self.task).await {
            Ok((pool_owner, messages)) => (pool_owner.map_err(|error| error.to_string()), messages),
            Err(error) => (Err(error.to_string()), Vec::new()),
        }
    }
}

/// The line about shards that are on this host now.
fn came(brought: &FetchedShards, step: &StepKey, ranks: u32) -> String {
    let FetchedShards { roots, fetched, bytes } = brought;
    let here = roots.len().saturating_sub(*fetched);
    let kib = bytes.div_ceil(1024);
    let StepKey { step, attempt, world, .. } = step;
    match *world == ranks {
        true => format!(
            "checkpoint: all ranks go on from step {step} of attempt {attempt}: of this host's shards {here} \
             were here, {fetched} came from other hosts ({kib} KiB)"
        ),
        false => format!(
            "checkpoint: a shard of step {step}, which {world} ranks saved, is on this host for \
             load(replicated=True) ({kib} KiB came from other hosts)"
        ),
    }
}
