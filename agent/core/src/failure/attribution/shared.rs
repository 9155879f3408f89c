//! The catalogue that comes with the program, shared by all who need it at the same time and freed when nobody does.

use std::sync::{Arc, PoisonError, Weak};

use super::catalog::{Catalog, CatalogError};

#[allow(
    clippy::disallowed_types,
    reason = "a cache of constant data: it changes what is computed twice, and no result"
)]
type Lock<T> = std::sync::Mutex<T>;

static SHARED: Lock<Weak<Catalog>> = Lock::new(Weak::new());

pub(super) fn catalog() -> Result<Arc<Catalog>, CatalogError> {
    // Whoever panicked with the lock left a whole value behind: it is written at once.
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(catalog) = shared.upgrade() {
        return Ok(catalog);
    }
    let catalog = Arc::new(Catalog::prepared()?);
    *shared = Arc::downgrade(&catalog);
    Ok(catalog)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_who_hold_it_share_it_and_the_last_one_frees_it() {
        let one = catalog().expect("a sound catalogue");
        let other = catalog().expect("a sound catalogue");
        assert!(Arc::ptr_eq(&one, &other));
        let gone = Arc::downgrade(&one);
        drop((one, other));
        // Another test may hold it: then it is that one which frees it.
        assert!(gone.upgrade().is_none_or(|held| Arc::strong_count(&held) > 1));
    }
}
