//! How a client handles the file it is given, and what it reports to the launcher.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a panic here is the test's report"
)]

use crate::support;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;

use mainstay_client::{Client, ExitKind, Note, OpenError, SectionId};
use mainstay_heartbeat::{Claim, LayoutError, MAJOR, MINOR, PAGE_BYTES, RefusalReason};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use support::{TestPage, fresh, map, scratch};

#[test]
fn a_fresh_page_is_claimed_with_pid_start_version_and_language() {
    let page = TestPage::new();
    assert_eq!(page.page.claim(), Claim::Unclaimed);
    let client = Client::open(&page.path).unwrap();
    assert!(client.is_active() && client.refusal().is_none());
    let Claim::Claimed(claimant) = page.page.claim() else { panic!("{:?}", page.page.claim()) };
    assert_eq!(claimant.pid, std::process::id());
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let ticks = stat.rsplit(')').next().unwrap().split_whitespace().nth(19).unwrap();
    assert_eq!(claimant.start_ticks.to_string(), ticks);
    assert_ne!(claimant.pid_namespace, 0);
    assert_eq!(claimant.version, concat!("mainstay-client ", env!("CARGO_PKG_VERSION")));
    assert_eq!(claimant.language, "rust");
}

#[test]
fn the_same_page_opened_twice_is_one_client() {
    let page = TestPage::new();
    let (first, second) = (Client::open(&page.path).unwrap(), Client::open(&page.path).unwrap());
    first.step(1);
    second.step(2);
    let beat = page.page.beat().unwrap();
    assert_eq!((beat.claim, beat.count, beat.step), (1, 2, Some(2)));
    second.close();
    assert!(!first.is_active());
    first.step(3);
    assert_eq!(page.page.beat().unwrap().step, Some(2));
    assert!(matches!(page.page.claim(), Claim::Closed { .. }));

    let again = Client::open(&page.path).unwrap();
    again.beat();
    let beat = page.page.beat().unwrap();
    assert_eq!((beat.claim, beat.count, beat.step), (2, 1, None));
}

#[test]
fn a_page_of_another_major_is_refused_in_the_page_itself() {
    let directory = scratch();
    let path = directory.path().join("newer.page");
    let mut bytes = fresh();
    bytes[8..16].copy_from_slice(&(u64::from(MAJOR) + 1).to_le_bytes());
    bytes[16..24].copy_from_slice(&4_u64.to_le_bytes());
    std::fs::write(&path, &bytes).unwrap();

    let error = Client::open(&path).unwrap_err();
    let newer = LayoutError::Major { major: u64::from(MAJOR) + 1, minor: 4 };
    assert!(matches!(error, OpenError::Layout { source, .. } if source == newer), "{error}");

    // What the launcher of that other version sees: only the frozen zone has changed, and it names this client.
    let mut after = std::fs::read(&path).unwrap();
    assert_eq!(after[256..], bytes[256..]);
    after[8..16].copy_from_slice(&u64::from(MAJOR).to_le_bytes());
    let as_mine = directory.path().join("mine.page");
    std::fs::write(&as_mine, &after).unwrap();
    let Claim::Refused(refusal) = map(&as_mine).claim() else { panic!("not refused") };
    assert_eq!((refusal.major, refusal.minor, refusal.reason), (MAJOR, MINOR, RefusalReason::Major));
    assert_eq!(refusal.pid, std::process::id());
    assert!(refusal.version.starts_with("mainstay-client "));
}

#[test]
fn a_page_of_a_newer_minor_is_used() {
    let directory = scratch();
    let path = directory.path().join("page");
    let mut bytes = fresh();
    bytes[16..24].copy_from_slice(&9_u64.to_le_bytes());
    std::fs::write(&path, &bytes).unwrap();
    Client::open(&path).unwrap().step(1);
    assert_eq!(map(&path).identity().minor, 9);
    assert_eq!(map(&path).beat().unwrap().step, Some(1));
}

