//! Constant data that is expensive to create, shared by all concurrent users and freed when the last one drops it.

use std::sync::{Arc, PoisonError, Weak};

#[allow(
    clippy::disallowed_types,
    reason = "a cache of constant data: it changes what is computed twice, and no result"
)]
type Lock<T> = std::sync::Mutex<T>;

/// A value that is created on demand.
#[derive(Debug)]
pub(super) struct Shared<T>(Lock<Weak<T>>);

impl<T> Shared<T> {
    pub(super) const fn new() -> Shared<T> {
        Shared(Lock::new(Weak::new()))
    }

    /// The shared value, or a new one.
    pub(super) fn get<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<Arc<T>, E> {
        // The value is replaced in one step, so it is intact even after a panic with the lock held.
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
    fn holders_share_the_value_and_the_last_one_frees_it() {
        let shared = Shared::new();
        let get = |value: u32| shared.get(|| Ok::<u32, ()>(value)).expect("made");
        let (one, other) = (get(1), get(2));
        assert!(Arc::ptr_eq(&one, &other));
        drop((one, other));
        assert_eq!(*get(3), 3, "the first one is gone");
    }

    #[test]
    fn a_failed_creation_is_retried() {
        let shared = Shared::new();
        assert_eq!(shared.get(|| Err::<u32, &str>("no")), Err("no"));
        assert_eq!(shared.get(|| Ok::<u32, &str>(7)).map(|value| *value), Ok(7));
    }
}
