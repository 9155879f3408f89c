//! In process: from a rank that raises, while its peers are blocked in a collective, until all ranks are in their
//! function again. Compared with NVRx's wrapper, with its defaults. Our part is also reported separately: from the
//! raise until the launcher knows, and from the last rank that has left its collectives to the last that is in its
//! function; between the two the ranks destroy the framework's process groups.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::figure::{Figure, Report};
use super::launchers::{Bed, Launcher, script_path};
use super::peers::NVRX_NAME;
use super::process::Running;
use crate::journal::{Entry, Follower};
use crate::paths;
use crate::progress::Progress;

/// Ranks of the jobs.
const WORLDS: [usize; 3] = [2, 4, 8];

/// One fault in one job may take NVRx 15 s.
const LIMIT: Duration = Duration::from_secs(600);

/// Faults in a job of NVRx's: each waits for gloo's time-out.
const PEER_FAULTS: usize = 3;

const SCRIPT: &str = "in_process_rank.py";

/// Measures `faults` faults in jobs of each size, all together one sample.
pub fn measure(progress: &Progress, bed: &Bed, faults: usize, quick: bool, report: &mut Report) {
    if !report.wants(&["restart.in_process", "restart.in_process_p99", "restart.in_process_added"]) {
        return;
    }
    let worlds = if quick { &WORLDS[..1] } else { &WORLDS[..] };
    let mut added = Vec::new();
    let mut of = |what: &str, faults: usize, job: &dyn Fn(usize, &Path) -> Result<Vec<Running>>| {
        let mut samples = Vec::new();
        for &world in worlds {
            let name = format!("restart in process: {what}, {world} ranks ({faults} faults)");
            match progress.step(&name, || rounds(world, faults, job)) {
                Ok(found) => {
                    added.extend(found.iter().filter_map(|round| round.added));
                    samples.extend(found.iter().map(|round| round.whole));
                }
                Err(error) => eprintln!("{name}: left out: {error:#}"),
            }
        }
        samples
    };
    let ours = of("mainstay", faults, &|world, folder| mainstay(bed, world, folder));
    let figures = [
        Figure::median("restart.in_process", "ms", &ours),
        Figure::p99("restart.in_process_p99", "ms", &ours),
    ];
    report.add(figures.iter().flatten().cloned());
    let theirs = match bed.peers {
        Some(_) => of(NVRX_NAME, PEER_FAULTS, &|world, folder| nvrx(bed, world, folder)),
        None => Vec::new(),
    };
    if !theirs.is_empty() {
        report.add(figures.iter().flatten().map(|figure| figure.beside(NVRX_NAME, &theirs)));
    }
    report.add(Figure::median("restart.in_process_added", "ms", &added));
}

/// Milliseconds of one fault.
struct Round {
    /// From the raise to the last rank that is in its function again.
    whole: f64,
    /// The part of it that launcher and client add to the framework's; none if no journal shows it.
    added: Option<f64>,
}

