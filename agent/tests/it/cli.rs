//! The program as people run it: the real binary with a real server.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::api::server;

use std::path::Path;
use std::process::{Output, Stdio};

use mainstay_model::entry::{Body, Fact};
use mainstay_model::health::HealthState;
use mainstay_model::id::{Attempt, Incident, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::{Cause, Doubts, FaultDomain, Verdict};
use serde_json::Value;
use server::Server;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

/// A command in an environment in which, as far as a test can ensure, only `dir` has servers.
fn mainstay(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mainstay"));
    command
        .env_clear()
        .env("XDG_RUNTIME_DIR", dir)
        .env("MAINSTAY_RUNTIME_DIR", dir.join("runs"))
        .env("TZ", "UTC")
        .stdin(Stdio::null())
        .kill_on_drop(true);
    command
}

async fn run(command: &mut Command) -> Output {
    command.output().await.unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A text without the directory of this machine's runs.
fn without_runs(text: &str) -> String {
    let is_path = |word: &&str| word.starts_with('/');
    let path = text.split([' ', ',']).find(is_path).unwrap_or("/");
    text.replacen(path, "RUNS", 1)
}

/// The headline of the recorded failure.
const KILLED: &str = "rank 1 was killed by SIGKILL";

fn verdict() -> Body {
    Body::Verdict(Verdict {
        incident: Incident(1),
        attempt: Attempt(0),
        headline: KILLED.into(),
        cause: Cause::Signal { signal: 9 },
        domain: FaultDomain::Unknown,
        class: None,
        deterministic: false,
        doubts: Doubts::default(),
        confidence: 0.6,
        culprit_confidence: None,
        cannot_run: false,
        culprit: Some(Rank(1)),
        host: None,
        victims: vec![Rank(0)],
        step: Some(4),
        data: None,
        heartbeats: true,
        fault_at: Mono(20),
        detected_at: Mono(21),
        evidence: vec!["the kernel said so".into()],
    })
}

fn progress(step: u64) -> Fact {
    Fact::Progress { attempt: Attempt(0), step, loss: None, saving: Span::default(), saves: 0 }
}

#[tokio::test]
async fn an_empty_variable_of_an_option_counts_as_unset() {
    let dir = testing::tempdir().unwrap();
    let output = run(mainstay(dir.path()).arg("status").env("MAINSTAY_SOCKET", "")).await;
    assert!(stderr(&output).contains("agent.sock"), "it looks at the default places: {output:?}");
    let mut job = mainstay(dir.path());
    job.args(["run", "--no-agent", "--no-python", "--log-dir"]).arg(dir.path().join("logs"));
    for variable in ["SOCKET", "RESTART_BUDGET", "HANG", "CHECKPOINT_DIR", "CHECKPOINT_SLOTS", "NO_WARM"] {
        job.env(format!("MAINSTAY_{variable}"), "");
    }
    let output = run(job.arg("/bin/true")).await;
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

#[tokio::test]
async fn without_a_server_the_message_names_the_searched_places_and_what_to_start() {
    let dir = testing::tempdir().unwrap();
    let missing = dir.path().join("missing.sock");
    for command in ["status", "events"] {
        let output = run(mainstay(dir.path()).arg(command).env("MAINSTAY_SOCKET", &missing)).await;
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        let text = stderr(&output);
        assert!(text.contains(&missing.display().to_string()), "{text}");
        assert!(text.contains("mainstay run"), "{text}");
    }
    let output = run(mainstay(dir.path()).args(["status", "--json", "--socket"]).arg(&missing)).await;
    assert_eq!(output.status.code(), Some(3));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["state"], "UNKNOWN");
    assert_eq!(json["servers"][0]["answers"], false);
}

/// The finding of `mainstay doctor` about a part.
fn finding(doctor: &Output, what: &str) -> Option<Value> {
    let report: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let findings = report["findings"].as_array().unwrap();
    for finding in findings.iter().filter(|finding| finding["found"] == "no") {
        assert!(finding["fix"].as_str().is_some_and(|fix| !fix.is_empty()), "{finding}");
    }
    findings.iter().find(|finding| finding["what"] == what).cloned()
}

#[tokio::test]
async fn the_commands_by_which_doctor_fixes_sockets_without_a_server_fix_them() {
    let dir = testing::tempdir().unwrap();
    // The sockets stay when their servers are gone. One needs quotes.
    let (agent, run_dir) = (dir.path().join("an agent.sock"), dir.path().join("runs/job"));
    std::fs::create_dir_all(&run_dir).unwrap();
    let launcher = run_dir.join("api.sock");
    for socket in [&agent, &launcher] {
        drop(std::os::unix::net::UnixListener::bind(socket).unwrap());
    }
    let notices = tokio::net::UnixDatagram::bind(dir.path().join("notices")).unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_mainstay")).parent().unwrap();
    let fix = |finding: &Value| {
        let mut shell = Command::new("sh");
        shell
            .arg("-c")
            .arg(format!("exec {}", finding["fix"].as_str().unwrap()))
            .env("PATH", format!("{}:/usr/bin:/bin", program.display()))
            .env("MAINSTAY_AGENT_STATE_DIR", dir.path().join("state"))
            .env("NOTIFY_SOCKET", dir.path().join("notices"))
            .stdin(Stdio::null())
            .kill_on_drop(true);
        shell
    };
    let doctor = async |named: Option<&Path>| {
        let mut command = mainstay(dir.path());
        command.args(["doctor", "--json"]);
        if let Some(socket) = named {
            command.arg("--socket").arg(socket);
        }
        run(&mut command).await
    };

    let ill = finding(&doctor(None).await, "launcher socket").unwrap();
    assert_eq!(ill["found"], "no");
    assert!(fix(&ill).status().await.unwrap().success());
    assert_eq!(finding(&doctor(None).await, "launcher socket"), None);

    let before = doctor(Some(&agent)).await;
    assert_eq!(before.status.code(), Some(1));
    let ill = finding(&before, "agent socket").unwrap();
    assert_eq!(ill["found"], "no");
    let running = fix(&ill).spawn().unwrap();
    let mut notice = [0; 4096];
    loop {
        let length = notices.recv(&mut notice).await.unwrap();
        if String::from_utf8_lossy(&notice[..length]).lines().any(|line| line == "READY=1") {
            break;
        }
    }
    let well = finding(&doctor(Some(&agent)).await, "agent socket").unwrap();
    assert_eq!((&well["found"], well.get("fix")), (&Value::from("ok"), None));
    drop(running);
}

#[tokio::test]
async fn a_launcher_warns_if_no_agent_answers_on_the_named_socket() {
    let dir = testing::tempdir().unwrap();
    let missing = dir.path().join("missing.sock");
    let launch = async |options: &[&str]| {
        let mut command = mainstay(dir.path());
        command.env("PATH", "/usr/bin:/bin").env("MAINSTAY_SOCKET", &missing);
        command.args(["run", "--no-python", "--log-dir"]).arg(dir.path().join("logs"));
        let output = run(command.args(options).arg("/bin/true")).await;
        assert!(output.status.success(), "{output:?}");
        stderr(&output)
    };
    let text = launch(&[]).await;
    assert!(text.contains(&format!("agent: none: no socket at {}", missing.display())), "{text}");
    let text = launch(&["--no-agent"]).await;
    assert!(text.contains("agent: none") && !text.contains("no socket"), "{text}");
}

#[tokio::test]
async fn the_exit_status_of_status_is_the_worst_state() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    let socket = server.socket.clone();
    let status = async || run(mainstay(dir.path()).args(["status", "--socket"]).arg(&socket)).await;
    assert_eq!(status().await.status.code(), Some(3));
    server.health("host.cpu", HealthState::Healthy);
    assert_eq!(status().await.status.code(), Some(0));
    server.health("host.memory", HealthState::Degraded);
    assert_eq!(status().await.status.code(), Some(1));
    server.health("host.disk", HealthState::Unhealthy);
    server.job("demo");
    server.record(20, Some("demo"), verdict());
    let output = status().await;
    assert_eq!(output.status.code(), Some(2));
    let text = stdout(&output);
    for part in ["node-17  UNHEALTHY", "host.disk", "job demo  RUNNING", "rank 1 was killed", "4001"] {
        assert!(text.contains(part), "{part:?} is missing in:\n{text}");
    }
    assert!(!text.contains('\x1b'), "colours are for terminals: {text}");
    server.stop().await;
}

#[tokio::test]
async fn status_of_one_job_is_the_jobs() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.health("host.disk", HealthState::Unhealthy);
    server.job("good");
    server.job("bad");
    server.fact(20, "bad", Fact::JobEnded { exit: 1, reason: "no restarts left".into() });
    let socket = server.socket.clone();
    let status = async |job: &str| {
        let args = ["status", "--json", "--job", job, "--socket"];
        let output = run(mainstay(dir.path()).args(args).arg(&socket)).await;
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        (output.status.code(), json["servers"][0]["jobs"][0]["phase"].clone())
    };
    assert_eq!(status("good").await, (Some(0), Value::from("RUNNING")));
    assert_eq!(status("bad").await, (Some(2), Value::from("ENDED")));
    assert_eq!(status("none").await, (Some(3), Value::Null));
    server.stop().await;
}

