//! Trainers whose newest checkpoint is damaged when the job restarts: they find the newest whole one, in the job
//! and with or without an agent, or the job ends with an explanation.

#![allow(clippy::unwrap_used, clippy::panic, reason = "in a test, a panic is the report")]

use crate::hosts;

use std::fs;

use hosts::{Hosts, ckpt, json};
use mainstay_model::entry::Fact;
use mainstay_tests::{End, Plan, Stage, processes};

/// `save STEP` writes as Transformers does, its mark last; `newest` is the step that it would go on from.
pub const TRAINER: &str = r#"
save() {
    mkdir -p "$OUT/checkpoint-$1"
    printf 'the state of step %s' "$1" > "$OUT/checkpoint-$1/weights"
    printf '{"global_step": %s}' "$1" > "$OUT/checkpoint-$1/trainer_state.json"
}
newest() { ls "$OUT" | grep '^checkpoint-' | sort -t- -k2 -n | tail -n 1 | cut -d- -f2; }
goes_on_from() {
    test "$(newest)" = "$1" && test "$(cat "$OUT/checkpoint-$1/weights")" = "the state of step $1"
}
sealed() { until ls "$LOGS"/.sealed/*/step-*"$1.json" > /dev/null 2>&1; do sleep 0.01; done; }
"#;

fn watched<'a>(stage: &'a Stage, script: &str) -> Plan<'a> {
    let out = stage.work().join("out");
    let options = format!("--checkpoint-watch huggingface:{}", out.display());
    stage
        .sh(&format!("{TRAINER}{script}"))
        .variable("OUT", &out)
        .variable("LOGS", stage.logs())
        .options(&options)
}

/// The launcher's lines that contain these values, without the stage's directories. The closing line has times.
fn lines(stage: &Stage, end: &End, named: &[&str]) -> String {
    let lines = end.lines(named).into_iter().filter(|line| !line.starts_with("job "));
    stage.masked(&lines.collect::<Vec<&str>>().join("\n"))
}

fn restarted(end: &End) -> bool {
    end.journal.iter().any(|entry| {
        matches!(&entry.body, mainstay_model::entry::Body::Fact(Fact::AttemptStarted { attempt, .. }) if attempt.0 == 1)
    })
}

#[test]
fn a_job_whose_newest_checkpoint_is_torn_restarts_from_the_older_whole_one() {
    let stage = Stage::new();
    let script = r#"
if [ "$ATTEMPT" = 0 ]; then
    save 10; sealed 10; save 20; sealed 20
    printf 'torn' > "$OUT/checkpoint-20/weights"
    exit 9
fi
goes_on_from 10
"#;
    let end = watched(&stage, script).start().end();
    end.assert_status(0);
    testing::snapshot!("sealing", "the newest checkpoint is torn", lines(&stage, &end, &["work/out"]));
    assert!(restarted(&end));
    let aside = stage.work().join("out/.checkpoint-20.not-whole/weights");
    assert_eq!(fs::read_to_string(aside).unwrap(), "torn", "it is renamed and nothing of it is lost");
}

#[test]
fn a_save_that_a_kill_tore_is_not_what_the_job_restarts_from() {
    let stage = Stage::new();
    let script = r#"
if [ "$ATTEMPT" = 0 ]; then
    save 10
    mkdir "$OUT/checkpoint-20"
    printf 'half of' > "$OUT/checkpoint-20/weights"
    kill -9 $$
fi
goes_on_from 10
"#;
    let end = watched(&stage, script).start().end();
    end.assert_status(0);
    testing::snapshot!("sealing", "a save that a kill tore", lines(&stage, &end, &["checkpoint-20"]));
    assert!(restarted(&end));
}

#[test]
fn a_job_without_a_whole_checkpoint_left_ends_with_the_reason() {
    let stage = Stage::new();
    let script = r#"
if [ "$ATTEMPT" = 0 ]; then
    save 10; sealed 10
    printf 'torn' > "$OUT/checkpoint-10/weights"
    exit 9
fi
mark started-over
"#;
    let end = watched(&stage, script).start().end();
    testing::snapshot!("sealing", "none is left", lines(&stage, &end, &["checkpoint-10/weights"]));
    assert_eq!(end.status, 70, "{end}");
    assert!(!stage.marks().join("started-over").exists());
    // A new launch reports the same, before any rank starts.
    let again = watched(&stage, "mark started-over").start().end();
    testing::snapshot!(
        "sealing",
        "none is left: a new launch",
        lines(&stage, &again, &["checkpoint-10/weights"])
    );
    assert!(!stage.marks().join("started-over").exists());
}

#[test]
fn an_output_directory_that_is_missing_for_a_moment_does_not_make_the_job_start_over() {
    let stage = Stage::new();
    let script = r#"
if [ "$ATTEMPT" = 0 ]; then
    save 10; sealed 10
    mv "$OUT" "$OUT.away"
    exit 9
fi
goes_on_from 10
"#;
    let job = watched(&stage, script).start();
    job.wait_until_printed(crate::words::terminal::WAITS_FOR_IT);
    let out = stage.work().join("out");
    fs::rename(stage.work().join("out.away"), out).unwrap();
    job.end().assert_status(0);
}

#[test]
fn an_overwritten_file_is_restored_as_it_was_sealed() {
    let stage = Stage::new();
    let archive = stage.work().join("archive.py");
    fs::write(
        &archive,
        "import sys, zipfile\nzipfile.ZipFile(sys.argv[1], 'w').writestr('data.pkl', 'state')\n",
    )
    .unwrap();
    let script = r#"
if [ "$ATTEMPT" = 0 ]; then
    mkdir -p "$OUT"
    python3 "$ARCHIVE" "$OUT/ckpt.pt"
    until ls "$LOGS"/.sealed/*/copies/step-*/rank-00000/manifest.json > /dev/null 2>&1; do sleep 0.01; done
    printf 'PK torn' > "$OUT/ckpt.pt"
    exit 9
fi
python3 -c "import sys, zipfile; assert zipfile.ZipFile(sys.argv[1]).read('data.pkl') == b'state'" "$OUT/ckpt.pt"
"#;
    let out = stage.work().join("out");
    let options = format!("--checkpoint-watch {}", out.display());
    let plan =
        stage.sh(script).variable("OUT", &out).variable("LOGS", stage.logs()).variable("ARCHIVE", &archive);
    let end = plan.options(&options).start().end();
    end.assert_status(0);
    assert!(restarted(&end));
}

