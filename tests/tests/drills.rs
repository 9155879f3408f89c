//! Faults of all kinds in one job of real processes, one after the other and one inside the other: it always goes on, two
//! attempts never train at once, and nothing is left over. `MAINSTAY_TEST_FAULTS` says how many, `MAINSTAY_TEST_SEED` which.

#![allow(clippy::expect_used, clippy::panic, reason = "in a test, a panic is the report")]

use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::process::Command;

use mainstay_core::entry::Fact;
use mainstay_core::id::Attempt;
use mainstay_tests::{Job, Stage, has_client, mainstay, processes, story};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const RANKS: u32 = 3;

/// Ranks that go step by step together, in memory that outlives them, and write down each step with its attempt.
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

/// What is done. `Twice` is a kill with another one in the attempt that follows, before it has made a step.
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

/// Hangs take seconds to be told from work: they are rarer.
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

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % bound
    }
}

/// What the ranks write down, read as it grows.
struct Trace {
    path: PathBuf,
    read: u64,
    attempt: u32,
    /// By rank: its process, and its steps in this attempt.
    steps: BTreeMap<u32, (i32, u32)>,
}

impl Trace {
    fn look(&mut self) {
        let Ok(mut file) = std::fs::File::open(&self.path) else { return };
        let mut text = String::new();
        file.seek(SeekFrom::Start(self.read)).expect("a file");
        file.read_to_string(&mut text).expect("text");
        let whole = text.rfind('\n').map_or(0, |last| last + 1);
        for line in text[..whole].lines() {
            let numbers: Vec<i64> = line.split(' ').map(|word| word.parse().expect("a number")).collect();
            let [attempt, rank, pid, _] = numbers[..] else { panic!("a line of another form: {line}") };
            let (attempt, rank, pid) = (attempt as u32, rank as u32, pid as i32);
            assert!(
                attempt >= self.attempt,
                "attempt {attempt} still trains beside attempt {}",
                self.attempt
            );
            if attempt > self.attempt {
                (self.attempt, self.steps) = (attempt, BTreeMap::new());
            }
            let steps = self.steps.entry(rank).or_insert((pid, 0));
            assert_eq!(steps.0, pid, "two processes of rank {rank} train in attempt {attempt}");
            steps.1 += 1;
        }
        self.read += whole as u64;
    }

    /// The ranks' processes, once all of them have made so many steps in an attempt from this one on.
    fn wait_for(&mut self, attempt: u32, steps: u32) -> BTreeMap<u32, i32> {
        let seen = std::cell::RefCell::new(self);
        processes::wait_until(&format!("all ranks make {steps} steps in attempt {attempt} or later"), || {
            let mut trace = seen.borrow_mut();
            trace.look();
            let enough = trace.steps.len() == RANKS as usize && trace.steps.values().all(|of| of.1 >= steps);
            trace.attempt >= attempt && enough
        });
        let trace = seen.into_inner();
        trace.steps.iter().map(|(rank, (pid, _))| (*rank, *pid)).collect()
    }
}

fn order(job: &Job, arguments: &[&str]) {
    let output = Command::new(mainstay())
        .args(arguments)
        .args(["--reason", "drill", "--socket"])
        .arg(job.socket())
        .output()
        .expect("mainstay can be started");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn signal(pid: i32, signal: Signal) {
    // A process that has just ended by itself is as good.
    let _ = kill(Pid::from_raw(pid), signal);
}

fn is_template(pid: &i32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).contains("template.py")
}

/// What one launcher holds, as numbers that must not grow.
fn held(job: &Job, stage: &Stage, ranks: &BTreeMap<u32, i32>) -> BTreeMap<&'static str, usize> {
    let pages = std::fs::read_dir(stage.tmpfs().join(job.id())).expect("the job's directory").count();
    let template = usize::from(processes::of_job(job.id()).iter().any(is_template));
    // Standbys come and go; all else beside the ranks is the guardian, and no zombies for long.
    let is_other = |pid: &i32| !is_template(pid) && !ranks.values().any(|rank| rank == pid);
    let others = || processes::children(job.launcher()).into_iter().filter(is_other).count();
    processes::wait_until("all orphans are taken off the table", || others() <= 1);
    BTreeMap::from([
        // One to the template, which is not always there.
        ("open files", processes::open_files(job.launcher()) - template),
        ("sockets", processes::sockets(job.launcher()) - template),
        ("children", others()),
        ("files on tmpfs", pages),
    ])
}

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
    let mut trace = Trace { path: stage.marks().join("trace"), read: 0, attempt: 0, steps: BTreeMap::new() };
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
        // Each kind comes, whatever the seed.
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
    let at_last = held(&job, &stage, &ranks);
    stage.mark("end");
    let end = job.end();
    end.assert_status(0);
    for (what, count) in at_last {
        assert!(
            count <= at_first[what],
            "{what}: {} at a quarter of the faults, then {count}\n{end}",
            at_first[what]
        );
    }
    // Each attempt is over before the next one begins, by the journal as well.
    let mut running = None;
    for fact in story::facts(&end.story) {
        match fact {
            Fact::AttemptStarted { attempt, .. } => {
                assert_eq!(running, None, "{end}");
                running = Some(*attempt);
            }
            Fact::AttemptEnded { attempt, .. } if running == Some(*attempt) => running = None,
            _ => {}
        }
    }
    assert_eq!(running, None::<Attempt>, "{end}");
    let started = story::facts(&end.story).filter(|fact| matches!(fact, Fact::AttemptStarted { .. })).count();
    assert!(started as u64 > faults, "each fault is followed by an attempt: {started} of {faults}");
}