#[tokio::test]
async fn an_unknown_job_is_an_error_of_every_command_in_both_forms() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.job("good");
    let order = ["--reason", "a test"];
    let commands: [&[&str]; 8] = [
        &["status"],
        &["ranks"],
        &["stacks"],
        &["events"],
        &["explain"],
        &["goodput"],
        &["job", "restart", order[0], order[1]],
        &["inject", "kill", "--rank", "0", order[0], order[1]],
    ];
    for command in commands {
        for named in [&["nope"][..], &["--job", "nope"]] {
            let mut asked = mainstay(dir.path());
            let output = run(asked.args(command).args(named).arg("--socket").arg(&server.socket)).await;
            assert_eq!(output.status.code(), Some(3), "{command:?} {named:?}: {output:?}");
            assert!(stderr(&output).contains("nope"), "{command:?} {named:?}: {output:?}");
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn a_failure_is_explained_by_the_server_that_knows_the_job() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.record(20, Some("exp-9"), verdict());
    server.job("exp-2");
    let ask = |words: &[&str]| {
        let mut command = mainstay(dir.path());
        command.arg("explain").args(words).arg("--socket").arg(&server.socket);
        command
    };
    let reported = run(&mut ask(&["exp-9"])).await;
    assert!(stdout(&reported).contains(KILLED), "{} {}", stdout(&reported), stderr(&reported));
    let json = run(&mut ask(&["exp-9", "--json"])).await;
    let json: Value = serde_json::from_str(&stdout(&json)).unwrap();
    assert_eq!((&json["run"], &json["verdict"]["incident"]), (&"exp-9".into(), &1.into()));
    // An option counts more than a variable, and the variable of the host more than that of the socket.
    let (at, nowhere) = (server.grpc.to_string(), "127.0.0.1:1");
    let explain = |words: &[&str], host: &str| {
        let mut command = mainstay(dir.path());
        command
            .args(["explain", "exp-9"])
            .args(words)
            .env("MAINSTAY_SOCKET", "/nowhere")
            .env("MAINSTAY_HOST", host);
        command
    };
    let socket = server.socket.to_str().unwrap();
    for (words, host) in
        [(&["--host", &at][..], nowhere), (&[][..], &at), (&["--socket", socket][..], nowhere)]
    {
        let shown = run(&mut explain(words, host)).await;
        assert_eq!(stdout(&shown), stdout(&reported), "{words:?}: {}", stderr(&shown));
    }
    for words in [&["--host", "a/b"][..], &["--host", &at, "--socket", socket][..]] {
        assert_eq!(run(&mut explain(words, nowhere)).await.status.code(), Some(64), "{words:?}");
    }
    // No server knows the second failure or the other job.
    assert!(!run(&mut ask(&["exp-9", "--incident", "2"])).await.status.success());
    let unknown = run(&mut ask(&["exp-1"])).await;
    assert!(!unknown.status.success(), "{}", stderr(&unknown));
    testing::snapshot!("explain", "an unknown job", without_runs(&stderr(&unknown)));
    // A known job without a failure.
    let healthy = run(&mut ask(&["exp-2"])).await;
    assert_eq!(healthy.status.code(), Some(3), "{}", stderr(&healthy));
    testing::snapshot!("explain", "a job without a failure", stderr(&healthy));
    server.stop().await;
}

#[tokio::test]
async fn servers_are_found_and_dead_sockets_are_marked() {
    let dir = testing::tempdir().unwrap();
    let runs = dir.path().join("runs");
    for run in ["alive", "dead", "silent"] {
        std::fs::create_dir_all(runs.join(run)).unwrap();
    }
    let mut server = Server::start(&runs.join("alive")).await;
    server.job("alive");
    drop(std::os::unix::net::UnixListener::bind(runs.join("dead/api.sock")).unwrap());
    // It accepts connections and never answers.
    let _silent = std::os::unix::net::UnixListener::bind(runs.join("silent/api.sock")).unwrap();
    let output = run(mainstay(dir.path()).args(["status"])).await;
    let text = stdout(&output);
    assert!(text.contains("job alive  RUNNING"), "{text}");
    let dead = runs.join("dead/api.sock").display().to_string();
    assert!(text.lines().any(|line| line.starts_with("dead socket") && line.contains(&dead)), "{text}");
    let silent = runs.join("silent/api.sock").display().to_string();
    assert!(text.lines().any(|line| line.starts_with("no answer") && line.contains(&silent)), "{text}");
    server.stop().await;
}

#[tokio::test]
async fn events_are_printed_filtered_and_counted() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.job("demo");
    server.record(20, Some("demo"), verdict());
    for step in 0..5 {
        server.fact(30, "other", progress(step));
    }
    let socket = server.socket.clone();
    let events = async |args: &[&str]| {
        let output = run(mainstay(dir.path()).arg("events").arg("--socket").arg(&socket).args(args)).await;
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        stdout(&output).lines().map(str::to_owned).collect::<Vec<String>>()
    };
    assert_eq!(events(&[]).await.len(), 9);
    let verdicts = events(&["--kind", "verdict"]).await;
    testing::snapshot!("events", "a verdict", verdicts.join("\n"));
    let cursors = async |args: &[&str]| -> Vec<u64> {
        let cursor = |line: String| -> u64 {
            let json: Value = serde_json::from_str(&line).unwrap();
            json["cursor"].as_u64().unwrap()
        };
        events(args).await.into_iter().map(cursor).collect()
    };
    assert_eq!(cursors(&["--json", "--since", "7"]).await, [8, 9]);
    assert_eq!(cursors(&["--json", "-n", "3"]).await, [7, 8, 9]);
    assert_eq!(
        cursors(&["--json", "--since", "2026-01-01T00:00:20", "--until", "2026-01-01T00:00:20Z"]).await,
        [4]
    );
    assert_eq!(cursors(&["--json", "--job", "demo", "-n", "2"]).await, [3, 4]);
    assert_eq!(cursors(&["--json", "--severity", "error"]).await, [4]);
    let nope =
        run(mainstay(dir.path()).args(["events", "--job", "nope", "--socket"]).arg(&server.socket)).await;
    assert_eq!((nope.status.code(), stdout(&nope).as_str()), (Some(3), ""));
    server.stop().await;

    // The same without a server.
    let journal = dir.path().join("journal");
    let output =
        run(mainstay(dir.path()).args(["events", "--json", "--since", "8", "--journal"]).arg(&journal)).await;
    let line: Value = serde_json::from_str(stdout(&output).trim()).unwrap();
    assert_eq!((&line["cursor"], &line["type"]), (&Value::from(9), &Value::from("progress")));
    let output = run(mainstay(dir.path()).args(["events", "--journal", "/nowhere"])).await;
    assert_eq!(output.status.code(), Some(3));
    testing::snapshot!("events", "no journal there", stderr(&output));
}

