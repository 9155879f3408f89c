//! Known copies, on this host and on peers, and copies that were found damaged.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::TryLockError;
use std::time::{Duration, Instant};

use mainstay_checkpoint::choice::{RestoreRequest, choose};
use mainstay_checkpoint::decision::{Decision, DecisionReply};
use mainstay_checkpoint::divergence::{ReplicaDivergence, SavedShard, divergences};
use mainstay_checkpoint::inventory::{Copy, Medium, Shard, StepKey, StepState, restorable, steps};
use mainstay_checkpoint::prepared_memory::expected;

use crate::lock;
use crate::peer::durable::copies_in;
use crate::peer::error::PeerError;
use crate::peer::message::{Dropped, Inventory, StoredCopy, Withdrawal};
use crate::peer::service::{DISTRUST_TIME, Peer, Shared, WITHDRAWAL_MAX_AGE, report_eligibility};
use crate::seal::SealedShard;

/// Between two requests, interval of checks whether the service stops.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(50);

impl Shared {
    /// What this agent reports to others.
    pub(crate) fn inventory(&self) -> Inventory {
        let (used, quota) = self.store.usage();
        self.own.look();
        Inventory {
            software: self.settings.software.clone(),
            domain: self.settings.domain.clone(),
            used,
            quota,
            copies: self.known_inventory(),
            standing: self.standing(),
            failures: self.failures(),
        }
    }

    /// All known copies on hosts that answer, except those that were found damaged.
    pub(crate) fn copies(&self) -> Vec<Copy> {
        self.copies_at(|peer| peer.alive)
    }

    /// All known copies, also those on hosts that do not answer now, except those that were found damaged.
    pub(super) fn copies_as_last_reported(&self) -> Vec<Copy> {
        self.copies_at(|_| true)
    }

    fn copies_at(&self, counts: impl Fn(&Peer) -> bool) -> Vec<Copy> {
        let mut copies = Vec::new();
        let named = |holder: &str, held: StoredCopy| Copy {
            // A peer can report its own copies only.
            holder: holder.into(),
            medium: held.medium,
            own: held.own,
            verified: held.verified,
            shard: held.shard,
        };
        copies.extend(self.known_inventory().into_iter().map(|held| named(self.name(), held)));
        for (name, peer) in self.peers().iter().filter(|(_, peer)| counts(peer)) {
            copies.extend(peer.inventory.copies.iter().cloned().map(|held| named(name, held)));
        }
        copies.extend(self.durable().into_iter().flat_map(copies_in));
        let mut distrusted = lock(&self.distrusted);
        distrusted.retain(|_, since| since.elapsed() < DISTRUST_TIME);
        copies.retain(|copy| !distrusted.contains_key(&(copy.holder.to_string(), copy.shard.root.clone())));
        drop(distrusted);
        // Holders that have not received the withdrawal would cause it to be copied again.
        let withdrawn = lock(&self.withdrawals.roots);
        copies.retain(|copy| !withdrawn.contains_key(copy.shard.whole()));
        copies
    }

    /// Determines which shards may arrive soon, for the thread that prepares memory.
    pub(super) fn expect(&self) {
        let sizes = expected(&self.copies(), self.name(), &self.own.reserved(), self.settings.copies);
        self.signals.expect(sizes);
    }

    pub(super) fn known_inventory(&self) -> Vec<StoredCopy> {
        let own = self.own.list().into_iter().map(|copy| (copy, true));
        let kept = self.store.list().into_iter().map(|copy| (copy, false));
        let shared_content = self.own.shared_content();
        let held = |((shard, medium, verified), own): ((Shard, Medium, bool), bool)| {
            // Only a rank's own agent reports the rank's group.
            let shared_content = shared_content.get(&shard.root).filter(|_| own).cloned();
            StoredCopy { shard, medium, own, verified, shared_content }
        };
        own.chain(kept).map(held).collect()
    }

