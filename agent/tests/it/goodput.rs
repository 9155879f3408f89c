//! `mainstay goodput`: the books of jobs from run directories, from a journal and from a server.

use std::path::Path;
use std::process::{Output, Stdio};

use mainstay_journal::store::journal::{Journal, Limits};
use mainstay_model::entry::{Body, ExitStatus, Fact, JobSpec};
use mainstay_model::id::{Attempt, BootId, Incident, JobId, Pid, Rank};
use mainstay_model::time::{Mono, Span, Stamp, Wall};
use mainstay_model::verdict::{Action, Cause, DecidedBy, Decision, Doubts, FaultDomain, Verdict};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::api::server::Server;

/// 2026-01-01 00:00:00 UTC.
const DAY: i64 = 1_767_225_600;

fn body(fact: Fact) -> Body {
    Body::Fact(fact)
}

fn started(follows: bool) -> Body {
    let run = "exp~0123456789ab".to_owned();
    body(Fact::JobStarted(JobSpec {
        world_size: 4,
        local_world_size: 2,
        run,
        follows,
        uid: 0,
        ..JobSpec::default()
    }))
}

fn attempt(number: u32) -> Body {
    let (attempt, ranks, hosts) = (Attempt(number), Vec::new(), Vec::new());
    body(Fact::AttemptStarted { attempt, master_port: 1, ranks, hosts })
}

fn stepping(step: u64) -> Body {
    body(Fact::RanksStepping { attempt: Attempt(0), step, counted: false, restoring: Span::default() })
}

fn progress(step: u64) -> Body {
    body(Fact::Progress { attempt: Attempt(0), step, loss: None, saving: Span::default(), saves: 0 })
}

fn ended(exit: i32) -> Body {
    body(Fact::JobEnded { exit, reason: "why".to_owned() })
}

/// A launch that trains for 90 s, loses a host, and is handed back after 100 s.
fn first(follows: bool) -> Vec<(u64, Body)> {
    let exited = Fact::RankExited {
        attempt: Attempt(0),
        rank: Rank(2),
        pid: Pid(1),
        status: ExitStatus::Signal(9),
        step: Some(91),
        data: None,
        after_stop: false,
        stderr_tail: Vec::new(),
        stdout_tail: Vec::new(),
        stderr_times: Vec::new(),
        stdout_times: Vec::new(),
    };
    let verdict = Verdict {
        incident: Incident(1),
        attempt: Attempt(0),
        headline: "host node-7 was lost".to_owned(),
        cause: Cause::HostLost { host: "node-7".to_owned() },
        domain: FaultDomain::Infrastructure,
        class: None,
        deterministic: false,
        doubts: Doubts::default(),
        confidence: 0.9,
        culprit_confidence: None,
        culprit: None,
        host: None,
        victims: Vec::new(),
        step: None,
        data: None,
        heartbeats: true,
        cannot_run: false,
        fault_at: Mono(95_000_000_000),
        detected_at: Mono(97_000_000_000),
        evidence: Vec::new(),
    };
    let decision = Decision {
        incident: Incident(1),
        action: Action::HandBack { exit: 75 },
        after: Span::default(),
        rule: mainstay_model::verdict::Rule::HostMissing,
        why: "no spare".to_owned(),
        by: DecidedBy::Launcher,
        agent_evidence: false,
    };
    vec![
        (0, started(follows)),
        (2, attempt(0)),
        (5, stepping(1)),
        (95, body(exited)),
        (98, body(Fact::AttemptEnded { attempt: Attempt(0), orphans_killed: 0, waiting: Vec::new() })),
        (98, Body::Verdict(verdict)),
        (99, Body::Decision(decision)),
        (100, ended(75)),
    ]
}

/// The next one, 900 s later, which repeats 40 steps.
fn second() -> Vec<(u64, Body)> {
    vec![
        (1000, started(false)),
        (1001, attempt(0)),
        (1010, stepping(52)),
        (1100, progress(142)),
        (1110, ended(0)),
    ]
}

