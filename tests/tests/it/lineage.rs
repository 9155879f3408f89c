//! Whose checkpoints a job resumes from: its own directory's, whatever the names; another's only if the user
//! requests it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "in a test, a panic is the report"
)]

use std::fs;
use std::path::{Path, PathBuf};

use mainstay_tests::{Agent, End, Stage};

use crate::hosts::{Hosts, ckpt, json};
use crate::peers::{assert_is_in, save};

const SIZE: usize = 1 << 20;

/// A job whose ranks print the run that they save under.
fn launch(stage: &Stage, agent: Option<&Agent>, directory: &Path, options: &str) -> End {
    let plan = stage.sh("echo \"$MAINSTAY_LAUNCH\" > \"$SAID\"").variable("SAID", printed(stage)).own_paths();
    let plan = match agent {
        Some(agent) => plan.with(agent),
        None => plan,
    };
    let options = format!(
        "--rdzv-id train --log-dir {} --runtime-dir {} --checkpoint-dir {} {options}",
        stage.logs().display(),
        stage.tmpfs().display(),
        directory.display()
    );
    plan.options(&options).start().end()
}

fn printed(stage: &Stage) -> PathBuf {
    stage.work().join("launch")
}

/// The run of the job that ran last.
fn run_of(stage: &Stage) -> String {
    fs::read_to_string(printed(stage)).unwrap().trim().to_owned()
}

fn plain(run: &str) -> &str {
    run.split_once('@').unwrap().0
}

fn steps_in(directory: &Path) -> Vec<String> {
    let names = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
    names.map(|name| name.to_string_lossy().into_owned()).filter(|name| name.starts_with("step-")).collect()
}

#[test]
fn a_job_never_resumes_from_another_directorys_checkpoints_because_the_names_are_the_same() {
    let hosts = Hosts::new(13, 2, &[]);
    let (agent, _peer) = (hosts.agent(0), hosts.agent(1));
    let stage = &hosts.stages[0];
    let (a, b) = (stage.work().join("a/out"), stage.work().join("b/out"));
    let started = launch(stage, Some(&agent), &a, "");
    started.assert_status(0);
    let of_a = run_of(stage);
    started.assert_printed(&format!("run id {}", plain(&of_a)));
    save(&a, &of_a, 40, 2, SIZE);
    let pushed = ckpt(&agent, &["push", "train", &a.display().to_string(), "--wait", "90", "--json"]);
    assert_eq!(json(&pushed)["copies"], 2, "{}", String::from_utf8_lossy(&pushed.stderr));

    // The same names in another directory.
    let other = launch(stage, Some(&agent), &b, "");
    other.assert_status(0).assert_printed(&format!("not resumed from run {}", plain(&of_a)));
    assert_eq!(steps_in(&b), Vec::<String>::new());
    assert_ne!(plain(&run_of(stage)), plain(&of_a));

    // The same directory, launched again, whatever its present name and whatever was lost in it.
    launch(stage, Some(&agent), &a, "").assert_status(0).assert_printed("checkpoint: step 40");
    assert_eq!(plain(&run_of(stage)), plain(&of_a));
    fs::remove_dir_all(a.join("step-000000000040")).unwrap();
    let moved = stage.work().join("moved");
    fs::rename(&a, &moved).unwrap();
    launch(stage, Some(&agent), &moved, "").assert_status(0).assert_printed("checkpoint: step 40");
    assert_eq!(plain(&run_of(stage)), plain(&of_a));
    assert_is_in(&moved, 40, 2, SIZE);

    // A new directory with the old name: only the user knows.
    fs::create_dir(&a).unwrap();
    let refused = launch(stage, Some(&agent), &a, "");
    refused.assert_status(70).assert_printed(&format!("--resume-from {}", plain(&of_a)));
    assert_eq!(steps_in(&a), Vec::<String>::new());
    let resumed = launch(stage, Some(&agent), &a, "--resume-from train");
    resumed.assert_status(0).assert_printed("checkpoint: step 40");
    assert_is_in(&a, 40, 2, SIZE);
    // And from then on it is that run's directory.
    launch(stage, Some(&agent), &a, "").assert_status(0).assert_printed("checkpoint: step 40");

    // On purpose into the other directory too, with the name of the directory that wrote it.
    let resumed = launch(stage, Some(&agent), &b, &format!("--resume-from {}", a.display()));
    resumed.assert_status(0).assert_printed("checkpoint: step 40");
    assert_is_in(&b, 40, 2, SIZE);
}

#[test]
fn without_an_agent_a_job_has_its_directory_and_no_other() {
    let stage = Stage::new();
    let (a, b) = (stage.work().join("a/out"), stage.work().join("b/out"));
    launch(&stage, None, &a, "").assert_status(0);
    let of_a = run_of(&stage);
    save(&a, &of_a, 40, 1, SIZE);
    launch(&stage, None, &b, "").assert_status(0);
    assert_ne!(plain(&run_of(&stage)), plain(&of_a));
    assert_eq!(steps_in(&b), Vec::<String>::new());
    launch(&stage, None, &a, "--resume-from train").assert_status(0);
    assert_eq!(plain(&run_of(&stage)), plain(&of_a));
    let refused = launch(&stage, None, &b, "--resume-from train");
    refused.assert_status(70);
    testing::snapshot!(
        "sealing",
        "no agent for another directory",
        stage.masked(refused.line(&["checkpoints of other"]))
    );
}
