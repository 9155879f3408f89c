//! The blocks of the documents that are marked `<!-- run -->`, on a host with an agent, a job that runs and one that
//! failed.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use mainstay_tests::documents::{self, Checked};
use mainstay_tests::{Stage, has_client, mainstay, processes, skipped};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// Options with which a command goes on until it is stopped.
const ENDLESS: [&str; 2] = ["--watch", "tail -F"];

/// Exit statuses from here on are not about what was asked: the command line, or a failure of the command itself.
const NO_ANSWER: i32 = 64;

#[test]
fn the_documents_commands_do_what_the_documents_say() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let usual = stage.home().join(".local/state/mainstay");
    fs::create_dir_all(&usual).expect("a directory");
    std::os::unix::fs::symlink(stage.logs(), usual.join("runs")).expect("a link");
    let agent = stage.agent();
    let script = r#"
import mainstay
state = mainstay.checkpoint.load()
for step in range(3):
    mainstay.step(step)
mainstay.checkpoint.save(2, {"step": 2})
mark(f"up.{RANK}")
wait_for("end")
"#;
    let steps = stage.work().join("steps");
    let options = format!("--checkpoint-dir {}", steps.display());
    let job = stage.python(script).ranks(2).options(&options).with(&agent).start();
    job.mark("up.0");
    job.mark("up.1");
    processes::wait_until("the step is on the disk", || {
        let verified =
            stage.shell(&format!("mainstay ckpt verify {}", steps.display())).output().expect("a shell");
        verified.status.success()
    });
    // The newest run.
    let failed = stage.python("raise KeyError('learning_rate')").ranks(1).with(&agent).start();
    let (failed_id, failed_run) = (failed.id().to_owned(), failed.run_dir());
    failed.end();
    let trace = stage.work().join("steps.csv");
    let row = |rank: u32, step: u32| format!("{rank},{step},step,{}\n", if rank == 3 { 150 } else { 100 });
    let rows: String = (0..40).flat_map(|step| (0..4).map(move |rank| row(rank, step))).collect();
    fs::write(&trace, format!("rank,step,section,duration_ns\n{rows}")).expect("a trace");

    // What stands for something of the reader's, and the usual places, which belong to another agent here.
    let agents = agent.socket().parent().expect("a socket in a directory");
    let meant = [
        ("RUN", failed_id),
        ("JOB", job.id().to_owned()),
        ("FILE", trace.display().to_string()),
        ("DIRECTORY", steps.display().to_string()),
        ("/path/to/logs", failed_run.display().to_string()),
        ("/var/lib/mainstay/journal", stage.work().join("agent-state/journal").display().to_string()),
        ("/run/mainstay", agents.display().to_string()),
    ];
    let mut run = 0;
    for page in documents::pages(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..")) {
        for block in page.blocks().iter().filter(|block| block.checked() == Some(Checked::Run)) {
            let missing = ["jq", "curl"].iter().find(|tool| block.text.contains(**tool) && !is_there(tool));
            if let Some(tool) = missing {
                skipped(&format!("{}: there is no {tool}", page.at(block.start)));
                continue;
            }
            let scripts = if block.language == "console" { block.commands() } else { parts(&block.text) };
            for script in scripts {
                let script = meant.iter().fold(script, |text, (name, value)| text.replace(name, value));
                let ended = run_script(&stage, agent.socket(), &script);
                assert!(ended.is_ok(), "{}: {script}\n{}", page.at(block.start), ended.unwrap_err());
                run += 1;
            }
        }
    }
    assert!(run > 10, "{run} commands were run");
    stage.mark("end");
    job.end();
}

fn is_there(tool: &str) -> bool {
    Command::new("which").arg(tool).stdout(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// The parts of a script between its empty lines, each with the first one before it: the directory.
fn parts(text: &str) -> Vec<String> {
    let mut parts = text.split("\n\n");
    let first = parts.next().unwrap_or_default();
    parts.map(|part| format!("{first}\n{part}")).collect()
}

/// Runs it as a user would. One without an end is stopped after its first line.
fn run_script(stage: &Stage, socket: &Path, script: &str) -> Result<(), String> {
    let mut shell = stage.shell(script);
    shell.env("MAINSTAY_SOCKET", socket).env("MAINSTAY_RUNTIME_DIR", stage.tmpfs()).stdin(Stdio::null());
    if !ENDLESS.iter().any(|option| script.contains(option)) {
        let output = shell.output().expect("a shell");
        let is_reply = !output.stdout.is_empty() && output.status.code().is_some_and(|code| code < NO_ANSWER);
        let has_answered = output.status.success() || is_reply;
        return if has_answered { Ok(()) } else { Err(format!("{output:?}")) };
    }
    // One that says nothing is not waited for without end.
    let mut shell = stage.shell("exec timeout --foreground 60 sh -c \"$SCRIPT\"");
    shell.env("SCRIPT", script).env("MAINSTAY_SOCKET", socket).env("MAINSTAY_RUNTIME_DIR", stage.tmpfs());
    let mut child = shell.stdout(Stdio::piped()).process_group(0).spawn().expect("a shell");
    let mut line = String::new();
    let read = BufReader::new(child.stdout.take().expect("its output")).read_line(&mut line);
    let group = Pid::from_raw(i32::try_from(child.id()).expect("a process id"));
    let stopped = killpg(group, Signal::SIGKILL);
    let status = child.wait();
    match (read, stopped) {
        (Ok(length), Ok(())) if length > 0 => Ok(()),
        result => Err(format!("{result:?}, {status:?}")),
    }
}

#[test]
fn a_command_that_does_not_answer_is_an_error() {
    let stage = Stage::new();
    let socket = stage.tmpfs().join("no.sock");
    let refused = format!("{} status --nosuch", mainstay().display());
    assert!(run_script(&stage, &socket, &refused).is_err());
    assert!(run_script(&stage, &socket, "exit 3").is_err(), "it says nothing");
    assert!(run_script(&stage, &socket, "echo a").is_ok());
}
