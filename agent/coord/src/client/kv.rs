//! Keys and values: reads, writes, and transactions that compare before they write.

use super::ask::Repeat;
use super::{Client, LeaseId};
use crate::error::CoordError;
use crate::etcd::etcdserverpb as pb;
use crate::etcd::mvccpb;
use pb::kv_client::KvClient;
use tonic::transport::Channel;

/// Keys per page of a listing: keeps an answer far below the largest message.
const PAGE: i64 = 256;
/// The largest answer that is read, in bytes: a page of the largest values that launchers write.
const MAX_RESPONSE_BYTES: usize = 32 << 20;
/// The maximum number of attempts at a listing that compactions interrupt.
const LISTINGS: usize = 8;

/// A key with its value, revisions and version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyValue {
    /// The key. Launchers write only text; invalid bytes are replaced.
    pub key: String,
    /// The value.
    pub value: Vec<u8>,
    /// The revision at which it was created.
    pub create_revision: i64,
    /// The revision of the last change.
    pub mod_revision: i64,
    /// The number of changes since it was created, from 1.
    pub version: i64,
    /// The lease that it is attached to.
    pub lease: Option<LeaseId>,
}

impl From<mvccpb::KeyValue> for KeyValue {
    fn from(found: mvccpb::KeyValue) -> KeyValue {
        KeyValue {
            key: String::from_utf8_lossy(&found.key).into_owned(),
            value: found.value,
            create_revision: found.create_revision,
            mod_revision: found.mod_revision,
            version: found.version,
            lease: (found.lease != 0).then_some(LeaseId(found.lease)),
        }
    }
}

/// All keys with a prefix, at one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// The revision; a watch continues from the next one.
    pub revision: i64,
    /// The cluster of the store. Another cluster has other revisions.
    pub cluster: u64,
    /// The items, sorted by key.
    pub items: Vec<KeyValue>,
}

/// A transaction: if all comparisons hold, the `then_…` operations run, else the `else_…` operations. It is atomic.
#[derive(Clone, Debug, Default)]
pub struct Txn {
    request: pb::TxnRequest,
}

/// The result of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TxnReply {
    /// Whether all comparisons held.
    pub succeeded: bool,
    /// The store's revision afterwards. Written keys have it as their `mod_revision`.
    pub revision: i64,
    /// The results of the reads of the branch that ran, in the order in which they were added.
    pub reads: Vec<Vec<KeyValue>>,
}

impl Txn {
    /// An empty transaction.
    #[must_use]
    pub fn new() -> Txn {
        Txn::default()
    }

    /// Condition: the key does not exist.
    #[must_use]
    pub fn if_absent(self, key: &str) -> Txn {
        self.compare(key, pb::compare::CompareTarget::Create, pb::compare::TargetUnion::CreateRevision(0))
    }

    /// Condition: the key was last changed at this revision; 0 if it does not exist.
    #[must_use]
    pub fn if_mod_revision(self, key: &str, revision: i64) -> Txn {
        self.compare(key, pb::compare::CompareTarget::Mod, pb::compare::TargetUnion::ModRevision(revision))
    }

    /// Condition: the key was created at this revision.
    #[must_use]
    pub fn if_create_revision(self, key: &str, revision: i64) -> Txn {
        self.compare(
            key,
            pb::compare::CompareTarget::Create,
            pb::compare::TargetUnion::CreateRevision(revision),
        )
    }

    /// Condition: the key has this version, the number of its changes.
    #[must_use]
    pub fn if_version(self, key: &str, version: i64) -> Txn {
        self.compare(key, pb::compare::CompareTarget::Version, pb::compare::TargetUnion::Version(version))
    }

    /// Condition: the key has this value.
    #[must_use]
    pub fn if_value(self, key: &str, value: &[u8]) -> Txn {
        self.compare(key, pb::compare::CompareTarget::Value, pb::compare::TargetUnion::Value(value.to_vec()))
    }

    /// Condition: the key is attached to this lease.
    #[must_use]
    pub fn if_lease(self, key: &str, lease: LeaseId) -> Txn {
        self.compare(key, pb::compare::CompareTarget::Lease, pb::compare::TargetUnion::Lease(lease.0))
    }

    /// Writes the key.
    #[must_use]
    pub fn then_put(mut self, key: &str, value: &[u8], lease: Option<LeaseId>) -> Txn {
        let put = pb::request_op::Request::RequestPut(put(key, value, lease));
        self.request.success.push(pb::RequestOp { request: Some(put) });
        self
    }

