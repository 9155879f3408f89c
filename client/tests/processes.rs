//! Writers that fork and writers that die, as real processes.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a panic here is the test's report"
)]

#[path = "it/support/mod.rs"]
mod support;

use std::process::exit;

use mainstay_client::{Client, ExitKind, Note, OpenError};
use mainstay_heartbeat::{Claim, Page};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use support::TestPage;

/// Runs `child` in a forked process that ends with its answer as exit status.
fn forked(child: impl FnOnce() -> bool) -> Pid {
    // SAFETY: the child opens a client, writes to memory and exits. What it uses (malloc, file calls) glibc keeps
    // usable after a fork of a threaded process, and it takes no lock of the test harness.
    match unsafe { fork() }.unwrap() {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            let held = child();
            // SAFETY: ends at once, without the harness's exit handlers.
            unsafe { nix::libc::_exit(if held { 0 } else { 1 }) }
        }
    }
}

fn ends_well(child: Pid) {
    assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0));
}

fn await_beat(page: &Page<'_>, count: u64) {
    while page.beat().is_none_or(|beat| beat.count < count) {
        std::thread::yield_now();
    }
}

#[test]
fn a_forked_child_does_not_beat_for_its_parent() {
    let (mine, childs) = (TestPage::new(), TestPage::new());
    let client = Client::open(&mine.path).unwrap();
    let section = client.intern("forward");
    client.enter(section);
    client.step(1);
    let before = std::fs::read(&mine.path).unwrap();

    let inherited = client.clone();
    let (own_path, parents_path) = (childs.path.clone(), mine.path.clone());
    ends_well(forked(move || {
        inherited.beat();
        inherited.step(99);
        inherited.leave(section);
        inherited.collective(1, 2, 3);
        inherited.exit_note(&Note { kind: ExitKind::Other, exception: "", message: "child", traceback: "" });
        inherited.close();
        let inert = !inherited.is_active() && inherited.intern("new").get() == 0;
        // The parent is alive, so its page is not available; another page is.
        let parent = i32::try_from(std::os::unix::process::parent_id()).unwrap_or(0);
        let refused =
            matches!(Client::open(&parents_path), Err(OpenError::Busy { pid, .. }) if pid == Some(parent));
        let own = Client::open(&own_path).unwrap_or_default();
        own.step(7);
        inert && refused && own.is_active()
    }));

    assert_eq!(std::fs::read(&mine.path).unwrap(), before, "the child changed its parent's page");
    assert_eq!(childs.page.beat().unwrap().step, Some(7));
    assert!(client.is_active());
    client.step(2);
    assert_eq!(mine.page.beat().unwrap().step, Some(2));
    client.close();
}

#[test]
fn a_dead_writers_page_is_whole_and_can_be_claimed_again() {
    const KILLS: u64 = 200;
    let page = TestPage::new();
    let mut last_record = 0;
    for attempt in 1..=KILLS {
        let path = page.path.clone();
        let writer = forked(move || {
            let Ok(client) = Client::open(&path) else { return false };
            let section = client.intern("compute");
            for step in 0.. {
                client.enter(section);
                client.leave(section);
                client.step_with(
                    step,
                    mainstay_client::Measures {
                        loss: Some(step as f64),
                        grad_norm: Some(step as f64 + 0.5),
                        digest: Some(step ^ attempt),
                    },
                );
            }
            true
        });
        while page.page.beat().is_none_or(|beat| beat.claim < attempt || beat.step.is_none()) {
            assert_eq!(
                waitpid(writer, Some(nix::sys::wait::WaitPidFlag::WNOHANG)).unwrap(),
                WaitStatus::StillAlive
            );
        }
        // While the writer runs, and after it is gone, a read is always consistent.
        for dead in [false, true] {
            if dead {
                kill(writer, Signal::SIGKILL).unwrap();
                let ended = waitpid(writer, None).unwrap();
                assert_eq!(ended, WaitStatus::Signaled(writer, Signal::SIGKILL, false));
            }
            let beat = page.page.beat().unwrap();
            let step = beat.step.unwrap();
            assert_eq!(beat.claim, attempt);
            assert_eq!(beat.loss, Some(step as f64));
            assert_eq!(beat.grad_norm, Some(step as f64 + 0.5));
            assert_eq!(beat.digest, Some(step ^ attempt));
            // Three beats a step: the third completes it.
            assert!((step + 1) * 3 <= beat.count && beat.count <= (step + 1) * 3 + 2, "{beat:?}");
            let mut records = Vec::new();
            let drained = page.page.records_since(last_record, &mut records);
            assert_eq!(records.len() as u64 + drained.missed, drained.next_cursor - last_record);
            last_record = drained.next_cursor;
            assert!(records.iter().all(|record| record.loss == Some(record.step as f64)), "a torn record");
        }
        let Claim::Claimed(claimant) = page.page.claim() else { panic!("{:?}", page.page.claim()) };
        assert_eq!((claimant.claims, claimant.pid), (attempt, writer.as_raw() as u32));
    }
}