    /// Whether the newest step of this host's ranks has all its copies, as far as known. True if they saved none.
    pub(super) fn is_settled(&self) -> bool {
        let copies = self.copies();
        let own = copies.iter().filter(|copy| copy.own && copy.holder == self.name());
        let newest = own.map(|copy| &copy.shard.key).max_by_key(|key| (key.attempt, key.step));
        newest.is_none_or(|newest| {
            let all = steps(&copies, Some(newest.run_id()));
            let of_newest = all.iter().find(|state| state.key == *newest);
            of_newest.is_some_and(|state| state.is_whole() && state.least_copies() > self.settings.copies)
        })
    }

    /// Seconds to send the newest step of a job from this host to the slowest of its peers, at the rate of its last shard.
    pub(super) fn seconds_to_peers(&self, job: &str) -> Option<f64> {
        let own = self.own.list();
        let of_job = || own.iter().map(|(shard, ..)| shard).filter(|shard| shard.key.job == job);
        let newest = of_job().map(|shard| (shard.key.attempt, shard.key.step)).max()?;
        let of_newest = of_job().filter(|shard| (shard.key.attempt, shard.key.step) == newest);
        // A shard may be in memory and on disk.
        let bytes: BTreeMap<u32, u64> = of_newest.map(|shard| (shard.rank, shard.bytes)).collect();
        let slowest = self.peers().values().filter(|peer| peer.alive).filter_map(|peer| peer.rate).min()?;
        Some(bytes.values().sum::<u64>() as f64 / slowest.max(1) as f64)
    }

