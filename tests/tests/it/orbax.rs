//! The real Orbax: with its own multi-tier checkpointing, as MaxText uses it on GKE, it asks our agents as it asks
//! the replicator there; and checkpoints that it writes without it are watched.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "in a test, a panic is the report"
)]

use crate::hosts;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use hosts::{Hosts, ckpt, json};
use mainstay_tests::{Agent, processes, skipped};

/// A Python with JAX and Orbax: `MAINSTAY_TEST_FRAMEWORKS`, which `cargo xtask test` provides.
fn orbax() -> Option<PathBuf> {
    let python = std::env::var_os("MAINSTAY_TEST_FRAMEWORKS").map(PathBuf::from);
    if python.is_none() {
        skipped("MAINSTAY_TEST_FRAMEWORKS names no Python with Orbax; `cargo xtask test` provides it");
    }
    python
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("python").join(name)
}

/// The job's processes, one for each host; what they printed, of each.
fn train(python: &Path, hosts: &Hosts) -> Vec<String> {
    // An address that only the first host has.
    let (address, _) = hosts.names[0].rsplit_once(':').unwrap();
    let trainers: Vec<Child> = (0..2)
        .map(|host| {
            let directory = hosts.directory(host);
            let info = format!("{host}\n{address}:7141\n");
            fs::write(directory.join("jax-init-info.txt"), info).unwrap();
            let mut trainer = Command::new(python);
            trainer
                .arg(script("orbax_trainer.py"))
                .arg(directory)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            trainer.spawn().expect("a Python")
        })
        .collect();
    let ends = trainers.into_iter().map(|trainer| trainer.wait_with_output().unwrap());
    ends.map(|end| {
        let printed = String::from_utf8_lossy(&end.stdout).into_owned();
        assert!(end.status.success(), "{printed}{}", String::from_utf8_lossy(&end.stderr));
        // gloo prints lines as well.
        let own = printed.lines().filter(|line| line.starts_with("restored") || line.starts_with("saved"));
        own.collect::<Vec<&str>>().join("; ")
    })
    .collect()
}

fn agent(hosts: &Hosts, host: usize) -> Agent {
    let directory = hosts.directory(host);
    fs::create_dir_all(&directory).unwrap();
    hosts.agent_with(host, &[&format!("REPLICATOR={}", directory.display())])
}

fn wait_for_step(agent: &Agent, run: &str, step: u64) {
    processes::wait_until(&format!("step {step} on both hosts"), || {
        let listed = json(&ckpt(agent, &["ls", "--run", run, "--json"]));
        let steps = listed["steps"].as_array().cloned().unwrap_or_default();
        let mut steps = steps.iter();
        steps.any(|of| of["step"] == step && of["whole"] == true && of["least_copies"] == 2)
    });
}

/// A host is lost with all its files.
fn lose(hosts: &Hosts, host: usize, agent: Agent) {
    agent.kill();
    for lost in [hosts.directory(host), hosts.store(host), hosts.stages[host].work().join("agent-state")] {
        fs::remove_dir_all(lost).unwrap();
    }
}

#[test]
fn orbax_finds_its_steps_on_a_host_that_was_replaced() {
    let Some(python) = orbax() else { return };
    let hosts = Hosts::new(10, 2, &[]);
    let mut agents: Vec<Agent> = (0..2).map(|host| agent(&hosts, host)).collect();
    for printed in train(&python, &hosts) {
        assert_eq!(printed, "restored step 0: 0.0; saved step 10");
    }
    wait_for_step(&agents[0], "orbax-job", 10);

    // A host is lost with its agent, its directory and its replicas; another one takes its place.
    lose(&hosts, 1, agents.pop().unwrap());
    let _new = agent(&hosts, 1);
    let printed = train(&python, &hosts);
    assert_eq!(printed[0], "restored step 10: 10.0; saved step 20");
    assert_eq!(printed[1], "restored step 10: 524298.0; saved step 20", "the other half");
    wait_for_step(&agents[0], "orbax-job", 20);
}

#[test]
fn what_orbax_saves_by_itself_is_back_on_a_host_that_lost_it() {
    let Some(python) = orbax() else { return };
    let hosts = Hosts::new(11, 2, &[]);
    let mut agents: Vec<Agent> = (0..2).map(|host| hosts.agent(host)).collect();
    let train = |host: usize, agent: &Agent| {
        let (stage, directory) = (&hosts.stages[host], hosts.directory(host));
        let printed = stage.work().join("orbax-said");
        let ended = stage
            .sh("exec \"$ORBAX_PYTHON\" \"$SCRIPT\" \"$DIR\" > \"$SAID\"")
            .with(agent)
            .variable("ORBAX_PYTHON", &python)
            .variable("SCRIPT", script("orbax_alone.py"))
            .variable("DIR", &directory)
            .variable("SAID", &printed)
            .own_paths()
            .options(&format!(
                "--rdzv-id run-o --resume-from run-o~1 --log-dir {} --runtime-dir {} --checkpoint-watch orbax:{}",
                stage.logs().display(),
                stage.tmpfs().display(),
                directory.display()
            ))
            .start()
            .end();
        ended.assert_status(0);
        fs::read_to_string(printed).unwrap()
    };
    for (host, agent) in agents.iter().enumerate() {
        assert_eq!(train(host, agent), "restored step 0\nsaved step 10\n");
    }
    wait_for_step(&agents[0], "run-o:checkpoints", 10);
    lose(&hosts, 1, agents.pop().unwrap());
    let new = hosts.agent(1);
    assert_eq!(train(1, &new), "restored step 10\nsaved step 20\n");
}
