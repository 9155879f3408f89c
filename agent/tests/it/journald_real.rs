//! The kernel log from systemd's own journalctl, with a journal that systemd's own tools wrote. Not every machine
//! has these tools: without `systemd-journal-remote` the tests print a note and end.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use mainstay_model::entry::Fact;
use mainstay_model::kernel::LogCursor;
use mainstay_model::time::Mono;
use mainstay_sensors::source::journald::Journald;
use mainstay_sys::clock;
use testing::TempDir;

const NOW: Mono = Mono(5_000_000_000);

/// Where distributions install it.
const REMOTE: [&str; 2] = ["/lib/systemd/systemd-journal-remote", "/usr/lib/systemd/systemd-journal-remote"];

/// A directory of journal files, and a journalctl that reads it instead of this machine's.
struct Journal {
    directory: TempDir,
    remote: &'static str,
    written: usize,
}

impl Journal {
    /// None where systemd's tools are not installed.
    fn new() -> Option<Journal> {
        let remote = REMOTE.into_iter().find(|path| Path::new(path).exists());
        let Some(remote) = remote else {
            testing::skip("there is no systemd-journal-remote (apt-get install systemd-journal-remote)");
            return None;
        };
        let directory = testing::tempdir().unwrap();
        fs::create_dir(directory.path().join("journal")).unwrap();
        let journal = Journal { directory, remote, written: 0 };
        let script = format!("#!/bin/sh\nexec journalctl --directory={} \"$@\"\n", journal.files().display());
        testing::executable(&journal.program(), &script);
        Some(journal)
    }

    fn files(&self) -> PathBuf {
        self.directory.path().join("journal")
    }

    fn program(&self) -> PathBuf {
        self.directory.path().join("journalctl")
    }

    /// Writes a file with these entries (transport and message), and puts it among the others when it is whole.
    fn write(&mut self, entries: &[(&str, &[u8])]) {
        let beside = self.directory.path().join("new.journal");
        let mut remote = Command::new(self.remote)
            .args(["-o", beside.to_str().unwrap(), "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut input = remote.stdin.take().unwrap();
        let boot = clock::boot_id().0.replace('-', "");
        for (transport, message) in entries {
            self.written += 1;
            let number = self.written;
            let head = format!(
                "__REALTIME_TIMESTAMP={}\n__MONOTONIC_TIMESTAMP={}\n_BOOT_ID={boot}\n_TRANSPORT={transport}\nPRIORITY=4\n\
                 SYSLOG_IDENTIFIER=kernel\n_SOURCE_MONOTONIC_TIMESTAMP={}\nMESSAGE\n",
                1_763_700_000_000_000 + number,
                1_000_000 + number,
                1_000_000 + number,
            );
            // A field with arbitrary content is written with its length.
            input.write_all(head.as_bytes()).unwrap();
            input.write_all(&(message.len() as u64).to_le_bytes()).unwrap();
            input.write_all(message).unwrap();
            input.write_all(b"\n\n").unwrap();
        }
        drop(input);
        assert!(remote.wait().unwrap().success());
        fs::rename(beside, self.files().join(format!("{}.journal", self.written))).unwrap();
    }

    fn start(&self, cursor: Option<&LogCursor>) -> Journald {
        Journald::start(&self.program(), clock::boot_id(), cursor).unwrap()
    }
}

fn xid(code: u32) -> Vec<u8> {
    format!("NVRM: Xid (PCI:0000:01:00): {code}, pid=1, name=python, text").into_bytes()
}

/// Reads until the XID `last`; returns all codes with their times.
fn read_to(journal: &mut Journald, last: u32) -> Vec<(u32, Mono)> {
    let (stop, _open) = std::io::pipe().unwrap();
    let mut codes: Vec<(u32, Mono)> = Vec::new();
    while codes.last().is_none_or(|(code, _)| *code != last) {
        journal.wait(&stop, Duration::from_secs(60)).unwrap();
        codes.extend(journal.read(NOW).unwrap().facts.into_iter().filter_map(|(at, fact)| match fact {
            Fact::Xid(xid) => Some((xid.code, at)),
            _ => None,
        }));
    }
    codes
}

#[test]
fn a_journal_of_systemds_own_is_followed_and_read_on_after_a_restart() {
    let Some(mut journal) = Journal::new() else { return };
    let not_text = [&xid(48)[..], b" \xff\xfe"].concat();
    journal.write(&[
        ("kernel", b"Linux version 6.8"),
        ("stdout", &xid(95)),
        ("kernel", &xid(79)),
        ("kernel", &not_text),
    ]);
    let mut reader = journal.start(None);
    let read = read_to(&mut reader, 48);
    assert_eq!(read, [(79, Mono(1_000_003_000)), (48, Mono(1_000_004_000))], "and not the program's 95");
    assert_eq!(reader.doubt(), None);
    // Later entries arrive without a new request.
    journal.write(&[("kernel", &xid(62))]);
    assert_eq!(read_to(&mut reader, 62), [(62, Mono(1_000_005_000))]);
    let cursor = reader.cursor().clone();
    drop(reader);
    journal.write(&[("kernel", &xid(61))]);
    let mut again = journal.start(Some(&cursor));
    assert_eq!(read_to(&mut again, 61), [(61, Mono(1_000_006_000))], "nothing is told twice");
}

#[test]
fn a_journal_without_a_line_of_this_boots_kernel_is_not_believed() {
    let Some(mut journal) = Journal::new() else { return };
    journal.write(&[("stdout", &xid(79))]);
    let mut reader = journal.start(None);
    // The kernel's own line shows that nothing came before it.
    let before = reader.doubt();
    journal.write(&[("kernel", &xid(48))]);
    assert_eq!(read_to(&mut reader, 48).len(), 1);
    testing::snapshot!("journald", "no line of this boot's kernel", before.unwrap());
    assert_eq!(reader.doubt(), None);
}
