//! A soak: jobs of real processes of several kinds with random, nested faults, each brought to one of several ends.
//! It counts what must never happen: a wrong end, two attempts at once, something left over.
//!
//! `MAINSTAY_SOAK_FAULTS` sets the number of faults, `MAINSTAY_SOAK_SEED` the seed. `MAINSTAY_SOAK_REPORT` names a
//! file for the counts: the soak then continues after an error, and the reader of the counts decides.

#![allow(clippy::expect_used, clippy::panic, reason = "in a test, a panic is the report")]

use crate::drill;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use drill::{Random, Trace, held, is_template, order, overlapping, signal};
use mainstay_tests::{Job, Stage, has_client, has_torch, processes};
use nix::sys::signal::Signal;

/// Ranks that step together and write down each step with its attempt. Shared memory outlives them, and so do their
/// saves. `meet` and `begin` depend on the kind of job.
const TRAINING: &str = r#"
import mainstay, mmap, struct
WORLD = int(os.environ["WORLD_SIZE"])
slots = mmap.mmap(os.open(f"{MARKS}/slots", os.O_RDWR), 8 * WORLD)
trace = os.open(f"{MARKS}/trace", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def has(name):
    return os.path.exists(f"{MARKS}/{name}")
def completed(rank):
    return struct.unpack_from("q", slots, 8 * rank)[0]
def cleanup():
    if has(f"unclean.{RANK}"):
        os.remove(f"{MARKS}/unclean.{RANK}")
        raise OSError("cannot be cleaned up")
signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
def train():
    attempt = int(os.environ["MAINSTAY_ATTEMPT"])
    step = begin()
    while not meet(step):
        if RANK == 0 and has("bug"):
            raise KeyError("a bug")
        if has(f"raise.{RANK}"):
            os.remove(f"{MARKS}/raise.{RANK}")
            raise RuntimeError("injected")
        os.write(trace, f"{attempt} {RANK} {os.getpid()} {step}\n".encode())
        if step % 50 == 0:
            mainstay.checkpoint.save(step, {"step": step, "weights": bytes(1 << 16)})
        mainstay.step(step)
        step += 1
        struct.pack_into("q", slots, 8 * RANK, step)
        time.sleep(0.002)
"#;

/// They meet in memory.
const BY_MEMORY: &str = r#"
def begin():
    return completed(RANK)
def meet(step):
    while min(map(completed, range(WORLD))) < step:
        if has("end"):
            return True
        time.sleep(0.001)
    return has("end")
"#;

/// They meet in collectives of gloo.
const BY_GLOO: &str = r#"
import torch, torch.distributed as dist
torch.set_num_threads(1)
def agreed(number, how):
    tensor = torch.tensor([number])
    dist.all_reduce(tensor, op=how)
    return int(tensor)
def begin():
    dist.init_process_group("gloo")
    return agreed(completed(RANK), dist.ReduceOp.MIN)
def meet(step):
    return agreed(int(has("end")), dist.ReduceOp.MAX)
"#;

const IN_PROCESS: &str = "mainstay.restartable(train, cleanup=cleanup)()\n";
const PLAIN: &str = "train()\n";

/// The kind of job.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Ranks that stay in their processes.
    InProcess,
    /// Ranks that are all restarted.
    Plain,
    /// Ranks with PyTorch that stay in their processes, blocked in gloo when a peer fails.
    Gloo,
}

impl Kind {
    fn script(self) -> String {
        let (meeting, call) = match self {
            Kind::InProcess => (BY_MEMORY, IN_PROCESS),
            Kind::Plain => (BY_MEMORY, PLAIN),
            Kind::Gloo => (BY_GLOO, IN_PROCESS),
        };
        format!("{TRAINING}{meeting}{call}")
    }

    fn ranks(self) -> u32 {
        match self {
            Kind::InProcess | Kind::Plain => 3,
            Kind::Gloo => 2,
        }
    }
}

/// The faults. It takes seconds to distinguish a hang from work, so hangs are rarer.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Kill,
    KillAllButOne,
    KillAll,
    Terminate,
    Abort,
    Exit,
    Exception,
    /// And the rank cannot be cleaned up after it.
    Unclean,
    Stop,
    Hang,
    Template,
    Restart,
    Network,
    /// A kill, and another one in the attempt that follows before it has made a step.
    KillTwice,
    /// An exception, and a kill of another rank while the ranks leave.
    KillWhileLeaving,
}

const FAULTS: [Fault; 23] = [
    Fault::Kill,
    Fault::Exception,
    Fault::KillTwice,
    Fault::Terminate,
    Fault::KillWhileLeaving,
    Fault::Exit,
    Fault::Unclean,
    Fault::KillAllButOne,
    Fault::Kill,
    Fault::Template,
    Fault::Abort,
    Fault::Network,
    Fault::Exception,
    Fault::KillAll,
    Fault::Restart,
    Fault::KillTwice,
    Fault::Kill,
    Fault::KillWhileLeaving,
    Fault::Exception,
    Fault::Exit,
    Fault::Kill,
    Fault::Stop,
    Fault::Hang,
];

