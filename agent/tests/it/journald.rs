//! The kernel log from systemd's journal, with a fake `journalctl` that writes what the real one does.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_health::host::kernel_reports::LogState;
use mainstay_model::entry::Fact;
use mainstay_model::id::BootId;
use mainstay_model::kernel::LogCursor;
use mainstay_model::time::Mono;
use mainstay_sensors::source::journald::{JOURNALD, Journald};
use mainstay_sensors::source::kernel_log::Source;
use mainstay_sys::clock;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use support::Agent;
use testing::TempDir;

const NOW: Mono = Mono(5_000_000_000);

/// Prints the entries from the one that `--cursor` names on, as the real one does, and then waits. Its arguments
/// are recorded in `asked`.
const FAKE: &str = r#"#!/bin/sh
here=$(dirname "$0")
echo "$@" >> "$here/asked"
echo $$ > "$here/pid"
from=
for word in "$@"; do case "$word" in --cursor=*) from="${word#--cursor=}";; esac; done
if [ -n "$from" ]; then sed -n "/$from/,\$p" "$here/entries"; else cat "$here/entries"; fi
exec tail -n 0 -f "$here/entries"
"#;

struct Journal {
    directory: TempDir,
}

impl Journal {
    fn new(entries: &str) -> Journal {
        Journal::with_program(FAKE, entries)
    }

    fn with_program(script: &str, entries: &str) -> Journal {
        let directory = testing::tempdir().unwrap();
        fs::write(directory.path().join("entries"), entries).unwrap();
        let journal = Journal { directory };
        testing::executable(&journal.program(), script);
        journal
    }

    fn program(&self) -> PathBuf {
        self.directory.path().join("journalctl")
    }

    fn asked(&self) -> String {
        fs::read_to_string(self.directory.path().join("asked")).unwrap_or_default()
    }

    fn start(&self, cursor: Option<&LogCursor>) -> Journald {
        Journald::start(&self.program(), boot(), cursor).unwrap()
    }

    /// A text without its folder.
    fn masked(&self, text: &str) -> String {
        text.replace(&self.directory.path().display().to_string(), "DIRECTORY")
    }

    /// A kernel log that does not exist.
    fn kmsg(&self) -> PathBuf {
        self.directory.path().join("kmsg")
    }
}

fn boot() -> BootId {
    BootId("01234567-89ab-cdef-0123-456789abcdef".into())
}

fn entry(number: u64, boot: &BootId, message: &str) -> String {
    let id = boot.0.replace('-', "");
    let micros = 1_000_000 + number;
    format!(
        "{{\"__CURSOR\":\"s=ab;i={number:x};b={id};m={micros:x}\",\"__REALTIME_TIMESTAMP\":\"1763700000000000\",\
         \"__MONOTONIC_TIMESTAMP\":\"{micros}\",\"_BOOT_ID\":\"{id}\",\"_TRANSPORT\":\"kernel\",\"PRIORITY\":\"4\",\
         \"SYSLOG_IDENTIFIER\":\"kernel\",\"MESSAGE\":{message}}}\n"
    )
}

fn printed(code: u32) -> String {
    format!("NVRM: Xid (PCI:0000:01:00): {code}, pid=1, name=python, text")
}

fn xid(number: u64, code: u32) -> String {
    entry(number, &boot(), &format!("\"{}\"", printed(code)))
}

/// The XIDs that it reports up to the entry with that number.
fn codes(journal: &mut Journald, last: u64) -> Vec<u32> {
    let (stop, _open) = std::io::pipe().unwrap();
    let mut codes = Vec::new();
    let is_last = |journal: &Journald| {
        journal.doubt().is_none()
            && journal
                .cursor()
                .journal
                .as_ref()
                .is_some_and(|cursor| cursor.contains(&format!(";i={last:x};")))
    };
    while !is_last(journal) {
        journal.wait(&stop, Duration::from_secs(60)).unwrap();
        codes.extend(journal.read(NOW).unwrap().facts.into_iter().filter_map(|(_, fact)| match fact {
            Fact::Xid(xid) => Some(xid.code),
            _ => None,
        }));
    }
    codes
}

#[test]
fn entries_of_this_boots_kernel_become_facts_with_their_times() {
    let bytes = format!("{:?}", printed(48).into_bytes());
    let earlier =
        entry(1, &BootId("ffffffff-89ab-cdef-0123-456789abcdef".into()), &format!("\"{}\"", printed(95)));
    let program = xid(2, 94).replace("\"kernel\"", "\"stdout\"");
    let entries = [earlier, program, xid(3, 79), "no entry\n".into(), entry(4, &boot(), &bytes)].concat();
    let journal = Journal::new(&entries);
    let mut journald = journal.start(None);
    assert_eq!(codes(&mut journald, 4), [79, 48]);
    assert!(journal.asked().starts_with("-k -b -o json -f --no-tail\n"), "{}", journal.asked());
    assert_eq!(journald.cursor().next, 1_000_004 + 1);
}