struct Follower {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Follower {
    fn start(dir: &Path, socket: &Path) -> Follower {
        let mut child = mainstay(dir)
            .args(["events", "--json", "--follow", "--socket"])
            .arg(socket)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Follower { child, lines }
    }

    async fn next_cursor(&mut self) -> u64 {
        let line: Value = serde_json::from_str(&self.lines.next_line().await.unwrap().unwrap()).unwrap();
        line["cursor"].as_u64().unwrap_or_else(|| panic!("no event: {line}"))
    }

    async fn next_note(&mut self) -> String {
        let mut lines = BufReader::new(self.child.stderr.as_mut().unwrap()).lines();
        lines.next_line().await.unwrap().unwrap()
    }
}

#[tokio::test]
async fn a_follower_goes_on_over_a_restart_of_the_server() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.job("demo");
    let mut follower = Follower::start(dir.path(), &server.socket);
    let mut seen = Vec::new();
    for _ in 0..3 {
        seen.push(follower.next_cursor().await);
    }
    server.fact(20, "demo", progress(2));
    seen.push(follower.next_cursor().await);
    server.stop().await;
    let note = follower.next_note().await;
    // Before that is how the connection ended.
    testing::snapshot!("events", "a follower whose server stops", note.rsplit_once("; ").unwrap().1);
    let mut server = Server::start(dir.path()).await;
    server.fact(30, "demo", progress(3));
    server.fact(30, "demo", progress(4));
    for _ in 0..2 {
        seen.push(follower.next_cursor().await);
    }
    assert_eq!(seen, [1, 2, 3, 4, 5, 6]);
    server.stop().await;
}