#[test]
fn a_stopped_reader_and_a_deleted_page_block_no_writer() {
    let page = TestPage::new();
    let client = Client::open(&page.path).unwrap();
    let path = page.path.clone();
    let reader = forked(move || {
        let page = support::map(&path);
        loop {
            std::hint::black_box(page.beat());
        }
    });
    kill(reader, Signal::SIGSTOP).unwrap();
    let stopped = waitpid(reader, Some(nix::sys::wait::WaitPidFlag::WUNTRACED)).unwrap();
    assert_eq!(stopped, WaitStatus::Stopped(reader, Signal::SIGSTOP));
    for step in 0..10_000 {
        client.step(step);
    }
    std::fs::remove_file(&page.path).unwrap();
    client.step(10_000);
    assert_eq!(page.page.beat().unwrap().step, Some(10_000));
    client.exit_note(&Note { kind: ExitKind::Clean, exception: "", message: "done", traceback: "" });
    client.close();
    assert_eq!(page.page.exit_note().unwrap().message, "done");
    kill(reader, Signal::SIGKILL).unwrap();
    waitpid(reader, None).unwrap();
}

#[test]
fn a_stopped_writer_leaves_a_whole_beat() {
    let page = TestPage::new();
    let path = page.path.clone();
    let writer = forked(move || {
        let Ok(client) = Client::open(&path) else { exit(1) };
        for step in 0.. {
            client.step_with(step, mainstay_client::Measures { digest: Some(!step), ..Default::default() });
        }
        true
    });
    for round in 1..=100 {
        await_beat(&page.page, round * 10);
        kill(writer, Signal::SIGSTOP).unwrap();
        waitpid(writer, Some(nix::sys::wait::WaitPidFlag::WUNTRACED)).unwrap();
        let (first, second) = (page.page.beat().unwrap(), page.page.beat().unwrap());
        assert_eq!(first, second);
        assert_eq!(first.digest, first.step.map(|step| !step));
        kill(writer, Signal::SIGCONT).unwrap();
    }
    kill(writer, Signal::SIGKILL).unwrap();
    waitpid(writer, None).unwrap();
}

/// The word in the page that the kernel marks when its claimant's first thread ends.
fn lifeline(page: &TestPage) -> u32 {
    let at = page.page.lifeline().expect("a lifeline");
    let bytes = std::fs::read(&page.path).unwrap();
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

const OWNER_DIED: u32 = 0x4000_0000;
const WAITERS: u32 = 0x8000_0000;

#[test]
fn the_kernel_marks_the_lifeline_of_a_writer_that_is_killed_and_of_no_other() {
    let page = TestPage::new();
    let path = page.path.clone();
    let writer = forked(move || {
        let Ok(client) = Client::open(&path) else { return false };
        // A worker that ends is not the rank that ends, and a worker that opened the page again changes nothing.
        ends_well(forked(|| true));
        client.close();
        let Ok(client) = Client::open(&path) else { return false };
        client.step(1);
        loop {
            nix::unistd::pause();
        }
    });
    await_beat(&page.page, 1);
    assert_eq!(lifeline(&page), writer.as_raw() as u32 | WAITERS, "held by the writer's first thread");
    kill(writer, Signal::SIGKILL).unwrap();
    waitpid(writer, None).unwrap();
    assert_eq!(lifeline(&page), WAITERS | OWNER_DIED);

    // The next process that claims it has its own lifeline.
    let path = page.path.clone();
    ends_well(forked(move || Client::open(&path).is_ok_and(|client| client.is_active())));
    assert_eq!(lifeline(&page), WAITERS | OWNER_DIED);
}

#[test]
fn a_thread_other_than_the_first_sets_up_no_lifeline() {
    let page = TestPage::new();
    let path = page.path.clone();
    std::thread::spawn(move || drop(Client::open(&path).unwrap())).join().unwrap();
    assert_eq!(page.page.lifeline(), None);
}
