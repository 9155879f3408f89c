//! Shared parts of the drills: ranks that write down each step with its attempt, a reader of these traces, and the
//! means to inject faults.
#![allow(clippy::expect_used, clippy::panic, reason = "in a test, a panic is the report")]
#![allow(dead_code, reason = "not every test needs all of it")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::process::Command;

use mainstay_model::entry::{Entry, Fact};
use mainstay_model::id::Attempt;
use mainstay_tests::{Job, Stage, journal, mainstay, processes};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// SplitMix64 (Steele, Lea, Flood 2014).
pub struct Random(pub u64);

impl Random {
    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % bound
    }
}

/// The ranks' traces, read as they grow.
pub struct Trace {
    path: PathBuf,
    ranks: u32,
    read: u64,
    /// The newest attempt that trains.
    pub attempt: u32,
    /// By rank: its process, and its steps in this attempt.
    steps: BTreeMap<u32, (i32, u32)>,
    /// What must never happen: an attempt that trains at the same time as a later one, or two processes of a rank
    /// in one attempt.
    pub overlaps: BTreeSet<String>,
}

impl Trace {
    /// For this many ranks.
    pub fn of(stage: &Stage, ranks: u32) -> Trace {
        let path = stage.marks().join("trace");
        Trace { path, ranks, read: 0, attempt: 0, steps: BTreeMap::new(), overlaps: BTreeSet::new() }
    }

    fn look(&mut self) {
        let Ok(mut file) = std::fs::File::open(&self.path) else { return };
        let mut text = String::new();
        file.seek(SeekFrom::Start(self.read)).expect("a file");
        file.read_to_string(&mut text).expect("text");
        let whole = text.rfind('\n').map_or(0, |last| last + 1);
        for line in text[..whole].lines() {
            let numbers: Vec<i64> = line.split(' ').map(|word| word.parse().expect("a number")).collect();
            let [attempt, rank, pid, _] = numbers[..] else { panic!("a line of another form: {line}") };
            self.stepped(attempt as u32, rank as u32, pid as i32);
        }
        self.read += whole as u64;
    }

    fn stepped(&mut self, attempt: u32, rank: u32, pid: i32) {
        if attempt < self.attempt {
            let words = format!("attempt {attempt} still trains beside attempt {}", self.attempt);
            self.overlaps.insert(words);
            return;
        }
        if attempt > self.attempt {
            (self.attempt, self.steps) = (attempt, BTreeMap::new());
        }
        let steps = self.steps.entry(rank).or_insert((pid, 0));
        if steps.0 != pid {
            let words = format!("two processes of rank {rank} train in attempt {attempt}");
            self.overlaps.insert(words);
        }
        steps.1 += 1;
    }

    /// The ranks' processes, once all of them have made this many steps in an attempt from this one on.
    pub fn wait_for(&mut self, attempt: u32, steps: u32) -> BTreeMap<u32, i32> {
        let seen = std::cell::RefCell::new(self);
        processes::wait_until(&format!("all ranks make {steps} steps in attempt {attempt} or later"), || {
            let mut trace = seen.borrow_mut();
            trace.look();
            let enough =
                trace.steps.len() == trace.ranks as usize && trace.steps.values().all(|of| of.1 >= steps);
            trace.attempt >= attempt && enough
        });
        let trace = seen.into_inner();
        trace.steps.iter().map(|(rank, (pid, _))| (*rank, *pid)).collect()
    }
}

/// Sends an order that must succeed.
pub fn order(job: &Job, arguments: &[&str]) {
    let output = Command::new(mainstay())
        .args(arguments)
        .args(["--reason", "drill", "--socket"])
        .arg(job.socket())
        .output()
        .expect("mainstay can be started");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Signals a process.
pub fn signal(pid: i32, signal: Signal) {
    // A process that has just ended by itself is just as good.
    let _ = kill(Pid::from_raw(pid), signal);
}

/// Whether it is a template that ranks are forked from.
pub fn is_template(pid: &i32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).contains("template.py")
}

/// Resources that one launcher holds, as numbers that must not grow.
pub fn held(job: &Job, stage: &Stage, ranks: &BTreeMap<u32, i32>) -> BTreeMap<&'static str, usize> {
    let pages = std::fs::read_dir(stage.tmpfs().join(job.id())).expect("the job's directory").count();
    let template = usize::from(processes::of_job(job.id()).iter().any(is_template));
    // Standbys come and go; the only other child is the guardian, and zombies are reaped soon.
    let is_other = |pid: &i32| !is_template(pid) && !ranks.values().any(|rank| rank == pid);
    let others = || processes::children(job.launcher()).into_iter().filter(is_other).count();
    processes::wait_until("all orphans are taken off the table", || others() <= 1);
    BTreeMap::from([
        // One to the template, which does not always exist.
        ("open files", processes::open_files(job.launcher()) - template),
        ("sockets", processes::sockets(job.launcher()) - template),
        ("children", others()),
        ("files on tmpfs", pages),
    ])
}

/// Attempts that started before the previous one was over, by the journal; in words.
pub fn overlapping(journal: &[Entry]) -> Vec<String> {
    let (mut running, mut wrong) = (None::<Attempt>, Vec::new());
    for fact in journal::facts(journal) {
        match fact {
            Fact::AttemptStarted { attempt, .. } => {
                if let Some(before) = running.replace(*attempt) {
                    wrong
                        .push(format!("attempt {} began while attempt {} was not over", attempt.0, before.0));
                }
            }
            Fact::AttemptEnded { attempt, .. } if running == Some(*attempt) => running = None,
            _ => {}
        }
    }
    wrong.extend(running.map(|attempt| format!("attempt {} never ended", attempt.0)));
    wrong
}
