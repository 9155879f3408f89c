//! How much each user may put into the journal: more would push entries of others out of it.

use std::collections::BTreeMap;

use mainstay_model::time::{Mono, Span};

/// Maximum number of users that are counted.
const MAX_USERS: usize = 1024;

/// What each user may use in one period.
#[derive(Debug)]
pub(super) struct Allowance {
    most: u64,
    period: Span,
    users: BTreeMap<u32, Used>,
}

#[derive(Debug)]
struct Used {
    began: Mono,
    used: u64,
    left_out: u64,
}

impl Allowance {
    pub(super) fn new(most: u64, period: Span) -> Allowance {
        Allowance { most, period, users: BTreeMap::new() }
    }

    /// Whether an entry at this cost is kept, with the number of entries that were left out before it. An error for
    /// one that is left out, with the number left out so far; 0 if there are too many users.
    pub(super) fn take(&mut self, uid: u32, cost: u64, now: Mono) -> Result<u64, u64> {
        if self.users.len() >= MAX_USERS && !self.users.contains_key(&uid) {
            self.users.retain(|_, of| now.since(of.began) < self.period);
            if self.users.len() >= MAX_USERS {
                return Err(0);
            }
        }
        let user = self.users.entry(uid).or_insert(Used { began: now, used: 0, left_out: 0 });
        if now.since(user.began) >= self.period {
            (user.began, user.used) = (now, 0);
        }
        // Nothing smaller is kept after an entry that was left out: there is one gap in each period.
        let is_over = user.used.saturating_add(cost) > self.most;
        user.used = if is_over { self.most } else { user.used + cost };
        if is_over {
            user.left_out = user.left_out.saturating_add(1);
            return Err(user.left_out);
        }
        Ok(std::mem::take(&mut user.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::{Allowance, MAX_USERS, Mono, Span};

    const PERIOD: Span = Span::seconds(60);

    #[test]
    fn one_user_does_not_fill_the_journal_and_what_is_left_out_is_counted() {
        let mut entries = Allowance::new(20, PERIOD);
        let now = Mono(1_000_000_000);
        for _ in 0..4 {
            assert_eq!(entries.take(7, 4, now), Ok(0));
        }
        assert_eq!(entries.take(7, 5, now), Err(1));
        assert_eq!(entries.take(7, 1, now), Err(2), "one gap, not many");
        assert_eq!(entries.take(8, 20, now), Ok(0), "another user's entries are kept");
        assert_eq!(entries.take(7, 1, Mono(now.0 + PERIOD.0)), Ok(2));
    }

    #[test]
    fn users_are_bounded() {
        let mut entries = Allowance::new(1, PERIOD);
        (0..MAX_USERS as u32 + 5).for_each(|uid| _ = entries.take(uid, 1, Mono(1)));
        assert!(entries.users.len() <= MAX_USERS);
    }
}
