//! Leadership: one launcher at a time, by a key that is attached to its lease, with an epoch that only increases.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::Value;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use super::member::{MemberState, Membership, Shared};
use super::values::{JobEndedNote, LARGEST_VALUE, Leader, Record, Round, StoredRecord, VERSION};
use super::{Group, GroupState};
use crate::client::{KeyValue, Lease, LeaseId, Txn, TxnReply, WatchEvent};
use crate::error::CoordError;

/// The pause after an attempt without an answer from the store.
const RETRY_PAUSE: std::time::Duration = std::time::Duration::from_millis(200);
/// The maximum number of attempts at a write whose answer is lost. Writes are idempotent.
const WRITES: usize = 3;

/// The leadership of this launcher. Dropping it does not end it: resign, end the job, or say goodbye.
#[derive(Debug)]
pub struct Leadership {
    group: Group,
    me: Leader,
    record: Option<StoredRecord>,
    round: Option<Round>,
    newest_round: AtomicU64,
    /// The lease of record and round, kept as long as a leader exists.
    retention: Lease,
    lost: watch::Receiver<bool>,
    task: JoinHandle<()>,
}

impl Membership {
    /// Waits until this launcher leads. Dropping the future withdraws the candidacy.
    ///
    /// # Errors
    /// This client is refused, the job has ended, or a key cannot be read. Waits for a store that does not answer.
    pub async fn campaign(&self) -> Result<Leadership, CoordError> {
        let (answer, answered) = oneshot::channel();
        tokio::spawn(campaign(Arc::clone(&self.shared), answer));
        answered.await.unwrap_or_else(|_| {
            Err(CoordError::Ended { operation: "campaign", why: "the runtime is stopping".to_owned() })
        })
    }
}

type LeadershipReply = oneshot::Sender<Result<Leadership, CoordError>>;

/// Runs in its own task: a leadership that is won after the caller stopped waiting is resigned.
async fn campaign(shared: Arc<Shared>, mut answer: LeadershipReply) {
    loop {
        let attempt = attempt(&shared, &mut answer).await;
        let result = match attempt {
            Ok(Some(leadership)) => Ok(leadership),
            Ok(None) if answer.is_closed() => return,
            Ok(None) => continue,
            Err(error) if passes(&error) => {
                tracing::debug!(%error, "an election is waiting for the coordination store");
                tokio::select! {
                    () = answer.closed() => return,
                    () = tokio::time::sleep(RETRY_PAUSE) => continue,
                }
            }
            Err(error) => Err(error),
        };
        if let Err(Ok(leadership)) = answer.send(result) {
            let _ = leadership.resign().await;
        }
        return;
    }
}

fn passes(error: &CoordError) -> bool {
    error.is_unreachable() || error.is_unsure() || matches!(error, CoordError::LeaseLost { .. })
}

/// Reads the state once, then tries or waits once. None: read again.
async fn attempt(shared: &Shared, answer: &mut LeadershipReply) -> Result<Option<Leadership>, CoordError> {
    let group = &shared.group;
    let mut lease = shared.lease.subscribe();
    let held = lease.borrow_and_update().clone();
    let Some(held) = held else {
        if *shared.state.borrow() == MemberState::Ended {
            return Err(CoordError::Ended {
                operation: "campaign",
                why: "see the note of its end".to_owned(),
            });
        }
        tokio::select! {
            () = answer.closed() => {}
            _ = lease.changed() => {}
        }
        return Ok(None);
    };
    let state = group.state().await?;
    if let Some(ended) = state.ended {
        return Err(CoordError::Ended { operation: "campaign", why: ended.why });
    }
    // A member of a newer program does not matter here, but leader values of one must not be overwritten.
    for key in ["leader", "record", "round", "ended"].map(|name| group.key(name)) {
        if let Some(why) = state.unreadable.get(&key) {
            return Err(CoordError::Unreadable { key, why: why.clone() });
        }
    }
    let Some(leader) = &state.leader else { return elect(shared, &held, &state).await };
    if leader.launch == shared.me().launch {
        // Won in an attempt whose answer was lost or not awaited: delete the key and try again.
        let key = group.key("leader");
        group.client.txn(Txn::new().if_mod_revision(&key, leader.mod_revision).then_delete(&key)).await?;
        return Ok(None);
    }
    let mut watch = group.client.watch(&group.key("leader"), Some(state.revision + 1));
    tokio::select! {
        () = answer.closed() => {}
        _ = lease.changed() => {}
        event = watch.next() => { event?; }
    }
    Ok(None)
}

