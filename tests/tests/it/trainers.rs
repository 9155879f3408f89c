//! Real agents, launchers and trainers that know nothing of Mainstay: their checkpoints are replicated, and a host
//! that lost them gets them back before its ranks start. An agent that is killed during an upload continues it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "in a test, a panic is the report"
)]

use crate::hosts;

use std::fs;
use std::process::Command;

use hosts::{Hosts, ckpt, json};
use mainstay_tests::{Agent, Job, mainstay, processes};

/// Saves as Megatron does: this host's files, and the tracker when they are there.
const SAVES: &str = "mkdir -p \"$DIR/iter_0000010\" && echo \"state of $HOST\" > \"$DIR/iter_0000010/model.pt\" && \
                     echo 10 > \"$DIR/latest_checkpointed_iteration.txt\"";

/// Ends with 0 only if this host's own files are there.
const LOADS: &str = "test \"$(cat \"$DIR/latest_checkpointed_iteration.txt\")\" = 10 && \
                     test \"$(cat \"$DIR/iter_0000010/model.pt\")\" = \"state of $HOST\"";

/// The hosts of a test have directories with different paths: `--resume-from` declares that they belong to one run.
fn launch(hosts: &Hosts, agent: &Agent, host: usize, run: &str, script: &str) -> Job {
    let stage = &hosts.stages[host];
    let directory = hosts.directory(host);
    stage
        .sh(script)
        .with(agent)
        .variable("DIR", &directory)
        .variable("HOST", format!("host-{host}"))
        .own_paths()
        .options(&format!(
            "--rdzv-id {run} --resume-from {run}~1 --log-dir {} --runtime-dir {} --checkpoint-watch megatron:{}",
            stage.logs().display(),
            stage.tmpfs().display(),
            directory.display()
        ))
        .start()
}

#[test]
fn a_trainer_without_a_line_of_ours_finds_its_files_on_a_host_that_lost_them() {
    let hosts = Hosts::new(12, 2, &[]);
    let mut agents: Vec<Agent> = (0..2).map(|host| hosts.agent(host)).collect();
    for (host, agent) in agents.iter().enumerate() {
        launch(&hosts, agent, host, "run-t", SAVES).end().assert_status(0);
    }
    processes::wait_until("the step on both hosts", || {
        let listed = json(&ckpt(&agents[0], &["ls", "--run", "run-t:checkpoints", "--json"]));
        let newest = &listed["steps"][0];
        newest["whole"] == true && newest["least_copies"] == 2
    });
    // One host is lost with all its files.
    agents.pop().unwrap().kill();
    fs::remove_dir_all(hosts.directory(1)).unwrap();
    fs::remove_dir_all(hosts.store(1)).unwrap();
    fs::remove_dir_all(hosts.stages[1].work().join("agent-state")).unwrap();
    let again = hosts.agent(1);
    let back = launch(&hosts, &again, 1, "run-t", LOADS).end();
    back.assert_status(0).assert_printed("step 10 (decision");
    // The other one has everything still.
    launch(&hosts, &agents[0], 0, "run-t", LOADS).end().assert_status(0).assert_printed("step 10 (decision");
}

#[test]
fn an_agent_that_is_killed_while_it_uploads_goes_on_where_it_was() {
    let bucket = testing::TempDir::new().unwrap();
    let url = format!("file://{}", bucket.path().display());
    let durable = format!("DURABLE={url}");
    let hosts = Hosts::new(9, 1, &[&durable, "REDUNDANCY=0"]);
    // Slow enough that the upload takes long, whatever else runs.
    let agent = hosts.agent_with(0, &["DURABLE_BANDWIDTH=1MiB"]);
    let directory = hosts.directory(0);
    fs::create_dir_all(directory.join("iter_0000010")).unwrap();
    let content: Vec<u8> =
        (1..=6_u64 << 20).flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
    fs::write(directory.join("iter_0000010/model.pt"), &content).unwrap();
    fs::write(directory.join("latest_checkpointed_iteration.txt"), "10").unwrap();
    launch(&hosts, &agent, 0, "run-u", "true").end().assert_status(0);
    let notes = hosts.stages[0].work().join("agent-state/durable-uploads");
    let has_part = || {
        let mut notes = fs::read_dir(&notes).into_iter().flatten().flatten();
        notes.any(|note| fs::read_to_string(note.path()).is_ok_and(|text| !text.contains("\"done\":{}")))
    };
    processes::wait_until("a part in the storage", has_part);
    agent.kill();
    let list = || {
        let mut list = Command::new(mainstay());
        list.args(["ckpt", "ls", "--json", "--run", "run-u:checkpoints", "--dir", &url]);
        list.output().expect("mainstay can be started")
    };
    assert_ne!(list().status.code(), Some(0), "half a step is none");
    let _again = hosts.agent(0);
    processes::wait_until("the step in the storage", || list().status.code() == Some(0));
    // Restored from nothing but the bucket: a plain archive.
    let out = testing::TempDir::new().unwrap();
    let mut pull = Command::new(mainstay());
    pull.args(["ckpt", "pull", "run-u:checkpoints"]).arg(out.path()).args(["--from", &url]);
    assert!(pull.output().unwrap().status.success());
    let archive = out.path().join("step-000000000010/rank-00000/files.tar");
    let untarred = Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(out.path()).status().unwrap();
    assert!(untarred.success());
    assert!(fs::read(out.path().join("iter_0000010/model.pt")).unwrap() == content, "as it was written");
}
