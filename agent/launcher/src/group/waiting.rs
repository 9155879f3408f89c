//! A launcher that waits as a spare gets ready: its template imports what ranks import, and it keeps copies of checkpoints
//! for the hosts with ranks. The terminal, the journal and `mainstay status` show what it has.

use mainstay_group::spare_ready::{SpareCopy, SpareReady};
use mainstay_model::entry::{Body, Fact};

use crate::group::Following;
use crate::run::Launcher;
use mainstay_sys::clock;

impl Launcher {
    /// Starts to wait as a spare. Its journal names the job; once it has a seat, it records the leader's journal.
    pub(crate) fn begin_to_wait(&mut self) {
        let Some(spec) = self.waiting().map(|following| following.spec.clone()) else { return };
        self.publish_body(clock::mono(), Body::Fact(Fact::JobStarted(spec)));
        self.look_what_is_ready();
    }

    /// Reports what a spare has ready, if that changed.
    pub(crate) fn look_what_is_ready(&mut self) {
        if self.waiting().is_none() {
            return;
        }
        let kept = self.checkpoints.replicas.as_ref().and_then(|replicas| replicas.kept());
        let copy = kept.map(|(of, shards)| SpareCopy {
            attempt: of.attempt,
            step: of.step,
            shards,
            ranks: of.world,
        });
        let now = SpareReady { imports: self.ranks.warm.are_imports_done(), copy };
        let Some(following) = self.group.follower_mut() else { return };
        let ready = following.ready.get_or_insert_default();
        let Some(is_news) = ready.take(&now) else { return };
        if is_news {
            self.output.terminal.print(now.reported());
        }
        self.publish_body(clock::mono(), Body::Fact(now.fact()));
    }

    /// This host has ranks from now on, or again.
    pub(crate) fn has_a_seat(&mut self) {
        let Some(following) = self.group.follower_mut() else { return };
        let seat = following.follow.seat();
        let last = seat.first_rank + self.settings.local_world_size.saturating_sub(1);
        self.output.terminal.print(format!(
            "this host joined the job: it is node rank {} of {}, with ranks {} to {last} of {}",
            seat.group_rank, seat.group_world_size, seat.first_rank, seat.world_size
        ));
        if let Some(ready) = &mut following.ready {
            ready.forget();
        }
    }

    /// Ends a spare that is asked to stop: it has no ranks to stop. Returns whether this launcher is a spare.
    pub(crate) fn leaves_as_spare(&mut self, signal: i32) -> bool {
        let waits = self.waiting().is_some();
        if waits {
            self.output
                .terminal
                .print(format!("signal {signal} while this host waited as a spare: it leaves the job"));
            if let Some(following) = self.group.follower_mut() {
                following.cut_off = Some(format!("signal {signal} while it waited as a spare"));
            }
            self.exit = Some(128 + signal);
        }
        waits
    }

    /// Whether this host started as a spare.
    pub(crate) fn was_spare(&self) -> bool {
        self.group.follower().is_some_and(|following| following.ready.is_some())
    }

    /// Sets where copies of checkpoints are kept from now on.
    pub(crate) fn meet(&mut self, hosts: &[String], spares: Vec<String>) {
        if let Some(replicas) = &self.checkpoints.replicas {
            replicas.meet(hosts, spares);
        }
    }

    /// This launcher as a follower, while it waits for a seat.
    pub(crate) fn waiting(&self) -> Option<&Following> {
        self.group.waiting()
    }
}
