//! Has the ranks of all hosts resume from one step. Hosts report what they hold, one step that is whole over all of
//! them is chosen ([`choice`](mainstay_checkpoint::choice)), and each host brings its shards before ranks start. Each
//! wait for a host is limited.

use std::collections::{BTreeSet, VecDeque};

use super::{Merge, Next, Phase, observed};
use crate::round::Seated;
use mainstay_checkpoint::choice::{RestoreRequest, choose};
use mainstay_checkpoint::inventory::{Copy, StepKey};
use mainstay_model::observation::HostsEvent;
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::protocol::{Command, Event};

/// A launcher waits this long for checksums of what its ranks saved before it reports what it holds.
pub const SUMMED_WITHIN: Span = Span::seconds(60);

/// After this time a host that has not reported what it holds is not waited for: half a minute more than it may need
/// for checksums.
const GATHERED_WITHIN: Span = Span::seconds(90);

/// After this time a host that has not brought its shards cannot have the step: enough for 100 GB at 1.3 Gbit/s.
const BROUGHT_WITHIN: Span = Span::seconds(600);

/// In a job of up to this many hosts each stores copies with all others; in a larger job with fewer.
pub const COPIES_AMONG: usize = 256;

/// In a larger job a host stores copies with this many neighbors on each side.
const NEXT: usize = 16;

impl Merge {
    /// Asks all hosts what they hold, and sends them the list of the others.
    pub(super) fn gather(&mut self, at: Mono, port: u16, next: &mut VecDeque<Next>) {
        self.phase = Phase::Gathering { port, since: at };
        self.hosts.iter_mut().for_each(|host| host.holding = None);
        self.copies.clear();
        let (attempt, peers) = (self.attempt, self.peers());
        let mut place = 0;
        for host in &self.hosts {
            let Seated { member, seat } = &host.seated;
            if host.here {
                let peers = around(&peers, place);
                next.push_back(Next::Command(seat.group_rank, Command::Gather { attempt, peers }));
            }
            place += usize::from(!member.replicas.is_empty());
        }
    }

    /// Ends waits that take too long.
    pub(super) fn look_at_checkpoints(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        match &self.phase {
            Phase::Gathering { port, since } if at.since(*since) >= GATHERED_WITHIN => {
                self.bring_newest(at, *port, next);
            }
            Phase::Bringing { step, since, .. } if at.since(*since) >= BROUGHT_WITHIN => {
                let step = step.clone();
                let late = self.hosts.iter().find(|host| !host.brought);
                let Some(seat) = late.map(|host| host.seated.seat.group_rank) else { return };
                let error = format!("its shards were not there within {BROUGHT_WITHIN}");
                self.brought(at, seat, &step, Some(error), next);
            }
            _ => {}
        }
    }

    /// The addresses where the hosts store copies of checkpoints for each other.
    pub fn peers(&self) -> Vec<String> {
        let peers = self.hosts.iter().map(|host| host.seated.member.replicas.clone());
        peers.filter(|peer| !peer.is_empty()).collect()
    }

    pub(super) fn holds(&mut self, at: Mono, seat: u32, copies: Vec<Copy>, next: &mut VecDeque<Next>) {
        let Phase::Gathering { port, .. } = self.phase else { return };
        if let Some(host) = self.host(seat) {
            host.holding = Some(copies);
        }
        if !self.awaits(|host| host.holding.is_none()) {
            self.bring_newest(at, port, next);
        }
    }

    /// Orders the shards of the newest step that is whole over all hosts to where its ranks will run.
    fn bring_newest(&mut self, at: Mono, port: u16, next: &mut VecDeque<Next>) {
        // Each host's list is moved out once: those of a large job are 100 MB.
        self.copies.extend(self.hosts.iter_mut().filter_map(|host| host.holding.take()));
        let world = self.world();
        let wanted = RestoreRequest { run: None, world: Some(world), failed: Some(&self.failed_steps) };
        let choice = choose(self.copies.iter().flatten(), wanted);
        let (chosen, other) = (choice.key(), choice.of_other_world.map(|state| state.key));
        if !std::mem::replace(&mut self.other_world_done, true)
            && let Some(other) = other
        {
            let event = saved_by_other_ranks(&other, chosen.as_ref().map(|key| key.step), world);
            next.push_back(Next::Job(at, event));
            return self.bring(at, port, &other, next);
        }
        let Some(key) = chosen else {
            return self.start(port, None, next);
        };
        let StepKey { step, attempt, .. } = &key;
        let detail =
            format!("step {step} of attempt {attempt} is whole over all hosts: all ranks go on from it");
        let values = [("step", step.to_string()), ("attempt", attempt.to_string())];
        next.push_back(Next::Job(at, observed(HostsEvent::CheckpointChosen, detail, &values)));
        self.bring(at, port, &key, next);
    }

