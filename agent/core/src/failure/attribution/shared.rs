//! Constant data that is costly to make, shared by all who need it at the same time and freed when no one does.

use std::sync::{Arc, PoisonError, Weak};

#[allow(
    clippy::disallowed_types,
    reason = "a cache of constant data: it changes what is computed twice, and no result"
)]
type Lock<T> = std::sync::Mutex<T>;

/// One value, made when it is needed.
#[derive(Debug)]
pub(super) struct Shared<T>(Lock<Weak<T>>);

impl<T> Shared<T> {
    pub(super) const fn new() -> Shared<T> {
        Shared(Lock::new(Weak::new()))
    }

    /// The value that others hold, or a new one.
    pub(super) fn get<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<Arc<T>, E> {
        // Whoever panicked with the lock left a whole value behind: it is written at once.
        let mut shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = shared.upgrade() {
            return Ok(value);
        }
        let value = Arc::new(make()?);
        *shared = Arc::downgrade(&value);
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_who_hold_it_share_it_and_the_last_one_frees_it() {
        let shared = Shared::new();
        let get = |value: u32| shared.get(|| Ok::<u32, ()>(value)).expect("made");
        let (one, other) = (get(1), get(2));
        assert!(Arc::ptr_eq(&one, &other));
        drop((one, other));
        assert_eq!(*get(3), 3, "the first one is gone");
    }

    #[test]
    fn what_cannot_be_made_is_tried_again() {
        let shared = Shared::new();
        assert_eq!(shared.get(|| Err::<u32, &str>("no")), Err("no"));
        assert_eq!(shared.get(|| Ok::<u32, &str>(7)).map(|value| *value), Ok(7));
    }
}
