//! Faults of all kinds, one after the other, on three hosts with agents and etcd: agents and launchers are killed and
//! frozen, hosts are cut off in both directions or one, a log directory has no room. It counts what must never happen:
//! steps that were saved and are lost, ranks that a fault disturbs which does not concern them, processes that are left.
//!
//! `MAINSTAY_CHAOS_SECONDS` sets the length. `MAINSTAY_CHAOS_REPORT` names a file for the counts: its reader then decides.
//! The ranks' wall clock is not changed: a namespace has no own.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use mainstay_tests::{Agent, Job, has_client, is_root, processes, skipped};
use nix::sys::signal::Signal;
use nix::time::{ClockId, clock_gettime};
use serde_json::json;

use super::cluster::Cluster;
use super::etcd::has_etcd;
use super::links::Quality;

const HOSTS: usize = 3;

/// A scenario has some faults; the benchmark gives it minutes.
const USUAL_LENGTH: Duration = Duration::from_secs(40);

/// How long a fault lasts that makes others act on it, and one that must not.
const LONG: Duration = Duration::from_secs(8);
const SHORT: Duration = Duration::from_secs(1);

/// A step counts as saved when all ranks have had it for so long: its copies are on other hosts then.
const COPIED_WITHIN: Duration = Duration::from_secs(2);

/// How long the job may take to go on after a fault.
const GOES_ON_WITHIN: Duration = Duration::from_secs(120);

/// One rank for each host. They step together by slots in a file, and note when they began and saved.
const RANKS: &str = r#"
import mainstay, mmap, struct
WORLD = int(os.environ["WORLD_SIZE"])
slots = mmap.mmap(os.open(os.environ["SLOTS"], os.O_RDWR), 8 * WORLD)
trace = os.open(f"{MARKS}/trace", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def note(what, step):
    os.write(trace, f"{what} {time.monotonic_ns()} {RANK} {step}\n".encode())
def others():
    return min(struct.unpack_from("q", slots, 8 * rank)[0] for rank in range(WORLD))
saved = mainstay.checkpoint.load()
step = 0 if saved is None else saved + 1
note("began", step)
ended = lambda: os.path.exists(os.environ["ENDS"])
while not ended():
    # Slots of an earlier attempt are smaller.
    at = ATTEMPT * 10**9 + step
    struct.pack_into("q", slots, 8 * RANK, at)
    while others() < at and not ended():
        time.sleep(0.002)
    mainstay.step(step, loss=1.0)
    if step % 20 == 0 and mainstay.checkpoint.save(step, step):
        note("saved", step)
    step += 1
    time.sleep(0.02)
"#;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    KillAgent,
    StopAgent,
    StopLauncher,
    FillLogs,
    CutShortly,
    KillLauncher,
    Freeze,
    Cut,
    CutOut,
    CutIn,
}

/// In this order again and again, each on the next host.
const FAULTS: [Fault; 10] = [
    Fault::KillAgent,
    Fault::KillLauncher,
    Fault::StopAgent,
    Fault::CutOut,
    Fault::FillLogs,
    Fault::Freeze,
    Fault::CutShortly,
    Fault::Cut,
    Fault::StopLauncher,
    Fault::CutIn,
];

impl Fault {
    /// Whether the job may restart its ranks for it.
    fn may_disturb(self) -> bool {
        matches!(self, Fault::KillLauncher | Fault::Freeze | Fault::Cut | Fault::CutOut | Fault::CutIn)
    }
}

/// What a rank noted.
#[derive(Clone, Copy, Debug)]
struct Note {
    began: bool,
    at: u64,
    rank: u64,
    step: u64,
}

fn now() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("the clock");
    now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64
}