/// How a job ends, and with which status.
#[derive(Clone, Copy, Debug)]
enum Ending {
    /// All ranks return.
    Done,
    /// One rank raises the same exception at the same step, again and again: a person has to act.
    Bug,
    /// The launcher is asked to stop while it recovers.
    Reported,
    /// The launcher is killed.
    Killed,
}

const ENDINGS: [Ending; 4] = [Ending::Done, Ending::Bug, Ending::Reported, Ending::Killed];

/// What must never happen.
#[derive(Debug, Default)]
struct Counts {
    faults: u64,
    jobs: u64,
    wrong_ends: u64,
    overlaps: u64,
    leaks: u64,
}

impl Counts {
    fn to_json(&self) -> serde_json::Value {
        let Counts { faults, jobs, wrong_ends, overlaps, leaks } = self;
        serde_json::json!({
            "faults": faults, "jobs": jobs, "wrong_ends": wrong_ends, "overlaps": overlaps, "leaks": leaks,
        })
    }
}

#[test]
fn jobs_of_all_kinds_always_end_as_they_should_and_leave_nothing() {
    if !has_client() {
        return;
    }
    let number =
        |name: &str, usual| std::env::var(name).map_or(usual, |text| text.parse().expect("a number"));
    let (faults, seed) = (number("MAINSTAY_SOAK_FAULTS", 24), number("MAINSTAY_SOAK_SEED", 11));
    let report = std::env::var_os("MAINSTAY_SOAK_REPORT").map(PathBuf::from);
    let kinds: &[Kind] = if has_torch() {
        &[Kind::InProcess, Kind::Gloo, Kind::Plain]
    } else {
        &[Kind::InProcess, Kind::Plain]
    };
    let of_a_job = (faults / 6).clamp(1, 25);
    let (mut random, mut counts) = (Random(seed), Counts::default());
    while counts.faults < faults {
        let kind = kinds[counts.jobs as usize % kinds.len()];
        let ending = ENDINGS[counts.jobs as usize % ENDINGS.len()];
        let planned = of_a_job.min(faults - counts.faults);
        println!(
            "job {}: {kind:?}, {planned} faults from the {}th on, then {ending:?}",
            counts.jobs, counts.faults
        );
        let first = counts.faults;
        let one = || soak(kind, ending, first, planned, &mut random, &mut counts);
        if catch_unwind(AssertUnwindSafe(one)).is_err() {
            counts.wrong_ends += 1;
        }
        (counts.faults, counts.jobs) = (first + planned, counts.jobs + 1);
        if let Some(report) = &report {
            std::fs::write(report, counts.to_json().to_string()).expect("a report");
        }
    }
    println!("{counts:?}");
    if report.is_none() {
        assert_eq!((counts.wrong_ends, counts.overlaps, counts.leaks), (0, 0, 0), "{counts:?}");
    }
}

/// Short-lived resources may add this many at one moment: a standby that is being made, a save on its way to the
/// disk. A leak per fault or restart adds up to more.
const IN_PASSING: usize = 2;