fn journal(dir: &Path, name: &str, entries: Vec<(u64, Body)>) {
    journal_since(DAY, dir, name, entries);
}

/// The entries at so many seconds after `start`, in seconds since 1970.
fn journal_since(start: i64, dir: &Path, name: &str, entries: Vec<(u64, Body)>) {
    let mut journal = Journal::open(&dir.join("journal"), Limits::default(), BootId("boot".into())).unwrap();
    for (second, body) in entries {
        let wall = Wall((start + second as i64) * 1_000_000_000);
        let at = Stamp { mono: Mono(second * 1_000_000_000), wall };
        journal.append(at, Some(&JobId(name.to_owned())), None, body).unwrap();
    }
}

/// A number of seconds, rounded.
fn whole(seconds: &Value) -> i64 {
    seconds.as_f64().unwrap().round() as i64
}

async fn goodput(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mainstay"));
    command.env_clear().env("XDG_RUNTIME_DIR", dir).env("TZ", "UTC").stdin(Stdio::null()).kill_on_drop(true);
    command.arg("goodput").args(args).output().await.unwrap()
}

async fn books(dir: &Path, args: &[&str]) -> Value {
    let output = goodput(dir, &[args, &["--json"]].concat()).await;
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test]
async fn a_job_has_one_account_over_its_launches_and_hosts() {
    let dir = testing::tempdir().unwrap();
    journal(&dir.path().join("exp"), "exp", first(false));
    journal(&dir.path().join("exp.follower"), "exp", first(true));
    journal(&dir.path().join("exp.2"), "exp.2", second());
    let log_dir = dir.path().to_str().unwrap();
    let shown = books(dir.path(), &["exp", "--log-dir", log_dir, "--price", "2"]).await;
    assert_eq!(shown["schema_version"], 1);
    let job = &shown["jobs"][0];
    assert_eq!(shown["jobs"].as_array().unwrap().len(), 1);
    assert_eq!(json!([job["job"], job["launches"]]), json!(["exp", 2]));
    assert_eq!(whole(&job["wall_seconds"]), 1110);
    let seconds = |state: &str| -> f64 {
        let times = job["times"].as_array().unwrap().iter().filter(|time| time["state"] == state);
        times.map(|time| time["seconds"].as_f64().unwrap()).sum::<f64>().round()
    };
    assert_eq!((seconds("idle"), seconds("undetected"), seconds("lost_work")), (900.0, 2.0, 39.0));
    // 90 s, 51 of 90 s, and 10 s to the end in which no step is known.
    assert_eq!(seconds("training"), 90.0 + 51.0 + 10.0);
    assert_eq!(json!([job["lost_steps"], job["steps"], job["failures"]]), json!([40, 142, 1]));
    assert_eq!(job["causes"][0]["host"], "node-7");
    assert_eq!(whole(&job["mttr_seconds"]), 915);
    let hours = 4.0 * 1110.0 / 3600.0;
    assert!((job["device_hours"].as_f64().unwrap() - hours).abs() < 1e-6, "{job}");
    assert!((job["cost"].as_f64().unwrap() - 2.0 * hours).abs() < 1e-6, "{job}");

    let window = ["--since", "2026-01-01T00:16:40", "--until", "2026-01-01T00:17:40Z"];
    let last = books(dir.path(), &[&["--log-dir", log_dir], &window[..]].concat()).await;
    assert_eq!(whole(&last["total"]["wall_seconds"]), 60);
    // A run directory is a name too.
    let run_dir = dir.path().join("exp").display().to_string();
    let by_directory = books(dir.path(), &[&run_dir, "--log-dir", log_dir]).await;
    assert_eq!(by_directory["total"], books(dir.path(), &["--log-dir", log_dir]).await["total"]);
    for unknown in [&["nope", "--log-dir", log_dir][..], &["--journal", "/nowhere"]] {
        assert_eq!(goodput(dir.path(), unknown).await.status.code(), Some(3), "{unknown:?}");
    }
    for wrong in [&["--since", "yesterday"][..], &["--price", "-1"], &["--since", "1h", "--until", "2h"]] {
        assert_eq!(goodput(dir.path(), wrong).await.status.code(), Some(64), "{wrong:?}");
    }
}