#[test]
fn a_checkpoint_name_of_no_known_kind_is_reported_as_unsealed() {
    let stage = Stage::new();
    let script = r#"
if [ "$ATTEMPT" = 0 ]; then
    mkdir -p "$OUT"
    echo weights > "$OUT/model.pt"
    exit 9
fi
"#;
    let end = watched(&stage, script).start().end();
    end.assert_status(0);
    testing::snapshot!("sealing", "no known kind", lines(&stage, &end, &["model.pt"]));
}

#[test]
fn with_an_agent_a_checkpoint_name_of_no_known_kind_is_reported_as_unsealed() {
    let hosts = Hosts::new(16, 2, &[]);
    let agents: Vec<_> = (0..2).map(|host| hosts.agent(host)).collect();
    let (stage, out) = (&hosts.stages[0], hosts.directory(0));
    fs::create_dir_all(&out).unwrap();
    fs::write(out.join("model.pt"), "weights").unwrap();
    let end = stage
        .sh("true")
        .with(&agents[0])
        .own_paths()
        .options(&format!(
            "--log-dir {} --runtime-dir {} --checkpoint-watch huggingface:{}",
            stage.logs().display(),
            stage.tmpfs().display(),
            out.display()
        ))
        .start()
        .end();
    end.assert_status(0);
    testing::snapshot!("sealing", "no known kind, with an agent", lines(stage, &end, &["model.pt"]));
}

#[test]
fn with_an_agent_a_damaged_checkpoint_is_restored_from_a_peer_within_the_job() {
    let hosts = Hosts::new(13, 2, &[]);
    let agents: Vec<_> = (0..2).map(|host| hosts.agent(host)).collect();
    let (stage, out) = (&hosts.stages[0], hosts.directory(0));
    let script = r#"
if [ "$ATTEMPT" = 0 ]; then
    save 20; mark saved; wait_for replicated
    printf 'torn' > "$OUT/checkpoint-20/weights"
    exit 9
fi
goes_on_from 20
"#;
    // Both hosts have asked before anything exists: their parts belong to one decision.
    let second = &hosts.stages[1];
    second
        .sh("true")
        .with(&agents[1])
        .own_paths()
        .options(&format!(
            "--rdzv-id run-d --resume-from run-d:checkpoints~1 --log-dir {} --runtime-dir {} --checkpoint-watch huggingface:{}",
            second.logs().display(),
            second.tmpfs().display(),
            hosts.directory(1).display()
        ))
        .start()
        .end()
        .assert_status(0);
    let job = stage
        .sh(&format!("{TRAINER}{script}"))
        .with(&agents[0])
        .variable("OUT", &out)
        .own_paths()
        .options(&format!(
            "--rdzv-id run-d --resume-from run-d:checkpoints~1 --log-dir {} --runtime-dir {} --checkpoint-watch huggingface:{}",
            stage.logs().display(),
            stage.tmpfs().display(),
            out.display()
        ))
        .start();
    job.mark("saved");
    // A step is whole with the parts of both hosts: the other one writes its own.
    let other = hosts.directory(1).join("checkpoint-20");
    fs::create_dir_all(&other).unwrap();
    fs::write(other.join("trainer_state.json"), "{\"global_step\": 20}").unwrap();
    processes::wait_until("the step on both hosts", || {
        let listed = json(&ckpt(&agents[0], &["ls", "--run", "run-d:checkpoints", "--json"]));
        let newest = &listed["steps"][0];
        newest["whole"] == true && newest["least_copies"] == 2
    });
    stage.mark("replicated");
    let end = job.end();
    end.assert_status(0);
    assert!(!end.lines(&["step 20", "checkpoint-20/weights"]).is_empty(), "the damaged file is named\n{end}");
}