#[tokio::test]
async fn usage_errors_are_64_and_help_has_examples() {
    let dir = testing::tempdir().unwrap();
    for args in [&["no-such-command"][..], &["status", "--no-such-option"], &["events", "--since", "x"], &[]]
    {
        let output = run(mainstay(dir.path()).args(args)).await;
        assert_eq!(output.status.code(), Some(64), "{args:?}: {output:?}");
    }
    let output = run(mainstay(dir.path()).arg("run").env("MAINSTAY_SOCKET", "/nowhere")).await;
    assert_eq!(output.status.code(), Some(64), "{output:?}");
    assert!(!stderr(&output).contains("--socket"), "a variable is no required option: {output:?}");
    for command in ["status", "events", "version", "completions"] {
        let output = run(mainstay(dir.path()).args([command, "--help"])).await;
        assert_eq!(output.status.code(), Some(0));
        let text = stdout(&output);
        assert!(text.contains("Examples:"), "{text}");
        assert!(command == "completions" || text.contains("--json") && text.contains("--output"), "{text}");
    }
}

#[tokio::test]
async fn version_and_completions_are_printed() {
    let dir = testing::tempdir().unwrap();
    let output = run(mainstay(dir.path()).args(["version", "--json"])).await;
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!((&json["schema_version"], &json["protocols"]["json"]), (&1.into(), &"1".into()));
    assert!(json["glibc"].is_string() && json["protocols"]["launchers"].is_string(), "{json}");
    let output = run(mainstay(dir.path()).args(["version", "--output", "yaml"])).await;
    assert!(stdout(&output).starts_with("---\n"), "{output:?}");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = run(mainstay(dir.path()).args(["completions", shell])).await;
        assert!(stdout(&output).contains("MAINSTAY_COMPLETE"), "{shell}");
    }
}

