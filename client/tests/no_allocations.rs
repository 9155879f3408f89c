//! Beats allocate nothing: shown by an allocator that counts.
#![allow(clippy::unwrap_used, reason = "a panic here is the test's report")]

#[path = "it/support/mod.rs"]
mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use mainstay_client::{Client, ExitKind, Measures, Note};
use support::TestPage;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is passed on to the system's allocator unchanged; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn nothing_after_the_open_allocates() {
    let page = TestPage::new();
    let client = Client::open(&page.path).unwrap();
    let before = ALLOCATIONS.get();
    assert!(before > 0, "the counter counts");
    for step in 0..1000 {
        let guard = client.section("forward");
        client.step(step);
        client.step_with(step, Measures { loss: Some(0.5), grad_norm: Some(1.0), digest: Some(step) });
        client.beat();
        client.collective(step % 20, step, step);
        drop(guard);
    }
    client.exit_note(&Note { kind: ExitKind::Exception, exception: "E", message: "m", traceback: "t" });
    client.close();
    assert_eq!(ALLOCATIONS.get(), before);
    assert_eq!(page.page.beat().unwrap().count, 5000);
}
