//! Texts of others that would drive a terminal, hide or turn text around, in everything that the commands print.

use std::path::Path;
use std::process::Command;

use mainstay_journal::store::journal::{Journal, Limits};
use mainstay_model::entry::{Body, Fact, JobSpec};
use mainstay_model::id::{Attempt, BootId, Incident, JobId, Rank};
use mainstay_model::time::{Mono, Stamp, Wall};
use mainstay_model::verdict::{Cause, Doubts, FaultDomain, Verdict};

/// A title of the terminal, a cleared screen in two forms, a delete, text that is read backwards, and text that is not
/// seen.
const HOSTILE: &str =
    "a\x1b]0;t\x07\x1b[2J\u{9b}2J\u{7f}\u{202e}b\u{2066}c\u{200b}\u{feff}\u{2028}\u{e0041}d";

fn hostile_run(directory: &Path) {
    let mut journal =
        Journal::open(&directory.join("journal"), Limits::default(), BootId("boot".into())).unwrap();
    let text = || HOSTILE.to_owned();
    let spec = JobSpec { command: vec![text()], world_size: 1, local_world_size: 1, ..JobSpec::default() };
    let verdict = Verdict {
        incident: Incident(1),
        attempt: Attempt(0),
        headline: text(),
        cause: Cause::ExitCode { code: 1 },
        domain: FaultDomain::User,
        class: Some("user_code".into()),
        deterministic: true,
        doubts: Doubts { against: vec![text()], would_change: vec![text()] },
        confidence: 0.9,
        culprit_confidence: None,
        cannot_run: false,
        culprit: Some(Rank(0)),
        host: Some(text()),
        victims: Vec::new(),
        step: Some(4),
        data: None,
        heartbeats: true,
        fault_at: Mono(1),
        detected_at: Mono(2),
        evidence: vec![text()],
    };
    let bodies = [
        Body::Fact(Fact::JobStarted(spec)),
        Body::Verdict(verdict),
        Body::Fact(Fact::JobEnded { exit: 1, reason: text() }),
    ];
    for (second, body) in (1..).zip(bodies) {
        let at = Stamp { mono: Mono(second), wall: Wall(second as i64) };
        journal.append(at, Some(&JobId("exp".to_owned())), None, body).unwrap();
    }
}

/// The characters of an output that a reader does not see as they are.
fn unseen(output: &[u8]) -> Vec<char> {
    let is_unseen = |letter: &char| {
        letter.is_control() && !"\n\t".contains(*letter)
            || HOSTILE.contains(*letter) && !letter.is_ascii()
            || *letter == char::REPLACEMENT_CHARACTER
    };
    String::from_utf8_lossy(output).chars().filter(is_unseen).collect()
}

#[test]
fn nothing_that_others_wrote_drives_the_terminal_or_hides_text() {
    let directory = testing::tempdir().unwrap();
    let run = directory.path();
    hostile_run(run);
    let run = run.to_str().unwrap();
    let commands: [&[&str]; 14] = [
        &["explain", run],
        &["explain", "--all", run],
        &["explain", "--markdown", run],
        &["explain", "--json", run],
        &["events", "--journal", run],
        &["events", "--json", "--journal", run],
        &["report", "--markdown", run],
        &["bundle", run],
        &["replay", run],
        &["explain", HOSTILE],
        &["status", "--socket", HOSTILE],
        &["ckpt", "ls", HOSTILE],
        &["events", "--kind", HOSTILE],
        &[HOSTILE],
    ];
    for arguments in commands {
        let output = Command::new(env!("CARGO_BIN_EXE_mainstay")).args(arguments).output().unwrap();
        assert!(!output.stdout.is_empty() || !output.stderr.is_empty(), "{arguments:?}");
        for part in [&output.stdout, &output.stderr] {
            assert!(
                unseen(part).is_empty(),
                "{arguments:?}: {}",
                String::from_utf8_lossy(part).escape_debug()
            );
        }
    }
}
