//! Transactions: all comparisons first, then one of the two branches, all in one revision.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use super::{DUPLICATE_KEY, EMPTY_KEY, NOT_SERVED, Range, Refusal, Store, TOO_LARGE, TOO_MANY_OPERATIONS};
use crate::etcd::etcdserverpb as pb;
use pb::compare::{CompareResult, CompareTarget, TargetUnion};
use pb::request_op::Request;
use pb::response_op::Response;

impl Store {
    /// Runs a transaction.
    ///
    /// # Errors
    /// One of its operations would be refused: then nothing is changed.
    pub fn txn(&mut self, question: pb::TxnRequest) -> Result<pb::TxnResponse, Refusal> {
        self.check_txn(&question)?;
        let mut succeeded = true;
        for compare in &question.compare {
            succeeded &= self.compare(compare)?;
        }
        let branch = if succeeded { question.success } else { question.failure };
        self.check_branch(&branch)?;
        let mut responses = Vec::new();
        for op in branch {
            responses.push(pb::ResponseOp { response: Some(self.operate(op)?) });
        }
        self.commit();
        // Reads saw the open revision; the header of the answer names the resulting one.
        let header = self.header();
        Ok(pb::TxnResponse { header: Some(header), succeeded, responses })
    }

    fn check_txn(&self, question: &pb::TxnRequest) -> Result<(), Refusal> {
        let most = self.limits.operations;
        let longest = question.compare.len().max(question.success.len()).max(question.failure.len());
        if longest > most {
            return Err(TOO_MANY_OPERATIONS);
        }
        if question.compare.iter().any(|compare| compare.key.is_empty()) {
            return Err(EMPTY_KEY);
        }
        check_overlaps(&question.success)?;
        check_overlaps(&question.failure)
    }

    /// All refusals happen here: later, no operation may fail halfway.
    fn check_branch(&self, branch: &[pb::RequestOp]) -> Result<(), Refusal> {
        let (mut bytes, mut keys) = (0, 0);
        for op in branch {
            match &op.request {
                Some(Request::RequestPut(put)) => {
                    self.check_put(put)?;
                    bytes += put.key.len() + put.value.len();
                    keys += 1;
                }
                Some(Request::RequestDeleteRange(delete)) if delete.key.is_empty() => return Err(EMPTY_KEY),
                Some(Request::RequestDeleteRange(_)) => {}
                Some(Request::RequestRange(range)) => {
                    self.range(&pb::RangeRequest { count_only: true, ..range.clone() })?;
                }
                None => return Err(NOT_SERVED),
            }
        }
        if bytes > self.limits.request {
            return Err(TOO_LARGE);
        }
        if keys > 0 { self.check_space(bytes, keys) } else { Ok(()) }
    }

    fn operate(&mut self, op: pb::RequestOp) -> Result<Response, Refusal> {
        Ok(match op.request {
            Some(Request::RequestPut(put)) => {
                let prev_kv = self.do_put(put);
                Response::ResponsePut(pb::PutResponse { header: None, prev_kv })
            }
            Some(Request::RequestDeleteRange(delete)) => {
                Response::ResponseDeleteRange(self.do_delete(&delete))
            }
            Some(Request::RequestRange(range)) => Response::ResponseRange(self.range(&range)?),
            None => return Err(NOT_SERVED),
        })
    }

    fn compare(&self, compare: &pb::Compare) -> Result<bool, Refusal> {
        let found = self.keys.get(&compare.key);
        let target = CompareTarget::try_from(compare.target).map_err(|_| NOT_SERVED)?;
        let number = |have: i64, wanted: Option<i64>| have.cmp(&wanted.unwrap_or(0));
        let wanted = compare.target_union.as_ref();
        let ordering = match target {
            CompareTarget::Value => {
                let wanted = match wanted {
                    Some(TargetUnion::Value(value)) => value.as_slice(),
                    _ => &[],
                };
                match found {
                    Some(found) => found.value.as_slice().cmp(wanted),
                    // As in etcd, a missing value matches no comparison.
                    None => return Ok(false),
                }
            }
            CompareTarget::Version => number(found.map_or(0, |found| found.version), number_of(wanted)),
            CompareTarget::Create => {
                number(found.map_or(0, |found| found.create_revision), number_of(wanted))
            }
            CompareTarget::Mod => number(found.map_or(0, |found| found.mod_revision), number_of(wanted)),
            CompareTarget::Lease => number(found.map_or(0, |found| found.lease), number_of(wanted)),
        };
        let result = CompareResult::try_from(compare.result).map_err(|_| NOT_SERVED)?;
        Ok(match result {
            CompareResult::Equal => ordering == Ordering::Equal,
            CompareResult::Greater => ordering == Ordering::Greater,
            CompareResult::Less => ordering == Ordering::Less,
            CompareResult::NotEqual => ordering != Ordering::Equal,
        })
    }
}

fn number_of(wanted: Option<&TargetUnion>) -> Option<i64> {
    match wanted? {
        TargetUnion::Version(number)
        | TargetUnion::CreateRevision(number)
        | TargetUnion::ModRevision(number)
        | TargetUnion::Lease(number) => Some(*number),
        TargetUnion::Value(_) => None,
    }
}

/// Checks that no key is written twice in one revision, or both written and removed.
fn check_overlaps(branch: &[pb::RequestOp]) -> Result<(), Refusal> {
    let mut written = BTreeSet::new();
    let mut removed = Vec::new();
    for op in branch {
        match &op.request {
            Some(Request::RequestPut(put)) if !written.insert(put.key.as_slice()) => {
                return Err(DUPLICATE_KEY);
            }
            Some(Request::RequestDeleteRange(delete)) => {
                removed.push(Range::new(&delete.key, &delete.range_end));
            }
            _ => {}
        }
    }
    let both = written.iter().any(|key| removed.iter().any(|range| range.holds(key)));
    if both { Err(DUPLICATE_KEY) } else { Ok(()) }
}
