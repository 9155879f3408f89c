//! `mainstay stacks`: what the ranks of a job are doing now.

use std::iter;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::bail;
use mainstay_api::stacks::RanksByHost;
use mainstay_hang::{PlaceGroup, listed};
use mainstay_model::id::Rank;
use mainstay_proto::v1::{HostStacks, Job, ServerMode};
use serde_json::Value;

use super::answer::{ServerReply, is_over};
use super::client::Client;
use super::exit;
use super::find::{Ask, JobName, find};
use super::output::{self, Paint, clean};
use super::status::{ask_all, reported_once};
use mainstay_sensors::source::evidence::{self, CollectedEvidence, Frames};

/// Time limit.
const STACKS_TIMEOUT: Duration = Duration::from_secs(5);

/// Number of threads shown for a rank without a Python stack; `--json` has all.
const MAX_THREADS: usize = 8;

/// Show the Python stacks of a job's ranks, and what they wait for in the kernel
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Python stacks come from py-spy if it is installed. Else ranks that have a handler for SIGSTKFLT are sent
that signal and write theirs; training continues. /proc is read as the user of the command: the job's
user, or root. The job's launcher gets the stacks of the ranks on other hosts from their launchers.

Exit status: 0 shown, 3 there is no such job here, 64 the command line was not understood."
)]
pub(super) struct Args {
    #[command(flatten)]
    job: JobName,
    /// Include native frames if py-spy is installed; pauses each rank for a fraction of a second
    #[arg(long)]
    native: bool,
    #[command(flatten)]
    ask: Ask,
}

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut answers = ask_all(find(args.ask.socket.as_deref()).places).await;
    let launchers = launchers(&answers);
    reported_once(&mut answers);
    let snapshots = answers.into_iter().filter_map(|answer| answer.result.ok());
    let jobs = snapshots.flat_map(|snapshot| {
        snapshot.jobs.into_iter().map(move |job| (snapshot.server.hostname.clone(), job))
    });
    let jobs: Vec<(String, Job)> = jobs.filter(|(_, job)| !is_over(job)).collect();
    let (host, job) = match chosen(jobs, args.job.get().map(String::as_str)) {
        Ok(job) => job,
        Err(why) => {
            output::note(&why);
            return Ok(ExitCode::from(exit::UNKNOWN));
        }
    };
    let launcher = launchers.into_iter().find(|(of, _)| *of == job.id).map(|(_, socket)| socket);
    let elsewhere = elsewhere(&job, &host, launcher.as_deref(), args.native).await;
    let frames = if args.native { Frames::Native } else { Frames::Python };
    let taken = take(&host, &job, frames, elsewhere, &mut |note| output::note(&note))?;
    if let Some(form) = args.ask.form.structured() {
        output::print(&form.document(taken.whole))?;
    } else {
        output::print(&shown(&taken, Paint::for_stdout()))?;
    }
    Ok(ExitCode::from(exit::OK))
}

/// The stacks of a job's ranks on this host, as text, with notes about the ranks without. Takes up to 5 s.
pub(super) fn text(host: &str, job: &Job) -> anyhow::Result<String> {
    let mut notes = String::new();
    let note = &mut |note| notes.push_str(&format!("{note}\n"));
    let taken = take(host, job, Frames::Python, Vec::new(), note)?;
    Ok(notes + &shown(&taken, Paint::plain()))
}

/// The sockets of launchers, with their jobs.
fn launchers(answers: &[ServerReply]) -> Vec<(String, PathBuf)> {
    let of_launcher = |answer: &ServerReply| {
        let snapshot = answer.result.as_ref().ok().filter(|of| of.server.mode() == ServerMode::Launcher)?;
        let of = |job: &Job| (job.id.clone(), answer.place.socket.clone());
        Some(snapshot.jobs.iter().map(of).collect::<Vec<_>>())
    };
    answers.iter().filter_map(of_launcher).flatten().collect()
}

/// What the job's launcher gets from the other hosts; empty if there are none, or if it cannot be asked.
async fn elsewhere(job: &Job, host: &str, launcher: Option<&Path>, native: bool) -> Vec<HostStacks> {
    let Some(launcher) = launcher.filter(|_| !RanksByHost::of(job, host).elsewhere.is_empty()) else {
        return Vec::new();
    };
    let asked = async { Client::connect(launcher).await?.stacks_elsewhere(native).await };
    asked.await.unwrap_or_else(|error| {
        output::note(&format!("the ranks of other hosts: {error}"));
        Vec::new()
    })
}

