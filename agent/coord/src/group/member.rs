//! Membership: a member's key under a lease, which is replaced if it is lost.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::values::{LARGEST_MEMBER, Member};
use super::{Group, check_name};
use crate::client::{Lease, LeaseState, Txn};
use crate::error::CoordError;

/// The pause after a failed attempt to join again.
const REJOIN_PAUSE: Duration = Duration::from_millis(300);

/// The state of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberState {
    /// The other launchers see it.
    Kept,
    /// The store does not answer; the other launchers still see it.
    Unanswered {
        /// The time since which it does not answer.
        since: Instant,
    },
    /// The lease has ended: the other launchers consider this one lost. It joins again as soon as the store answers.
    Lost,
    /// The store has a note that the job has ended. It joins again if that is removed: a stranger may have written it.
    Ended,
}

/// The membership of this launcher. Dropping it lets the lease expire.
#[derive(Debug)]
pub struct Membership {
    pub(super) shared: Arc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) group: Group,
    me: Mutex<Member>,
    pub(super) state: watch::Sender<MemberState>,
    /// The current lease; None while there is none.
    pub(super) lease: watch::Sender<Option<Arc<Lease>>>,
    rejoins: watch::Sender<u64>,
}

impl Group {
    /// Joins under a new lease.
    ///
    /// # Errors
    /// No endpoint answered, this client is refused, the job has ended, or the member is too large or badly named.
    pub async fn join(&self, me: Member) -> Result<Membership, CoordError> {
        check_name("launch", &me.launch)?;
        let shared = Arc::new(Shared {
            group: self.clone(),
            me: Mutex::new(me),
            state: watch::Sender::new(MemberState::Kept),
            lease: watch::Sender::new(None),
            rejoins: watch::Sender::new(0),
        });
        let lease = Arc::new(self.client.lease(self.options.member_ttl).await?);
        shared.put(&lease).await?;
        shared.lease.send_replace(Some(Arc::clone(&lease)));
        let task = tokio::spawn(keep(Arc::clone(&shared), lease));
        Ok(Membership { shared, task })
    }
}

impl Membership {
    /// The launch of this member.
    #[must_use]
    pub fn launch(&self) -> String {
        self.shared.me().launch
    }

    /// The member as the other launchers see it, or will see it.
    #[must_use]
    pub fn member(&self) -> Member {
        self.shared.me()
    }

    /// The current state and its changes.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<MemberState> {
        self.shared.state.subscribe()
    }

    /// How often it joined again.
    #[must_use]
    pub fn rejoins(&self) -> u64 {
        *self.shared.rejoins.borrow()
    }

    /// Publishes a new entry. It is kept and written again after a lost lease. The launch stays the same.
    ///
    /// # Errors
    /// No endpoint answered (it is then written when the member joins again, or with the next update), the job has
    /// ended, or the member is too large.
    pub async fn update(&self, mut me: Member) -> Result<(), CoordError> {
        me.launch = self.launch();
        self.shared.group.encoded("members", &me, LARGEST_MEMBER)?;
        *self.shared.me.lock().unwrap_or_else(PoisonError::into_inner) = me;
        let lease = self.shared.lease.borrow().clone();
        match lease {
            Some(lease) => match self.shared.put(&lease).await {
                // The task that keeps the lease notices it too, and writes the current entry.
                Err(CoordError::LeaseLost { .. }) => Ok(()),
                done => done,
            },
            None => Ok(()),
        }
    }

    /// Leaves: the other launchers see that it is on purpose, and the reason. A leader's key is removed too.
    ///
    /// # Errors
    /// No endpoint answered; the lease then expires, which looks like a failure.
    pub async fn goodbye(self, reason: &str) -> Result<(), CoordError> {
        self.task.abort();
        let lease = self.shared.lease.send_replace(None);
        let Some(lease) = lease else { return Ok(()) };
        let mut me = self.shared.me();
        me.leaving = Some(reason.to_owned());
        *self.shared.me.lock().unwrap_or_else(PoisonError::into_inner) = me;
        match self.shared.put(&lease).await {
            Ok(()) | Err(CoordError::Ended { .. } | CoordError::LeaseLost { .. }) => {}
            Err(error) => return Err(error),
        }
        self.shared.group.client.revoke(lease.id()).await
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.task.abort();
        self.shared.lease.send_replace(None);
    }
}

impl Shared {
    pub(super) fn me(&self) -> Member {
        self.me.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Writes the member's key, unless the job has ended.
    async fn put(&self, lease: &Lease) -> Result<(), CoordError> {
        let me = self.me();
        let value = self.group.encoded("members", &me, LARGEST_MEMBER)?;
        let (key, ended) = (self.group.member_key(&me.launch), self.group.key("ended"));
        let txn = || Txn::new().if_absent(&ended).then_put(&key, &value, Some(lease.id())).else_get(&ended);
        let done = match self.group.client.txn(txn()).await {
            // Only this launcher writes the key, so that a second write is harmless.
            Err(error) if error.is_unsure() => self.group.client.txn(txn()).await?,
            done => done?,
        };
        if done.succeeded {
            return Ok(());
        }
        let ended = done.reads.first().and_then(|found| found.first());
        let ended =
            ended.and_then(|item| super::values::read::<super::values::JobEndedNote>(&item.value).ok());
        let why = ended.map_or_else(|| "for an unknown reason".to_owned(), |ended| ended.why);
        Err(CoordError::Ended { operation: "join", why })
    }
}

/// Follows the lease, and gets another one if it is lost.
async fn keep(shared: Arc<Shared>, mut lease: Arc<Lease>) {
    loop {
        follow(&shared, &lease).await;
        shared.lease.send_replace(None);
        shared.state.send_replace(MemberState::Lost);
        lease = loop {
            match again(&shared).await {
                Ok(lease) => break lease,
                Err(CoordError::Ended { .. }) => {
                    shared.state.send_replace(MemberState::Ended);
                }
                Err(error) => tracing::debug!(%error, "this launcher cannot join again yet"),
            }
            tokio::time::sleep(REJOIN_PAUSE).await;
        };
        shared.rejoins.send_modify(|count| *count += 1);
        shared.lease.send_replace(Some(Arc::clone(&lease)));
        shared.state.send_replace(MemberState::Kept);
    }
}

async fn again(shared: &Shared) -> Result<Arc<Lease>, CoordError> {
    let lease = Arc::new(shared.group.client.lease(shared.group.options.member_ttl).await?);
    shared.put(&lease).await?;
    Ok(lease)
}

/// Returns when the lease is lost.
async fn follow(shared: &Shared, lease: &Lease) {
    let mut state = lease.state();
    loop {
        match *state.borrow_and_update() {
            LeaseState::Kept => shared.state.send_replace(MemberState::Kept),
            LeaseState::Unanswered { since } => shared.state.send_replace(MemberState::Unanswered { since }),
            LeaseState::Lost => return,
        };
        if state.changed().await.is_err() {
            return;
        }
    }
}