#[tokio::test]
async fn tables_and_logs_have_the_same_sums() {
    let dir = testing::tempdir().unwrap();
    journal(&dir.path().join("exp"), "exp", first(false));
    journal(&dir.path().join("exp.2"), "exp.2", second());
    let log_dir = dir.path().to_str().unwrap();
    let text = async |args: &[&str]| -> String {
        let output = goodput(dir.path(), &[&["--log-dir", log_dir], args].concat()).await;
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let csv = text(&["--csv"]).await;
    let seconds = |row: &str| -> f64 { row.split(',').nth(6).unwrap().parse().unwrap() };
    let sum: f64 = csv.lines().skip(1).map(seconds).sum();
    assert!((sum - 1110.0).abs() < 0.01, "{csv}");
    assert!(csv.lines().any(|row| row.contains(",lost_work,host_lost,node-7,1,39.000,")), "{csv}");
    assert!(text(&["--by", "host"]).await.contains("node-7"));
    assert!(text(&["--by", "cause", "--price", "3"]).await.contains("host_lost"));
    assert!(text(&[]).await.contains("host node-7 was lost"));

    // What Google's calculator would show of the log.
    let log = dir.path().join("log");
    std::fs::write(&log, text(&["--ml-goodput"]).await).unwrap();
    let read = goodput(dir.path(), &["--read-ml-goodput", log.to_str().unwrap()]).await;
    let read: Value = serde_json::from_slice(&read.stdout).unwrap();
    assert_eq!((whole(&read["total"]), &read["disruptions"]), (1110, &json!(1)));
    assert_eq!(whole(&read["badput"]["WASTED_PROGRESS_FROM_DISRUPTION"]), 39);
}

#[tokio::test]
async fn a_server_has_the_books_of_its_jobs_also_over_tcp() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.job("demo");
    server.record(72, Some("demo"), progress(61));
    let tcp = server.grpc.to_string();
    for (option, place) in [("--socket", server.socket.to_str().unwrap()), ("--host", &tcp)] {
        let shown = books(dir.path(), &["demo", option, place]).await;
        // The clock of the server is at 100 s, and the job began at 10 s.
        assert_eq!(whole(&shown["total"]["wall_seconds"]), 90);
        let limited = goodput(dir.path(), &[option, place, "--since", "1h"]).await;
        assert_eq!(limited.status.code(), Some(64));
        assert_eq!(goodput(dir.path(), &["nope", option, place]).await.status.code(), Some(3));
    }
    server.stop().await;
}

#[tokio::test]
async fn the_commands_of_the_page_work() {
    let home = testing::tempdir().unwrap();
    let runs = home.path().join(".local/state/mainstay/runs");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    journal_since(now.cast_signed() - 1200, &runs.join("exp"), "exp", first(false));
    let page =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/howto/goodput.md")).unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_mainstay")).parent().unwrap();
    let commands: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("$ ")).collect();
    assert!(commands.len() > 6);
    // An agent of this host or of another one is not here.
    let has_no_agent = |line: &&str| !line.contains("/var/lib") && !line.contains("--host");
    for line in commands.into_iter().filter(has_no_agent) {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", &line.replace("JOB", "exp")]).current_dir(home.path()).env_clear();
        let output = shell.env("PATH", program).env("HOME", home.path()).output().await.unwrap();
        assert_eq!(output.status.code(), Some(0), "{line}: {output:?}");
    }
}
