//! Jobs that stop in the middle of a step, and the culprits that the hang judge names.
//!
//! Ranks run a pipeline of micro-batches with tensor-parallel collectives within a stage, transfers between stages
//! and one reduction over all replicas. Each rank launches some operations ahead of its device, as real ones do. When
//! one rank stops launching, the state in which the other ranks stop is computed, not assumed.

use mainstay_hang::{Count, Hang, HangKind, HangStatus, Limits, PhaseId, RankSample, Watch};
use mainstay_model::id::Rank;
use mainstay_model::time::{Mono, Span};

use crate::mesh::{Mesh, PER_HOST};
use crate::random::Random;

/// Micro-batches per step.
const MICRO_BATCHES: usize = 4;
/// Collectives of a stage per micro-batch and direction.
const IN_STAGE: usize = 2;
/// The maximum number of operations that a rank launches before its device has started them.
const MOST_AHEAD: usize = 3;
/// The interval of reports.
const REPORT_INTERVAL: Span = Span::millis(500);
/// The time limit of the judge.
const HANG_LIMIT: Span = Span::seconds(90);
/// Steps before the hang.
const STEPS: u64 = 1000;

/// Reports that do not reach the judge.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    /// Share of reports that are lost.
    pub reports: f32,
    /// Share of hosts that report nothing after the hang starts.
    pub silent_hosts: f32,
}

impl Loss {
    /// 5 % of all reports, and 1 % of hosts.
    pub const USUAL: Loss = Loss { reports: 0.05, silent_hosts: 0.01 };
}

/// What stops the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HangFault {
    /// A rank stops launching and still reports.
    Rank(usize),
    /// A rank stops launching on a host that reports nothing any more.
    SilentHost(usize),
    /// An operation between the ranks of a communicator never ends although all have launched it.
    Link(usize),
}

/// An operation, by its participants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    /// With the ranks that share the layer.
    Tensor,
    /// With the previous stage.
    Before,
    /// With the next stage.
    After,
    /// With the same position in all replicas.
    Data,
}

const OPS: [Op; 4] = [Op::Tensor, Op::Before, Op::After, Op::Data];

/// The operations of the ranks of each stage in a step.
fn programs(mesh: Mesh) -> Vec<Vec<Op>> {
    let program = |stage: usize| {
        let (first, last) = (stage == 0, stage + 1 == mesh.pipeline);
        let mut ops = Vec::new();
        for _ in 0..MICRO_BATCHES {
            ops.extend((!first).then_some(Op::Before));
            ops.extend([Op::Tensor; IN_STAGE]);
            ops.extend((!last).then_some(Op::After));
        }
        for _ in 0..MICRO_BATCHES {
            ops.extend((!last).then_some(Op::After));
            ops.extend([Op::Tensor; IN_STAGE]);
            ops.extend((!first).then_some(Op::Before));
        }
        ops.push(Op::Data);
        ops
    };
    (0..mesh.pipeline).map(program).collect()
}

/// A stopped job.
struct Stuck {
    mesh: Mesh,
    programs: Vec<Vec<Op>>,
    /// Operations that the device of each rank has completed, and those that it was given.
    done: Vec<usize>,
    launched: Vec<usize>,
}

impl Stuck {
    /// Runs the job until no rank makes progress.
    fn new(mesh: Mesh, trouble: HangFault, random: &mut Random) -> Stuck {
        let programs = programs(mesh);
        let ranks = mesh.ranks();
        let ahead: Vec<usize> = (0..ranks).map(|_| 1 + random.below(MOST_AHEAD)).collect();
        let stage = match trouble {
            HangFault::Rank(rank) | HangFault::SilentHost(rank) | HangFault::Link(rank) => mesh.stage(rank),
        };
        let at = random.below(programs[stage].len());
        let mut stuck = Stuck { mesh, programs, done: vec![0; ranks], launched: vec![0; ranks] };
        let mut arrived = vec![0_u16; 4 * ranks];
        let mut ready: Vec<usize> = (0..ranks).collect();
        while let Some(rank) = ready.pop() {
            let done = stuck.done[rank];
            stuck.launched[rank] = done + ahead[rank];
            match trouble {
                HangFault::Rank(culprit) | HangFault::SilentHost(culprit) if rank == culprit => {
                    stuck.launched[rank] = stuck.launched[rank].min(at);
                    if done >= at {
                        continue;
                    }
                }
                HangFault::Link(member) => {
                    let op = stuck.op(rank, done);
                    let here = stuck.op(member, at);
                    if done == at && op == here && stuck.comm(rank, op) == stuck.comm(member, here) {
                        continue;
                    }
                }
                HangFault::Rank(_) | HangFault::SilentHost(_) => {}
            }
            let op = stuck.op(rank, done);
            let comm = stuck.comm(rank, op);
            arrived[comm] += 1;
            if usize::from(arrived[comm]) == stuck.size(op) {
                arrived[comm] = 0;
                for member in stuck.members(rank, op) {
                    stuck.done[member] += 1;
                    ready.push(member);
                }
            }
        }
        stuck
    }

