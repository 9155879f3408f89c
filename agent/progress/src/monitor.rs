//! Findings about a running job. Steps are assembled from the reports of each rank and passed to the judges of
//! stragglers and of numbers.
//!
//! A step is judged when all ranks have completed it, or when others are so far ahead that the missing ranks are no
//! longer waited for.

mod exchange;
mod lasting;
mod pace;

use std::collections::{BTreeMap, BTreeSet};

pub use pace::Pace;

use exchange::Exchange;
use lasting::Unproven;
use pace::{LAST, Paces};

use crate::memory::JobMemory;
use crate::numerics::{self, Anomaly, Numbers};
use crate::parallelism::Layout;
use crate::straggler::{self, Limits, Names, OpenFindings, Peers, Role, Row, learn};
use mainstay_health::host::contention::SlowdownHints;
use mainstay_model::entry::{JobSpec, StepDone};
use mainstay_model::finding::Finding;
use mainstay_model::id::{Attempt, Rank};

/// A step is judged without the missing ranks when most ranks are this many steps ahead.
const PASSED_BY: u64 = 8;

/// The most steps that wait for ranks. With more, the steps farthest ahead are not waited for.
const MAX_WAITING_STEPS: usize = 32;

/// A rank's report about a step.
#[derive(Clone, Copy, Debug, Default)]
struct Reported {
    done: bool,
    took: f32,
    /// Seconds without waiting for others and pauses; NaN if no section covers either.
    without_waiting: f32,
    wait: f32,
    /// Seconds in sections without communication.
    alone: f32,
    numbers: Numbers,
}

/// Watches one job.
#[derive(Clone, Debug)]
pub struct Watch {
    spec_ranks: u32,
    layout: Layout,
    rank_context: SlowdownHints,
    findings_count: u64,
    attempt: Attempt,
    now: Option<Present>,
    /// The hosts, and the host of each rank; empty if all are on one.
    hosts: (Vec<String>, BTreeMap<Rank, u32>),
    /// What earlier runs and attempts learned: the noise of the job, and the stage of each rank.
    noise: Option<f32>,
    stages: Vec<u32>,
}

/// The present attempt.
#[derive(Clone, Debug)]
struct Present {
    ranks: Vec<Rank>,
    names: Names,
    /// The host of each rank, if there are several.
    hosts: Vec<Option<u32>>,
    stragglers: straggler::Judge,
    /// The stage of each rank, if learned.
    stages: Vec<u32>,
    /// The declared role of each rank.
    roles: Vec<Option<(String, Option<u32>)>>,
    standing: OpenFindings,
    unproven: Unproven,
    /// The first self times, while peers can still be learned from them.
    learning: Option<(Vec<u64>, Vec<Vec<f32>>)>,
    paces: Paces,
    exchange: Exchange,
    numbers: numerics::Judge,
    anomaly: BTreeMap<(mainstay_model::finding::FindingKind, u32), Finding>,
    steps: BTreeMap<u64, Reports>,
    judged: Option<u64>,
    /// By rank: its newest step.
    newest: Vec<Option<u64>>,
    /// The newest step of any rank.
    furthest: u64,
}

/// The reports about a step.
#[derive(Clone, Debug)]
struct Reports {
    by_rank: Vec<Reported>,
    /// Ranks that have completed it.
    done: usize,
}

impl Watch {
    /// The number of a finding that another judge makes.
    pub fn next_number(&mut self) -> u64 {
        self.findings_count += 1;
        self.findings_count
    }

    /// Starts to watch a job.
    pub fn new(spec: &JobSpec) -> Watch {
        Watch {
            spec_ranks: spec.world_size,
            layout: Layout::of_command(&spec.command),
            rank_context: SlowdownHints::default(),
            findings_count: 0,
            attempt: Attempt(0),
            now: None,
            hosts: Default::default(),
            noise: None,
            stages: Vec::new(),
        }
    }