    /// Removes the key.
    #[must_use]
    pub fn then_delete(self, key: &str) -> Txn {
        self.then_remove(key, Vec::new())
    }

    /// Removes all keys with the prefix. The same transaction must not write one of them.
    #[must_use]
    pub fn then_delete_prefix(self, prefix: &str) -> Txn {
        self.then_remove(prefix, prefix_end(prefix))
    }

    /// Reads the key if the comparisons hold.
    #[must_use]
    pub fn then_get(mut self, key: &str) -> Txn {
        self.request.success.push(read(key, Vec::new()));
        self
    }

    /// Reads all keys with the prefix if the comparisons hold.
    #[must_use]
    pub fn then_list(mut self, prefix: &str) -> Txn {
        self.request.success.push(read(prefix, prefix_end(prefix)));
        self
    }

    /// Reads the key if a comparison does not hold.
    #[must_use]
    pub fn else_get(mut self, key: &str) -> Txn {
        self.request.failure.push(read(key, Vec::new()));
        self
    }

    fn then_remove(mut self, key: &str, range_end: Vec<u8>) -> Txn {
        let key = key.as_bytes().to_vec();
        let delete = pb::DeleteRangeRequest { key, range_end, prev_kv: false };
        let request = Some(pb::request_op::Request::RequestDeleteRange(delete));
        self.request.success.push(pb::RequestOp { request });
        self
    }

    fn compare(
        mut self,
        key: &str,
        target: pb::compare::CompareTarget,
        wanted: pb::compare::TargetUnion,
    ) -> Txn {
        self.request.compare.push(pb::Compare {
            result: pb::compare::CompareResult::Equal.into(),
            target: target.into(),
            key: key.as_bytes().to_vec(),
            target_union: Some(wanted),
        });
        self
    }
}

impl Client {
    /// The current value of the key.
    ///
    /// # Errors
    /// No endpoint answered, or this client is refused.
    pub async fn get(&self, key: &str) -> Result<Option<KeyValue>, CoordError> {
        let question = range(key.as_bytes().to_vec(), Vec::new());
        let answer = self.range("get", question).await?;
        Ok(answer.kvs.into_iter().next().map(KeyValue::from))
    }