    /// Withdraws a shard that its owner has changed since it was sealed: its holders need not keep their copies.
    pub(crate) fn withdraw(&self, root: &str) {
        let holders: Vec<(String, Vec<Shard>)> = {
            let mut peers = self.peers();
            let holders = peers.iter_mut().filter(|(_, peer)| peer.alive);
            let withdrawn_at = |(name, peer): (&String, &mut Peer)| {
                let copies = &mut peer.inventory.copies;
                let gone = copies.extract_if(.., |held| held.shard.whole() == root);
                let gone: Vec<Shard> = gone.map(|held| held.shard).collect();
                (!gone.is_empty()).then(|| (name.clone(), gone))
            };
            holders.filter_map(withdrawn_at).collect()
        };
        self.record_withdrawals([root.to_owned()]);
        self.store.forget(root);
        for (holder, gone) in holders {
            match self.forget_at(&holder, &gone) {
                Ok(Dropped { refused: 1.., .. }) => tracing::warn!(
                    peer = holder,
                    "a copy that is out of date stays until retention deletes it: another host has put it there, and without TLS only \
                     that one can withdraw it"
                ),
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(peer = holder, %error, "a copy that is out of date could not be withdrawn");
                }
            }
        }
    }

    /// Withdraws these shards at a peer.
    pub(super) fn forget_at(&self, peer: &str, shards: &[Shard]) -> Result<Dropped, PeerError> {
        self.client().forget(peer, &Withdrawal::new(shards, self.store.withdrawal_key()))
    }

    /// Records that these shards are withdrawn: peers that report copies of them later get the withdrawal again.
    pub(super) fn record_withdrawals(&self, roots: impl IntoIterator<Item = String>) {
        let now = Instant::now();
        let mut withdrawn = lock(&self.withdrawals.roots);
        withdrawn.extend(roots.into_iter().map(|root| (root, now)));
    }

    /// Repeats the withdrawal at peers that still report a copy: they were unreachable, or received the copy just then.
    pub(super) fn withdraw_again(&self) {
        // A removal deletes the copies itself, and reports their number.
        let _deleting = match self.withdrawals.deleting.try_lock() {
            Ok(deleting) => deleting,
            Err(TryLockError::Poisoned(deleting)) => deleting.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let offered: BTreeSet<String> = self.own.list().into_iter().map(|(shard, ..)| shard.root).collect();
        let roots: BTreeSet<String> = {
            let mut withdrawn = lock(&self.withdrawals.roots);
            // A shard that exists again unchanged is no longer obsolete.
            withdrawn.retain(|root, since| since.elapsed() < WITHDRAWAL_MAX_AGE && !offered.contains(root));
            withdrawn.keys().cloned().collect()
        };
        if roots.is_empty() {
            return;
        }
        // A holder that missed the withdrawal may have made a copy here.
        roots.iter().for_each(|root| _ = self.store.forget(root));
        let late: Vec<(String, Vec<Shard>)> = {
            let peers = self.peers();
            let late_at = |(name, peer): (&String, &Peer)| {
                let copies = peer.inventory.copies.iter().map(|held| &held.shard);
                let late = copies.filter(|shard| roots.contains(shard.whole()));
                (name.clone(), late.cloned().collect::<Vec<_>>())
            };
            let late = peers.iter().filter(|(_, peer)| peer.alive).map(late_at);
            late.filter(|(_, copies)| !copies.is_empty()).collect()
        };
        for (holder, copies) in late {
            // The next check shows whether the peer received it.
            if let Err(error) = self.forget_at(&holder, &copies) {
                tracing::debug!(peer = holder, %error, "a copy that is out of date could not be withdrawn");
            }
        }
    }

    /// Records a damaged copy: it does not count for a while.
    pub(crate) fn distrust(&self, holder: &str, root: &str) {
        self.count(|counts| counts.damaged += 1);
        if holder == self.name() {
            self.own.mark_bad(root);
            self.store.remove(root);
        }
        let mut distrusted = lock(&self.distrusted);
        distrusted.insert((holder.to_owned(), root.to_owned()), Instant::now());
    }

    /// Records that a damaged shard of this host was fetched again and verified.
    pub(crate) fn trust_own(&self, root: &str) {
        self.own.mark_good(root);
        let mut distrusted = lock(&self.distrusted);
        distrusted.remove(&(self.name().to_owned(), root.to_owned()));
    }

    pub(crate) fn distrusted(&self) -> Vec<(String, String)> {
        lock(&self.distrusted).keys().cloned().collect()
    }

    /// Number of peers with this address; peers that are known by host name do not count.
    pub(super) fn peers_at(&self, host: Option<IpAddr>) -> usize {
        let Some(host) = host.map(|host| host.to_canonical()) else { return 0 };
        let is_there =
            |name: &String| name.parse().is_ok_and(|address: SocketAddr| address.ip().to_canonical() == host);
        self.peers().keys().filter(|name| is_there(name)).count()
    }

    pub(crate) fn alive(&self) -> Vec<String> {
        self.peers().iter().filter(|(_, peer)| peer.alive).map(|(name, _)| name.clone()).collect()
    }

    /// The peers that did not answer the last request.
    pub(super) fn silent(&self) -> Vec<String> {
        self.peers().iter().filter(|(_, peer)| !peer.alive).map(|(name, _)| name.clone()).collect()
    }

    /// Asks all peers for their inventories at once.
    pub(crate) fn refresh(&self) {
        let names: Vec<String> = self.peers().keys().cloned().collect();
        self.ask_peers(&names, Duration::ZERO);
    }

    /// Asks these peers for their inventories, one by one over this time.
    pub(super) fn ask_peers(&self, names: &[String], spread: Duration) {
        let started = Instant::now();
        std::thread::scope(|scope| {
            for (index, name) in (0..).zip(names) {
                let at = started + spread * index / u32::try_from(names.len()).unwrap_or(u32::MAX);
                while Instant::now() < at && !self.stops() {
                    std::thread::sleep(STOP_CHECK_INTERVAL.min(at.saturating_duration_since(Instant::now())));
                }
                if self.stops() {
                    return;
                }
                scope.spawn(move || {
                    let asked = Instant::now();
                    let answer = self.client().list(name);
                    self.received(name, asked, answer);
                });
            }
        });
    }

    pub(super) fn received(&self, name: &str, asked: Instant, answer: Result<Inventory, PeerError>) {
        let mut peers = self.peers();
        let Some(peer) = peers.get_mut(name) else { return };
        match answer {
            Ok(inventory) => {
                if !peer.alive {
                    tracing::info!(peer = name, software = inventory.software, "a peer answers");
                }
                report_eligibility(name, peer.inventory.excluded(), inventory.excluded());
                (peer.alive, peer.seen, peer.inventory) = (true, Some(Instant::now()), inventory);
                peer.asked = Some(asked);
                if peer.not_before.is_none() {
                    peer.error = None;
                }
            }
            Err(error) => {
                let text = error.to_string();
                if !self.stops() && (peer.alive || peer.error.as_ref() != Some(&text)) {
                    if self.has_leader()
                        && matches!(error, PeerError::Lost { .. } | PeerError::Unreachable { .. })
                    {
                        // The leader of the job reports which of its hosts are lost.
                        tracing::debug!(peer = name, error = text, "a host of the job does not answer");
                    } else {
                        tracing::warn!(peer = name, error = text, "a peer does not answer");
                    }
                }
                (peer.alive, peer.error) = (false, Some(text));
            }
        }
    }
}