    /// Sets the hosts of the ranks of the next attempt.
    pub fn set_hosts(&mut self, hosts: Vec<String>, host_of: BTreeMap<Rank, u32>) {
        self.hosts = (hosts, host_of);
    }

    /// Sets the number of ranks of the next attempt.
    pub fn set_ranks(&mut self, ranks: u32) {
        self.spec_ranks = ranks;
    }

    /// Loads what earlier runs of the job learned.
    pub fn recall(&mut self, learned: &JobMemory) {
        self.noise = learned.noise;
        self.stages.clone_from(&learned.stages);
    }

    /// Adds what this run learned, for the next one.
    pub fn remember(&self, learned: &mut JobMemory) {
        let present = self.now.as_ref();
        learned.noise = present.and_then(|present| present.stragglers.noise()).or(self.noise);
        learned.stages.clone_from(present.map_or(&self.stages, |present| &present.stages));
    }

    /// Starts an attempt with these ranks. Earlier findings are not carried over.
    pub fn begin_attempt(&mut self, attempt: Attempt, ranks: Vec<Rank>) {
        if let Some(present) = &self.now {
            self.noise = present.stragglers.noise().or(self.noise);
            self.stages.clone_from(&present.stages);
        }
        self.attempt = attempt;
        let role = |rank: &Rank| {
            let stage = self.layout.stage(rank.0, self.spec_ranks);
            Role { group: stage.unwrap_or(0), stage, host: self.hosts.1.get(rank).copied() }
        };
        let given = ranks.iter().any(|rank| self.layout.stage(rank.0, self.spec_ranks).is_some());
        let recalled = !given && self.stages.len() == ranks.len() && !ranks.is_empty();
        let peers = match recalled {
            true => of_stages(&self.stages),
            false => Peers::new(ranks.iter().map(role).collect()),
        };
        let mut stragglers = straggler::Judge::new(peers, Limits::default());
        if let Some(noise) = self.noise {
            stragglers.recall_noise(noise);
        }
        let mut now = Present {
            names: Names { ranks: ranks.clone(), devices: Vec::new(), hosts: self.hosts.0.clone() },
            hosts: ranks.iter().map(|rank| self.hosts.1.get(rank).copied()).collect(),
            stragglers,
            roles: vec![None; ranks.len()],
            stages: if recalled { self.stages.clone() } else { Vec::new() },
            standing: OpenFindings::default(),
            unproven: Unproven::default(),
            learning: (!given && !recalled).then(Default::default),
            paces: Paces::new(ranks.len()),
            exchange: Exchange::default(),
            numbers: numerics::Judge::default(),
            anomaly: BTreeMap::new(),
            steps: BTreeMap::new(),
            judged: None,
            newest: vec![None; ranks.len()],
            furthest: 0,
            ranks,
        };
        now.name_devices(&self.rank_context);
        self.now = Some(now);
    }

    /// Sets the state of the host and its devices that may explain slowness, and replaces the previous one. Returns
    /// the current findings that it explains, to be reported again.
    pub fn set_rank_context(&mut self, rank_context: SlowdownHints) -> Vec<Finding> {
        self.rank_context = rank_context;
        let Some(present) = &mut self.now else { return Vec::new() };
        present.name_devices(&self.rank_context);
        present.standing.explain(&present.names, &self.rank_context.hints)
    }

    /// Sets the declared role of a rank. Once all ranks have one, each is compared with those of its role and stage.
    /// A declaration takes precedence over learned stages and the command line.
    pub fn set_role(&mut self, rank: Rank, role: String, stage: Option<u32>) {
        let noise = self.noise;
        let Some(present) = &mut self.now else { return };
        let Ok(index) = present.ranks.binary_search(&rank) else { return };
        let known_role = Some((role, stage));
        if present.roles[index] == known_role {
            return;
        }
        present.roles[index] = known_role;
        present.take_roles(noise);
    }