/// Each fault of one job.
fn rounds(
    world: usize,
    faults: usize,
    job: impl Fn(usize, &Path) -> Result<Vec<Running>>,
) -> Result<Vec<Round>> {
    let folder = paths::target().join("bench/in_process");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("emptying {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    // Read by the script, whichever launcher starts it.
    fs::write(folder.join("faults"), faults.to_string()).context("writing the number of faults")?;
    let mut running = job(world, &folder)?;
    let Some(first) = running.first_mut() else { bail!("nothing was started") };
    let events = folder.join("events.jsonl");
    first.wait_for("end of the last round", LIMIT, || {
        let done = read(&events).iter().filter(|event| event.event == "done").count();
        (done >= world).then_some(())
    })?;
    let mut journal = Follower::new(&folder.join("logs"));
    journal.poll()?;
    let found = durations(&read(&events), &journal.entries, world);
    if found.len() != faults {
        bail!("{} of {faults} faults were followed by a whole round\n{}", found.len(), first.printed());
    }
    Ok(found)
}

fn mainstay(bed: &Bed, world: usize, folder: &Path) -> Result<Vec<Running>> {
    let mut command = bed.job(Launcher::Mainstay, world, &folder.join("logs"), SCRIPT)?;
    variables(&mut command, folder)?;
    Ok(vec![Running::start(command, &folder.join("launcher.log"))?])
}

/// NVRx's wrapper runs alone: a launcher would stop the job at the first fault of a process.
fn nvrx(bed: &Bed, world: usize, folder: &Path) -> Result<Vec<Running>> {
    let python = bed.peers.as_ref().context("no peers")?.join("bin/python");
    let port = free_ports()?.to_string();
    let start = |rank: usize| {
        let mut command = Command::new(&python);
        command.arg(script_path(SCRIPT)).env("BENCH_NVRX", "1");
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        variables(&mut command, folder)?;
        Running::start(command, &folder.join(format!("rank-{rank}.log")))
    };
    (0..world).map(start).collect()
}

fn variables(command: &mut Command, folder: &Path) -> Result<()> {
    let faults = fs::read_to_string(folder.join("faults")).context("reading the number of faults")?;
    command.env("BENCH_EVENTS", folder.join("events.jsonl")).env("BENCH_FAULTS", faults);
    Ok(())
}

/// A port with free ones after it, as far as this process can tell.
fn free_ports() -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("looking for a free port")?;
    Ok(listener.local_addr().context("looking for a free port")?.port())
}

/// A line of the ranks' own record.
#[derive(Deserialize)]
struct Event {
    at: u64,
    event: String,
    round: u64,
}

fn read(events: &Path) -> Vec<Event> {
    let text = fs::read_to_string(events).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// From each raise to the last rank's entry into the next round, for rounds that all ranks have entered.
fn durations(events: &[Event], journal: &[Entry], world: usize) -> Vec<Round> {
    let mut entered: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for event in events.iter().filter(|event| event.event == "enter") {
        entered.entry(event.round).or_default().push(event.at);
    }
    let raised = events.iter().filter(|event| event.event == "raise");
    let next = |raise: &Event| {
        let entered = entered.get(&(raise.round + 1)).filter(|entered| entered.len() == world)?;
        let whole = entered.iter().max()?.saturating_sub(raise.at);
        let added =
            framework(journal, raise.at).map(|framework| whole.saturating_sub(framework) as f64 / 1e6);
        Some(Round { whole: whole as f64 / 1e6, added })
    };
    raised.filter_map(next).collect()
}

/// From when the launcher knew of the raise at `raised_at` until no rank was in its collectives any more, in
/// nanoseconds.
fn framework(journal: &[Entry], raised_at: u64) -> Option<u64> {
    let after = journal.iter().skip_while(|entry| entry.mono < raised_at);
    let mut after = after.skip_while(|entry| !entry.rank_raised());
    let known = after.next()?.mono;
    let left = after.find(|entry| entry.attempt_ended())?.mono;
    Some(left.saturating_sub(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_counts_from_the_raise_to_the_last_rank_that_enters_it() {
        let event = |event: &str, round, at| Event { at, event: event.to_owned(), round };
        let events = [
            event("raise", 0, 1_000_000),
            event("enter", 1, 3_000_000),
            event("enter", 1, 5_000_000),
            event("raise", 1, 9_000_000),
            event("enter", 2, 11_000_000),
        ];
        let fact = |at: u64, what: &str| {
            let line = format!(r#"{{"at":{{"mono":{at}}},"body":{{"kind":"fact","what":"{what}"}}}}"#);
            Entry::parse(&line).expect("a line of a journal")
        };
        let journal =
            [fact(900_000, "rank_raised"), fact(1_500_000, "rank_raised"), fact(2_000_000, "rank_raised")];
        let journal: Vec<Entry> = journal.into_iter().chain([fact(4_000_000, "attempt_ended")]).collect();
        let found = durations(&events, &journal, 2);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].whole, found[0].added), (4.0, Some(1.5)));
        assert_eq!(durations(&events, &[], 2)[0].added, None);
    }
}