// Decides which step a job goes back to where no launcher leads: the first agent by name chooses it, for all agents that ask,
// and announces it to all peers that answer.

impl Shared {
    /// The decision of the leader: the first by name of the hosts that answer.
    pub(crate) fn decide(&self, run: &str) -> Result<Decision, PeerError> {
        self.refresh();
        let mut leaders = self.alive();
        leaders.push(self.name().to_owned());
        leaders.sort();
        let mut last = None;
        for leader in leaders {
            let asked = if leader == self.name() {
                self.lead(run, self.name(), &[])
            } else {
                self.client().decide(&leader, run, self.name(), self.distrusted())
            };
            match asked {
                Ok(decision) => {
                    let reply = self.decisions().store(&decision);
                    if let DecisionReply::Refused(newer) = reply {
                        return Ok(newer);
                    }
                    return Ok(decision);
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| PeerError::Local("no host decides".to_owned())))
    }

    /// Makes the decision for `asker` and announces it to all peers that answer.
    pub(crate) fn lead(
        &self,
        run: &str,
        asker: &str,
        distrusted: &[(String, String)],
    ) -> Result<Decision, PeerError> {
        for (holder, root) in distrusted {
            let mut known = lock(&self.distrusted);
            known.entry((holder.clone(), root.clone())).or_insert_with(Instant::now);
        }
        self.own.look();
        self.refresh();
        self.refresh_durable(run);
        let newest = self.newest_after_second_request(run);
        // A peer that knows a newer decision raises the number; after this many tries something is wrong.
        for _ in 0..8 {
            let decision = self.decisions().decide(self.name(), run, asker, newest.as_ref());
            let Some(newer) = self.announce(&decision) else { return Ok(decision) };
            let mut decisions = self.decisions();
            let newer = Decision {
                fence: newer.fence.max(decision.fence).saturating_add(1),
                step: newest.clone(),
                by: self.name().to_owned(),
                ..newer
            };
            let _ = decisions.store(&newer);
        }
        Err(PeerError::Local(format!("peers do not agree on a step of {run}")))
    }

    /// The newest whole step. Peers that did not answer are asked once more if the job would otherwise start from scratch or
    /// lose a step that is whole with what they reported last: on a busy host one request may time out. A lost host whose
    /// shards have copies elsewhere delays nothing.
    fn newest_after_second_request(&self, run: &str) -> Option<StepKey> {
        let wanted = RestoreRequest { run: Some(run), ..RestoreRequest::default() };
        let newest = |copies: Vec<Copy>| choose(&restorable(copies), wanted).key();
        let answered = newest(self.copies());
        let silent = self.silent();
        if silent.is_empty() || (answered.is_some() && answered == newest(self.copies_as_last_reported())) {
            return answered;
        }
        tracing::info!(
            run,
            peers = silent.join(", "),
            "peers that may have the newest step do not answer: asking once more"
        );
        self.ask_peers(&silent, Duration::ZERO);
        newest(self.copies())
    }

    /// Announces a decision to all peers that answer. Returns the newest decision with which one of them rejects it.
    pub(super) fn announce(&self, decision: &Decision) -> Option<Decision> {
        let alive = self.alive();
        let replies = std::thread::scope(|scope| {
            let threads: Vec<_> =
                alive.iter().map(|peer| scope.spawn(|| self.client().announce(peer, decision))).collect();
            threads.into_iter().map(|reply| reply.join()).collect::<Vec<_>>()
        });
        let refused = replies.into_iter().filter_map(|reply| match reply {
            Ok(Ok(DecisionReply::Refused(newer))) => Some(newer),
            _ => None,
        });
        refused.max_by_key(|newer| newer.fence)
    }

    /// The known state of a step, with all copies that a restore can use.
    pub(crate) fn step(&self, key: &StepKey) -> Option<StepState> {
        self.refresh_durable(key.run_id());
        steps(&restorable(self.copies()), Some(key.run_id())).into_iter().find(|step| step.key == *key)
    }
}

// Detects ranks that declared that they save equal bytes and did not, on this host and on all peers that answer.

/// Maximum number that is remembered; the oldest steps are forgotten first.
const MAX_DIVERGENCES: usize = 64;

/// Divergences by step and group.
pub(super) type Divergences = BTreeMap<(StepKey, String), ReplicaDivergence>;

impl Shared {
    /// Compares shards that ranks declared equal: of this host, and of peers by their last inventories.
    pub(super) fn compare_shared_content(&self) {
        divergences(&self.reported_shared_content()).into_iter().for_each(|found| self.remember(found));
    }

