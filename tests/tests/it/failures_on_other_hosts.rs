//! Agents that know each other report how jobs failed: in doubt a job is handed back for one try on another host,
//! and a failure that recurs there is not tried again.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "in a test, a panic is the report"
)]

use crate::hosts;

use hosts::{Hosts, ckpt, json};
use mainstay_model::verdict::{Action, Rule};
use mainstay_recovery::policy::HAND_BACK_EXIT;
use mainstay_tests::{Agent, End, Stage, has_client, journal, processes, python};

/// Output that a broken GPU and a bug of the program have in common.
const SCRIPT: &str = r#"
import mainstay, os
mainstay.step(7)
raise RuntimeError(f"CUDA error: unspecified launch failure (process {os.getpid()})")
"#;

/// Waits until `agent` knows that the other host's agent answers, and that it reported this many failures.
fn wait_for_peer(agent: &Agent, failures: u64) {
    processes::wait_until("the other host", || {
        let listed = json(&ckpt(agent, &["ls", "--json"]));
        let peer = &listed["peers"][0];
        peer["alive"] == true && peer["failures"] == failures
    });
}

/// Two hosts whose agents know each other, and a program that both have, as on a shared file system.
fn two_hosts(test: u8) -> (Hosts, Vec<Agent>, String) {
    let hosts = Hosts::new(test, 2, &[]);
    let agents: Vec<Agent> = (0..2).map(|host| hosts.agent(host)).collect();
    agents.iter().for_each(|agent| wait_for_peer(agent, 0));
    let script = hosts.stages[0].script("train.py", SCRIPT);
    (hosts, agents, script)
}

fn run(stage: &Stage, agent: &Agent, script: &str) -> End {
    let python = python().display().to_string();
    stage.command(&[&python, script]).with(agent).ranks(1).options("--max-restarts 10").start().end()
}

#[test]
fn in_doubt_another_host_is_tried_once_and_what_fails_there_too_is_the_programs() {
    if !has_client() {
        return;
    }
    let (hosts, agents, script) = two_hosts(13);
    let first = run(&hosts.stages[0], &agents[0], &script);
    first.assert_status(HAND_BACK_EXIT);
    assert_eq!(journal::decisions(&first.journal)[1].rule, Rule::AnotherHost, "{first}");
    assert_eq!(journal::restarts(&first.journal), 1, "{first}");
    assert_eq!(journal::verdicts(&first.journal)[0].domain.name(), "unknown", "{first}");

    wait_for_peer(&agents[1], 2);
    let confirmed = run(&hosts.stages[1], &agents[1], &script);
    let named = format!(" after step 7 on {} ", hosts.names[0]);
    confirmed.assert_status(1).assert_printed(&named);
    assert_eq!(journal::restarts(&confirmed.journal), 0, "{confirmed}");
    let verdicts = journal::verdicts(&confirmed.journal);
    let last = verdicts.last().expect("a verdict");
    let reported = format!("this program failed in the same way before on {}", hosts.names[0]);
    assert!(last.evidence.iter().any(|line| line.contains(&reported)), "{:?}", last.evidence);
    assert_eq!(last.domain.name(), "user", "{confirmed}");

    // Back on the first host the same program is not sent to another host again.
    let again = run(&hosts.stages[0], &agents[0], &script);
    again.assert_status(1);
    assert!(
        matches!(journal::decisions(&again.journal).last().unwrap().action, Action::Stop { .. }),
        "{again}"
    );
}

#[test]
fn a_changed_program_is_tried_as_if_it_had_never_failed() {
    if !has_client() {
        return;
    }
    let (hosts, agents, script) = two_hosts(14);
    run(&hosts.stages[0], &agents[0], &script).assert_status(HAND_BACK_EXIT);
    wait_for_peer(&agents[1], 2);
    let mended = format!("{SCRIPT}# mended\n");
    hosts.stages[0].script("train.py", &mended);
    let second = run(&hosts.stages[1], &agents[1], &script);
    second.assert_status(HAND_BACK_EXIT);
    assert_eq!(journal::restarts(&second.journal), 1, "{second}");
}