    /// The pace of the rank's last steps.
    pub fn pace(&self, rank: Rank) -> Pace {
        let Some(present) = &self.now else { return Pace::default() };
        let Ok(index) = present.ranks.binary_search(&rank) else { return Pace::default() };
        present.paces.pace(index, present.stragglers.last_scores(index as u32, LAST))
    }

    /// The last step of this attempt up to which no replica is known to have differed: a restart can return to what
    /// was saved up to it. `None` if neither digests nor checkpoints can be compared.
    pub fn vouched(&self) -> Option<u64> {
        self.now.as_ref()?.numbers.vouched()
    }

    /// Records what all ranks saved of a step, by rank the checksums of its shard's chunks. Returns new findings.
    pub fn saved(&mut self, step: u64, shards: &[(Rank, Vec<u64>)]) -> Vec<Finding> {
        let Some(present) = &mut self.now else { return Vec::new() };
        if shards.iter().map(|(rank, _)| *rank).ne(present.ranks.iter().copied()) {
            return Vec::new();
        }
        let shards: Vec<Vec<u64>> = shards.iter().map(|(_, chunks)| chunks.clone()).collect();
        let (mut anomaly, mut found) = (Vec::new(), Vec::new());
        present.numbers.saved(step, &shards, &mut anomaly);
        present.report(step, anomaly, self.attempt, &mut self.findings_count, &mut found);
        found
    }

    /// Records steps that a rank completed. Returns new findings.
    pub fn steps(&mut self, rank: Rank, done: &[StepDone]) -> Vec<Finding> {
        let mut found = Vec::new();
        for step in done {
            let Some(present) = &mut self.now else { break };
            let Ok(index) = present.ranks.binary_search(&rank) else { break };
            present.take(index, step);
            while let Some((step, row)) = present.next_row() {
                present.judge(
                    step,
                    &row,
                    self.attempt,
                    &mut self.findings_count,
                    &self.rank_context,
                    &mut found,
                );
            }
        }
        found
    }
}

impl Present {
    fn take(&mut self, index: usize, done: &StepDone) {
        self.newest[index] = Some(done.step);
        self.furthest = self.furthest.max(done.step);
        if self.judged.is_some_and(|judged| done.step <= judged) {
            return;
        }
        let ranks = self.ranks.len();
        let unreported = || Reports { by_rank: vec![Reported::default(); ranks], done: 0 };
        let row = self.steps.entry(done.step).or_insert_with(unreported);
        row.done += usize::from(!row.by_rank[index].done);
        row.by_rank[index] = Reported::from_step(done);
        if self.steps.len() > MAX_WAITING_STEPS {
            self.steps.pop_last();
        }
    }

    /// The oldest step, if no rank is waited for any longer.
    fn next_row(&mut self) -> Option<(u64, Vec<Reported>)> {
        let oldest = self.steps.first_entry()?;
        let step = *oldest.key();
        let whole = oldest.get().done == oldest.get().by_rank.len();
        // Most ranks: a single rank that counts from elsewhere must not rush the others.
        // Where only some ranks print their steps, nothing is ever known of the others.
        let ahead = |newest: &&u64| **newest >= step + PASSED_BY;
        let passed_by = || {
            let known = || self.newest.iter().flatten();
            known().filter(ahead).count() * 2 > known().count()
        };
        // Reports are frequent: count the ranks only if one of them is that far.
        if !whole && (self.furthest < step + PASSED_BY || !passed_by()) {
            return None;
        }
        self.judged = Some(step);
        self.steps.pop_first().map(|(step, row)| (step, row.by_rank))
    }

