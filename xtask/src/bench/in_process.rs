//! In process: from a rank that raises, while its peers are blocked in a collective, until all ranks are in
//! their function again. Compared with NVRx's wrapper, with its defaults. Our part is also reported separately:
//! from the raise until the launcher knows, and from the last rank that has left its collectives to the last
//! that is in its function; between the two the ranks destroy the framework's process groups.

use std::collections::BTreeMap;

use super::events::Event;
use super::prelude::*;

/// Ranks of the jobs.
const WORLDS: [usize; 3] = [2, 4, 8];

/// One fault in one job may take NVRx 15 s.
const LIMIT: Duration = Duration::from_secs(600);

/// Faults in a job of NVRx's: each waits for gloo's time-out.
const PEER_FAULTS: usize = 3;

const SCRIPT: &str = "in_process_rank.py";

/// Measures faults in jobs of each size, all together one sample.
pub fn measure(bench: &mut Bench, bed: &Bed) {
    let faults = bench.samples(20, 5);
    let worlds = if bench.args.quick { &WORLDS[..1] } else { &WORLDS[..] };
    let mut comparison = Comparison::of(vec![
        Of::median("restart.in_process", "ms", |round: &Round| round.whole),
        Of::at(0.99, "restart.in_process_p99", "ms", |round: &Round| round.whole),
        Of::median("restart.in_process_added", "ms", |round: &Round| round.added),
    ]);
    for &world in worlds {
        bench.take(&mut comparison, None, &format!("{world} ranks ({faults} faults)"), || {
            rounds(world, faults, |folder| mainstay(bed, world, faults, folder))
        });
    }
    for &world in worlds.iter().filter(|_| bed.peers.is_some()) {
        let what = format!("{NVRX_NAME}, {world} ranks ({PEER_FAULTS} faults)");
        bench.take(&mut comparison, Some(NVRX_NAME), &what, || {
            rounds(world, PEER_FAULTS, |folder| nvrx(bed, world, folder))
        });
    }
}

/// Milliseconds of one fault.
struct Round {
    /// From the raise to the last rank that is in its function again.
    whole: f64,
    /// The part of it that launcher and client add to the framework's; not a number if no journal shows it.
    added: f64,
}

fn rounds(
    world: usize,
    faults: usize,
    job: impl FnOnce(&Path) -> Result<Vec<Running>>,
) -> Result<Vec<Round>> {
    let folder = paths::fresh(paths::target().join("bench/in_process"))?;
    let mut running = job(&folder)?;
    let first = running.first_mut().context("nothing was started")?;
    let mut events = Events::of(folder.join("events.jsonl"), world);
    first.wait_within(LIMIT, "end of the last round", || {
        let done = events.all().iter().filter(|event| event.event == "done").count();
        (done >= world).then_some(())
    })?;
    let mut journal = Follower::new(&folder.join("logs"));
    journal.poll();
    let found = durations(events.all(), &journal.entries, world);
    let count = found.len();
    ensure!(
        count == faults,
        "{count} of {faults} faults were followed by a whole round\n{}",
        first.printed()
    );
    Ok(found)
}

fn mainstay(bed: &Bed, world: usize, faults: usize, folder: &Path) -> Result<Vec<Running>> {
    let mut command = bed.job(Launcher::Mainstay, world, &folder.join("logs"), "", SCRIPT);
    variables(&mut command, faults, folder);
    Ok(vec![Running::start(command, &folder.join("launcher.log"))?])
}

/// NVRx's wrapper runs alone: a launcher would stop the job at the first fault of a process.
fn nvrx(bed: &Bed, world: usize, folder: &Path) -> Result<Vec<Running>> {
    let (python, script) = (bed.peers_tool("python"), script_path(SCRIPT));
    // A port with free ones after it, as far as this process can tell.
    let port = free_port()?.to_string();
    let start = |rank: usize| {
        let mut command = cmd!("{python} {script}");
        command.env("BENCH_NVRX", "1").env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        variables(&mut command, PEER_FAULTS, folder);
        Running::start(command, &folder.join(format!("rank-{rank}.log")))
    };
    (0..world).map(start).collect()
}

fn variables(command: &mut Command, faults: usize, folder: &Path) {
    command.env("BENCH_EVENTS", folder.join("events.jsonl")).env("BENCH_FAULTS", faults.to_string());
}

/// From each raise to the last rank's entry into the next round, for rounds that all ranks have entered.
fn durations(events: &[Event], journal: &[Entry], world: usize) -> Vec<Round> {
    let mut entered: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for event in events.iter().filter(|event| event.event == "enter") {
        entered.entry(event.round).or_default().push(event.at);
    }
    let next = |raise: &Event| {
        let entered = entered.get(&(raise.round + 1)).filter(|entered| entered.len() == world)?;
        let whole = entered.iter().max()?.saturating_sub(raise.at);
        let added = framework(journal, raise.at).map(|framework| whole.saturating_sub(framework));
        let ms = |ns: u64| ns as f64 / 1e6;
        Some(Round { whole: ms(whole), added: added.map_or(f64::NAN, ms) })
    };
    events.iter().filter(|event| event.event == "raise").filter_map(next).collect()
}

/// From when the launcher knew of the raise at `raised_at` until no rank was in its collectives any more, in
/// nanoseconds.
fn framework(journal: &[Entry], raised_at: u64) -> Option<u64> {
    let mut after = journal.iter().skip_while(|entry| entry.at.mono.0 < raised_at);
    let known = after.find(|entry| matches!(journal::fact(entry), Some(Fact::RankRaised { .. })))?;
    let left = after.find(|entry| matches!(journal::fact(entry), Some(Fact::AttemptEnded { .. })))?;
    Some(left.at.mono.since(known.at.mono).0)
}

#[cfg(test)]
mod tests {
    use mainstay_model::entry::Body;
    use mainstay_model::id::{Attempt, BootId, Pid, Rank};
    use mainstay_model::time::{Mono, Stamp, Wall};

    use super::*;

    #[test]
    fn a_round_counts_from_the_raise_to_the_last_rank_that_enters_it() {
        let event = |event: &str, round, at| Event {
            at,
            event: event.to_owned(),
            round,
            rank: 0,
            pid: 0,
            step: None,
        };
        let events = [
            event("raise", 0, 1_000_000),
            event("enter", 1, 3_000_000),
            event("enter", 1, 5_000_000),
            event("raise", 1, 9_000_000),
            event("enter", 2, 11_000_000),
        ];
        let entry = |at: u64, fact: Fact| {
            let at = Stamp { mono: Mono(at), wall: Wall(0) };
            Entry { seq: 1, at, boot: BootId::default(), job: None, origin_seq: None, body: Body::Fact(fact) }
        };
        let (attempt, note) = (Attempt(0), Default::default());
        let raised = Fact::RankRaised { attempt, rank: Rank(0), pid: Pid(1), note, data: None };
        let ended = Fact::AttemptEnded { attempt, orphans_killed: 0, waiting: Vec::new() };
        let raised = |at| entry(at, raised.clone());
        let journal = [raised(900_000), raised(1_500_000), raised(2_000_000), entry(4_000_000, ended)];
        let found = durations(&events, &journal, 2);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].whole, found[0].added), (4.0, 1.5));
        assert!(durations(&events, &[], 2)[0].added.is_nan());
    }
}