#[tokio::test]
async fn a_shell_completes_commands_and_the_names_of_running_jobs_and_of_components() {
    let dir = testing::tempdir().unwrap();
    let runs = dir.path().join("runs");
    for job in ["exp-7", "exp-8", "other"] {
        std::fs::create_dir_all(runs.join(job)).unwrap();
        let socket = std::os::unix::net::UnixListener::bind(runs.join(job).join("api.sock")).unwrap();
        // The socket stays; no one has to answer.
        drop(socket);
    }
    let script = stdout(&run(mainstay(dir.path()).args(["completions", "bash"])).await);
    let program = mainstay(dir.path()).as_std().get_program().to_owned();
    let completed_with = async |line: &str, agent: Option<&Path>| {
        let words: Vec<&str> = line.split(' ').collect();
        let last = words.len() - 1;
        let ask = format!(
            "{script}\nmainstay() {{ {program:?} \"$@\"; }}\nCOMP_WORDS=({}{}) COMP_CWORD={last} COMP_TYPE=9\n\
             _clap_complete_mainstay mainstay \"${{COMP_WORDS[$COMP_CWORD]}}\"\necho \"${{COMPREPLY[@]}}\"",
            words.join(" "),
            if words[last].is_empty() { "''" } else { "" },
        );
        let mut shell = tokio::process::Command::new("bash");
        shell.args(["-c", &ask]).env("MAINSTAY_RUNTIME_DIR", &runs);
        if let Some(socket) = agent {
            shell.env("MAINSTAY_SOCKET", socket);
        }
        let output = run(&mut shell).await;
        let mut found: Vec<String> = stdout(&output).split_whitespace().map(str::to_owned).collect();
        found.sort();
        found
    };
    let completed = async |line: &str| completed_with(line, None).await;
    assert_eq!(completed("mainstay rank").await, ["ranks"]);
    assert_eq!(completed("mainstay ranks exp").await, ["exp-7", "exp-8"]);
    assert_eq!(completed("mainstay status --job ot").await, ["other"]);
    assert_eq!(completed("mainstay explain exp-").await, ["exp-7", "exp-8"]);
    // The agent knows the components.
    let mut server = Server::start(dir.path()).await;
    for component in ["host.cpu", "host.memory", "net.eth0"] {
        server.health(component, HealthState::Healthy);
    }
    let with_agent = Some(server.socket.as_path());
    for command in ["ack", "silence", "unsilence", "explain"] {
        let line = format!("mainstay {command} host.");
        assert_eq!(completed_with(&line, with_agent).await, ["host.cpu", "host.memory"], "{command}");
    }
    server.stop().await;
}