/// Writes the leader's key and the record with the next epoch in one transaction.
async fn elect(
    shared: &Shared,
    lease: &Arc<Lease>,
    state: &GroupState,
) -> Result<Option<Leadership>, CoordError> {
    let group = &shared.group;
    let me = shared.me();
    let before = state.record.as_ref();
    let epoch = group.highest_epoch().max(before.map_or(0, |record| record.epoch)) + 1;
    let leader = Leader {
        version: VERSION,
        needs: 1,
        launch: me.launch,
        host: me.host,
        addresses: me.addresses,
        epoch,
        mod_revision: 0,
    };
    // A record without a body counts as none.
    let (needs, body) =
        before.map_or((1, Value::Null), |record| (record.needs, record.body().unwrap_or_default()));
    let record = Record { version: VERSION, needs, epoch, body };
    let retention = group.client.lease(group.options.retention).await?;
    let (leader_key, record_key) = (group.key("leader"), group.key("record"));
    let seen = group.client.get(&record_key).await?;
    if epoch_of(seen.as_ref()) != before.map(|record| record.epoch) {
        return Ok(None);
    }
    let txn = Txn::new()
        .if_absent(&leader_key)
        .if_absent(&group.key("ended"))
        .if_mod_revision(&record_key, seen.map_or(0, |item| item.mod_revision))
        .then_put(&leader_key, &group.encoded("leader", &leader, LARGEST_VALUE)?, Some(lease.id()))
        .then_put(&record_key, &group.encoded("record", &record, LARGEST_VALUE)?, Some(retention.id()));
    let reply = group.client.txn(txn).await?;
    if !reply.succeeded {
        let _ = retention.revoke().await;
        return Ok(None);
    }
    group.at_least(epoch);
    let leader = Leader { mod_revision: reply.revision, ..leader };
    keep_others(group, &leader, retention.id()).await?;
    let (lost_sender, lost) = watch::channel(false);
    let task = tokio::spawn(guard(group.clone(), Arc::clone(lease), leader.clone(), lost_sender));
    Ok(Some(Leadership {
        group: group.clone(),
        me: leader,
        record: state.record.clone(),
        round: state.round.clone(),
        newest_round: AtomicU64::new(state.round.as_ref().map_or(0, |round| round.round)),
        retention,
        lost,
        task,
    }))
}

fn epoch_of(item: Option<&KeyValue>) -> Option<u64> {
    item.and_then(|item| StoredRecord::parse_header(&item.value).ok()).map(|record| record.epoch)
}

/// Moves round and secret to the new leader's lease, since that of the previous leader ends.
async fn keep_others(group: &Group, me: &Leader, retention: LeaseId) -> Result<(), CoordError> {
    for name in ["round", "secret"] {
        let key = group.key(name);
        if let Some(found) = group.client.get(&key).await? {
            let txn = Txn::new().if_mod_revision(&group.key("leader"), me.mod_revision);
            let txn = txn.if_mod_revision(&key, found.mod_revision);
            group.client.txn(txn.then_put(&key, &found.value, Some(retention))).await?;
        }
    }
    Ok(())
}

/// Reports when the leader's key has changed or may have been lost.
async fn guard(group: Group, lease: Arc<Lease>, me: Leader, lost_sender: watch::Sender<bool>) {
    let mut watch = group.client.watch(&group.key("leader"), Some(me.mod_revision + 1));
    loop {
        tokio::select! {
            () = lease.lost() => break,
            event = watch.next() => match event {
                Ok(WatchEvent::Listed { items, .. })
                    if items.iter().any(|item| item.mod_revision == me.mod_revision) => {}
                // Refused: the next write will report it. Until then nothing contradicts the leadership.
                Err(_) => {
                    lease.lost().await;
                    break;
                }
                Ok(_) => break,
            },
        }
    }
    lost_sender.send_replace(true);
}

