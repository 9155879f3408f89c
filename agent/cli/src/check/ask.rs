//! The source of checks: the host's agent, which knows the history, or else a look in a child process that is
//! abandoned if it hangs.

use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mainstay_health::host::preflight::{Check, CheckVerdict, Group};
use mainstay_model::time::Span;
use mainstay_proto::v1::RunPreflightRequest;
use tokio::sync::oneshot;

use super::Args;
use crate::client::{AskError, Client};
use crate::find::find;
use mainstay_app::{default_paths, one_check};
use mainstay_node::config::{Config, ConfigError, Environment};
use mainstay_sensors::probe;
use mainstay_sys::private_directory::private_directory;
use mainstay_sys::spawn::spawn_bound;
use mainstay_view::convert::{duration, preflight as convert};

/// Time allowed for the request and the answer, in addition to the checks themselves.
const BESIDE: Duration = Duration::from_secs(2);

/// Checks, and their source.
pub(super) struct CheckResults {
    pub(super) checks: Vec<Check>,
    /// In words: "agent at /run/mainstay/agent.sock".
    pub(super) by: String,
}

/// The checks of what is monitored.
pub(super) async fn watched(args: &Args, groups: &[Group]) -> CheckResults {
    let mut silent = Vec::new();
    if !args.alone {
        let agents = find(args.ask.socket.as_deref()).places.into_iter().filter(|place| place.job.is_none());
        for place in agents {
            match ask(&place.socket, args, groups).await {
                Ok(checks) => {
                    return CheckResults { checks, by: format!("agent at {}", place.socket.display()) };
                }
                Err(error) if args.ask.socket.is_some() => {
                    return nothing(groups, "agent", error.to_string());
                }
                // The agent exists but does not work; the host is checked without it.
                Err(error @ AskError::Silent(_)) => {
                    silent.extend(groups.first().map(|group| unknown("agent", *group, error.to_string())));
                }
                Err(_) => {}
            }
        }
    }
    let mut answers = look_alone(args, groups).await;
    answers.checks.extend(silent);
    answers
}

async fn ask(socket: &Path, args: &Args, groups: &[Group]) -> Result<Vec<Check>, AskError> {
    let request = RunPreflightRequest {
        groups: groups.iter().map(|group| convert::group(*group).into()).collect(),
        required: args.require.iter().map(|required| convert::requirement(*required)).collect(),
        deadline: Some(duration(args.deadline().0)),
        deep: false,
    };
    let checks = Client::connect(socket).await?.preflight(request, args.longest() + BESIDE).await?;
    Ok(checks.into_iter().map(convert::check_of).collect())
}

/// The agent's configuration, for a look without an agent.
pub(super) fn configuration(file: Option<&Path>) -> Result<Config, ConfigError> {
    let environment = Environment::new(default_paths::variables(), nix::unistd::geteuid().as_raw());
    Config::load(file, &environment, &[])
}

/// The result for the requested groups is unknown, for this reason.
fn nothing(groups: &[Group], name: &str, reason: String) -> CheckResults {
    CheckResults {
        checks: groups.first().map(|group| unknown(name, *group, reason)).into_iter().collect(),
        by: "nobody".into(),
    }
}

fn unknown(name: &str, group: Group, reason: String) -> Check {
    Check::new(name, group, CheckVerdict::Unknown, reason)
}

/// Starts the sensors in a child process and asks it.
async fn look_alone(args: &Args, groups: &[Group]) -> CheckResults {
    let mut look = match SensorProcess::start(args.config.as_deref()) {
        Ok(look) => look,
        Err(error) => return nothing(groups, "look", format!("the checks could not be started: {error}")),
    };
    let reading = match look.ready(args.longest()).await {
        Ok(()) => ask(&look.socket(), args, groups).await.map_err(|error| error.to_string()),
        Err(why) => Err(why),
    };
    match reading {
        Ok(checks) => CheckResults { checks, by: "this command, without an agent".to_owned() },
        Err(why) => nothing(groups, "look", why),
    }
}

/// The sensors in a child process. They end with this value; a child that hangs in the kernel is abandoned.
struct SensorProcess {
    child: Child,
    directory: PathBuf,
}

impl SensorProcess {
    fn start(config: Option<&Path>) -> io::Result<SensorProcess> {
        let directory = std::env::temp_dir().join(format!("mainstay-check-{}", std::process::id()));
        private_directory(&directory)?;
        let mut command = Command::new("/proc/self/exe");
        command.args([probe::SUBCOMMAND, "look", "--directory"]).arg(&directory);
        if let Some(config) = config {
            command.arg("--config").arg(config);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // The runtime of the command line runs on the main thread.
        match spawn_bound(&mut command, None) {
            Ok(child) => Ok(SensorProcess { child, directory }),
            Err(error) => {
                let _ = fs::remove_dir_all(&directory);
                Err(error)
            }
        }
    }

    fn socket(&self) -> PathBuf {
        self.directory.join(one_check::SOCKET)
    }

    /// Waits until it can be asked; else returns why it cannot.
    async fn ready(&mut self, longest: Duration) -> Result<(), String> {
        let (Some(response), Some(errors)) = (self.child.stdout.take(), self.child.stderr.take()) else {
            return Err("the checks could not be started: no pipe to them".to_owned());
        };
        let (report, receiver) = oneshot::channel();
        // A thread, since the pipe can stay silent for as long as the child hangs; it ends with the child.
        let listen = move || {
            let mut line = String::new();
            let ready =
                BufReader::new(response).read_line(&mut line).is_ok() && line.trim_end() == one_check::READY;
            let answer = if ready { Ok(()) } else { Err(stderr_tail(errors)) };
            let _ = report.send(answer);
        };
        if let Err(error) = std::thread::Builder::new().name("look".to_owned()).spawn(listen) {
            return Err(format!("the checks could not be started: {error}"));
        }
        match tokio::time::timeout(longest, receiver).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err("the checks ended before they started".to_owned()),
            Err(_) => Err(format!("did not start within {}", Span(longest.as_nanos() as u64))),
        }
    }
}

/// Why the child ended, from its output.
fn stderr_tail(mut errors: impl Read) -> String {
    let mut text = String::new();
    let _ = errors.read_to_string(&mut text);
    let line = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("without a word");
    format!("the checks ended before they began: {}", line.trim_start_matches("mainstay: "))
}

impl Drop for SensorProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.try_wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}
