//! The journal on a real disk: continuation, rotation, damage, concurrent readers.
#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::path::{Path, PathBuf};

use mainstay_journal::store::journal::{Gap, Journal, JournalError, JournalReader, Limits, Most};
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::id::BootId;
use mainstay_model::time::{Mono, Stamp, Wall};

fn open(dir: &Path, limits: Limits) -> Journal {
    Journal::open(dir, limits, BootId("boot".into())).unwrap()
}

fn kills(count: u64) -> Body {
    Body::Fact(Fact::OutOfMemoryKills { count })
}

fn at(number: u64) -> Stamp {
    Stamp { mono: Mono(number), wall: Wall(number as i64) }
}

fn append(journal: &mut Journal, count: u64) -> Entry {
    journal.append(at(count), None, None, kills(count)).unwrap()
}

fn all(reader: &JournalReader) -> Vec<Entry> {
    reader.entries_after(0, usize::MAX).unwrap().entries
}

fn numbers(entries: &[Entry]) -> Vec<u64> {
    entries.iter().map(|entry| entry.seq).collect()
}

fn segments(dir: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap()
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "jsonl"))
        .collect();
    paths.sort();
    paths
}

const SMALL: Limits = Limits { segment_bytes: 4096, total_bytes: 16384 };

#[test]
fn a_link_or_a_pipe_in_the_place_of_a_segment_is_refused_without_waiting() {
    let dir = testing::tempdir().unwrap();
    append(&mut open(dir.path(), Limits::default()), 1);
    let next = dir.path().join(format!("{:020}.jsonl", 2));
    let reader = JournalReader::new(dir.path());
    let refused = || {
        // A large limit: all segments are read.
        let errors = [reader.entries_after(0, usize::MAX).err(), reader.replay(drop).err()];
        errors.into_iter().all(|error| error.is_some_and(|error| error.to_string().contains("regular file")))
    };
    std::os::unix::fs::symlink("/dev/zero", &next).unwrap();
    assert!(refused());
    std::fs::remove_file(&next).unwrap();
    nix::unistd::mkfifo(&next, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(refused());
}

#[test]
fn a_writer_sets_aside_what_stands_in_the_place_of_a_segment() {
    for is_link in [false, true] {
        let dir = testing::tempdir().unwrap();
        append(&mut open(dir.path(), Limits::default()), 1);
        let next = dir.path().join(format!("{:020}.jsonl", 2));
        match is_link {
            true => std::os::unix::fs::symlink("/dev/zero", &next).unwrap(),
            false => std::fs::create_dir(&next).unwrap(),
        }
        let mut journal = open(dir.path(), Limits::default());
        append(&mut journal, 2);
        assert_eq!(numbers(&all(&journal.reader())), [1, 2]);
        assert!(next.with_extension("set-aside").symlink_metadata().is_ok(), "it is kept");
    }
}

#[test]
fn what_is_read_at_once_is_bounded_in_bytes_and_has_at_least_one_entry() {
    let dir = testing::tempdir().unwrap();
    let mut journal = open(dir.path(), SMALL);
    let written: Vec<Entry> = (1..50).map(|number| append(&mut journal, number)).collect();
    let reader = journal.reader();
    for bytes in [1, 300] {
        let (mut found, mut cursor, mut chunks) = (Vec::new(), 0, 0);
        loop {
            let read = reader.entries_after(cursor, Most { entries: 500, bytes }).unwrap();
            if read.entries.is_empty() {
                break;
            }
            assert!(bytes > 1 || (read.entries.len() == 1 && read.is_cut));
            (cursor, chunks) = (read.cursor, chunks + 1);
            found.extend(read.entries);
        }
        assert_eq!(found, written);
        assert!(chunks > 10);
    }
}

#[test]
fn numbers_continue_over_restarts() {
    let dir = testing::tempdir().unwrap();
    for begin in [1, 4, 7] {
        let mut journal = open(dir.path(), Limits::default());
        assert_eq!(journal.next_seq(), begin);
        let written: Vec<Entry> = (begin..begin + 3).map(|number| append(&mut journal, number)).collect();
        assert_eq!(numbers(&written), (begin..begin + 3).collect::<Vec<_>>());
        journal.sync().unwrap();
    }
    let mut replayed = Vec::new();
    let journal = open(dir.path(), Limits::default());
    let found = journal.replay(|entry| replayed.push(entry)).unwrap();
    assert_eq!(numbers(&replayed), (1..=9).collect::<Vec<_>>());
    assert_eq!((found.entries, found.corrupt, found.unknown), (9, 0, 0));
    assert_eq!(replayed, all(&journal.reader()));
}

#[test]
fn a_second_writer_is_refused_and_the_error_names_the_holder() {
    let dir = testing::tempdir().unwrap();
    let first = open(dir.path(), Limits::default());
    let refused = Journal::open(dir.path(), Limits::default(), BootId::default()).unwrap_err();
    assert!(
        matches!(refused, JournalError::Locked { holder: Some(pid), .. } if pid == std::process::id() as i32)
    );
    assert!(refused.to_string().contains(&format!("process {}", std::process::id())), "{refused}");
    drop(first);
    open(dir.path(), Limits::default());
}

#[test]
fn the_oldest_segments_are_deleted_and_readers_see_a_gap() {
    let dir = testing::tempdir().unwrap();
    let mut journal = open(dir.path(), SMALL);
    for number in 1..=1000 {
        append(&mut journal, number);
        let total: u64 = segments(dir.path()).iter().map(|path| path.metadata().unwrap().len()).sum();
        assert!(total <= SMALL.total_bytes, "{total} bytes after entry {number}");
    }
    let reader = journal.reader();
    let oldest = reader.oldest().unwrap().unwrap();
    assert!(oldest > 1);
    assert_eq!(journal.oldest(), Some(oldest));
    assert_eq!(reader.newest().unwrap(), Some(1000));

    let read = reader.entries_after(5, 10).unwrap();
    assert_eq!(read.gap, Some(Gap { first: 6, last: oldest - 1 }));
    assert_eq!(numbers(&read.entries), (oldest..oldest + 10).collect::<Vec<_>>());
    assert_eq!(read.cursor, oldest + 9);
    assert_eq!(reader.entries_after(oldest - 1, 1).unwrap().gap, None);
}

#[test]
fn every_cursor_and_limit_gives_what_follows() {
    let dir = testing::tempdir().unwrap();
    // One segment much larger than the distance below which lines are read one by one.
    let mut journal = open(dir.path(), Limits::default());
    for number in 1..=3000 {
        append(&mut journal, number);
    }
    let reader = journal.reader();
    for cursor in (0..=3001).step_by(7).chain([2999, 3000, 3001, u64::MAX]) {
        let read = reader.entries_after(cursor, 5).unwrap();
        let expected: Vec<u64> = (cursor.saturating_add(1)..=3000).take(5).collect();
        assert_eq!(numbers(&read.entries), expected, "after {cursor}");
        assert_eq!(read.gap, None);
    }
    assert_eq!(reader.newest().unwrap(), Some(3000));
}

#[test]
fn a_directory_without_a_journal_reads_as_empty() {
    let dir = testing::tempdir().unwrap();
    let reader = JournalReader::new(&dir.path().join("not yet"));
    assert_eq!(all(&reader), []);
    assert_eq!((reader.oldest().unwrap(), reader.newest().unwrap()), (None, None));
}

#[test]
fn damage_costs_the_damaged_line_and_nothing_else() {
    let dir = testing::tempdir().unwrap();
    let mut journal = open(dir.path(), Limits::default());
    (1..=5).for_each(|number| drop(append(&mut journal, number)));
    drop(journal);

    let path = &segments(dir.path())[0];
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines: Vec<Vec<u8>> = text.lines().map(|line| line.as_bytes().to_vec()).collect();
    lines[1] = vec![0; 40];
    lines[2] = br#"{"seq":3,"at":{"mono":1,"wall":1},"boot":"b","body":{"kind":"prophecy"},"colour":"blue"}"#
        .to_vec();
    lines[4] = b"\xff{".to_vec();
    std::fs::write(path, [lines.join(&b'\n'), b"\n".to_vec()].concat()).unwrap();

    let mut journal = open(dir.path(), Limits::default());
    let found = journal.replay(drop).unwrap();
    assert_eq!((found.entries, found.corrupt, found.unknown), (2, 2, 1));
    // The damaged last line was entry 5: its number is not used again.
    assert_eq!(append(&mut journal, 6).seq, 6);
    let read = journal.reader().entries_after(0, 100).unwrap();
    assert_eq!((numbers(&read.entries), read.skipped), (vec![1, 4, 6], 3));
}

#[test]
fn fields_of_newer_versions_are_ignored() {
    let dir = testing::tempdir().unwrap();
    let path = dir.path().join("00000000000000000001.jsonl");
    std::fs::write(
        &path,
        concat!(
            r#"{"seq":1,"at":{"mono":1,"wall":1,"tai":2},"boot":"b","new":[1],"#,
            r#""body":{"kind":"fact","what":"out_of_memory_kills","count":3,"of":"python"}}"#,
            "\n"
        ),
    )
    .unwrap();
    let entries = all(&JournalReader::new(dir.path()));
    assert_eq!(entries[0].body, kills(3));
}

#[test]
fn a_journal_cut_at_any_byte_is_continued() {
    let whole = testing::tempdir().unwrap();
    let mut journal = open(whole.path(), Limits::default());
    let written: Vec<Entry> = (1..=4).map(|number| append(&mut journal, number)).collect();
    let bytes = std::fs::read(&segments(whole.path())[0]).unwrap();
    let ends: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at] == b'\n').map(|at| at + 1).collect();

    for cut in ends[1]..=bytes.len() {
        let dir = testing::tempdir().unwrap();
        std::fs::write(dir.path().join("00000000000000000001.jsonl"), &bytes[..cut]).unwrap();
        let mut journal = open(dir.path(), Limits::default());
        let left = ends.iter().filter(|end| **end <= cut).count();
        let next = append(&mut journal, 99);
        assert_eq!(next.seq, left as u64 + 1, "cut at {cut}");
        assert_eq!(all(&journal.reader()), [&written[..left], &[next]].concat(), "cut at {cut}");
    }
}