    /// Same for an offered shard. If it differs from those of others, asks peers again: only its owner reports the rank and host.
    pub(crate) fn compare_offered(&self, sealed: &SealedShard) {
        let Some(content) = &sealed.shared_content else { return };
        let is_equal = |saved: &SavedShard| {
            saved.key != sealed.shard.key || saved.group != content.group || saved.root == content.root
        };
        let is_known = |saved: &SavedShard| saved.key == sealed.shard.key && saved.rank == sealed.shard.rank;
        let all = self.reported_shared_content();
        if !all.iter().all(is_equal) && !all.iter().any(is_known) {
            self.refresh();
            self.compare_shared_content();
        }
    }

    fn reported_shared_content(&self) -> Vec<SavedShard> {
        let saved = |holder: &str, held: &StoredCopy| {
            let (group, root) = held.shared_content.clone().filter(|_| held.own)?;
            let (key, rank) = (held.shard.key.clone(), held.shard.rank);
            Some(SavedShard { key, group, rank, holder: holder.to_owned(), root })
        };
        let own = self.known_inventory();
        let mut all: Vec<SavedShard> = own.iter().filter_map(|held| saved(self.name(), held)).collect();
        for (name, peer) in self.peers().iter() {
            all.extend(peer.inventory.copies.iter().filter_map(|held| saved(name, held)));
        }
        all
    }

    fn remember(&self, found: ReplicaDivergence) {
        let mut known = lock(&self.reports.divergences);
        let roots = |divergence: &ReplicaDivergence| -> Vec<(u32, String)> {
            divergence.members.iter().map(|member| (member.rank, member.root.clone())).collect()
        };
        let key = (found.key.clone(), found.group.clone());
        let before = known.get(&key);
        if before.is_some_and(|before| roots(before) == roots(&found)) {
            return;
        }
        if before.is_none() {
            self.count(|counts| counts.divergences += 1);
        }
        tracing::error!("{}", found.sentence());
        known.insert(key, found);
        while known.len() > MAX_DIVERGENCES {
            known.pop_first();
        }
    }
}
