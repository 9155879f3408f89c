//! Before the ranks of several hosts start, each host reports which checkpoints it holds, and brings the shards of its
//! ranks of the step that the leader chose. The loop goes on meanwhile.

use std::collections::BTreeMap;

use mainstay_checkpoint::copied_step;
use mainstay_checkpoint::inventory::StepKey;
use mainstay_model::entry::Fact;
use mainstay_model::id::Attempt;
use mainstay_model::time::Mono;
use mainstay_tier::peer::Brought;

use crate::checkpoints::copied_step::CopyNews;
use crate::checkpoints::replicas::FromReplicas;
use crate::run::Launcher;
use mainstay_recovery::protocol::Event;
use mainstay_sys::clock;

impl Launcher {
    /// The leader asks which checkpoints are here, and names the other hosts.
    pub(crate) fn gather_checkpoints(&mut self, attempt: Attempt, peers: Vec<String>) {
        // What ranks have written completely counts. They are gone by now, or wait.
        if let Some(pool_owner) = &self.checkpoints.pool_owner {
            pool_owner.begin_attempt(attempt.0.into());
        }
        match &self.checkpoints.replicas {
            Some(replicas) => replicas.gather(attempt, peers),
            None => self.step(clock::mono(), Event::Holding { attempt, copies: Vec::new() }),
        }
    }

    /// The leader wants the shards of a step where the ranks of this host look for them.
    pub(crate) fn bring_checkpoint(&mut self, attempt: Attempt, step: StepKey) {
        match &self.checkpoints.replicas {
            Some(replicas) => replicas.bring(attempt, step, self.rank_spec.seat.world_size),
            None => {
                let error = Some("no memory is kept for checkpoints there".to_owned());
                self.step(clock::mono(), Event::Brought { attempt, step, error });
            }
        }
    }

    pub(crate) fn checkpoints_news(&mut self, update: FromReplicas) {
        let now = clock::mono();
        match update {
            FromReplicas::Line(line) => self.output.terminal.print(line),
            // A spare reports itself what it has.
            FromReplicas::Copies(_) if self.waiting().is_some() => {}
            FromReplicas::Copies(CopyNews::First(step)) => {
                let reported = format!("checkpoint: each shard of step {step} has a copy on another host");
                self.output.terminal.print(reported);
            }
            FromReplicas::Copies(CopyNews::Newest(step)) => self.record_copies(now, step.fact()),
            FromReplicas::Copies(CopyNews::Behind(why)) => {
                self.record_copies(now, copied_step::behind(&why));
                self.output.terminal.print(why);
            }
            FromReplicas::Holding(attempt, copies) => self.step(now, Event::Holding { attempt, copies }),
            FromReplicas::Brought(attempt, step, brought) => {
                let (error, roots) = match brought {
                    Ok(Brought { roots, fetched, bytes }) => {
                        let here = roots.len().saturating_sub(fetched);
                        let kib = bytes.div_ceil(1024);
                        let StepKey { step: number, attempt: of, world, .. } = &step;
                        self.output.terminal.print(match *world == self.rank_spec.seat.world_size {
                            true => format!(
                                "checkpoint: all ranks go on from step {number} of attempt {of}: of this host's shards {here} \
                                 were here, {fetched} came from other hosts ({kib} KiB)"
                            ),
                            false => format!(
                                "checkpoint: a shard of step {number}, which {world} ranks saved, is on this host for \
                                 load(replicated=True) ({kib} KiB came from other hosts)"
                            ),
                        });
                        (None, Some(roots))
                    }
                    Err(error) => (Some(error), None),
                };
                if let Some(replicas) = &mut self.checkpoints.replicas {
                    replicas.brought = roots.map(|roots| (step.clone(), roots));
                }
                self.step(now, Event::Brought { attempt, step, error });
            }
        }
    }

    /// All launchers see the same copies; the leader records them for all.
    fn record_copies(&mut self, now: Mono, fact: Fact) {
        if self.group.lead().is_some() {
            self.step(now, Event::Fact(fact));
        }
    }

    /// Sets which step the ranks load, as the leader orders.
    pub(crate) fn resume_from(&mut self, step: Option<&StepKey>) -> Result<(), String> {
        self.rank_spec.resume = match step {
            None => BTreeMap::new(),
            Some(step) => {
                let brought =
                    self.checkpoints.replicas.as_ref().and_then(|replicas| replicas.brought.as_ref());
                let (_, roots) = brought
                    .filter(|(of, _)| of == step)
                    .ok_or_else(|| format!("the shards of step {} are not on this host", step.step))?;
                roots.iter().map(|(rank, root)| (*rank, format!("{} {root}", step.step))).collect()
            }
        };
        Ok(())
    }
}