#[test]
fn after_a_restart_nothing_is_reported_twice_and_nothing_missed() {
    let entries = [xid(1, 79), xid(2, 48)].concat();
    let journal = Journal::new(&entries);
    let mut journald = journal.start(None);
    assert_eq!(codes(&mut journald, 2), [79, 48]);
    let cursor = journald.cursor().clone();
    drop(journald);
    // A later entry may have the same time as the last one that was read.
    let same_time = xid(3, 62).replace("\"1000003\"", "\"1000002\"");
    fs::write(
        journal.directory.path().join("entries"),
        [&entries, &same_time, &xid(4, 95)].map(String::as_str).concat(),
    )
    .unwrap();
    assert_eq!(codes(&mut journal.start(Some(&cursor)), 4), [62, 95]);
    assert!(journal.asked().contains(&format!("--cursor={}", cursor.journal.as_ref().unwrap())));

    // The facts in the agent's journal are ahead of the cursor.
    let behind = LogCursor { next: 1_000_002 + 1, ..cursor.clone() };
    assert_eq!(codes(&mut journal.start(Some(&LogCursor { next: 1_000_004 + 1, ..behind })), 4), NOTHING);
    // A cursor of another boot is ignored.
    let other = LogCursor { boot: BootId("other".into()), ..cursor };
    assert_eq!(codes(&mut journal.start(Some(&other)), 4), [79, 48, 62, 95]);
}

const NOTHING: [u32; 0] = [];

#[test]
fn a_failing_journal_is_reported_and_a_silent_one_is_not_trusted() {
    let journal = Journal::with_program("#!/bin/sh\necho 'No journal files were opened' >&2\nexit 1\n", "");
    let mut failing = journal.start(None);
    let (stop, open) = std::io::pipe().unwrap();
    failing.wait(&stop, Duration::from_secs(60)).unwrap();
    let error = failing.read(NOW).unwrap_err().to_string();
    testing::snapshot!("journald", "journalctl fails", error);

    let missing = journal.directory.path().join("missing");
    let error = Source::open(&journal.kmsg(), &missing, boot(), None).unwrap_err().to_string();
    testing::snapshot!("journald", "neither the log nor the journal", journal.masked(&error));

    let journal = Journal::new("");
    let silent = Source::open(&journal.kmsg(), &journal.program(), boot(), None).unwrap();
    assert_eq!(silent.state(), None);
    let Some(LogState::Absent(why)) = silent.doubt() else { panic!("it is believed") };
    testing::snapshot!("journald", "a silent journal in place of a log", journal.masked(&why));
    drop(open);
    silent.wait(&stop, Duration::from_secs(3600)).unwrap();
}

#[test]
fn it_is_used_only_where_the_kernel_log_is_not_readable() {
    let journal = Journal::new(&xid(1, 79));
    fs::write(journal.kmsg(), "").unwrap();
    let read = Source::open(&journal.kmsg(), &journal.program(), boot(), None).unwrap();
    assert_eq!(read.state(), Some(LogState::Reading));
    let named = Source::open(&journal.directory.path().join("messages"), &journal.program(), boot(), None);
    assert!(named.unwrap_err().to_string().contains("No such file"));
    assert!(matches!(read, Source::Log(_)));
    assert_eq!(journal.asked(), "");

    fs::remove_file(journal.kmsg()).unwrap();
    let instead = Source::open(&journal.kmsg(), &journal.program(), boot(), None).unwrap();
    assert!(matches!(instead, Source::Journald(_, Some(_))));
    let asked = Source::open(Path::new(JOURNALD), &journal.program(), boot(), None).unwrap();
    assert!(matches!(asked, Source::Journald(_, None)));
}

#[test]
fn the_agent_reads_it_in_place_of_a_log_that_is_not_there_and_once_only() {
    let this_boot = clock::boot_id();
    let journal = Journal::new(&entry(1, &this_boot, &format!("\"{}\"", printed(79))));
    let path = std::env::var("PATH").unwrap();
    let path = PathBuf::from(format!("{}:{path}", journal.directory.path().display()));
    let start = || {
        Agent::start_in(journal.directory.path(), &[("KERNEL_LOG_PATH", &journal.kmsg())], &[("PATH", &path)])
    };
    let agent = start();
    let reported = agent.wait_until_in_state("host.kernel_log", "HEALTHY");
    let reason = reported["component.reason"].as_str().unwrap();
    testing::snapshot!("journald", "the journal in place of a log", journal.masked(reason));
    agent.wait_for("XID 79");
    let pid = fs::read_to_string(journal.directory.path().join("pid")).unwrap().trim().parse().unwrap();
    let child = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
    drop(agent);
    // It was killed without a chance to end its child.
    poll(&mut [PollFd::new(&child, PollFlags::IN)], None).unwrap();

    let more = [1, 2]
        .map(|number| entry(number, &this_boot, &format!("\"{}\"", printed([79, 62][number as usize - 1]))));
    fs::write(journal.directory.path().join("entries"), more.concat()).unwrap();
    let agent = start();
    agent.wait_for("XID 62 of GPU 0000:01:00");
    let events = agent.events();
    drop(agent);
    assert!(events.contains("XID 79"), "{events}");
    let kept = fs::read_dir(journal.directory.path().join("state/journal")).unwrap();
    let text: String = kept
        .flatten()
        .filter(|file| file.path().extension().is_some_and(|extension| extension == "jsonl"))
        .map(|file| fs::read_to_string(file.path()).unwrap())
        .collect();
    let facts = text.lines().filter(|line| line.contains("\"what\":\"xid\"")).count();
    assert_eq!(facts, 2, "each entry is one fact:\n{text}");
}