    /// All keys with the prefix, at one revision.
    ///
    /// # Errors
    /// No endpoint answered, this client is refused, or the store is compacted faster than it can be listed.
    pub async fn list(&self, prefix: &str) -> Result<Listing, CoordError> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            match self.list_once(prefix).await {
                Err(CoordError::Store { code: "out of range", .. }) if attempts < LISTINGS => {}
                listed => return listed,
            }
        }
    }

    async fn list_once(&self, prefix: &str) -> Result<Listing, CoordError> {
        let mut listing = Listing::default();
        let mut from = prefix.as_bytes().to_vec();
        loop {
            let mut question = range(from, prefix_end(prefix));
            question.limit = PAGE;
            question.revision = listing.revision;
            let answer = self.range("list", question).await?;
            if listing.revision == 0 {
                let header = answer.header.unwrap_or_default();
                (listing.revision, listing.cluster) = (header.revision, header.cluster_id);
            }
            let Some(last) = answer.kvs.last() else { return Ok(listing) };
            from = [last.key.as_slice(), &[0]].concat();
            listing.items.extend(answer.kvs.into_iter().map(KeyValue::from));
            if !answer.more {
                return Ok(listing);
            }
        }
    }

    async fn range(
        &self,
        operation: &'static str,
        question: pb::RangeRequest,
    ) -> Result<pb::RangeResponse, CoordError> {
        let call = self.ask(operation, Repeat::Freely, question, |channel, question| async move {
            kv(channel).range(question).await
        });
        Ok(call.await?.0)
    }

    /// Writes the key, and returns the revision.
    ///
    /// # Errors
    /// No endpoint answered, this client is refused, the lease has ended, or the value is too large.
    pub async fn put(&self, key: &str, value: &[u8], lease: Option<LeaseId>) -> Result<i64, CoordError> {
        let question = put(key, value, lease);
        let call = self.ask("put", Repeat::Freely, question, |channel, question| async move {
            kv(channel).put(question).await
        });
        let (answer, _) = call.await.map_err(|error| without_lease(error, lease))?;
        Ok(answer.header.map_or(0, |header| header.revision))
    }

    /// Removes the key, and returns the number of removed keys: 0 or 1. After a repeated request, 0 may mean 1.
    ///
    /// # Errors
    /// No endpoint answered, or this client is refused.
    pub async fn delete(&self, key: &str) -> Result<u64, CoordError> {
        self.remove(key, Vec::new()).await
    }

    /// Removes all keys with the prefix, and returns their number.
    ///
    /// # Errors
    /// No endpoint answered, or this client is refused.
    pub async fn delete_prefix(&self, prefix: &str) -> Result<u64, CoordError> {
        self.remove(prefix, prefix_end(prefix)).await
    }

    async fn remove(&self, key: &str, range_end: Vec<u8>) -> Result<u64, CoordError> {
        let question = pb::DeleteRangeRequest { key: key.as_bytes().to_vec(), range_end, prev_kv: false };
        let call = self.ask("delete", Repeat::Freely, question, |channel, question| async move {
            kv(channel).delete_range(question).await
        });
        Ok(u64::try_from(call.await?.0.deleted).unwrap_or(0))
    }

    /// Runs the transaction. It is repeated only if it was certainly never received.
    ///
    /// # Errors
    /// As for the other requests; [`CoordError::Unsure`] if the answer was lost: it may have been applied.
    pub async fn txn(&self, txn: Txn) -> Result<TxnReply, CoordError> {
        let lease = txn.lease();
        let call =
            self.ask("transaction", Repeat::OnlyIfUnsent, txn.request, |channel, question| async move {
                kv(channel).txn(question).await
            });
        let (answer, _) = call.await.map_err(|error| without_lease(error, lease))?;
        let reads = answer.responses.into_iter().filter_map(|response| match response.response {
            Some(pb::response_op::Response::ResponseRange(found)) => {
                Some(found.kvs.into_iter().map(KeyValue::from).collect())
            }
            _ => None,
        });
        Ok(TxnReply {
            succeeded: answer.succeeded,
            revision: answer.header.map_or(0, |header| header.revision),
            reads: reads.collect(),
        })
    }

    /// Removes the history before the revision.
    ///
    /// # Errors
    /// No endpoint answered, this client is refused, or the revision is compacted already or does not exist.
    pub async fn compact(&self, revision: i64) -> Result<(), CoordError> {
        let question = pb::CompactionRequest { revision, physical: false };
        let call = self.ask("compact", Repeat::Freely, question, |channel, question| async move {
            kv(channel).compact(question).await
        });
        call.await.map(|_| ())
    }
}

impl Txn {
    /// A lease that it attaches keys to.
    fn lease(&self) -> Option<LeaseId> {
        self.request.success.iter().find_map(|op| match &op.request {
            Some(pb::request_op::Request::RequestPut(put)) if put.lease != 0 => Some(LeaseId(put.lease)),
            _ => None,
        })
    }
}

fn kv(channel: Channel) -> KvClient<Channel> {
    KvClient::new(channel).max_decoding_message_size(MAX_RESPONSE_BYTES)
}

fn put(key: &str, value: &[u8], lease: Option<LeaseId>) -> pb::PutRequest {
    let lease = lease.map_or(0, |lease| lease.0);
    pb::PutRequest { key: key.as_bytes().to_vec(), value: value.to_vec(), lease, prev_kv: false }
}

fn range(key: Vec<u8>, range_end: Vec<u8>) -> pb::RangeRequest {
    pb::RangeRequest { key, range_end, ..pb::RangeRequest::default() }
}

fn read(key: &str, range_end: Vec<u8>) -> pb::RequestOp {
    let read = range(key.as_bytes().to_vec(), range_end);
    pb::RequestOp { request: Some(pb::request_op::Request::RequestRange(read)) }
}

/// The end of the range of all keys with the prefix, in etcd's sense: the next key without it.
pub(crate) fn prefix_end(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    while let Some(last) = end.pop() {
        if last < 0xff {
            end.push(last + 1);
            return end;
        }
    }
    // Every key.
    vec![0]
}

/// Maps the store's message for an ended lease to the error that callers match.
fn without_lease(error: CoordError, lease: Option<LeaseId>) -> CoordError {
    match (error, lease) {
        (CoordError::Store { operation, why, .. }, Some(lease)) if why.contains("lease not found") => {
            CoordError::LeaseLost { operation, lease: lease.0 }
        }
        (error, _) => error,
    }
}