fn take(
    host: &str,
    job: &Job,
    frames: Frames,
    others: Vec<HostStacks>,
    note: &mut dyn FnMut(String),
) -> anyhow::Result<CollectedEvidence> {
    let ranks = RanksByHost::of(job, host);
    let (mut answered, mut of_others) = (Vec::new(), Vec::new());
    for HostStacks { host, json, error } in others {
        match serde_json::from_str::<CollectedEvidence>(&json) {
            Ok(taken) => of_others.push(taken),
            Err(_) if !error.is_empty() => note(format!("host {}: {}", clean(&host), clean(&error))),
            // Its launcher has another version.
            Err(_) => continue,
        }
        answered.push(host);
    }
    for (host, ranks) in ranks.elsewhere.iter().filter(|(host, _)| !answered.iter().any(|of| of == *host)) {
        let host = clean(host);
        note(format!("{} on host {host}: run `mainstay stacks` there", listed(ranks)));
    }
    for rank in &ranks.unknown {
        note(format!("rank {}: no process of this host with PID {} is this rank", rank.rank, rank.pid));
    }
    let subjects = ranks.subjects(job);
    if subjects.is_empty() && of_others.is_empty() {
        bail!("job {:?} has no living ranks on this host", job.id);
    }
    let mut taken = evidence::take(&subjects, frames, Instant::now() + STACKS_TIMEOUT);
    of_others.into_iter().for_each(|other| taken.add(other));
    if let Some(ranks) = taken.whole["ranks"].as_array_mut() {
        ranks.sort_by_key(|rank| rank["rank"].as_u64());
    }
    Ok(taken)
}

/// The job with this name, or the only running one, with the host of the server that knows it.
fn chosen(mut running: Vec<(String, Job)>, named: Option<&str>) -> Result<(String, Job), String> {
    if let Some(name) = named {
        running.retain(|(_, job)| job.id == name);
    }
    match (running.len(), named) {
        (1, _) => Ok(running.remove(0)),
        (0, Some(name)) => Err(format!("no job {name:?} runs here; `mainstay status` shows those that do")),
        (0, None) => Err("no job runs here".to_owned()),
        _ => {
            let names: Vec<String> = running.iter().map(|(_, job)| clean(&job.id)).collect();
            Err(format!("{} jobs run here: name one of {}", names.len(), names.join(", ")))
        }
    }
}

/// The groups first, then the stack of one rank of each.
fn shown(taken: &CollectedEvidence, paint: Paint) -> String {
    let mut text = String::new();
    for group in &taken.groups {
        text.push_str(&format!("{}\n", paint.bold(&clean(&PlaceGroup::to_string(group)))));
    }
    let state_of = |rank: &Rank| {
        taken.whole["ranks"].as_array().and_then(|ranks| ranks.iter().find(|entry| entry["rank"] == rank.0))
    };
    for group in &taken.groups {
        let Some((rank, state)) = group.ranks.first().and_then(|rank| Some((rank, state_of(rank)?))) else {
            continue;
        };
        text.push_str(&format!("\n{}\n", paint.dim(&format!("{rank}:"))));
        let stack = state["python_and_native"].as_str().or_else(|| state["python"].as_str());
        let stack = stack.map_or_else(|| without_python(&state["native"]), ToOwned::to_owned);
        for line in stack.lines() {
            text.push_str(&format!("  {}\n", clean(line)));
        }
    }
    let waits = taken.waits.iter().map(|waits| &waits.reported);
    for reported in waits.chain(&taken.findings) {
        text.push_str(&format!("{}\n", clean(reported)));
    }
    text
}

/// The kernel's information about a process without a Python stack.
fn without_python(native: &Value) -> String {
    let mut text =
        "no Python stack: the process does not answer, and py-spy is not installed or not permitted\n"
            .to_owned();
    let threads = native["threads"].as_array().into_iter().flatten();
    for thread in
        iter::once(&native["main"]).chain(threads).filter(|thread| thread.is_object()).take(MAX_THREADS)
    {
        let field = |name: &str| thread[name].as_str().unwrap_or("?");
        let (id, name, state) = (field("id"), field("name"), field("state"));
        let channel = field("wait_channel");
        let call = thread["system_call_name"].as_str().unwrap_or_else(|| field("system_call"));
        text.push_str(&format!(
            "thread {id} ({name}): state {state}, wait channel {channel}, system call {call}\n"
        ));
        for line in field("kernel_stack").lines().filter(|line| *line != "?") {
            text.push_str(&format!("  {line}\n"));
        }
    }
    text
}