#[test]
fn a_segment_that_was_started_and_never_written_keeps_the_number() {
    let dir = testing::tempdir().unwrap();
    std::fs::write(dir.path().join("00000000000000000042.jsonl"), "").unwrap();
    std::fs::write(dir.path().join("notes.txt"), "not ours").unwrap();
    let mut journal = open(dir.path(), Limits::default());
    assert_eq!(journal.oldest(), None);
    assert_eq!(append(&mut journal, 1).seq, 42);
    assert_eq!(journal.oldest(), Some(42));
}

#[test]
fn an_entry_kept_for_later_leaves_no_double_number() {
    let dir = testing::tempdir().unwrap();
    let mut journal = open(dir.path(), Limits::default());
    let mut kept = append(&mut journal, 1);
    assert!(matches!(journal.append_entry(&kept), Err(JournalError::Order { seq: 1, next: 2 })));
    kept.seq = 5;
    journal.append_entry(&kept).unwrap();
    assert_eq!(append(&mut journal, 6).seq, 6);
    assert_eq!(numbers(&all(&journal.reader())), [1, 5, 6]);
}

#[test]
fn readers_follow_a_writer_that_rotates_and_deletes() {
    let dir = testing::tempdir().unwrap();
    let reader = JournalReader::new(dir.path());
    const LAST: u64 = 5000;
    let path = dir.path().to_owned();
    let writer = std::thread::spawn(move || {
        let mut journal = open(&path, SMALL);
        (1..=LAST).for_each(|number| drop(append(&mut journal, number)));
    });
    let mut cursor = 0;
    while cursor < LAST {
        let read = reader.entries_after(cursor, 64).unwrap();
        if let Some(gap) = read.gap {
            assert_eq!(gap.first, cursor + 1);
            cursor = gap.last;
        }
        for entry in &read.entries {
            assert_eq!(entry.seq, cursor + 1, "an entry is missing without a gap being told");
            assert_eq!(entry.body, kills(entry.seq));
            cursor = entry.seq;
        }
        assert_eq!(read.skipped, 0);
        cursor = cursor.max(read.cursor);
    }
    writer.join().unwrap();
}

#[test]
fn errors_name_the_place_and_the_way_out() {
    let dir = testing::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = Journal::open(&file.join("journal"), Limits::default(), BootId::default()).unwrap_err();
    assert!(error.to_string().contains("file/journal"), "{error}");
    let folder = dir.path().display().to_string();
    testing::snapshot!(
        "journal",
        "a file is in the place of a directory",
        error.to_string().replace(&folder, "DIRECTORY")
    );
}
