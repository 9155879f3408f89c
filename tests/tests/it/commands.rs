//! Commands that people type from memory: the only running job is the one that is meant, and variables for other
//! commands have no effect.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Output};

use mainstay_model::entry::Fact;
use mainstay_tests::{Stage, has_client, mainstay};
use serde_json::Value;

/// A command that finds the launchers of this stage and no others.
fn asked(stage: &Stage, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(mainstay());
    command.env_clear().env("HOME", stage.home()).env("XDG_RUNTIME_DIR", stage.home());
    command.env("MAINSTAY_RUNTIME_DIR", stage.tmpfs()).envs(variables.iter().copied());
    command.args(arguments).output().expect("mainstay can be started")
}

fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.clone(), output.stderr.clone()].concat()).into_owned()
}

#[test]
fn the_only_job_that_runs_need_not_be_named() {
    let stage = Stage::new();
    let script = r#"mark "up.$MAINSTAY_JOB_ID"; work"#;
    let first = stage.sh(script).start();
    first.mark(&format!("up.{}", first.id()));
    let stacks = asked(&stage, &["stacks"], &[]);
    assert!(stacks.status.success(), "{}", printed(&stacks));

    let second = stage.sh(script).start();
    second.mark(&format!("up.{}", second.id()));
    for command in [&["stacks"][..], &["job", "stop", "--reason", "a test"]] {
        let refused = asked(&stage, command, &[]);
        assert_eq!(refused.status.code(), Some(3), "{}", printed(&refused));
        for job in [&first, &second] {
            assert!(printed(&refused).contains(job.id()), "{}", printed(&refused));
        }
    }
    let stopped = asked(&stage, &["job", "stop", "--reason", "a test", "--job", second.id()], &[]);
    assert!(stopped.status.success(), "{}", printed(&stopped));
    second.end();
    let stopped = asked(&stage, &["job", "stop", "--reason", "a test"], &[]);
    assert!(stopped.status.success(), "{}", printed(&stopped));
    first.end();
}

#[test]
fn a_journal_is_read_whatever_socket_the_environment_names() {
    let stage = Stage::new();
    let end = stage.sh("exit 0").start().end();
    let journal = end.run_dir.join("journal").display().to_string();
    let read = asked(&stage, &["events", "--journal", &journal], &[("MAINSTAY_SOCKET", "/nowhere")]);
    assert!(read.status.success() && printed(&read).contains("ended"), "{}", printed(&read));
    let run_dir = end.run_dir.display().to_string();
    let of_run = asked(&stage, &["events", "--journal", &run_dir], &[]);
    assert_eq!(printed(&of_run), printed(&read), "a run directory means its journal");
    let state = stage.home().join("state");
    fs::create_dir_all(state.join("mainstay")).expect("a directory");
    symlink(end.run_dir.parent().expect("runs"), state.join("mainstay/runs")).expect("a link");
    let name = end.run_dir.file_name().expect("the name of the job").to_string_lossy().into_owned();
    let of_job = asked(&stage, &["events", &name], &[("XDG_STATE_HOME", &state.display().to_string())]);
    let read_of_job: Vec<String> =
        printed(&read).lines().filter(|line| line.contains(&name)).map(str::to_owned).collect();
    assert_eq!(printed(&of_job).lines().collect::<Vec<_>>(), read_of_job, "no server knows the job");
    let empty = end.run_dir.join("checkpoints").display().to_string();
    let empty = asked(&stage, &["events", "--journal", &empty], &[]);
    assert_eq!(empty.status.code(), Some(3), "{}", printed(&empty));
    let run = end.run_dir.display().to_string();
    testing::snapshot!("commands", "events: no journal there", printed(&empty).replace(&run, "RUN"));
    let refused = asked(&stage, &["events", "--journal", &journal, "--socket", "/nowhere"], &[]);
    assert_eq!(refused.status.code(), Some(64), "{}", printed(&refused));
    assert!(printed(&refused).contains("--journal and --socket"), "{}", printed(&refused));
}

#[test]
fn an_ended_job_shows_its_last_step_also_after_the_agents_restart() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let agent = stage.agent();
    let script = "import mainstay\nfor step in range(1, 43):\n    mainstay.step(step)\n";
    let job = stage.python(script).ranks(2).with(&agent).start();
    let id = job.id().to_owned();
    job.end().assert_status(0);
    agent.wait_for_fact(&id, "the end", |fact| matches!(fact, Fact::JobEnded { .. }));
    agent.kill();
    let agent = stage.agent();
    let (_, status) = agent.status(&stage);
    let jobs =
        status["servers"].as_array().into_iter().flatten().flat_map(|server| server["jobs"].as_array());
    let shown = jobs.flatten().find(|job| job["id"] == id.as_str()).expect("the job");
    assert_eq!(shown["step"], 42, "{shown}");
}

#[test]
fn a_run_directory_is_attributed_by_the_output_of_its_ranks_alone() {
    let stage = Stage::new();
    let script = r#"
if [ "$RANK" = 1 ]; then
    echo "RuntimeError: CUDA error: uncorrectable ECC error encountered" >&2
    exit 1
fi
work
"#;
    let end = stage.sh(script).ranks(2).options("--max-restarts 0").start().end();
    let other =
        "Memory cgroup out of memory: Killed process 10 (python) total-vm:185938432kB, anon-rss:99kB\n";
    for file in ["checkpoints/readme.txt", "template.log", "attempt_0/hang.json"] {
        fs::write(end.run_dir.join(file), other).expect("a file that is no output of a rank");
    }
    for directory in [end.run_dir.clone(), end.run_dir.join("attempt_0")] {
        let logs = directory.display().to_string();
        let reported = asked(&stage, &["attribute", &logs, "--json"], &[]);
        let value: Value = serde_json::from_slice(&reported.stdout).expect("JSON");
        assert_eq!((&value["class"], &value["culprit"]), (&"hardware_gpu".into(), &1.into()), "{value}");
        let grounds = ["evidence", "against", "consequences"];
        let grounds = grounds.iter().flat_map(|name| value[*name].as_array().into_iter().flatten());
        let quotes = grounds.flat_map(|ground| ground["quotes"].as_array().into_iter().flatten());
        let sources: Vec<&str> = quotes.filter_map(|quote| quote["source"].as_str()).collect();
        let of_ranks = |source: &&str| source.contains("/attempt_0/1/") || source.starts_with("exit");
        assert!(!sources.is_empty() && sources.iter().all(of_ranks), "{value}");
    }
}