impl Leadership {
    /// The epoch: greater than that of every earlier leader.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.me.epoch
    }

    /// The record of the previous leader; None for a new job, or after the store was wiped.
    #[must_use]
    pub fn record(&self) -> Option<&StoredRecord> {
        self.record.as_ref()
    }

    /// The newest round at the election.
    #[must_use]
    pub fn round(&self) -> Option<&Round> {
        self.round.as_ref()
    }

    /// Whether the leadership is known to have ended.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        *self.lost.borrow()
    }

    /// Returns when the lease is lost or another launcher leads. Orders of this epoch are refused from then on.
    pub async fn lost(&self) {
        let mut lost = self.lost.clone();
        let _ = lost.wait_for(|lost| *lost).await;
    }

    /// Writes the record.
    ///
    /// # Errors
    /// [`CoordError::Superseded`] if this launcher no longer leads: step down. Otherwise as for every request.
    pub async fn write_record(&self, body: Value) -> Result<Record, CoordError> {
        self.write_record_for(1, body).await
    }

    /// Writes a record that only programs of protocol `needs` or newer may read.
    ///
    /// # Errors
    /// As [`Leadership::write_record`].
    pub async fn write_record_for(&self, needs: u32, body: Value) -> Result<Record, CoordError> {
        let record = Record { version: VERSION, needs, epoch: self.me.epoch, body };
        let value = self.group.encoded("record", &record, LARGEST_VALUE)?;
        let key = self.group.key("record");
        let lease = Some(self.retention.id());
        self.write("write record", |txn| txn.then_put(&key, &value, lease)).await?;
        Ok(record)
    }

    /// Publishes a round, and writes the record, if given, in the same transaction.
    ///
    /// # Errors
    /// As [`Leadership::write_record`]; or the number is not greater than that of the newest round.
    pub async fn publish_round(
        &self,
        round: u64,
        body: Value,
        record: Option<Value>,
    ) -> Result<Round, CoordError> {
        let newest = self.newest_round.load(Ordering::Relaxed);
        if round <= newest {
            let why = format!("round {newest} is published already; the number must be greater");
            return Err(CoordError::Setting { what: format!("round {round}"), why });
        }
        let epoch = self.me.epoch;
        let round = Round { version: VERSION, needs: 1, epoch, round, body };
        let value = self.group.encoded("round", &round, LARGEST_VALUE)?;
        let record = record.map(|body| Record { version: VERSION, needs: 1, epoch, body });
        let record = record.map(|record| self.group.encoded("record", &record, LARGEST_VALUE)).transpose()?;
        let (round_key, record_key) = (self.group.key("round"), self.group.key("record"));
        let lease = Some(self.retention.id());
        self.write("publish round", |txn| {
            let txn = txn.then_put(&round_key, &value, lease);
            match &record {
                Some(record) => txn.then_put(&record_key, record, lease),
                None => txn,
            }
        })
        .await?;
        self.newest_round.fetch_max(round.round, Ordering::Relaxed);
        Ok(round)
    }

    /// Asks the store whether this launcher still leads.
    ///
    /// # Errors
    /// [`CoordError::Superseded`] if it does not. Otherwise as for every request.
    pub async fn confirm(&self) -> Result<(), CoordError> {
        self.write("confirm leadership", |txn| txn).await.map(|_| ())
    }

    /// Ends the job: removes all its keys, and keeps the note of its end for some minutes.
    ///
    /// # Errors
    /// As [`Leadership::write_record`].
    pub async fn end(self, why: &str, body: Value) -> Result<(), CoordError> {
        let ended =
            JobEndedNote { version: VERSION, needs: 1, epoch: self.me.epoch, why: why.to_owned(), body };
        let value = self.group.encoded("ended", &ended, LARGEST_VALUE)?;
        let group = &self.group;
        let lease = Some(group.expiring(group.options.farewell).await?);
        let [ended, leader, record, round, secret] =
            ["ended", "leader", "record", "round", "secret"].map(|name| group.key(name));
        let members = group.key("members/");
        let done = self.write("end job", |txn| {
            txn.then_put(&ended, &value, lease)
                .then_delete_prefix(&members)
                .then_delete(&leader)
                .then_delete(&record)
                .then_delete(&round)
                .then_delete(&secret)
        });
        match done.await {
            Ok(_) => {}
            // The answer to the first attempt may have been lost: then the leader's key is gone and the note is ours.
            Err(CoordError::Superseded { .. }) if self.has_ended(&ended).await? => {}
            Err(error) => return Err(error),
        }
        let retention = self.retention.id();
        group.client.revoke(retention).await
    }

    async fn has_ended(&self, key: &str) -> Result<bool, CoordError> {
        let found = self.group.client.get(key).await?;
        let ended = found.and_then(|item| super::values::read::<JobEndedNote>(&item.value).ok());
        Ok(ended.is_some_and(|ended| ended.epoch == self.me.epoch))
    }

    /// Stops leading and stays a member. The record stays for the next leader.
    ///
    /// # Errors
    /// No endpoint answered, or this client is refused; the leader's key is then removed with the member's lease.
    pub async fn resign(self) -> Result<(), CoordError> {
        let key = self.group.key("leader");
        match self.write("resign", |txn| txn.then_delete(&key)).await {
            Ok(_) | Err(CoordError::Superseded { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Writes only if this launcher still leads.
    async fn write(
        &self,
        operation: &'static str,
        with: impl Fn(Txn) -> Txn,
    ) -> Result<TxnReply, CoordError> {
        let key = self.group.key("leader");
        let mut writes = 0;
        loop {
            writes += 1;
            let txn = with(Txn::new().if_mod_revision(&key, self.me.mod_revision)).else_get(&key);
            return match self.group.client.txn(txn).await {
                Ok(reply) if reply.succeeded => Ok(reply),
                Ok(reply) => {
                    Err(self.superseded(operation, reply.reads.first().and_then(|found| found.first())))
                }
                // The store that had the lease of the record is gone, and the leader's key with it.
                Err(CoordError::LeaseLost { .. }) => Err(self.superseded(operation, None)),
                Err(error) if error.is_unsure() && writes < WRITES => continue,
                Err(error) => Err(error),
            };
        }
    }

    fn superseded(&self, operation: &'static str, now: Option<&KeyValue>) -> CoordError {
        let leader = now.and_then(|item| self.group.leader_of(item).ok());
        let by =
            leader.map(|leader| format!("{} on {} (epoch {})", leader.launch, leader.host, leader.epoch));
        CoordError::Superseded { operation, epoch: self.me.epoch, by }
    }
}

impl Drop for Leadership {
    fn drop(&mut self) {
        self.task.abort();
    }
}
