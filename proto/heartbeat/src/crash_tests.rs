//! A writer that dies between any two of its stores.

use std::cell::Cell;

thread_local! {
    /// How many more stores the writer of this thread lives to make.
    static STORES_LEFT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Counts one store down; once there are none left, none reaches the page.
pub(crate) fn writer_is_dead() -> bool {
    STORES_LEFT.with(|left| match left.get() {
        None => false,
        Some(0) => true,
        Some(more) => {
            left.set(Some(more - 1));
            false
        }
    })
}
