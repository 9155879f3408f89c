//! What ranks write is kept in full and shown line by line with the rank before it; nobody who does not read it can
//! hold up or end the job.

#![allow(clippy::expect_used, reason = "in a test, a panic is the report")]

use std::fs::File;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::process::Stdio;

use mainstay_tests::{Stage, story};
use nix::sys::signal::Signal;

#[test]
fn lines_are_shown_with_their_rank_and_kept_without_it() {
    let stage = Stage::new();
    let end =
        stage.sh(r#"echo "out of $RANK"; echo "err of $RANK" >&2; printf unended"#).ranks(2).start().end();
    end.assert_status(0);
    for rank in 0..2 {
        assert!(end.stdout.contains(&format!("[rank {rank}] out of {rank}\n")), "{}", end.stdout);
        assert!(end.stdout.contains(&format!("[rank {rank}] unended\n")), "{}", end.stdout);
        assert!(end.stderr.contains(&format!("[rank {rank}] err of {rank}\n")), "{}", end.stderr);
        assert_eq!(end.output(0, rank, "stdout"), format!("out of {rank}\nunended"));
        assert_eq!(end.output(0, rank, "stderr"), format!("err of {rank}\n"));
    }
}

#[test]
fn the_last_words_of_a_killed_rank_are_kept_and_shown_though_it_never_flushed() {
    let stage = Stage::new();
    let script = r#"
print("last words of", RANK, "in", ATTEMPT)
if ATTEMPT == 0 and RANK == 1:
    print("something is wrong", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)
elif ATTEMPT == 0:
    time.sleep(36000)
"#;
    let end = stage.python(script).ranks(2).start().end();
    end.assert_status(0);
    assert_eq!(end.output(0, 1, "stdout"), "last words of 1 in 0\n");
    assert_eq!(end.output(1, 1, "stdout"), "last words of 1 in 1\n", "each attempt has its own files");
    assert!(end.stdout.contains("[rank 1] last words of 1 in 0\n"), "{}", end.stdout);
    let [verdict] = story::verdicts(&end.story)[..] else { panic!("one verdict\n{end}") };
    assert!(
        verdict.evidence.iter().any(|line| line.contains("something is wrong")),
        "{:?}",
        verdict.evidence
    );
}

#[test]
fn streams_and_ranks_are_kept_off_the_terminal_as_asked_and_stay_in_the_files() {
    let script = r#"echo "out $RANK"; echo "err $RANK" >&2"#;
    // Options, and what is shown on standard output and standard error.
    let cases: [(&str, &[&str], &[&str]); 5] = [
        ("--redirects 3", &[], &[]),
        ("--redirects 1", &[], &["err 0", "err 1"]),
        ("-r 0:3,1:2", &["out 1"], &[]),
        ("-r 3 -t 1:1", &["out 1"], &[]),
        ("--local-ranks-filter 1", &["out 1"], &["err 1"]),
    ];
    for (options, out, err) in cases {
        let stage = Stage::new();
        let end = stage.sh(script).ranks(2).options(options).start().end();
        end.assert_status(0);
        for line in ["out 0", "out 1"] {
            assert_eq!(end.stdout.contains(line), out.contains(&line), "{options}: {line}: {}", end.stdout);
        }
        for line in ["err 0", "err 1"] {
            assert_eq!(end.stderr.contains(line), err.contains(&line), "{options}: {line}: {}", end.stderr);
        }
        for rank in 0..2 {
            assert_eq!(end.output(0, rank, "stdout"), format!("out {rank}\n"), "{options}");
            assert_eq!(end.output(0, rank, "stderr"), format!("err {rank}\n"), "{options}");
        }
    }
}

/// Much more than a pipe holds, then a fault, then the end.
const TALKATIVE: &str = r#"
    i=0; while [ $i -lt 3000 ]; do echo "line $i of rank $RANK, padded with words until it is quite long"; i=$((i+1)); done
    mark "talked.$RANK.$ATTEMPT"
    [ "$ATTEMPT" = 1 ] && exit 0
    work"#;

#[test]
fn a_terminal_that_nobody_reads_holds_up_neither_ranks_nor_recovery_nor_end() {
    let stage = Stage::new();
    let (out, err) = (stuck_pipe(), stuck_pipe());
    let plan = stage.sh(TALKATIVE).ranks(2).stdout(Stdio::from(out.1)).stderr(Stdio::from(err.1));
    let job = plan.start();
    job.mark("talked.0.0");
    job.mark("talked.1.0");
    job.kill_rank(0, 1);
    let end = job.end();
    end.assert_status(0);
    assert_eq!(end.output(1, 0, "stdout").lines().count(), 3000, "all is in the files");
    drop((out.0, err.0));
}

#[test]
fn a_terminal_that_nobody_reads_does_not_hold_up_a_stop_either() {
    let stage = Stage::new();
    let (out, err) = (stuck_pipe(), stuck_pipe());
    let plan =
        stage.sh(r#"mark "up.$RANK"; work"#).ranks(2).stdout(Stdio::from(out.1)).stderr(Stdio::from(err.1));
    let job = plan.start();
    job.mark("up.1");
    job.signal(Signal::SIGTERM);
    job.end().assert_status(143);
    drop((out.0, err.0));
}

/// A pipe with a reader that does not read, and no room left.
fn stuck_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    rustix::io::ioctl_fionbio(&writer, true).expect("a pipe that does not wait");
    while writer.write(&[b'x'; 4096]).is_ok() {}
    while writer.write(b"x").is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).expect("a pipe that waits");
    (reader, writer)
}

#[test]
fn a_terminal_that_is_gone_ends_neither_the_job_nor_its_ranks() {
    let stage = Stage::new();
    let gone = || Stdio::from(std::io::pipe().expect("a pipe").1);
    let job = stage.sh(TALKATIVE).ranks(2).stdout(gone()).stderr(gone()).start();
    job.mark("talked.0.0");
    job.mark("talked.1.0");
    job.kill_rank(0, 0);
    let end = job.end();
    end.assert_status(0);
    assert_eq!(end.output(1, 1, "stdout").lines().count(), 3000);
}

#[test]
fn a_reader_gets_every_line_whole_and_in_the_order_of_its_rank() {
    let stage = Stage::new();
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    let script = r#"i=0; while [ $i -lt 500 ]; do echo "$RANK $i"; i=$((i+1)); done"#;
    let job = stage.sh(script).ranks(2).stdout(Stdio::from(writer)).start();
    let mut shown = String::new();
    reader.read_to_string(&mut shown).expect("text, to the end of the launcher");
    job.end().assert_status(0);
    for rank in 0..2 {
        let prefix = format!("[rank {rank}] ");
        let lines: Vec<&str> = shown.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        let expected: Vec<String> = (0..500).map(|line| format!("{rank} {line}")).collect();
        assert_eq!(lines, expected);
    }
}

#[test]
fn bytes_that_are_no_text_are_kept_as_they_are() {
    let stage = Stage::new();
    let end = stage.sh(r#"printf '\377\000\n'"#).start().end();
    end.assert_status(0);
    let mut bytes = Vec::new();
    let file = File::open(end.run_dir.join("attempt_0/0/stdout.log"));
    file.expect("a log").read_to_end(&mut bytes).expect("readable");
    assert_eq!(bytes, b"\xff\0\n");
}
