//! Two real users of one agent of root, on its local socket. Root starts them; without root the tests print a note
//! and are skipped.
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::support::Agent;
use hyper_util::rt::TokioIo;
use mainstay_model::entry::{Body, Entry, Fact, JobSpec};
use mainstay_model::id::{BootId, JobId};
use mainstay_model::time::{Mono, Stamp, Wall};
use mainstay_proto::v1::from_launcher::Message;
use mainstay_proto::v1::launcher_service_client::LauncherServiceClient;
use mainstay_proto::v1::{ForwardedEntry, FromLauncher, Hello};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

pub(crate) const A: u32 = 61_001;
pub(crate) const B: u32 = 61_002;
/// The group that may connect.
const GROUP: u32 = 61_000;

/// Names the client that this program runs as another user.
const ROLE: &str = "MAINSTAY_TEST_CLIENT";
const SOCKET: &str = "MAINSTAY_TEST_SOCKET";

pub(crate) struct Host {
    /// Dropped before its directory.
    pub(crate) agent: Agent,
    /// The turns of the agent's loop, as systemd would receive them.
    ticks: Receiver<()>,
    directory: testing::TempDir,
}

fn host() -> Option<Host> {
    host_with(&[])
}

/// The same with additional settings.
pub(crate) fn host_with(further: &[(&str, &Path)]) -> Option<Host> {
    if !nix::unistd::geteuid().is_root() {
        testing::skip("only root can start two users");
        return None;
    }
    let directory = testing::tempdir().unwrap();
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
    let reported = directory.path().join("notify");
    let notices = UnixDatagram::bind(&reported).unwrap();
    // Read all the time: a full queue would block the agent.
    let (report, ticks) = channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 512];
        while let Ok(length) = notices.recv(&mut buffer) {
            if buffer[..length].starts_with(b"WATCHDOG=1") && report.send(()).is_err() {
                return;
            }
        }
    });
    let log = directory.path().join("kmsg");
    fs::write(&log, "").unwrap();
    let mut settings: Vec<(&str, &Path)> = vec![
        ("KERNEL_LOG_PATH", &log),
        ("GPU_ENABLED", Path::new("false")),
        ("ALLOW_UIDS", Path::new("61001, 61002")),
        ("SOCKET_GID", Path::new("61000")),
    ];
    settings.extend(further);
    let agent = Agent::start_in(directory.path(), &settings, &[("NOTIFY_SOCKET", &reported)]);
    Some(Host { directory, ticks, agent })
}

impl Host {
    fn socket(&self) -> PathBuf {
        self.directory.path().join("agent.sock")
    }

    /// A command as another user.
    fn run_as(&self, uid: u32, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mainstay"));
        command.args(arguments).arg("--socket").arg(self.socket()).uid(uid).gid(GROUP).output().unwrap()
    }