/// One job with this many faults, and its end.
fn soak(kind: Kind, ending: Ending, first: u64, planned: u64, random: &mut Random, counts: &mut Counts) {
    let stage = Stage::new();
    let ranks = kind.ranks();
    std::fs::write(stage.marks().join("slots"), vec![0; 8 * ranks as usize]).expect("a file");
    // A rank may be hung in the middle of a save, which may take minutes in a job without history.
    let options =
        "--allow-inject --max-restarts 1000000 --fault-timeout 5s --hang-limit step=3s,checkpoint=3s";
    let job = stage.python(&kind.script()).ranks(ranks).options(options).start();
    let mut trace = Trace::of(&stage, ranks);
    let mut at_first = BTreeMap::new();
    for count in 0..planned {
        let pids = trace.wait_for(trace.attempt, 30);
        // Beside other load a single sample may be too early: a rank that has not connected yet holds nothing.
        if (planned / 4..=planned / 2).contains(&count) {
            for (what, now) in held(&job, &stage, &pids) {
                let most = at_first.entry(what).or_insert(now);
                *most = now.max(*most);
            }
        }
        // Each kind occurs, whatever the seed.
        let fault = match FAULTS.get((first + count) as usize) {
            Some(fault) => *fault,
            None => FAULTS[random.below(FAULTS.len() as u64) as usize],
        };
        let victim = random.below(u64::from(ranks)) as u32;
        let attempt = trace.attempt;
        println!("  {fault:?} of rank {victim} in attempt {attempt}");
        hurt(kind, fault, &job, &stage, victim, attempt, &pids, random);
        trace.wait_for(attempt + 1, 1);
    }
    let pids = trace.wait_for(trace.attempt, 30);
    // The page of the previous process stays for later analysis; a rank that stayed in its process has none.
    let passing = |what: &str| if what == "files on tmpfs" { ranks as usize } else { IN_PASSING };
    let most = |what: &str, now: usize| at_first.get(what).map_or(now, |before| before + passing(what));
    let is_more = |(what, now): &(&'static str, usize)| *now > most(what, *now);
    // What is in passing goes; a leak stays.
    let leaks = || held(&job, &stage, &pids).into_iter().filter(is_more).collect::<Vec<_>>();
    let gone = || processes::wait_until("what is in passing to go", || leaks().is_empty());
    if catch_unwind(AssertUnwindSafe(gone)).is_err() {
        for (what, held) in leaks() {
            println!("{what}: {} after up to half of the faults, {held} at the end", at_first[what]);
            println!("on tmpfs: {:?}", names(&stage.tmpfs().join(job.id())));
            counts.leaks += 1;
        }
    }
    let here = stage.tmpfs().join(job.id());
    let journal = end(ending, job, &stage, &pids);
    let overlaps = trace.overlaps.len() + journal.len();
    if overlaps > 0 {
        println!("{:?}, {journal:?}", trace.overlaps);
        counts.overlaps += overlaps as u64;
    }
    // Pages stay for later analysis, until another job starts.
    stage.sh("exit 0").start().end().assert_status(0);
    if here.exists() {
        println!("left on tmpfs: {:?}", names(&here));
        counts.leaks += 1;
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[expect(clippy::too_many_arguments, reason = "all that there is to a fault")]
fn hurt(
    kind: Kind,
    fault: Fault,
    job: &Job,
    stage: &Stage,
    victim: u32,
    attempt: u32,
    pids: &BTreeMap<u32, i32>,
    random: &mut Random,
) {
    let rank = victim.to_string();
    let others = || pids.iter().filter(|(rank, _)| **rank != victim).map(|(_, pid)| *pid);
    let another = others().nth(random.below(pids.len() as u64 - 1) as usize).unwrap_or_default();
    let next = random.below(pids.len() as u64) as u32;
    match fault {
        Fault::Kill => signal(pids[&victim], Signal::SIGKILL),
        Fault::KillAllButOne => others().for_each(|pid| signal(pid, Signal::SIGKILL)),
        Fault::KillAll => pids.values().for_each(|pid| signal(*pid, Signal::SIGKILL)),
        Fault::Terminate => signal(pids[&victim], Signal::SIGTERM),
        Fault::Abort => signal(pids[&victim], Signal::SIGABRT),
        Fault::Exit => signal(pids[&victim], Signal::SIGUSR1),
        // Not through the client: the code that the rank runs at that moment may catch what the client raises.
        Fault::Exception => stage.mark(&format!("raise.{victim}")),
        Fault::Unclean => {
            stage.mark(&format!("unclean.{victim}"));
            stage.mark(&format!("raise.{victim}"));
        }
        Fault::Stop => signal(pids[&victim], Signal::SIGSTOP),
        Fault::Hang => order(job, &["inject", "hang", "--rank", &rank]),
        // Without connections there is nothing to cut.
        Fault::Network if matches!(kind, Kind::Gloo) => order(job, &["inject", "network", "--rank", &rank]),
        Fault::Restart | Fault::Network => order(job, &["job", "restart"]),
        Fault::Template => {
            let templates = processes::of_job(job.id()).into_iter().filter(is_template);
            templates.for_each(|pid| signal(pid, Signal::SIGKILL));
            signal(pids[&victim], Signal::SIGKILL);
        }
        Fault::KillTwice => {
            signal(pids[&victim], Signal::SIGKILL);
            signal(job.attempt(attempt + 1).pids[&next], Signal::SIGKILL);
        }
        Fault::KillWhileLeaving => {
            order(job, &["inject", "exception", "--rank", &rank]);
            signal(another, Signal::SIGKILL);
        }
    }
}

/// Brings the job to its end; attempts that overlap by its journal.
fn end(ending: Ending, job: Job, stage: &Stage, pids: &BTreeMap<u32, i32>) -> Vec<String> {
    let status = match ending {
        Ending::Done => {
            stage.mark("end");
            0
        }
        Ending::Bug => {
            stage.mark("bug");
            1
        }
        Ending::Reported => {
            signal(pids[&0], Signal::SIGKILL);
            job.signal(Signal::SIGTERM);
            143
        }
        Ending::Killed => {
            signal(pids[&0], Signal::SIGKILL);
            job.kill_launcher();
            return Vec::new();
        }
    };
    let end = job.end();
    end.assert_status(status);
    overlapping(&end.journal)
}