/// A small file system for the logs of a host.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: PathBuf) -> SmallDisk {
        let mut mount = Command::new("mount");
        // The log of etcd alone takes 64 MiB twice.
        mount.args(["-t", "tmpfs", "-o", "size=256m", "chaos"]).arg(&at);
        assert!(mount.status().expect("there is mount").success());
        SmallDisk(at)
    }

    fn fill(&self) {
        let mut file = fs::File::create(self.0.join("fill")).expect("a file");
        let chunk = vec![0; 1 << 20];
        while file.write_all(&chunk).is_ok() {}
    }

    fn empty(&self) {
        fs::remove_file(self.0.join("fill")).expect("our own file");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // What ends late may have a file there.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// Three hosts, their agents, and the job.
struct Stand {
    jobs: Vec<Option<Job>>,
    agents: Vec<Option<Agent>>,
    ends: PathBuf,
    slots: PathBuf,
    /// When which fault began.
    faults: Vec<(u64, Fault)>,
    disk: SmallDisk,
    cluster: Cluster,
}

impl Stand {
    fn new() -> Stand {
        let cluster = Cluster::with_links_and_etcd_on(HOSTS, HOSTS);
        let work = cluster.stage(0).work();
        let (ends, slots) = (work.join("ends"), work.join("slots"));
        fs::write(&slots, [0; 8 * HOSTS]).expect("a file");
        let disk = SmallDisk::mount(cluster.stage(HOSTS - 1).logs());
        let agents = (0..HOSTS).map(|host| Some(cluster.stage(host).agent())).collect();
        let jobs = (0..HOSTS).map(|_| None).collect();
        let mut stand = Stand { jobs, agents, ends, slots, faults: Vec::new(), disk, cluster };
        (0..HOSTS).for_each(|host| stand.start(host));
        stand
    }

    fn start(&mut self, host: usize) {
        let options =
            format!("--nnodes {HOSTS} --node-rank {host} --nproc-per-node 1 --max-restarts 1000 --hang off");
        let (ends, slots) = (self.ends.display().to_string(), self.slots.display().to_string());
        let plan = self.cluster.plan(host, RANKS, &options, &[("ENDS", &ends), ("SLOTS", &slots)]);
        let agent = self.agents[host].as_ref().expect("an agent runs on each host");
        self.jobs[host] = Some(plan.with(agent).start());
    }

    /// Starts the launchers again that have ended, as Slurm or Kubernetes would.
    fn start_ended(&mut self) {
        for host in 0..HOSTS {
            let ended = |job: &Job| matches!(processes::state(job.launcher()), None | Some('Z'));
            if self.jobs[host].as_ref().is_none_or(ended) {
                self.jobs[host] = None;
                self.start(host);
            }
        }
    }

    fn notes(&self) -> Vec<Note> {
        let texts = (0..HOSTS).map(|host| fs::read_to_string(self.cluster.stage(host).marks().join("trace")));
        let lines: Vec<String> = texts
            .flat_map(|text| text.unwrap_or_default().lines().map(str::to_owned).collect::<Vec<_>>())
            .collect();
        let note = |line: &String| {
            let (what, numbers) = line.split_once(' ')?;
            let numbers: Vec<u64> = numbers.split(' ').filter_map(|number| number.parse().ok()).collect();
            let [at, rank, step] = numbers[..] else { return None };
            Some(Note { began: what == "began", at, rank, step })
        };
        lines.iter().filter_map(note).collect()
    }

    /// Waits until all ranks have saved a step. If all launchers were replaced, attempts are numbered from 0 again.
    fn goes_on(&mut self, what: &str) {
        let (since, began) = (now(), Instant::now());
        loop {
            let notes = self.notes();
            let saved = notes.iter().filter(|note| !note.began && note.at > since);
            if saved.map(|note| note.rank).collect::<BTreeSet<_>>().len() == HOSTS {
                return;
            }
            if began.elapsed() > GOES_ON_WITHIN {
                let printed = self.jobs.iter().flatten().map(Job::printed).collect::<Vec<_>>().join("\n--\n");
                panic!("the job does not go on after {what}:\n{printed}");
            }
            self.start_ended();
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn inject(&mut self, fault: Fault, host: usize) {
        self.faults.push((now(), fault));
        let network = self.cluster.network();
        let cut = |out, back, time| {
            network.set_link(host, out, back);
            std::thread::sleep(time);
            network.set_link(host, Quality::GOOD, Quality::GOOD);
        };
        let stopped = |signal: &dyn Fn(Signal), time| {
            signal(Signal::SIGSTOP);
            std::thread::sleep(time);
            signal(Signal::SIGCONT);
        };
        match fault {
            Fault::KillAgent => {
                self.agents[host].take().expect("an agent runs on each host").kill();
                std::thread::sleep(SHORT);
                self.agents[host] = Some(self.cluster.stage(host).agent());
            }
            Fault::StopAgent => {
                let agent = self.agents[host].as_ref().expect("an agent runs on each host");
                stopped(&|signal| agent.signal(signal), LONG);
            }
            Fault::StopLauncher => {
                let job = self.jobs[host].as_ref().expect("a launcher runs on each host");
                stopped(&|signal| job.signal(signal), SHORT);
            }
            Fault::KillLauncher => {
                self.jobs[host].take().expect("a launcher runs on each host").lose_launcher();
                std::thread::sleep(SHORT);
                self.start(host);
            }
            Fault::Freeze => {
                network.freeze(host);
                std::thread::sleep(LONG);
                network.thaw(host);
            }
            Fault::FillLogs => {
                self.disk.fill();
                std::thread::sleep(LONG);
                self.disk.empty();
            }
            Fault::CutShortly => cut(Quality::DEAD, Quality::DEAD, Duration::from_millis(500)),
            Fault::Cut => cut(Quality::DEAD, Quality::DEAD, LONG),
            Fault::CutOut => cut(Quality::DEAD, Quality::GOOD, LONG),
            Fault::CutIn => cut(Quality::GOOD, Quality::DEAD, LONG),
        }
    }

    /// Ranks that began again because of a fault that does not concern them, and saved steps from which no attempt
    /// continued, each with a line.
    fn count(&self) -> (usize, usize, Vec<String>) {
        let notes = self.notes();
        let mut saved: BTreeMap<u64, BTreeMap<u64, u64>> = BTreeMap::new();
        for note in notes.iter().filter(|note| !note.began) {
            let first = saved.entry(note.step).or_default().entry(note.rank).or_insert(note.at);
            *first = note.at.min(*first);
        }
        let whole: BTreeMap<u64, u64> = saved
            .into_iter()
            .filter(|(_, ranks)| ranks.len() == HOSTS)
            .filter_map(|(step, ranks)| Some((step, ranks.into_values().max()?)))
            .collect();
        let (mut disturbed, mut lost, mut lines) = (0, 0, Vec::new());
        let ends = self.faults.iter().skip(1).map(|(at, _)| *at).chain([u64::MAX]);
        for ((at, fault), end) in self.faults.iter().zip(ends) {
            let began = notes.iter().filter(|note| note.began && (*at..end).contains(&note.at));
            let began: Vec<u64> = began.map(|note| note.step).collect();
            let Some(from) = began.iter().min() else { continue };
            if !fault.may_disturb() {
                disturbed += began.len();
                lines.push(format!("{} ranks began again after {fault:?}", began.len()));
            }
            let copied = at.saturating_sub(COPIED_WITHIN.as_nanos() as u64);
            let behind = whole.iter().filter(|(step, at)| *step >= from && **at <= copied);
            let behind: Vec<u64> = behind.map(|(step, _)| *step).collect();
            if !behind.is_empty() {
                lost += behind.len();
                lines.push(format!("after {fault:?} ranks began at {from}, and {behind:?} were saved"));
            }
        }
        (disturbed, lost, lines)
    }

    /// Ends the job. Returns the processes of it that are left.
    fn end(&mut self) -> Vec<String> {
        fs::write(&self.ends, "").expect("a file");
        let jobs: Vec<Job> = self.jobs.iter_mut().filter_map(Option::take).collect();
        assert!(jobs.iter().all(Job::has_ended), "{}", jobs.iter().map(Job::printed).collect::<String>());
        let id = jobs.first().map(|job| job.id().to_owned()).unwrap_or_default();
        // Its journals can be read.
        assert!(jobs.iter().all(|job| !job.journal().is_empty()));
        processes::of_job(&id).into_iter().map(processes::reported).collect()
    }
}

#[test]
fn no_saved_step_is_lost_and_only_ranks_that_a_fault_concerns_begin_again() {
    if !has_client() || !has_etcd() {
        return;
    }
    if !is_root() {
        return skipped("only root has hosts with a network each");
    }
    let length = std::env::var("MAINSTAY_CHAOS_SECONDS").ok().and_then(|text| text.parse().ok());
    let length = length.map_or(USUAL_LENGTH, Duration::from_secs);
    let report = std::env::var_os("MAINSTAY_CHAOS_REPORT").map(PathBuf::from);
    let mut stand = Stand::new();
    stand.goes_on("its start");
    let began = Instant::now();
    for (number, fault) in FAULTS.into_iter().cycle().enumerate() {
        if began.elapsed() >= length {
            break;
        }
        let host = if fault == Fault::FillLogs { HOSTS - 1 } else { number % HOSTS };
        println!("{fault:?} on host {host}");
        stand.inject(fault, host);
        stand.goes_on(&format!("{fault:?} on host {host}"));
    }
    let faults = stand.faults.len();
    let leaks = stand.end();
    let (disturbed_ranks, lost_steps, lines) = stand.count();
    lines.iter().for_each(|line| println!("{line}"));
    match report {
        Some(file) => {
            let counts = json!({
                "faults": faults, "lost_steps": lost_steps, "disturbed_ranks": disturbed_ranks, "leaks": leaks.len(),
            });
            fs::write(file, counts.to_string()).expect("a file for the counts");
        }
        None => assert_eq!((disturbed_ranks, lost_steps, leaks), (0, 0, Vec::new()), "{lines:#?}"),
    }
}
