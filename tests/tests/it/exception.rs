//! An uncaught exception is the rank's own report on its end: the launcher acts on it at once, and does not retry
//! forever.

use mainstay_diagnosis::diagnose::CLIENT_FAILED;
use mainstay_model::entry::{Body, ExitStatus, Fact};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::verdict::{Action, Cause, FaultDomain, Rule};
use mainstay_tests::{Stage, has_client, journal, mainstay};

#[test]
fn a_rank_that_raised_is_not_waited_for_while_its_process_takes_its_time_to_die() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    // Hours to clean up after the exception, and SIGTERM is ignored.
    let job = stage
        .python(
            r#"
import atexit, mainstay
if ATTEMPT == 0:
    mainstay.step(3)
    if RANK == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        atexit.register(time.sleep, 36000)
        raise ValueError("bad batch 17")
    time.sleep(36000)
"#,
        )
        .ranks(2)
        .options("--fault-timeout 0.2s")
        .start();
    let end = job.end();
    end.assert_status(0);
    let raised =
        end.journal.iter().position(|entry| matches!(entry.body, Body::Fact(Fact::RankRaised { .. })));
    let exited = end.journal.iter().position(|entry| {
        matches!(entry.body, Body::Fact(Fact::RankExited { rank: Rank(1), attempt: Attempt(0), .. }))
    });
    assert!(raised.expect("an exit note") < exited.expect("an end"), "{end}");
    let verdict = end.verdict();
    assert_eq!((verdict.culprit, verdict.step), (Some(Rank(1)), Some(3)), "{end}");
    let exception = "ValueError";
    assert!(
        matches!(&verdict.cause, Cause::Exception { exception: raised, .. } if raised == exception),
        "{end}"
    );
    assert!(verdict.evidence.iter().any(|line| line.contains("ranks.py")), "{:?}", verdict.evidence);
    assert_eq!(journal::exits(&end.journal, 1)[0], ExitStatus::Signal(9), "its end was forced\n{end}");
}

#[test]
fn an_exception_inside_mainstays_own_client_is_not_the_programs_fault() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    // A fault of the client: its own code calls what is no function.
    let script = r#"
import mainstay
mainstay.step(3)
if ATTEMPT == 0 and RANK == 1:
    mainstay.checkpoint._step_number = None
    mainstay.checkpoint.load(3)
"#;
    let end = stage.python(script).ranks(2).start().end();
    end.assert_status(0);
    let verdict = end.verdict();
    assert_eq!((verdict.culprit, verdict.domain), (Some(Rank(1)), FaultDomain::Platform), "{end}");
    assert_eq!(verdict.class.as_deref(), Some(CLIENT_FAILED), "{end}");
    assert!(!verdict.cannot_run && verdict.confidence > 0.9, "{verdict:?}");
}

#[test]
fn the_same_exception_at_the_same_step_again_stops_the_job_with_the_reason() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
mainstay.step(3)
if RANK == 1:
    raise ValueError(f"bad batch {os.getpid()}")
time.sleep(36000)
"#;
    let end = stage.python(script).ranks(2).options("--max-restarts 50").start().end();
    end.assert_status(1);
    assert_eq!(end.summary().attempts, 2, "{end}");
    let last = journal::decisions(&end.journal)[1];
    assert_eq!(last.action, Action::Stop { exit: 1 });
    assert_eq!(last.rule, Rule::Recurred, "{end}");
    assert!(end.summary().reason.contains("ValueError"), "{end}");
    // torch's own format is written too, for other readers.
    let file = end.run_dir.join("attempt_1/1/error.json");
    let text = std::fs::read_to_string(file).expect("an error file");
    assert!(text.contains("ValueError: bad batch") && text.contains("py_callstack"), "{text}");
}

#[test]
fn a_plain_program_error_is_not_restarted_and_one_that_may_pass_is() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script =
        |statement: &str| format!("import mainstay\nmainstay.beat()\nif ATTEMPT == 0:\n    {statement}\n");
    let end = stage.python(&script("undefined_name")).ranks(1).start().end();
    end.assert_status(1);
    assert_eq!(journal::restarts(&end.journal), 0, "{end}");
    assert_eq!(journal::decisions(&end.journal)[0].rule, Rule::FailsByItself, "{end}");
    let end = stage.python(&script("raise ConnectionResetError('by peer')")).ranks(1).start().end();
    end.assert_status(0);
    assert_eq!(journal::restarts(&end.journal), 1, "{end}");
}

#[test]
fn the_same_exception_at_another_step_is_tried_again() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
mainstay.step(ATTEMPT)
if RANK == 1 and ATTEMPT < 3:
    raise ValueError("bad batch")
"#;
    let end = stage.python(script).ranks(2).options("--max-restarts 3").start().end();
    end.assert_status(0);
    assert_eq!(end.summary().attempts, 4, "{end}");
}

#[test]
fn the_same_exception_at_the_same_data_stops_the_job_at_any_step_and_is_called_the_datas() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    // Each attempt is some steps further when it reaches the bad batch.
    let script = r#"
import mainstay
mainstay.step(3 + 4 * ATTEMPT)
mainstay.data_at(640)
if RANK == 1:
    raise RuntimeError(f"the reader gave {os.getpid()}")
