//! `mainstay status`: asks every server that is found, concurrently, and shows one screen.

use std::process::ExitCode;

use mainstay_checkpoint::owner;
use mainstay_proto::v1::{HealthState, Job, JobPhase, ServerMode};
use mainstay_view::convert::health::complete;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::answer::{ServerReply, is_over};
use super::client::{AskError, Client, Snapshot};
use super::find::{AskAny, JobName, SocketAt, SocketSearch, find};
use super::output::{self, Paint};
use super::screen::Shown;
use super::{exit, screen};

/// Show the node, its components, its jobs and their ranks on one screen.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay status                     everything that answers on this host
  mainstay status demo                one job; the exit status is the job's
  mainstay status --all               each rank, and the jobs that are over
  mainstay status --json | jq .state
  watch -c mainstay status            again every two seconds

Exit status: 0 healthy, 1 degraded or a job recovers, 2 unhealthy or the job asked for failed,
3 nothing answers or the state is unknown, 64 the command line was not understood.")]
pub(super) struct Args {
    #[command(flatten)]
    ask: AskAny,
    #[command(flatten)]
    job: JobName,
    /// Show each rank, however many there are, and the jobs that are over
    #[arg(long)]
    all: bool,
}

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let found = find(args.ask.server.named());
    let mut answers = ask_all(found.places.clone()).await;
    reported_once(&mut answers);
    if let Some(job) = args.job.get() {
        only_job(&mut answers, job);
    }
    let status = weigh(&answers, args.job.get().is_some());
    if let Some(form) = args.ask.form.structured() {
        output::print(&form.document(as_json(&answers, &found, status)))?;
        return Ok(ExitCode::from(status));
    }
    // A job that was asked for is shown when it is over too.
    let shown = Shown { over: args.all || args.job.get().is_some(), ranks: args.all };
    output::print(&screen::render(&answers, Paint::for_stdout(), shown))?;
    if !answers.iter().any(|answer| answer.result.is_ok()) {
        output::note(&nothing_answers(&found));
    } else if let Some(job) = args.job.get().filter(|_| jobs(&answers).next().is_none()) {
        output::note(&format!("no job {job:?} is known here; `mainstay status` shows those that are"));
    }
    Ok(ExitCode::from(status))
}