    fn op(&self, rank: usize, index: usize) -> Op {
        let program = &self.programs[self.mesh.stage(rank)];
        program[index % program.len()]
    }

    fn members(&self, rank: usize, op: Op) -> Vec<usize> {
        let Mesh { tensor, data, .. } = self.mesh;
        let stage = tensor * data;
        match op {
            Op::Tensor => (0..tensor).map(|t| rank - rank % tensor + t).collect(),
            Op::Before => vec![rank - stage, rank],
            Op::After => vec![rank, rank + stage],
            Op::Data => {
                let first = rank - rank % stage + rank % tensor;
                (0..data).map(|d| first + d * tensor).collect()
            }
        }
    }

    fn size(&self, op: Op) -> usize {
        match op {
            Op::Tensor => self.mesh.tensor,
            Op::Before | Op::After => 2,
            Op::Data => self.mesh.data,
        }
    }

    /// The number of a communicator: its first member and its purpose.
    fn comm(&self, rank: usize, op: Op) -> usize {
        let stage = self.mesh.tensor * self.mesh.data;
        match op {
            Op::Tensor => 4 * (rank - rank % self.mesh.tensor),
            Op::Before => 4 * (rank - stage) + 2,
            Op::After => 4 * rank + 2,
            Op::Data => 4 * (rank - rank % stage + rank % self.mesh.tensor) + 3,
        }
    }

    /// The counters of a rank after `done` and `launched` operations of this step.
    fn counts(&self, rank: usize, done: usize, launched: usize) -> Vec<Count> {
        let program = &self.programs[self.mesh.stage(rank)];
        let of = |op: Op| {
            let among = |ops: &[Op]| ops.iter().filter(|each| **each == op).count();
            let a_step = among(program);
            let before = |index: usize| {
                let steps = STEPS as usize + index / program.len();
                (steps * a_step + among(&program[..index % program.len()])) as u64
            };
            let comm = self.comm(rank, op) as u64 + 1;
            Count { comm, entered: before(launched), completed: before(done), signature: 0 }
        };
        OPS.into_iter().filter(|op| program.contains(op)).map(of).collect()
    }
}

/// The result of the judge.
#[derive(Clone, Debug, PartialEq)]
pub struct Score {
    /// The judge named exactly the faulty rank, or no rank where none is faulty.
    pub rank: bool,
    /// All named ranks are on the faulty host.
    pub host: bool,
    /// Time from the first report of the stopped job to the verdict.
    pub took: Span,
    /// The verdict; none if there was none within 90 s.
    pub hang: Option<Hang>,
}

/// A stopped job and the judge that receives its reports look by look.
pub struct Case {
    mesh: Mesh,
    trouble: HangFault,
    loss: Loss,
    stuck: Stuck,
    silent: Vec<bool>,
    random: Random,
    watch: Watch,
    now: Mono,
    /// The counters of all ranks after the job has stopped.
    counts: Vec<Vec<Count>>,
}

impl Case {
    /// A job that has trained for a while and has just stopped.
    pub fn new(mesh: Mesh, trouble: HangFault, loss: Loss, seed: u64) -> Case {
        let mut random = Random::new(seed);
        let stuck = Stuck::new(mesh, trouble, &mut random);
        let hosts = mesh.ranks().div_ceil(PER_HOST);
        let mut silent: Vec<bool> = (0..hosts).map(|_| random.happens(loss.silent_hosts)).collect();
        match trouble {
            HangFault::Rank(rank) => silent[mesh.host(rank)] = false,
            HangFault::SilentHost(rank) => silent[mesh.host(rank)] = true,
            HangFault::Link(_) => {}
        }
        let now = Mono(Span::seconds(1000).0);
        let mut watch = Watch::new(Limits::default(), Rank(0), mesh.ranks(), now);
        watch.set_hosts((0..mesh.ranks()).map(|rank| mesh.host(rank) as u32).collect());
        let at_rest = |rank: usize| stuck.counts(rank, stuck.done[rank], stuck.launched[rank]);
        let counts = (0..mesh.ranks()).map(at_rest).collect();
        let mut case = Case { mesh, trouble, loss, stuck, silent, random, watch, now, counts };
        case.train();
        case
    }

