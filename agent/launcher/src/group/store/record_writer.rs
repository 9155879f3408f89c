//! What a leader writes into the store for its successor.

use mainstay_coord::{CoordError, Leadership};
use mainstay_group::record::Record;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};

use crate::group::store::seal::Seal;
use crate::group::store::{FromStore, PAUSE, REPORT_EVERY};

/// The leader's write access to the store.
#[derive(Debug)]
pub struct RecordWriter {
    pub epoch: u64,
    /// Proves that a launcher of the job wrote its end.
    pub(crate) seal: Seal,
    pub(crate) requests: mpsc::UnboundedSender<StoreRequest>,
}

#[derive(Debug)]
pub(crate) enum StoreRequest {
    /// Its number, the protocol version needed to read it, and its content.
    Record(u64, u32, Value),
    /// A record that could not be written before.
    Again,
    End {
        why: String,
        /// As [`Seal::sealed`] makes it.
        body: Value,
        done: oneshot::Sender<()>,
    },
}

impl RecordWriter {
    /// Has the record stored; [`FromStore::Written`] reports when it is. A newer record replaces one that is not stored yet.
    pub fn write(&self, number: u64, record: &Record) {
        // The receiver ends with the leadership, which is reported separately.
        let _ = self.requests.send(StoreRequest::Record(number, record.needs(), json!(record)));
    }
}

/// Writes the records of the leader and reports when the leadership is over.
pub(crate) async fn hold(
    leadership: Leadership,
    mut requests: mpsc::UnboundedReceiver<StoreRequest>,
    update: mpsc::UnboundedSender<FromStore>,
) {
    let deposed = FromStore::Deposed(leadership.epoch());
    let mut unwritten: Option<(u64, u32, Value)> = None;
    loop {
        let order = tokio::select! {
            () = leadership.lost() => {
                let _ = update.send(deposed);
                return;
            }
            order = requests.recv() => order,
            () = tokio::time::sleep(PAUSE), if unwritten.is_some() => Some(StoreRequest::Again),
        };
        match order {
            None => {
                let _ = leadership.resign().await;
                return;
            }
            Some(StoreRequest::End { why, body, done }) => {
                if let Err(error) = leadership.end(&why, body).await {
                    tracing::debug!(%error, "the keys of the job stay until their leases end");
                }
                let _ = done.send(());
                return;
            }
            Some(StoreRequest::Again) => {}
            Some(StoreRequest::Record(number, needs, record)) => unwritten = Some((number, needs, record)),
        }
        let Some((number, needs, record)) = unwritten.clone() else { continue };
        match leadership.write_record_for(needs, record).await {
            Ok(_) => {
                unwritten = None;
                if update.send(FromStore::Written(number)).is_err() {
                    return;
                }
            }
            Err(CoordError::Superseded { .. }) => {
                let _ = update.send(deposed);
                return;
            }
            Err(error) if error.is_unreachable() || error.is_unsure() => {
                tracing::debug!(%error, "the job's record is not written yet");
            }
            Err(error) => {
                let problem = format!("the job's record cannot be written, so nothing is restarted: {error}");
                let _ = update.send(FromStore::Problem(problem));
                tokio::time::sleep(REPORT_EVERY).await;
            }
        }
    }
}
