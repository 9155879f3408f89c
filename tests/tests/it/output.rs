//! The output of ranks is stored in full and shown line by line with the rank as prefix; a reader that does not
//! read it cannot block or end the job.

#![allow(clippy::expect_used, reason = "in a test, a panic is the report")]

use std::fs::File;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::process::Stdio;

use mainstay_model::entry::{Entry, Fact, LineTime};
use mainstay_model::id::Rank;
use mainstay_tests::{Stage, has_client, has_torch, journal};
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
fn the_last_lines_of_a_killed_rank_are_kept_and_shown_though_it_never_flushed() {
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
    let verdict = end.verdict();
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
fn a_terminal_without_a_reader_blocks_neither_ranks_nor_recovery_nor_end() {
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
fn a_terminal_without_a_reader_does_not_block_a_stop_either() {
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
fn a_closed_terminal_ends_neither_the_job_nor_its_ranks() {
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

/// The kept lines of a rank's stream at its end, each with its time.
fn timed(journal: &[Entry], of: u32, stderr: bool) -> Vec<(String, LineTime)> {
    let find = |fact: &Fact| match fact {
        Fact::RankExited {
            rank: Rank(rank), stderr_tail, stderr_times, stdout_tail, stdout_times, ..
        } if *rank == of => {
            let (lines, times) =
                if stderr { (stderr_tail, stderr_times) } else { (stdout_tail, stdout_times) };
            assert_eq!(lines.len(), times.len(), "each line has its time");
            Some(lines.iter().cloned().zip(times.iter().copied()).collect())
        }
        _ => None,
    };
    journal::facts(journal).find_map(find).expect("an end of the rank")
}

fn steps_after(lines: &[(String, LineTime)], what: &str) -> Option<u64> {
    lines.iter().find(|(line, _)| line.contains(what)).expect("the line was kept").1.steps_after
}

#[test]
fn each_line_of_a_killed_rank_has_the_number_of_steps_after_it() {
    let stage = Stage::new();
    let script = r#"
        echo "FutureWarning: this will change" ; echo "UserWarning: nobody listens" >&2
        i=1; while [ $i -le 50 ]; do echo "iter $i: loss 2.5, time 1.00ms"; i=$((i+1)); sleep 0.01; done
        echo "last line"; mark "stepped.$RANK"; work"#;
    let job = stage.sh(script).ranks(2).options("--max-restarts 0").start();
    job.mark("stepped.0");
    job.mark("stepped.1");
    job.kill_rank(0, 1);
    let end = job.end();
    let stdout = timed(&end.journal, 1, false);
    assert_eq!(steps_after(&stdout, "FutureWarning"), Some(49), "{stdout:?}");
    assert_eq!(steps_after(&stdout, "iter 40:"), Some(9), "{stdout:?}");
    assert_eq!(steps_after(&stdout, "last line"), Some(0), "{stdout:?}");
    assert!(stdout.is_sorted_by_key(|(_, time)| time.at), "{stdout:?}");
    // In another file: steps printed after the poll that found the warning count.
    let stderr = timed(&end.journal, 1, true);
    assert!(steps_after(&stderr, "UserWarning").is_some_and(|steps| (2..50).contains(&steps)), "{stderr:?}");
}

#[test]
fn steps_of_heartbeats_count_by_their_own_times() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
print("UserWarning: nobody listens", file=sys.stderr)
for step in range(50):
    time.sleep(0.01)
    mainstay.step(step)
print("last line", file=sys.stderr)
mark(f"stepped.{RANK}")
time.sleep(36000)
"#;
    let job = stage.python(script).ranks(2).options("--max-restarts 0").start();
    job.mark("stepped.0");
    job.mark("stepped.1");
    job.kill_rank(0, 1);
    let end = job.end();
    let stderr = timed(&end.journal, 1, true);
    assert!(steps_after(&stderr, "UserWarning").is_some_and(|steps| (2..=50).contains(&steps)), "{stderr:?}");
    assert_eq!(steps_after(&stderr, "last line"), Some(0), "{stderr:?}");
}

#[test]
fn without_reported_steps_none_are_counted() {
    let stage = Stage::new();
    let end = stage.sh("echo nothing of steps; exit 9").options("--max-restarts 0").start().end();
    assert_eq!(steps_after(&timed(&end.journal, 0, false), "nothing of steps"), None);
}

#[test]
fn a_long_traceback_is_kept_from_its_start() {
    let stage = Stage::new();
    // Functions that differ, because Python leaves out frames that repeat.
    let script = r#"
for n in range(60):
    exec(f"def f{n}():\n    f{n + 1}()")
def f60():
    raise ValueError("deep")
try:
    f0()
except ValueError as error:
    raise RuntimeError("deeper") from error
"#;
    let end = stage.python(script).options("--max-restarts 0").start().end();
    let stderr = timed(&end.journal, 0, true);
    assert!(stderr.len() > 60 && stderr[0].0.starts_with("Traceback"), "{stderr:?}");
    assert!(stderr.iter().any(|(line, _)| line == "ValueError: deep"), "{stderr:?}");
    assert_eq!(stderr.last().map(|(line, _)| line.as_str()), Some("RuntimeError: deeper"));
}

/// torch.distributed collects the output of the exception hooks before it, and prints it when they are done: after
/// the client's note, on which the launcher acts.
#[test]
fn the_traceback_of_the_rank_that_failed_is_never_lost() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if RANK == 1:
    raise ValueError("bad batch 17")
dist.all_reduce(torch.ones(1))
"#;
    for _ in 0..3 {
        let end = stage.python(script).ranks(2).options("--max-restarts 0").start().end();
        end.assert_status(1);
        for text in [&end.stderr, &end.output(0, 1, "stderr")] {
            assert!(text.contains("[rank1]: Traceback (most recent call last):"), "{end}\n{text}");
            assert!(text.contains("[rank1]: ValueError: bad batch 17\n"), "{end}\n{text}");
        }
        let stderr = timed(&end.journal, 1, true);
        assert!(stderr.iter().any(|(line, _)| line.contains("ValueError: bad batch 17")), "{stderr:?}");
        // The victim was ended at once, and has printed nothing.
        let victim = end.output(0, 0, "stderr");
        assert!(!victim.contains("Traceback"), "{victim}");
        let verdict = end.verdict();
        assert_eq!((verdict.culprit, verdict.step), (Some(Rank(1)), None), "{end}");
        assert!(verdict.headline.contains("ValueError: bad batch 17"), "{end}");
    }
}

/// A hook that prints nothing for a while and then the traceback: the launcher waits for it, and no longer than it
/// must.
#[test]
fn a_rank_that_never_prints_its_traceback_is_not_waited_for_for_long() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import atexit, mainstay
if ATTEMPT == 0:
    mainstay.step(1)
    if RANK == 1:
        atexit.register(time.sleep, 36000)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        raise ValueError("said to nobody")
    time.sleep(36000)
"#;
    let end = stage.python(script).ranks(2).start().end();
    end.assert_status(0);
    assert_eq!(journal::exits(&end.journal, 1)[0], mainstay_model::entry::ExitStatus::Signal(15), "{end}");
}