    /// This program as another user, after it has started its role.
    pub(crate) fn client(&self, uid: u32, role: &str) -> Client {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "two_users::as_another_user", "--nocapture"])
            .env(ROLE, role)
            .env(SOCKET, self.socket())
            .uid(uid)
            .gid(GROUP)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let printed = lines
            .find_map(|line| line.unwrap().split_once("client: ").map(|(_, printed)| printed.to_owned()));
        Client { child, printed: printed.unwrap_or_default() }
    }

    /// The agent's behavior for the watchdog and for a user.
    pub(crate) fn seen_by(&self, uid: u32) -> Seen {
        while self.ticks.try_recv().is_ok() {}
        let mut waits: Vec<Duration> = (0..3)
            .map(|_| {
                let began = Instant::now();
                self.ticks.recv_timeout(WATCHDOG).unwrap();
                began.elapsed()
            })
            .collect();
        waits.sort_unstable();
        let attach = self.client(uid, "measure").printed.clone();
        let began = Instant::now();
        self.run_a_job_that_restarts(uid);
        Seen { longest_turn: waits[2], attach, job_with_a_restart: began.elapsed() }
    }

    /// A job of this user whose rank fails once, with the agent.
    fn run_a_job_that_restarts(&self, uid: u32) {
        let end = self.run_a_job(uid, &["--max-restarts", "1"], "[ -e mark ] || { touch mark; exit 1; }");
        assert!(end.status.success(), "{end:?}");
        assert!(String::from_utf8_lossy(&end.stderr).contains("1 restart"), "{end:?}");
    }

    /// A job of this user, in a new directory, with the agent.
    fn run_a_job(&self, uid: u32, options: &[&str], script: &str) -> Output {
        let home = testing::tempdir().unwrap();
        std::os::unix::fs::chown(home.path(), Some(uid), Some(GROUP)).unwrap();
        let place = |name: &str| home.path().join(name).display().to_string();
        let (logs, pages) = (place("logs"), place("pages"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_mainstay"));
        command.args(["run", "--no-python", "--log-dir", &logs, "--runtime-dir", &pages, "--socket"]);
        command.arg(self.socket()).args(options).args(["sh", "-c", script]);
        command.current_dir(home.path()).uid(uid).gid(GROUP).output().unwrap()
    }
}

/// How long a turn of the agent's loop may take before systemd would end the agent.
const WATCHDOG: Duration = Duration::from_secs(30);

/// How well the agent serves clients that are not hostile. Printed, not asserted: it depends on the machine.
#[derive(Debug)]
#[allow(dead_code, reason = "printed")]
pub(crate) struct Seen {
    longest_turn: Duration,
    attach: String,
    job_with_a_restart: Duration,
}

pub(crate) struct Client {
    child: Child,
    /// Its first line of output.
    pub(crate) printed: String,
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn jobs_of_two_users_with_one_name_are_two_jobs() {
    let Some(host) = host() else { return };
    let of_a = host.client(A, "attach train");
    let of_b = host.client(B, "attach train");
    assert_eq!((of_a.printed.as_str(), of_b.printed.as_str()), ("welcome", "welcome"));
    let events = [host.agent.wait_for("\"train\""), host.agent.wait_for("61002!train")];
    assert!(!events[0].contains("61002!train"));
    let speaks_for_a = host.client(B, "attach 61001!train");
    assert!(speaks_for_a.printed.contains("another user's"), "{}", speaks_for_a.printed);
    for bad in ["", "a/../b", "with\u{7}bell", &"x".repeat(1 << 20)] {
        // An environment variable cannot hold a megabyte; the client creates the text.
        let role = if bad.len() > 1000 { "attach-long".to_owned() } else { format!("attach {bad}") };
        let refused = host.client(B, &role);
        assert!(refused.printed.contains("choose another --rdzv-id"), "{bad:?}: {}", refused.printed);
    }
}

#[test]
fn the_outcome_of_an_ended_job_is_not_replaced_by_another_users_job_of_that_name() {
    let Some(host) = host() else { return };
    let run = |uid, script| {
        let end = host.run_a_job(uid, &["--max-restarts", "0", "--rdzv-id", "train"], script);
        end.status.code()
    };
    assert_eq!((run(A, "exit 3"), run(B, "exit 0")), (Some(3), Some(0)));
    host.agent.wait_for("61002!train");
    let shown = |uid| host.run_as(uid, &["status", "--job", "train"]).status.code();
    // 2: the job failed.
    assert_eq!((shown(A), shown(B)), (Some(2), Some(0)));
}

#[test]
fn a_user_is_no_operator_and_refused_calls_are_recorded() {
    let Some(host) = host() else { return };
    assert_eq!(fs::metadata(host.socket()).unwrap().gid(), GROUP);
    let refused = host.run_as(A, &["silence", "host.cpu", "--reason", "no reason", "--for", "1h"]);
    assert!(!refused.status.success(), "{refused:?}");
    let written = host.agent.wait_for("agent.calls");
    assert!(written.contains("61001") && written.contains("SilenceComponent"), "{written}");
    // A user outside the group cannot even connect.
    let mut stranger = Command::new(env!("CARGO_BIN_EXE_mainstay"));
    let answered =
        stranger.args(["status", "--socket"]).arg(host.socket()).uid(61_003).gid(61_003).output().unwrap();
    assert!(!answered.status.success(), "{answered:?}");
}

#[test]
fn the_output_of_a_users_program_is_for_that_user_and_for_operators() {
    let Some(host) = host() else { return };
    let script = "echo 'SECRET in its output' >&2; exit 7";
    let end = host.run_a_job(A, &["--max-restarts", "0", "--rdzv-id", "private"], script);
    assert_eq!(end.status.code(), Some(7), "{end:?}");
    host.agent.wait_for("job_ended");
    let root = 0;
    for arguments in
        [&["status", "--json"][..], &["status", "--all"], &["events", "--json"], &["explain", "private"]]
    {
        let seen = |uid| {
            let Output { stdout, stderr, .. } = host.run_as(uid, arguments);
            String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr)
        };
        for uid in [A, root] {
            assert!(seen(uid).contains("SECRET"), "{arguments:?} as {uid}: {}", seen(uid));
        }
        let of_another = seen(B);
        assert!(!of_another.contains("SECRET"), "{arguments:?}: {of_another}");
        assert!(of_another.contains("private"), "{arguments:?}: {of_another}");
        if arguments[0] == "explain" {
            let socket = host.socket().display().to_string();
            testing::snapshot!("two_users", "explain", of_another.replace(&socket, "SOCKET"));
        }
    }
    // What others may read is complete: that it failed, and the status.
    let events = String::from_utf8(host.run_as(B, &["events", "--json"]).stdout).unwrap();
    assert!(events.contains("\"status.code\":\"7\"") && events.contains("job_ended"), "{events}");
}

#[test]
fn hostile_launchers_starve_neither_the_loop_nor_another_user() {
    let Some(host) = host() else { return };
    let quiet = host.seen_by(B);
    let hostile: Vec<Client> = (0..16).map(|number| host.client(A, &format!("flood {number}"))).collect();
    assert!(hostile.iter().all(|client| client.printed == "flooding"));
    let flooded = host.seen_by(B);
    println!("quiet: {quiet:?}\nflooded: {flooded:?}");
    let status = host.run_as(B, &["status"]);
    assert!(String::from_utf8_lossy(&status.stdout).contains("host."), "{status:?}");
}

/// Not a test, but what the tests above start as another user.
#[test]
#[ignore = "started by the other tests"]
fn as_another_user() {
    let (Ok(role), Ok(socket)) = (std::env::var(ROLE), std::env::var(SOCKET)) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (what, about) = role.split_once(' ').unwrap_or((&role, ""));
    match what {
        "attach" => runtime.block_on(attach(socket, about.to_owned())),
        "measure" => runtime.block_on(measure(socket)),
        "attach-long" => runtime.block_on(attach(socket, "x".repeat(1 << 20))),
        "flood" => runtime.block_on(flood(socket, about)),
        _ => runtime.block_on(crate::unread::play(what, about, socket)),
    }
}

pub(crate) async fn connect(socket: String) -> Channel {
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost").connect_with_connector(connector).await.unwrap()
}

pub(crate) fn message(message: Message) -> FromLauncher {
    FromLauncher { message: Some(message) }
}

pub(crate) fn hello(job: &str) -> FromLauncher {
    message(Message::Hello(Hello { job: job.to_owned(), pid: 1, version: String::new() }))
}

/// The entry with which a job starts.
pub(crate) fn started(job: &str, seq: u64, command: String) -> FromLauncher {
    let spec = JobSpec { command: vec![command], ..JobSpec::default() };
    let at = Stamp { wall: Wall(1), mono: Mono(1) };
    let (boot, job) = (BootId("boot".to_owned()), Some(JobId(job.to_owned())));
    let body = Body::Fact(Fact::JobStarted(spec));
    let line = serde_json::to_string(&Entry { seq, at, boot, job, origin_seq: None, body }).unwrap();
    message(Message::Entry(ForwardedEntry { line }))
}

/// One job, which stays attached.
async fn attach(socket: String, job: String) {
    let mut client = LauncherServiceClient::new(connect(socket).await);
    let (printed, receives) = tokio::sync::mpsc::channel(4);
    printed.send(hello(&job)).await.unwrap();
    match client.attach(tokio_stream::wrappers::ReceiverStream::new(receives)).await {
        Err(status) => println!("\nclient: {}", status.message()),
        Ok(answers) => {
            let mut answers = answers.into_inner();
            answers.message().await.unwrap();
            printed.send(started(&job, 1, "python".to_owned())).await.unwrap();
            println!("\nclient: welcome");
            while let Ok(Some(_)) = answers.message().await {}
        }
    }
}

/// How long it takes to connect and attach: the median of several.
async fn measure(socket: String) {
    let mut took = Vec::new();
    for number in 0..9 {
        let began = Instant::now();
        let mut client = LauncherServiceClient::new(connect(socket.clone()).await);
        let (printed, receives) = tokio::sync::mpsc::channel(4);
        printed.send(hello(&format!("measured-{number}"))).await.unwrap();
        let answers = client.attach(tokio_stream::wrappers::ReceiverStream::new(receives)).await.unwrap();
        answers.into_inner().message().await.unwrap();
        took.push(began.elapsed());
    }
    took.sort_unstable();
    println!("\nclient: {:?}", took[took.len() / 2]);
}

/// Jobs with very long commands, as fast as they are accepted. All attach before the first one floods: streams of
/// one connection share its window, so a client that floods blocks its own later streams.
async fn flood(socket: String, number: &str) {
    let mut client = LauncherServiceClient::new(connect(socket).await);
    let mut streams = Vec::new();
    for stream in 0..15 {
        let (printed, receives) = tokio::sync::mpsc::channel(4);
        let job = format!("hostile-{number}-{stream}");
        printed.send(hello(&job)).await.unwrap();
        let answers = client.attach(tokio_stream::wrappers::ReceiverStream::new(receives)).await.unwrap();
        streams.push((answers, printed, job));
    }
    let (report, reported) = tokio::sync::oneshot::channel();
    let (mut report, mut answers) = (Some(report), Vec::new());
    for (stream, printed, job) in streams {
        answers.push(stream);
        let mut report = report.take();
        tokio::spawn(async move {
            for seq in 1.. {
                let command = "x".repeat(if seq % 4 == 0 { 1 << 20 } else { 16 });
                let is_refused = printed.send(started(&job, seq, command)).await.is_err();
                // More than may wait in the channel: a long one is in transit.
                if (seq == 8 || is_refused)
                    && let Some(report) = report.take()
                {
                    let _ = report.send(());
                }
                if is_refused {
                    return;
                }
            }
        });
    }
    reported.await.unwrap();
    println!("\nclient: flooding");
    std::future::pending::<()>().await;
}