    /// Compares ranks by their declared roles, once all have one.
    fn take_roles(&mut self, noise: Option<f32>) {
        let Some(roles) = self.roles.iter().cloned().collect::<Option<Vec<_>>>() else { return };
        let kinds: BTreeSet<&(String, Option<u32>)> = roles.iter().collect();
        let group =
            |role: &(String, Option<u32>)| kinds.iter().position(|kind| *kind == role).unwrap_or(0) as u32;
        let role_of = |(role, host): (&(String, Option<u32>), &Option<u32>)| Role {
            group: group(role),
            stage: role.1,
            host: *host,
        };
        let peers = Peers::new(roles.iter().zip(&self.hosts).map(role_of).collect());
        self.stragglers = straggler::Judge::new(peers, Limits::default());
        if let Some(noise) = noise {
            self.stragglers.recall_noise(noise);
        }
        self.unproven = Unproven::default();
        self.learning = None;
        self.stages.clear();
    }

    fn name_devices(&mut self, rank_context: &SlowdownHints) {
        let device = |rank: &Rank| rank_context.devices.get(rank).cloned();
        self.names.devices = self.ranks.iter().map(device).collect();
    }

    fn judge(
        &mut self,
        step: u64,
        row: &[Reported],
        attempt: Attempt,
        findings_count: &mut u64,
        rank_context: &SlowdownHints,
        found: &mut Vec<Finding>,
    ) {
        if let Some(self_times) = self_times(row) {
            self.pace_of(step, row, &self_times, attempt, findings_count, rank_context, found);
        }
        let numbers: Vec<Numbers> = row.iter().map(|step| step.numbers).collect();
        let mut anomaly = Vec::new();
        self.numbers.step(step, &numbers, &mut anomaly);
        self.report(step, anomaly, attempt, findings_count, found);
    }

    /// Creates findings for what is faulty, and for what no longer is.
    fn report(
        &mut self,
        step: u64,
        anomaly: Vec<Anomaly>,
        attempt: Attempt,
        findings_count: &mut u64,
        found: &mut Vec<Finding>,
    ) {
        for anomaly in anomaly {
            let before = self.anomaly.remove(&(anomaly.what, anomaly.place));
            let finding = match before.filter(|_| anomaly.over) {
                Some(before) => {
                    let headline = format!("ended at step {}: {}", anomaly.since, before.headline);
                    Finding { over: true, step: anomaly.since, headline, ..before }
                }
                None => {
                    *findings_count += 1;
                    let finding = self.finding_of(*findings_count, attempt, step, &anomaly);
                    self.anomaly.insert((anomaly.what, anomaly.place), finding.clone());
                    finding
                }
            };
            found.push(finding);
        }
    }

    /// Finds what makes the job slow.
    #[expect(clippy::too_many_arguments, reason = "a part of the judgement of one step")]
    fn pace_of(
        &mut self,
        step: u64,
        row: &[Reported],
        self_times: &[f32],
        attempt: Attempt,
        findings_count: &mut u64,
        rank_context: &SlowdownHints,
        found: &mut Vec<Finding>,
    ) {
        let waits: Vec<f32> = row.iter().map(|step| if step.done { step.wait } else { f32::NAN }).collect();
        let mut lengths: Vec<f32> = row.iter().filter(|step| step.done).map(|step| step.took).collect();
        lengths.sort_unstable_by(f32::total_cmp);
        let took = lengths.get(lengths.len() / 2).copied().unwrap_or(f32::NAN);
        self.paces.push(self_times.iter().zip(row).map(|(own, step)| (*own, step.wait, step.took)));
        self.learn_peers(step, self_times);
        let named = if waits.iter().any(|wait| *wait > 0.0) { waits.as_slice() } else { &[] };
        let mut changes = Vec::new();
        self.stragglers.step(Row { step, self_times, waits: named, took }, &mut changes);
        for change in &self.unproven.proven(changes, &self.names.devices) {
            let place = (self.stragglers.peers(), &self.names, rank_context.hints.as_slice());
            let finding = self.standing.report(change, *findings_count + 1, attempt, place);
            found.extend(finding.inspect(|finding| *findings_count = (*findings_count).max(finding.finding)));
        }
        let link =
            self.exchange.step(step, &waits, self_times, took, (*findings_count + 1, attempt, &self.names));
        found.extend(link.inspect(|finding| *findings_count = (*findings_count).max(finding.finding)));
    }

