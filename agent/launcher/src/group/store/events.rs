//! What a launcher learns of the members of its job in the store, and what it publishes about itself there.

use std::sync::Weak;

use mainstay_coord::{Group, GroupEvent, JobEndedNote, Leader, Member, Membership, StoredRecord};
use mainstay_group::electors::{Electors, Missed};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::group::store::seal::Seal;
use crate::group::store::{FromStore, PAUSE, REPORT_EVERY};

/// In a member's body: whether it has a seat, and the leader that it misses.
const SEATED: &str = "seated";
const MISSES: &str = "misses";

/// What a launcher publishes about itself in the body of its member.
#[derive(Clone, Debug, Default)]
pub(crate) struct PublishedState {
    pub(crate) seated: bool,
    pub(crate) misses: Option<Missed>,
}

impl PublishedState {
    fn body(&self) -> Value {
        json!({ SEATED: self.seated, MISSES: self.misses })
    }

    pub(crate) fn of(member: &Member) -> PublishedState {
        let misses = member.body.get(MISSES).and_then(|misses| Missed::deserialize(misses).ok());
        PublishedState { seated: member.body.get(SEATED) == Some(&Value::Bool(true)), misses }
    }
}

pub(crate) fn missed(leader: &Leader) -> Missed {
    Missed { launcher: leader.launch.clone(), epoch: leader.epoch }
}

/// Publishes the newest state of a launcher.
pub(crate) async fn report(membership: Weak<Membership>, mut says: watch::Receiver<PublishedState>) {
    while says.changed().await.is_ok() {
        let body = says.borrow_and_update().body();
        let Some(membership) = membership.upgrade() else { return };
        let me = Member { body, ..membership.member() };
        if let Err(error) = membership.update(me).await {
            tracing::debug!(%error, "what this launcher says is written when the store answers");
        }
    }
}

/// Handles the store's news for a launcher.
pub(crate) struct StoreListener {
    pub(crate) me: String,
    pub(crate) update: mpsc::UnboundedSender<FromStore>,
    pub(crate) record: watch::Sender<Option<StoredRecord>>,
    pub(crate) has_vote: watch::Sender<bool>,
    pub(crate) electors: Electors,
    pub(crate) leader: Option<Leader>,
    pub(crate) seal: Seal,
    pub(crate) foreign_end_reported: Option<Instant>,
}

impl StoreListener {
    fn keep_record(&self, found: StoredRecord) {
        self.record.send_replace(Some(found));
    }

    /// Processes an event: the members, and who leads.
    fn take(&mut self, event: &GroupEvent) {
        match event {
            GroupEvent::Snapshot(state) => {
                (self.electors, self.leader) = (Electors::default(), state.leader.clone());
                state.members.values().for_each(|member| self.set(member));
            }
            GroupEvent::Joined(member) | GroupEvent::Changed { now: member, .. } => self.set(member),
            GroupEvent::Left { member, .. } => self.electors.remove(&member.launch),
            GroupEvent::Elected(leader) => self.leader = Some(leader.clone()),
            GroupEvent::LeaderGone(_) => self.leader = None,
            _ => return,
        }
        let Some(leader) = &self.leader else { return };
        let print = self.electors.has_vote(&self.me, &leader.launch);
        self.has_vote.send_if_modified(|before| std::mem::replace(before, print) != print);
        if print && self.electors.miss(&missed(leader)) {
            let _ = self.update.send(FromStore::LeaderMissed);
        }
    }

    fn set(&mut self, member: &Member) {
        let PublishedState { seated, misses } = PublishedState::of(member);
        self.electors.set(&member.launch, seated, misses);
    }
}

/// Removes an end that no launcher of this job wrote: the store accepts no member and no leader while it has one.
async fn remove_foreign_end(group: &Group, listener: &mut StoreListener) -> Option<FromStore> {
    while let Err(error) = group.forget_end(|ended| listener.seal.is_of(ended)).await {
        if !error.is_unreachable() && !error.is_unsure() {
            tracing::debug!(%error, "an end that no launcher of the job wrote stays in the store");
            break;
        }
        tokio::time::sleep(PAUSE).await;
    }
    // Whoever writes it can write it again and again.
    if listener.foreign_end_reported.is_some_and(|at| at.elapsed() < REPORT_EVERY) {
        return None;
    }
    listener.foreign_end_reported = Some(Instant::now());
    Some(FromStore::Notice(
        "the store had an end of the job that no launcher of the job wrote: it is ignored and removed"
            .to_owned(),
    ))
}

/// The job's end, if a launcher of the job wrote it.
async fn end(group: &Group, listener: &mut StoreListener, found: JobEndedNote) -> Option<FromStore> {
    if listener.seal.is_of(&found) {
        return Some(FromStore::Ended(found));
    }
    remove_foreign_end(group, listener).await
}

/// A value that cannot be read. An end has no valid proof then.
async fn unreadable(
    group: &Group,
    listener: &mut StoreListener,
    key: String,
    why: &str,
) -> Option<FromStore> {
    if group.is_end(&key) {
        return remove_foreign_end(group, listener).await;
    }
    Some(FromStore::Notice(format!("{key}: {why}")))
}

/// Passes on the news that concerns launchers.
pub(crate) async fn watch_group(group: Group, mut listener: StoreListener) {
    let mut watch = group.watch();
    loop {
        let event = match watch.next().await {
            Ok(event) => event,
            Err(error) => {
                let _ = listener.update.send(FromStore::Problem(format!("the coordination store: {error}")));
                tokio::time::sleep(REPORT_EVERY).await;
                continue;
            }
        };
        listener.take(&event);
        let updates = match event {
            GroupEvent::Snapshot(state) => {
                state.record.into_iter().for_each(|found| listener.keep_record(found));
                let mut updates = vec![FromStore::Leader(state.leader)];
                if let Some(ended) = state.ended {
                    updates.extend(end(&group, &mut listener, ended).await);
                }
                for (key, why) in state.unreadable {
                    updates.extend(unreadable(&group, &mut listener, key, &why).await);
                }
                updates
            }
            GroupEvent::Elected(leader) => vec![FromStore::Leader(Some(leader))],
            GroupEvent::LeaderGone(_) => vec![FromStore::Leader(None)],
            GroupEvent::RecordChanged(found) => {
                listener.keep_record(found);
                continue;
            }
            GroupEvent::Ended(ended) => end(&group, &mut listener, ended).await.into_iter().collect(),
            GroupEvent::Unreadable { key, why } => {
                unreadable(&group, &mut listener, key, &why).await.into_iter().collect()
            }
            GroupEvent::Joined(_)
            | GroupEvent::Changed { .. }
            | GroupEvent::Left { .. }
            | GroupEvent::RoundPublished(_) => continue,
        };
        for news_of_it in updates {
            if listener.update.send(news_of_it).is_err() {
                return;
            }
        }
    }
}