time.sleep(36000)
"#;
    let end = stage.python(script).ranks(2).options("--max-restarts 50").start().end();
    end.assert_status(1);
    assert_eq!(journal::decisions(&end.journal)[1].rule, Rule::Recurred, "{end}");
    assert_eq!(end.summary().attempts, 2, "{end}");
    let verdicts = journal::verdicts(&end.journal);
    let last = verdicts.last().expect("a verdict");
    // The message alone does not point to the data; the same exception at the same position does.
    assert_ne!(verdicts[0].class.as_deref(), Some("data"), "{end}");
    assert_eq!((last.data, last.class.as_deref()), (Some(640), Some("data")), "{end}");
    assert!(last.evidence.iter().any(|line| line.contains("position 640")), "{:?}", last.evidence);
}

#[test]
fn another_exception_at_the_same_step_is_tried_again() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
mainstay.step(1)
if ATTEMPT < 2:
    raise [ValueError, KeyError][ATTEMPT]("x")
"#;
    let end = stage.python(script).start().end();
    end.assert_status(0);
    assert_eq!(end.summary().attempts, 3, "{end}");
}

#[test]
fn an_error_file_counts_without_the_client() {
    let stage = Stage::new();
    let script = r#"
        if [ "$RANK" = 1 ]; then
            printf '{"message": {"message": "RuntimeError: shard 9 is gone", "extraInfo": {"py_callstack": "x", "timestamp": "1"}}}' \
                > "$TORCHELASTIC_ERROR_FILE"
            exit 1
        fi
        work"#;
    let end = stage.sh(script).ranks(2).options("--max-restarts 50").start().end();
    end.assert_status(1);
    let verdicts = journal::verdicts(&end.journal);
    assert_eq!(verdicts.len(), 2, "the same again stops the job\n{end}");
    assert_eq!(verdicts[0].culprit, Some(Rank(1)));
    let Cause::Exception { exception, .. } = &verdicts[0].cause else { panic!("no exception\n{end}") };
    assert_eq!(exception, "RuntimeError");
    end.assert_printed("shard 9 is gone");
    let file = end.run_dir.join("attempt_0/1/error.json").display().to_string();
    end.assert_printed(&file);
    let named =
        |fact: &Fact| matches!(fact, Fact::RankRaised { note, .. } if note.file.as_ref() == Some(&file));
    assert!(journal::facts(&end.journal).any(named), "{end}");
}

#[test]
fn an_exception_that_is_dealt_with_is_no_fault() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
mainstay.step(0)
try:
    raise ValueError("dealt with")
except ValueError:
    sys.excepthook(*sys.exc_info())
mainstay.step(1)
"#;
    let end = stage.python(script).ranks(2).start().end();
    end.assert_status(0);
    assert!(journal::verdicts(&end.journal).is_empty(), "{end}");
    assert!(!journal::facts(&end.journal).any(|fact| matches!(fact, Fact::RankRaised { .. })), "{end}");
}

#[test]
fn a_rank_without_heartbeats_is_reported_without_a_step() {
    let stage = Stage::new();
    // Plainly the program's own fault, but after an unknown number of steps: it gets its restart.
    let script = r#"
if ATTEMPT == 0:
    no_such_name
"#;
    let end = stage.python(script).start().end();
    end.assert_status(0);
    let verdict = end.verdict();
    assert!(verdict.headline.contains("no_such_name") && !verdict.headline.contains("step"), "{end}");
}

#[test]
fn a_run_can_be_bundled_without_its_secrets_and_replayed_elsewhere() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
mainstay.step(0)
raise ValueError("no run for token=abcdef0123456789")
"#;
    let job = stage.python(script).ranks(1).options("--max-restarts 1").start();
    let run_dir = job.run_dir();
    let end = job.end();
    let bundle = stage.work().join("incident.jsonl");
    let ask = |arguments: &[&std::ffi::OsStr]| {
        let reported =
            std::process::Command::new(mainstay()).args(arguments).output().expect("mainstay can be started");
        (reported.status.code(), String::from_utf8_lossy(&reported.stdout).into_owned())
    };
    let made = ask(&["bundle".as_ref(), run_dir.as_ref(), "-o".as_ref(), bundle.as_ref()]);
    assert_eq!(made.0, Some(0), "{end}");
    let text = std::fs::read_to_string(&bundle).expect("a bundle");
    assert!(text.contains("no run for token=<masked>") && !text.contains("abcdef0123456789"), "{text}");
    // What is for a ticket has none either, and the user can show them.
    for command in
        [&["explain"][..], &["explain", "--markdown"], &["explain", "--json"], &["report", "--markdown"]]
    {
        let mut command: Vec<&std::ffi::OsStr> = command.iter().map(|word| (*word).as_ref()).collect();
        command.push(run_dir.as_ref());
        let (status, reported) = ask(&command);
        assert_eq!(status, Some(0), "{reported}{end}");
        assert!(reported.contains("masked") && !reported.contains("abcdef0123456789"), "{reported}");
        command.push("--show-secrets".as_ref());
        let (status, reported) = ask(&command);
        assert_eq!(status, Some(0), "{reported}{end}");
        assert!(reported.contains("abcdef0123456789"), "{reported}");
    }
    let (status, reported) = ask(&["replay".as_ref(), bundle.as_ref()]);
    assert_eq!(status, Some(0), "{reported}{end}");
    testing::snapshot!("replay", "the same verdicts", stage.masked(&reported));
    // A changed verdict is shown: as if this version decided differently.
    let changed = text.replace(r#""domain":"user""#, r#""domain":"hardware""#);
    assert_ne!(changed, text, "{text}");
    std::fs::write(&bundle, changed).expect("a file");
    let (status, reported) = ask(&["replay".as_ref(), bundle.as_ref()]);
    assert_eq!(status, Some(1), "{reported}");
    testing::snapshot!("replay", "another domain", stage.masked(&reported));
}
