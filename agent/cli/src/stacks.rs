//! `mainstay stacks`: what the ranks of a job are doing now.

use std::collections::BTreeMap;
use std::iter;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::bail;
use mainstay_hang::{PlaceGroup, listed};
use mainstay_model::id::{Pid, Rank};
use mainstay_proto::v1::{self, Job, RankPhase};
use serde_json::Value;

use super::answer::is_over;
use super::exit;
use super::find::{Ask, JobName, find};
use super::output::{self, Paint, clean};
use super::status::{ask_all, reported_once};
use mainstay_sensors::source::evidence::{self, Frames, Subject};
use mainstay_sys::processes;

/// Time limit.
const STACKS_TIMEOUT: Duration = Duration::from_secs(5);

/// Number of threads shown for a rank without a Python stack; `--json` has all.
const MAX_THREADS: usize = 8;

/// Show the Python stacks of a job's ranks, and what they wait for in the kernel
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Python stacks come from py-spy if it is installed. Else ranks that have a handler for SIGSTKFLT are sent
that signal and write theirs; training continues. The API names the ranks, and /proc is read: run the
command on their host, as their user or as root.

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
    let frames = if args.native { Frames::Native } else { Frames::Python };
    let taken = take(&host, &job, frames, &mut |note| output::note(&note))?;
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
    let taken = take(host, job, Frames::Python, &mut |note| notes.push_str(&format!("{note}\n")))?;
    Ok(notes + &shown(&taken, Paint::plain()))
}

fn take(
    host: &str,
    job: &Job,
    frames: Frames,
    note: &mut dyn FnMut(String),
) -> anyhow::Result<evidence::CollectedEvidence> {
    let (here, elsewhere) = by_host(job, host);
    for (host, ranks) in &elsewhere {
        let host = clean(host);
        note(format!("{} on host {host}: run `mainstay stacks` there", listed(ranks)));
    }
    let (ours, others): (Vec<&v1::Rank>, Vec<&v1::Rank>) = here.into_iter().partition(|rank| is_itself(rank));
    for rank in others {
        note(format!("rank {}: no process of this host with PID {} is this rank", rank.rank, rank.pid));
    }
    let subjects = subjects(job, &ours);
    if subjects.is_empty() {
        bail!("job {:?} has no living ranks on this host", job.id);
    }
    Ok(evidence::take(&subjects, frames, Instant::now() + STACKS_TIMEOUT))
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

/// The living ranks of this host, and those of other hosts: their PIDs mean nothing here.
fn by_host<'a>(job: &'a Job, this: &str) -> (Vec<&'a v1::Rank>, BTreeMap<&'a str, Vec<Rank>>) {
    let (mut here, mut elsewhere) = (Vec::new(), BTreeMap::<&str, Vec<Rank>>::new());
    for rank in job.ranks.iter().filter(|rank| rank.phase() != RankPhase::Exited) {
        match rank.host.as_deref().filter(|host| *host != this) {
            Some(host) => elsewhere.entry(host).or_default().push(Rank(rank.rank)),
            None => here.push(rank),
        }
    }
    (here, elsewhere)
}

/// Whether the process with the PID of a rank is that rank: hosts may have the same name, and PIDs are used again.
fn is_itself(rank: &v1::Rank) -> bool {
    let Some(ticks) = rank.start_ticks else { return true };
    i32::try_from(rank.pid).is_ok_and(|pid| processes::start_ticks(Pid(pid)) == Some(ticks))
}

fn subjects(job: &Job, ranks: &[&v1::Rank]) -> Vec<Subject> {
    let attempt = Path::new(&job.run_dir).join(format!("attempt_{}", job.attempt));
    let subject = |rank: &&v1::Rank| {
        Some(Subject {
            rank: Rank(rank.rank),
            pid: Pid(i32::try_from(rank.pid).ok()?),
            stacks: Some(attempt.join(rank.local_rank.to_string()).join("stacks.txt")),
            step: rank.step,
            sections: rank.sections.clone(),
            last_steps: Vec::new(),
        })
    };
    ranks.iter().filter_map(subject).collect()
}

/// The groups first, then the stack of one rank of each.
fn shown(taken: &evidence::CollectedEvidence, paint: Paint) -> String {
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