#[test]
fn a_file_that_is_no_page_is_left_alone() {
    let directory = scratch();
    let path = directory.path().join("notes.txt");
    let text = "Dear diary, ".repeat(20_000);
    std::fs::write(&path, &text).unwrap();
    let error = Client::open(&path).unwrap_err();
    assert!(matches!(error, OpenError::Layout { source: LayoutError::Magic { .. }, .. }), "{error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
}

#[test]
fn a_short_file_is_refused_before_it_can_hurt() {
    let directory = scratch();
    let path = directory.path().join("short.page");
    for length in [0, 8, 255, 256, 4096, PAGE_BYTES - 1] {
        std::fs::write(&path, &fresh()[..length]).unwrap();
        let error = Client::open(&path).unwrap_err();
        assert!(
            matches!(error, OpenError::Layout { source: LayoutError::TooShort { .. }, .. }),
            "{length}: {error}"
        );
    }
}

#[test]
fn an_unallocated_file_on_tmpfs_is_refused() {
    let directory = scratch();
    let path = directory.path().join("sparse.page");
    let file = File::create(&path).unwrap();
    file.write_all_at(&fresh()[..4096], 0).unwrap();
    file.set_len(PAGE_BYTES as u64).unwrap();
    if !directory.path().starts_with("/dev/shm") {
        return testing::skip("there is no tmpfs at /dev/shm");
    }
    let error = Client::open(&path).unwrap_err();
    assert!(matches!(error, OpenError::Sparse { allocated: 4096, .. }), "{error}");
    let Claim::Refused(refusal) = map(&path).claim() else { panic!("not refused") };
    assert_eq!(refusal.reason, RefusalReason::Sparse);
}

#[test]
fn paths_that_lead_nowhere_are_errors_with_the_path_in_them() {
    let directory = scratch();
    let fifo = directory.path().join("fifo");
    mkfifo(&fifo, Mode::S_IRWXU).unwrap();
    let missing = directory.path().join("missing");
    // The FIFO has no other end: opening it must not wait for one.
    for path in [missing.as_path(), fifo.as_path(), directory.path()] {
        let error = Client::open(path).unwrap_err();
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    }
    let read_only = directory.path().join("read-only");
    std::fs::write(&read_only, fresh()).unwrap();
    std::fs::set_permissions(&read_only, std::os::unix::fs::PermissionsExt::from_mode(0o400)).unwrap();
    if OpenOptions::new().write(true).open(&read_only).is_ok() {
        return testing::skip_part("a page that may not be written: this user may write anything");
    }
    assert!(matches!(Client::open(&read_only).unwrap_err(), OpenError::Io { .. }));
}

#[test]
fn a_disabled_client_does_nothing() {
    let client = Client::disabled();
    client.beat();
    client.step(1);
    drop(client.section("forward"));
    client.exit_note(&Note { kind: ExitKind::Other, exception: "", message: "", traceback: "" });
    client.close();
    assert!(!client.is_active() && client.refusal().is_none());
    assert_eq!(client.intern("forward"), SectionId::OTHER);
}

#[test]
fn news_rings_the_doorbell_and_beats_do_not() {
    let page = TestPage::new();
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).unwrap();
    inotify.add_watch(page.directory.path(), AddWatchFlags::IN_MODIFY).unwrap();
    let rang = || inotify.read_events().is_ok_and(|events| !events.is_empty());

    let client = Client::open(&page.path).unwrap();
    assert!(rang(), "no news of the claim");
    client.step(1);
    client.beat();
    drop(client.section("forward"));
    assert!(!rang(), "a beat made a system call");
    let note = Note { kind: ExitKind::Exception, exception: "ValueError", message: "x", traceback: "" };
    client.exit_note(&note);
    let mut fds = [PollFd::new(std::os::fd::AsFd::as_fd(&inotify), PollFlags::POLLIN)];
    assert_eq!(poll(&mut fds, PollTimeout::ZERO).unwrap(), 1);
    assert!(rang(), "no news of the exit note");
    client.exit_note(&Note { message: "second", ..note });
    assert!(!rang());
    assert_eq!(page.page.exit_note().unwrap().message, "x");
    client.close();
    assert!(rang(), "no news of the close");
}
