//! How much each user's launchers may send: a burst, and a rate per second. Messages beyond that are read more
//! slowly, which slows the launcher down through the connection and keeps the node's loop free for everyone else.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Bytes per second. A job of 64 ranks sends some 30 KB/s.
const PER_SECOND: u64 = 1 << 20;

/// Bytes at once: what a launcher sends after a restart of the agent, when it has stored entries in the meantime.
const MAX_BURST_BYTES: u64 = 8 << 20;

/// Minimum cost of a message: even the smallest needs some work.
const MIN_MESSAGE_COST: u64 = 1024;

/// Launchers of one user that may be attached at once.
const ATTACHED: usize = 256;

/// Users whose budgets are remembered after their last launcher has gone.
const MAX_REMEMBERED_USERS: usize = 4096;

/// The budgets of all users.
#[derive(Clone, Debug, Default)]
pub(super) struct Budgets(Arc<Mutex<BTreeMap<u32, Budget>>>);

#[derive(Debug)]
struct Budget {
    attached: usize,
    left: u64,
    at: Instant,
}

impl Budget {
    /// Takes this many bytes. Returns how long to wait until they are available.
    fn spend(&mut self, bytes: u64, now: Instant) -> Duration {
        let since = now.saturating_duration_since(self.at);
        let come =
            u64::try_from(since.as_micros()).unwrap_or(u64::MAX).saturating_mul(PER_SECOND) / 1_000_000;
        if come > 0 {
            self.left = self.left.saturating_add(come).min(MAX_BURST_BYTES);
            self.at = self.at.max(now);
        }
        if self.left >= bytes {
            self.left -= bytes;
            return Duration::ZERO;
        }
        let lacks = bytes - self.left;
        self.left = 0;
        let wait = Duration::from_micros(lacks.saturating_mul(1_000_000) / PER_SECOND);
        // The next caller waits behind this one.
        self.at = self.at.max(now) + wait;
        self.at.saturating_duration_since(now)
    }
}

impl Budgets {
    /// A share for one launcher of this user; none if the user has the maximum.
    pub(super) fn attach(&self, uid: u32) -> Option<Share> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Budget { attached: 0, left: MAX_BURST_BYTES, at: Instant::now() };
        let budget = all.entry(uid).or_insert_with(new);
        (budget.attached < ATTACHED).then(|| {
            budget.attached += 1;
            Share { budgets: self.clone(), uid }
        })
    }
}

/// One launcher's share in its user's budget.
#[derive(Debug)]
pub(super) struct Share {
    budgets: Budgets,
    uid: u32,
}

impl Share {
    /// Waits until a message of this many bytes may be accepted.
    pub(super) async fn spend(&self, bytes: usize) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX).max(MIN_MESSAGE_COST);
        let wait = {
            let mut all = self.budgets.0.lock().unwrap_or_else(PoisonError::into_inner);
            all.get_mut(&self.uid).map_or(Duration::ZERO, |budget| budget.spend(bytes, Instant::now()))
        };
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut all = self.budgets.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(of) = all.get_mut(&self.uid) else { return };
        of.attached -= 1;
        // Attaching again must not give the user a full budget.
        let is_full = of.spend(0, Instant::now()).is_zero() && of.left >= MAX_BURST_BYTES;
        // With very many users the budgets themselves would need memory.
        if of.attached == 0 && (is_full || all.len() > MAX_REMEMBERED_USERS) {
            all.remove(&self.uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::{ATTACHED, Budget, Budgets, MAX_BURST_BYTES, PER_SECOND};

    #[test]
    fn a_burst_is_bounded_and_the_rest_is_delayed() {
        let now = Instant::now();
        let mut budget = Budget { attached: 1, left: MAX_BURST_BYTES, at: now };
        assert_eq!(budget.spend(MAX_BURST_BYTES, now), Duration::ZERO);
        assert_eq!(budget.spend(3 * PER_SECOND, now), Duration::from_secs(3));
        // The next message waits behind that one.
        assert_eq!(budget.spend(PER_SECOND, now), Duration::from_secs(4));
        let later = now + Duration::from_secs(5);
        assert_eq!(budget.spend(PER_SECOND, later), Duration::ZERO);
        assert!(budget.spend(PER_SECOND, later) > Duration::ZERO);
        let much_later = later + Duration::from_secs(3600);
        assert_eq!(
            budget.spend(MAX_BURST_BYTES, much_later),
            Duration::ZERO,
            "what was saved up is bounded too"
        );
        assert!(budget.spend(PER_SECOND, much_later) > Duration::ZERO);
    }

    #[test]
    fn attaching_again_makes_no_new_budget_and_each_user_has_one() {
        let budgets = Budgets::default();
        let left = |uid: u32| budgets.0.lock().unwrap().get(&uid).map(|budget| budget.left);
        let share = budgets.attach(7).unwrap();
        budgets.0.lock().unwrap().get_mut(&7).unwrap().spend(MAX_BURST_BYTES, Instant::now());
        drop(share);
        let _share = budgets.attach(7).unwrap();
        assert!(left(7).unwrap() < MAX_BURST_BYTES / 2);
        let _other = budgets.attach(8).unwrap();
        assert_eq!(left(8), Some(MAX_BURST_BYTES));
    }

    #[test]
    fn launchers_of_one_user_are_bounded() {
        let budgets = Budgets::default();
        let held: Vec<_> = (0..ATTACHED).map(|_| budgets.attach(9).unwrap()).collect();
        assert!(budgets.attach(9).is_none());
        assert!(budgets.attach(10).is_some());
        drop(held);
        assert!(budgets.attach(9).is_some());
    }
}