    /// The steps before the hang, with heavy-tailed times, and a last report of each rank from a random point of the
    /// step.
    fn train(&mut self) {
        for step in 0..STEPS {
            let (normal, _) = self.random.normals();
            let outlier = if self.random.happens(0.01) { 1.0 + self.random.unit() } else { 1.0 };
            let took = f64::from((normal * 0.1).exp() * outlier);
            self.watch.phases().learn(PhaseId::STEP, step, Span((took * 1e9) as u64));
        }
        let culprit = match self.trouble {
            HangFault::SilentHost(rank) => Some(self.mesh.host(rank)),
            HangFault::Rank(_) | HangFault::Link(_) => None,
        };
        // Of the silent hosts, only that of the culprit became silent with the job. The others did so earlier.
        let before = self.now;
        self.now = before.after(Span::seconds(60));
        for rank in 0..self.mesh.ranks() {
            let host = self.mesh.host(rank);
            let reported = if self.silent[host] && culprit != Some(host) { before } else { self.now };
            let done = self.random.below(self.stuck.done[rank] + 1);
            let launched = (done + 1).min(self.stuck.launched[rank]).max(done);
            let counts = self.stuck.counts(rank, done, launched);
            self.watch.counts(rank, reported, &counts);
            self.watch.sample(rank, reported, &sample(1));
        }
        self.watch.look(self.now);
        self.now = self.now.after(REPORT_INTERVAL);
    }

    /// One look: the reports that arrive, and the result of the judge.
    pub fn tick(&mut self) -> HangStatus {
        for rank in 0..self.mesh.ranks() {
            if self.silent[self.mesh.host(rank)] || self.random.happens(self.loss.reports) {
                continue;
            }
            self.watch.counts(rank, self.now, &self.counts[rank]);
            self.watch.sample(rank, self.now, &sample(2));
        }
        self.watch.look(self.now)
    }

    /// A look at which every report arrives and is unchanged, as most are in a large job.
    pub fn look(&mut self) -> HangStatus {
        self.now = self.now.after(REPORT_INTERVAL);
        let sample = sample(2);
        for (rank, counts) in self.counts.iter().enumerate() {
            self.watch.sample(rank, self.now, &sample);
            self.watch.counts(rank, self.now, counts);
        }
        self.watch.look(self.now)
    }

    /// The memory of the judge in bytes.
    pub fn bytes(&self) -> usize {
        self.watch.bytes()
    }

    /// Looks until there is a verdict.
    pub fn run(mut self) -> Score {
        let began = self.now;
        while self.now.since(began) <= HANG_LIMIT {
            if let HangStatus::Confirmed(hang) = self.tick() {
                let took = self.now.since(began);
                return self.score(*hang, took);
            }
            self.now = self.now.after(REPORT_INTERVAL);
        }
        Score { rank: false, host: false, took: HANG_LIMIT, hang: None }
    }

    fn score(&self, hang: Hang, took: Span) -> Score {
        let hosts = |rank: usize| {
            let on_it = |named: &Rank| self.mesh.host(named.0 as usize) == self.mesh.host(rank);
            !hang.culprits.is_empty() && hang.culprits.iter().all(on_it)
        };
        let (rank, host) = match self.trouble {
            HangFault::Rank(rank) | HangFault::SilentHost(rank) => {
                (hang.culprits == [Rank(rank as u32)], hosts(rank))
            }
            HangFault::Link(_) => {
                let right = hang.kind == HangKind::Network && hang.culprits.is_empty();
                (right, right)
            }
        };
        Score { rank, host, took, hang: Some(hang) }
    }
}

fn sample(beats: u64) -> RankSample {
    let (step, since) = (Some(STEPS), Mono(Span::seconds(1000).0));
    let beat_at = since.after(Span::millis(beats));
    let phase = PhaseId::STEP;
    RankSample { registered: true, claim: 1, beats, beat_at, step, since, phase, ..RankSample::default() }
}

/// Judges one hang.
pub fn run(mesh: Mesh, trouble: HangFault, loss: Loss, seed: u64) -> Score {
    Case::new(mesh, trouble, loss, seed).run()
}
