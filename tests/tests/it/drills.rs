//! Faults of all kinds in one job of real processes, in sequence and nested: the job always continues, two attempts
//! never train at once, and nothing is left over. `MAINSTAY_TEST_FAULTS` sets their number, `MAINSTAY_TEST_SEED`
//! the seed.

#![allow(clippy::expect_used, clippy::panic, reason = "in a test, a panic is the report")]

use crate::drill;

use std::collections::BTreeMap;

use drill::{Random, Trace, held, is_template, order, overlapping, signal};
use mainstay_model::entry::Fact;
use mainstay_tests::{Stage, has_client, journal, processes};
use nix::sys::signal::Signal;

const RANKS: u32 = 3;

/// Ranks that step together, in memory that outlives them, and write down each step with its attempt.
const TRAINING: &str = r#"
import mainstay, mmap, struct
WORLD = int(os.environ["WORLD_SIZE"])
slots = mmap.mmap(os.open(f"{MARKS}/slots", os.O_RDWR), 8 * WORLD)
trace = os.open(f"{MARKS}/trace", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def completed(rank):
    return struct.unpack_from("q", slots, 8 * rank)[0]
@mainstay.restartable
def train():
    attempt = int(os.environ["MAINSTAY_ATTEMPT"])
    step = completed(RANK)
    while not os.path.exists(f"{MARKS}/end"):
        if min(map(completed, range(WORLD))) < step:
            time.sleep(0.001)
            continue
        os.write(trace, f"{attempt} {RANK} {os.getpid()} {step}\n".encode())
        mainstay.step(step)
        step += 1
        struct.pack_into("q", slots, 8 * RANK, step)
        time.sleep(0.002)
train()
"#;

/// The faults. `Twice` is a kill with another one in the attempt that follows, before it has made a step.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Kill,
    KillAllButOne,
    Terminate,
    Stop,
    Exception,
    Hang,
    Template,
    Restart,
    Twice,
}

/// It takes seconds to distinguish a hang from work, so hangs are rarer.
const FAULTS: [Fault; 16] = [
    Fault::Kill,
    Fault::Exception,
    Fault::Kill,
    Fault::Terminate,
    Fault::Twice,
    Fault::Exception,
    Fault::Kill,
    Fault::KillAllButOne,
    Fault::Kill,
    Fault::Exception,
    Fault::Twice,
    Fault::Restart,
    Fault::Template,
    Fault::Exception,
    Fault::Stop,
    Fault::Hang,
];

#[test]
fn whatever_fails_in_whatever_order_the_job_goes_on_and_leaves_nothing() {
    if !has_client() {
        return;
    }
    let number =
        |name: &str, usual| std::env::var(name).map_or(usual, |text| text.parse().expect("a number"));
    let (faults, seed) = (number("MAINSTAY_TEST_FAULTS", 32), number("MAINSTAY_TEST_SEED", 7));
    let stage = Stage::new();
    std::fs::write(stage.marks().join("slots"), [0; 8 * RANKS as usize]).expect("a file");
    let options = "--allow-inject --max-restarts 1000000 --fault-timeout 3s --hang-limit step=2s";
    let job = stage.python(TRAINING).ranks(RANKS).options(options).start();
    let mut trace = Trace::of(&stage, RANKS);
    let mut random = Random(seed);
    let mut at_first = BTreeMap::new();
    for count in 0..faults {
        let ranks = trace.wait_for(trace.attempt, 100);
        if count == faults / 4 {
            at_first = held(&job, &stage, &ranks);
        }
        let attempt = trace.attempt;
        let victim = random.below(u64::from(RANKS)) as u32;
        let rank = victim.to_string();
        // Each kind occurs, whatever the seed.
        let fault = match FAULTS.get(count as usize) {
            Some(fault) => *fault,
            None => FAULTS[random.below(FAULTS.len() as u64) as usize],
        };
        println!("fault {count}: {fault:?} of rank {victim} in attempt {attempt}");
        match fault {
            Fault::Kill => signal(ranks[&victim], Signal::SIGKILL),
            Fault::KillAllButOne => {
                ranks
                    .iter()
                    .filter(|(rank, _)| **rank != victim)
                    .for_each(|(_, pid)| signal(*pid, Signal::SIGKILL));
            }
            Fault::Terminate => signal(ranks[&victim], Signal::SIGTERM),
            Fault::Stop => signal(ranks[&victim], Signal::SIGSTOP),
            Fault::Exception => order(&job, &["inject", "exception", "--rank", &rank]),
            Fault::Hang => order(&job, &["inject", "hang", "--rank", &rank]),
            Fault::Restart => order(&job, &["job", "restart"]),
            Fault::Template => {
                processes::of_job(job.id())
                    .into_iter()
                    .filter(is_template)
                    .for_each(|pid| signal(pid, Signal::SIGKILL));
                signal(ranks[&victim], Signal::SIGKILL);
            }
            Fault::Twice => {
                signal(ranks[&victim], Signal::SIGKILL);
                let next = job.attempt(attempt + 1).pids;
                signal(next[&(random.below(u64::from(RANKS)) as u32)], Signal::SIGKILL);
            }
        }
        trace.wait_for(attempt + 1, 1);
    }
    let ranks = trace.wait_for(trace.attempt, 100);
    // What the last fault took, such as a connection of an order, is given back soon; what leaks stays.
    processes::wait_until("no more is held than at a quarter of the faults", || {
        let is_more = |(what, count): &(&str, usize)| *count > at_first[what];
        let more: Vec<_> = held(&job, &stage, &ranks).into_iter().filter(is_more).collect();
        println!("held: {more:?}, and {at_first:?} at a quarter of the faults");
        more.is_empty()
    });
    stage.mark("end");
    let end = job.end();
    end.assert_status(0);
    assert!(trace.overlaps.is_empty(), "{:?}\n{end}", trace.overlaps);
    assert!(overlapping(&end.journal).is_empty(), "{:?}\n{end}", overlapping(&end.journal));
    let started =
        journal::facts(&end.journal).filter(|fact| matches!(fact, Fact::AttemptStarted { .. })).count();
    assert!(started as u64 > faults, "each fault is followed by an attempt: {started} of {faults}");
}
