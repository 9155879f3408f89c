//! The journal with killed processes and full disks. The test program runs itself as the writer.
#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use mainstay_journal::store::journal::{Journal, Limits};
use mainstay_model::entry::{Body, Fact};
use mainstay_model::id::BootId;
use mainstay_model::time::Stamp;

const DIR: &str = "MAINSTAY_TEST_JOURNAL_DIR";
const LIMITS: Limits = Limits { segment_bytes: 16 << 10, total_bytes: 8 << 20 };

/// The directory to write to, if this process is the writer of another test.
fn directory_from_environment() -> Option<PathBuf> {
    std::env::var_os(DIR).map(PathBuf::from)
}

fn run_as_writer(test: &str, dir: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("journal_crash::{test}"), "--ignored", "--nocapture"])
        .env(DIR, dir)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn open(dir: &Path) -> Journal {
    Journal::open(dir, LIMITS, BootId("boot".into())).unwrap()
}

fn append(journal: &mut Journal, text: &str) -> Result<u64, mainstay_journal::store::journal::JournalError> {
    let fact = Fact::AgentLost { reason: text.to_owned() };
    journal.append(Stamp::default(), None, None, Body::Fact(fact)).map(|entry| entry.seq)
}

#[test]
#[ignore = "the writer of `killed_at_any_instant_nothing_is_lost_or_torn`"]
fn writer_without_end() {
    let Some(dir) = directory_from_environment() else { return };
    let mut journal = open(&dir);
    let long = "x".repeat(6000);
    for number in 0_usize.. {
        let seq = append(&mut journal, &long[..number * 37 % long.len()]).unwrap();
        println!("seq {seq}");
    }
}

#[test]
fn killed_at_any_instant_nothing_is_lost_or_torn() {
    let dir = testing::tempdir().unwrap();
    let mut acknowledged: u64 = 0;
    for round in 0..20_u64 {
        let mut child = run_as_writer("writer_without_end", dir.path());
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        // Killed during the work after an acknowledged entry, at another point each round.
        let mut to_see = 1 + round * 7 % 60;
        while to_see > 0 {
            line.clear();
            assert!(output.read_line(&mut line).unwrap() > 0, "the writer ended by itself");
            if let Some((_, seq)) = line.trim_end().split_once("seq ") {
                acknowledged = seq.parse().unwrap();
                to_see -= 1;
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // A line of the pipe may be torn too: only whole ones count.
        line.clear();
        output.read_to_string(&mut line).unwrap();
        let whole = &line[..line.rfind('\n').map_or(0, |end| end + 1)];
        let last = whole.lines().filter_map(|text| text.strip_prefix("seq ")).next_back();
        acknowledged = last.map_or(acknowledged, |seq| seq.parse().unwrap());

        let journal = open(dir.path());
        let mut expected = 0;
        let found = journal
            .replay(|entry| {
                expected += 1;
                assert_eq!(entry.seq, expected, "numbers without gaps");
            })
            .unwrap();
        assert_eq!((found.corrupt, found.unknown), (0, 0), "every line is whole");
        assert!(
            found.entries >= acknowledged,
            "{acknowledged} were acknowledged, {} are there",
            found.entries
        );
        assert_eq!(journal.next_seq(), expected + 1);
    }
    assert!(acknowledged > 200, "each of the 20 writers got some way: {acknowledged}");
}

/// Limits the size of files that this process writes: the kernel then accepts part of a write and refuses the rest,
/// as a full disk does.
fn set_file_size_limit(bytes: u64) {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (_, hard) = getrlimit(Resource::RLIMIT_FSIZE).unwrap();
    setrlimit(Resource::RLIMIT_FSIZE, bytes, hard).unwrap();
}

#[test]
#[ignore = "the writer of `a_line_that_the_disk_wrote_in_part_is_removed`"]
fn writer_on_a_full_disk() {
    let Some(dir) = directory_from_environment() else { return };
    // SAFETY: ignoring a signal installs no handler; this process runs this one test.
    unsafe {
        nix::sys::signal::signal(nix::sys::signal::Signal::SIGXFSZ, nix::sys::signal::SigHandler::SigIgn)
    }
    .unwrap();
    let mut journal = open(&dir);
    let segment = dir.join("00000000000000000001.jsonl");
    let mut refused = 0;
    for limit in (1000..12_000).step_by(501) {
        set_file_size_limit(limit);
        let error = loop {
            if let Err(error) = append(&mut journal, "some reason or other") {
                break error;
            }
        };
        assert!(error.is_disk());
        assert!(error.to_string().contains("00000000000000000001.jsonl"), "{error}");
        assert!(error.to_string().contains("ulimit -f"), "{error}");
        let text = std::fs::read(&segment).unwrap();
        assert_eq!(text.last(), Some(&b'\n'), "the part of the line was taken back");
        refused += 1;
    }
    set_file_size_limit(1 << 30);
    append(&mut journal, "space is back").unwrap();
    println!("refused {refused}");
}

#[test]
fn a_line_that_the_disk_wrote_in_part_is_removed() {
    let dir = testing::tempdir().unwrap();
    let output = run_as_writer("writer_on_a_full_disk", dir.path()).wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(String::from_utf8_lossy(&output.stdout).contains("refused 22"));
    let mut expected = 0;
    let found = open(dir.path())
        .replay(|entry| {
            expected += 1;
            assert_eq!(entry.seq, expected);
        })
        .unwrap();
    assert_eq!((found.corrupt, found.unknown), (0, 0));
    assert!(expected > 22);
}