    /// Checks whether the first steps show that ranks have different work by design. From then on they are compared
    /// within their stage, and the steps so far are judged again.
    fn learn_peers(&mut self, step: u64, self_times: &[f32]) {
        let Some((steps, rows)) = &mut self.learning else { return };
        steps.push(step);
        rows.push(self_times.to_vec());
        let stages = if self.stragglers.is_quiet() { learn::stages(rows) } else { None };
        if let Some(stages) = stages {
            self.stragglers = straggler::Judge::new(of_stages(&stages), Limits::default());
            self.stages = stages;
            // The caller judges the newest step.
            let before = rows.len() - 1;
            for (step, self_times) in steps.iter().zip(rows.iter()).take(before) {
                let row = Row { step: *step, self_times, waits: &[], took: f32::NAN };
                self.stragglers.step(row, &mut Vec::new());
            }
            self.learning = None;
        } else if rows.len() >= learn::MAX_STEPS || !self.stragglers.is_quiet() {
            self.learning = None;
        }
    }

    fn finding_of(&self, number: u64, attempt: Attempt, step: u64, anomaly: &Anomaly) -> Finding {
        let ranks: Vec<Rank> =
            anomaly.ranks.iter().filter_map(|index| self.ranks.get(*index as usize)).copied().collect();
        let named = match ranks.as_slice() {
            [rank] => rank.to_string(),
            ranks => {
                let numbers: Vec<String> = ranks.iter().map(|rank| rank.0.to_string()).collect();
                format!("ranks {}", numbers.join(", "))
            }
        };
        Finding {
            finding: number,
            attempt,
            what: anomaly.what,
            over: false,
            headline: anomaly.headline.replace("{ranks}", &named),
            domain: anomaly.domain,
            confidence: anomaly.confidence,
            ranks,
            device: None,
            host: None,
            stage: None,
            since_step: anomaly.since,
            step,
            cost_percent: None,
            evidence: anomaly.evidence.clone(),
            last_agreed_step: anomaly.last_agreed,
            doubtful_steps: anomaly.doubtful.clone(),
        }
    }
}

impl Reported {
    fn from_step(done: &StepDone) -> Reported {
        let seconds = |ns: u64| (ns as f64 / 1e9) as f32;
        let took = done.end.since(done.start).0;
        let spent = done.spent;
        // A first step includes imports and setup: its length does not represent training.
        let usable = !done.first;
        let without = took.saturating_sub(spent.wait_ns).saturating_sub(spent.pause_ns);
        Reported {
            done: true,
            took: if usable { seconds(took) } else { f32::NAN },
            without_waiting: if usable && spent.wait_ns > 0 { seconds(without) } else { f32::NAN },
            wait: if usable { seconds(spent.wait_ns) } else { f32::NAN },
            alone: if usable && spent.alone_ns > 0 { seconds(spent.alone_ns) } else { f32::NAN },
            numbers: Numbers {
                loss: done.loss,
                grad_norm: done.grad_norm,
                digest: done.digest,
                checkpointed: done.checkpoint_ns > 0,
            },
        }
    }
}

fn of_stages(stages: &[u32]) -> Peers {
    let role = |stage: &u32| Role { group: *stage, stage: Some(*stage), host: None };
    Peers::new(stages.iter().map(role).collect())
}

/// Self times by section names. `None` if no section has any. All ranks are measured alike.
fn self_times(row: &[Reported]) -> Option<Vec<f32>> {
    let known = |seconds: fn(&Reported) -> f32| -> Vec<f32> {
        row.iter().map(|step| if step.done { seconds(step) } else { f32::NAN }).collect()
    };
    let any = |times: &Vec<f32>| times.iter().any(|time| time.is_finite());
    Some(known(|step| step.without_waiting))
        .filter(any)
        .or_else(|| Some(known(|step| step.alone)).filter(any))
}