    /// A step of another number of ranks is brought as well: one of its shards, which is the whole step if all ranks
    /// have the same state.
    fn bring(&mut self, at: Mono, port: u16, step: &StepKey, next: &mut VecDeque<Next>) {
        self.hosts.iter_mut().for_each(|host| host.brought = false);
        self.phase = Phase::Bringing { port, step: step.clone(), since: at };
        self.to_all(&Command::Bring { attempt: self.attempt, step: step.clone() }, next);
    }

    pub(super) fn brought(
        &mut self,
        at: Mono,
        seat: u32,
        brought: &StepKey,
        error: Option<String>,
        next: &mut VecDeque<Next>,
    ) {
        let Phase::Bringing { port, step, .. } = &self.phase else { return };
        let (port, step) = (*port, step.clone());
        if step != *brought {
            return;
        }
        let Some(host) = self.host(seat) else { return };
        host.brought = error.is_none();
        if let Some(error) = error {
            let detail = format!(
                "{}: step {} cannot be restored: {error}; the next older whole step is taken",
                host.named(),
                step.step
            );
            let values = [("step", step.step.to_string())];
            next.push_back(Next::Job(at, observed(HostsEvent::CheckpointNotRestored, detail, &values)));
            self.failed_steps.insert(step);
            self.bring_newest(at, port, next);
        } else if !self.awaits(|host| !host.brought) {
            match self.world() == step.world {
                true => self.start(port, Some(step), next),
                false => self.bring_newest(at, port, next),
            }
        }
    }
}

/// The hosts with which a host in this place stores copies of checkpoints. In a large job these are not all, because
/// each would ask every other one what it has: the neighbors, and some at growing distances, which are in other
/// domains.
fn around(peers: &[String], place: usize) -> Vec<String> {
    let count = peers.len();
    if count <= COPIES_AMONG {
        return peers.to_vec();
    }
    let far = std::iter::successors(Some(2 * NEXT), |distance| Some(distance * 2));
    let distances = (1..=NEXT).chain(far.take_while(|distance| *distance <= count / 2));
    let places = distances.flat_map(|distance| [place + distance, place + count - distance]);
    let places: BTreeSet<usize> = places.chain([place]).map(|place| place % count).collect();
    places.into_iter().filter_map(|place| peers.get(place).cloned()).collect()
}

/// A step of another number of ranks is whole only for that number. The observation reports which step is loaded.
fn saved_by_other_ranks(other: &StepKey, chosen: Option<u64>, world: u32) -> Event {
    let instead = match chosen {
        Some(step) => format!("step {step}, the newest that {world} ranks have saved"),
        None => format!("nothing, for no step of {world} ranks is whole"),
    };
    let detail = format!(
        "step {} was saved by {} ranks, and there are {world} now. mainstay.checkpoint.load(replicated=True) and mainstay.dcp \
         load it; mainstay.checkpoint.load() divides no shards and loads {instead}",
        other.step, other.world
    );
    observed(HostsEvent::CheckpointOfOtherRanks, detail, &[("step", other.step.to_string())])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_a_large_job_hosts_store_copies_with_some_others_and_mutually() {
        let names = |count: usize| (0..count).map(|host| format!("h{host}:1")).collect::<Vec<_>>();
        let few = names(256);
        assert_eq!(around(&few, 7), few);
        let many = names(12_500);
        for place in [0, 7, 6000, 12_499] {
            let known = around(&many, place);
            assert!(known.len() < 64, "{}", known.len());
            let own = many[place].clone();
            assert!(known.contains(&own) && known.contains(&many[(place + 1) % 12_500]));
            let other = |peer: &&String| **peer != own;
            for peer in known.iter().filter(other) {
                let place = many.iter().position(|name| name == peer).expect("one of them");
                assert!(around(&many, place).contains(&own), "{peer} does not know {own}");
            }
        }
    }
}