pub(super) async fn ask_all(places: Vec<SocketAt>) -> Vec<ServerReply> {
    let mut asking = JoinSet::new();
    for (order, place) in places.into_iter().enumerate() {
        asking.spawn(async move {
            let result = async { Client::connect(&place.socket).await?.snapshot().await }.await;
            (order, ServerReply { place, result })
        });
    }
    let mut answers = asking.join_all().await;
    answers.sort_by_key(|(order, _)| *order);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// A job that both its agent and its launcher report is shown once, as the agent's. Of the ranks on other hosts only the
/// launcher knows what they do.
pub(super) fn reported_once(answers: &mut [ServerReply]) {
    let is_launcher = |snapshot: &Snapshot| snapshot.server.mode() == ServerMode::Launcher;
    let (launchers, agents): (Vec<&mut Snapshot>, Vec<&mut Snapshot>) = answers
        .iter_mut()
        .filter_map(|answer| answer.result.as_mut().ok())
        .partition(|snapshot| is_launcher(snapshot));
    let mut by_agents: Vec<&mut Job> = agents
        .into_iter()
        .filter(|snapshot| snapshot.server.mode() == ServerMode::Agent)
        .flat_map(|snapshot| snapshot.jobs.iter_mut().filter(|job| !is_over(job)))
        .collect();
    for snapshot in launchers {
        snapshot.jobs.retain(|of_launcher| {
            let mut same = by_agents.iter_mut().filter(|job| job.id == of_launcher.id).peekable();
            let is_reported = same.peek().is_some();
            same.for_each(|job| {
                if of_launcher.ranks.iter().any(|rank| rank.host.is_some()) {
                    complete(job, of_launcher);
                }
                job.leading_host.clone_from(&of_launcher.leading_host);
                job.incomplete.clone_from(&of_launcher.incomplete);
            });
            !is_reported
        });
    }
}

/// If another user's job has the name, the agent keeps a job of this user under the name with its owner.
fn only_job(answers: &mut [ServerReply], id: &str) {
    let own = owner::owned(nix::unistd::getuid().as_raw(), id);
    for snapshot in answers.iter_mut().filter_map(|answer| answer.result.as_mut().ok()) {
        let has_own = snapshot.jobs.iter().any(|job| job.id == own);
        snapshot.jobs.retain(|job| job.id == if has_own { own.as_str() } else { id });
    }
}

fn jobs(answers: &[ServerReply]) -> impl Iterator<Item = &Job> {
    answers.iter().filter_map(|answer| answer.result.as_ref().ok()).flat_map(|snapshot| &snapshot.jobs)
}

/// The exit status: the worst known state, before unknown.
fn weigh(answers: &[ServerReply], one_job: bool) -> u8 {
    let signs: Vec<u8> = if one_job {
        jobs(answers).map(job_sign).collect()
    } else {
        let nodes = answers.iter().filter_map(node_sign);
        nodes.chain(jobs(answers).filter(|job| !is_over(job)).map(job_sign)).collect()
    };
    let graveness = |sign: &u8| match *sign {
        exit::UNHEALTHY => 3,
        exit::DEGRADED => 2,
        exit::UNKNOWN => 1,
        _ => 0,
    };
    signs.into_iter().max_by_key(graveness).unwrap_or(exit::UNKNOWN)
}

/// None for answers without information about the node: the socket of a dead process, or a launcher that does not
/// monitor the host, whose node therefore has no components.
fn node_sign(answer: &ServerReply) -> Option<u8> {
    match &answer.result {
        Ok(snapshot)
            if snapshot.server.mode() == ServerMode::Launcher && snapshot.node.components.is_empty() =>
        {
            Some(exit::OK)
        }
        Ok(snapshot) => Some(match snapshot.node.state() {
            HealthState::Healthy => exit::OK,
            HealthState::Degraded => exit::DEGRADED,
            HealthState::Unhealthy => exit::UNHEALTHY,
            HealthState::Unknown | HealthState::Unspecified => exit::UNKNOWN,
        }),
        Err(AskError::Dead(_) | AskError::Missing(_)) => None,
        Err(_) => Some(exit::UNKNOWN),
    }
}

fn job_sign(job: &Job) -> u8 {
    match job.phase() {
        JobPhase::Recovering => exit::DEGRADED,
        JobPhase::Lost => exit::UNHEALTHY,
        JobPhase::Ended if job.exit_status != Some(0) => exit::UNHEALTHY,
        JobPhase::Ended | JobPhase::Starting | JobPhase::Running | JobPhase::Stopping => exit::OK,
        JobPhase::Unspecified => exit::UNKNOWN,
    }
}

/// The message if there is nothing to show.
pub(super) fn nothing_answers(found: &SocketSearch) -> String {
    format!(
        "nothing answers here. Looked at:\n  {}\nStart a job with `mainstay run -- python train.py`, or the host's agent with \
         `mainstay agent`; to use another socket, set --socket or MAINSTAY_SOCKET.",
        found.looked_at.join("\n  ")
    )
}

fn as_json(answers: &[ServerReply], found: &SocketSearch, status: u8) -> Value {
    let state = match status {
        exit::OK => "HEALTHY",
        exit::DEGRADED => "DEGRADED",
        exit::UNHEALTHY => "UNHEALTHY",
        _ => "UNKNOWN",
    };
    let servers: Vec<Value> = answers.iter().map(answer_as_json).collect();
    json!({ "state": state, "exit_status": status, "looked_at": found.looked_at, "servers": servers })
}

fn answer_as_json(answer: &ServerReply) -> Value {
    let socket = answer.place.socket.display().to_string();
    match &answer.result {
        Ok(snapshot) => json!({
            "socket": socket,
            "answers": true,
            "server": snapshot.server,
            "node": snapshot.node,
            "jobs": snapshot.jobs,
        }),
        Err(error) => json!({ "socket": socket, "answers": false, "error": error.to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use mainstay_proto::v1::{Component, Node, Server};

    use super::*;

    fn answer(mode: ServerMode, state: HealthState, jobs: Vec<Job>) -> ServerReply {
        let node = Node { state: state.into(), components: vec![Component::default()], ..Node::default() };
        let server = Server { mode: mode.into(), ..Server::default() };
        let place = SocketAt { socket: "/x".into(), job: None };
        ServerReply { place, result: Ok(Snapshot { server, node, jobs }) }
    }

    fn job(id: &str, phase: JobPhase) -> Job {
        Job { id: id.into(), phase: phase.into(), ..Job::default() }
    }

    fn failed(error: AskError) -> ServerReply {
        ServerReply { place: SocketAt { socket: "/x".into(), job: None }, result: Err(error) }
    }

    #[test]
    fn the_gravest_that_is_known_decides() {
        let agent = |state, jobs| answer(ServerMode::Agent, state, jobs);
        let check = |answers: &[ServerReply], expected: u8| assert_eq!(weigh(answers, false), expected);
        check(&[], exit::UNKNOWN);
        check(&[failed(AskError::Dead("/x".into()))], exit::UNKNOWN);
        check(&[agent(HealthState::Healthy, vec![])], exit::OK);
        check(&[agent(HealthState::Unknown, vec![])], exit::UNKNOWN);
        check(&[agent(HealthState::Healthy, vec![job("a", JobPhase::Recovering)])], exit::DEGRADED);
        check(&[agent(HealthState::Unhealthy, vec![job("a", JobPhase::Recovering)])], exit::UNHEALTHY);
        check(&[agent(HealthState::Healthy, vec![job("a", JobPhase::Lost)])], exit::OK);
        let healthy = || agent(HealthState::Healthy, vec![]);
        check(&[healthy(), failed(AskError::Dead("/x".into()))], exit::OK);
        check(&[healthy(), failed(AskError::Silent("/x".into()))], exit::UNKNOWN);
        check(&[agent(HealthState::Degraded, vec![]), failed(AskError::Silent("/x".into()))], exit::DEGRADED);
    }

    #[test]
    fn a_launcher_that_does_not_sense_the_host_does_not_speak_for_it() {
        let mut launcher = answer(ServerMode::Launcher, HealthState::Unknown, vec![]);
        if let Ok(snapshot) = &mut launcher.result {
            snapshot.node.components.clear();
        }
        assert_eq!(weigh(&[launcher], false), exit::OK);
    }

    #[test]
    fn a_job_that_is_asked_for_decides_alone() {
        let answers = |phase| [answer(ServerMode::Agent, HealthState::Unhealthy, vec![job("a", phase)])];
        assert_eq!(weigh(&answers(JobPhase::Running), true), exit::OK);
        assert_eq!(weigh(&answers(JobPhase::Lost), true), exit::UNHEALTHY);
        assert_eq!(weigh(&answers(JobPhase::Ended), true), exit::UNHEALTHY);
        assert_eq!(weigh(&[answer(ServerMode::Agent, HealthState::Healthy, vec![])], true), exit::UNKNOWN);
    }

    #[test]
    fn a_job_is_shown_once() {
        let mut answers = [
            answer(
                ServerMode::Agent,
                HealthState::Healthy,
                vec![job("a", JobPhase::Running), job("b", JobPhase::Lost)],
            ),
            answer(ServerMode::Launcher, HealthState::Healthy, vec![job("a", JobPhase::Running)]),
            answer(ServerMode::Launcher, HealthState::Healthy, vec![job("b", JobPhase::Running)]),
        ];
        reported_once(&mut answers);
        let shown: Vec<&str> = jobs(&answers).map(|job| job.id.as_str()).collect();
        assert_eq!(shown, ["a", "b", "b"]);
    }
}
