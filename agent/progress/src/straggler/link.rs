//! Distinguishes a slow link from a slow rank. Both make a collective long.
//!
//! A collective has two parts: ranks arrive, and data moves. All leave together, so the rank that was in it for the
//! shortest time came last, and its time is the duration of the transfer. How much longer another rank was in it is
//! how much earlier it arrived. That needs no synchronized clocks between hosts. A late rank makes the arrival long
//! and does not affect the transfer; a slow link is the reverse. So transfers are compared among communicators of the
//! same kind, with the judge that compares ranks.

use std::collections::BTreeMap;

use super::judge::Judge;
use super::measurements::{Limits, Row};
use super::peers::{Peers, Role};
use super::score::median;
use super::slowness::{Change, Slow};
use mainstay_model::finding::{Finding, FindingKind};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::verdict::FaultDomain;

/// Transfers scatter more than computation: a smaller excess is ignored.
const MIN_EXCESS: f32 = 0.15;

/// Collectives by step and communicator.
#[derive(Clone, Debug, Default)]
pub struct Links {
    communicators: BTreeMap<String, Communicator>,
    /// By step and communicator: seconds of arrival and of transfer.
    steps: BTreeMap<Step, BTreeMap<String, (f32, f32)>>,
}

/// A step: attempt and number.
type Step = (u64, u64);

/// In a message from one rank to another the two ends do not leave together.
const ONE_WAY: &[&str] = &["send", "recv", "receive", "sendrecv", "p2p"];

#[derive(Clone, Debug, Default)]
struct Communicator {
    members: Vec<u32>,
    /// Its operation, without which it cannot be compared.
    kind: String,
    /// The hosts of its members, if known.
    hosts: Vec<String>,
}

impl Links {
    /// Adds one collective: how many seconds each member was in it.
    pub fn push(&mut self, step: Step, communicator: &str, kind: &str, members: &BTreeMap<u32, f64>) {
        let lower = kind.to_ascii_lowercase();
        let one_way = lower.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| ONE_WAY.contains(&word));
        let moving = members.values().copied().fold(f64::MAX, f64::min);
        let longest = members.values().copied().fold(f64::MIN, f64::max);
        if members.len() < 2 || moving <= 0.0 || one_way {
            return;
        }
        let known = self.communicators.entry(communicator.to_owned()).or_default();
        if known.members.len() < members.len() {
            known.members = members.keys().copied().collect();
            known.kind = format!("{kind} of {}", members.len());
        }
        if members.len() < known.members.len() {
            // A missing rank may have come last.
            return;
        }
        let of_step = self.steps.entry(step).or_default().entry(communicator.to_owned()).or_default();
        of_step.0 += (longest - moving) as f32;
        of_step.1 += moving as f32;
    }

    /// Sets the hosts of the communicators' members.
    pub fn name_hosts(&mut self, host_of: impl Fn(u32) -> Option<String>) {
        for communicator in self.communicators.values_mut() {
            communicator.hosts = communicator.members.iter().filter_map(|rank| host_of(*rank)).collect();
            communicator.hosts.sort_unstable();
            communicator.hosts.dedup();
        }
    }

    /// Judges all steps. Findings are numbered from `next`. `took` returns a step's length, in seconds.
    pub fn judge(&self, limits: Limits, next: u64, took: impl Fn(Step) -> f32) -> Vec<Finding> {
        let mut kinds: Vec<&str> = self.communicators.values().map(|known| known.kind.as_str()).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let roles = self.communicators.values().map(|known| Role {
            group: kinds.binary_search(&known.kind.as_str()).unwrap_or(0) as u32,
            ..Role::default()
        });
        let mut judge =
            Judge::new(Peers::new(roles.collect()), Limits { rank: limits.rank.max(MIN_EXCESS), ..limits });
        let (mut changes, mut findings) = (Vec::new(), Vec::new());
        for (step, seen) in &self.steps {
            let moving: Vec<f32> = self
                .communicators
                .keys()
                .map(|name| seen.get(name).map_or(f32::NAN, |(_, moving)| *moving))
                .collect();
            changes.clear();
            judge
                .step(Row { step: step.1, self_times: &moving, waits: &[], took: took(*step) }, &mut changes);
            for change in &changes {
                if let Change::Found(straggler) = change
                    && let Slow::Rank(index) = straggler.slow
                    && let Some((name, communicator)) = self.communicators.iter().nth(index as usize)
                {
                    let number = next + findings.len() as u64;
                    findings.push(self.finding_of(number, name, communicator, straggler));
                }
            }
        }
        findings
    }

    fn finding_of(
        &self,
        number: u64,
        name: &str,
        communicator: &Communicator,
        straggler: &super::slowness::Straggler,
    ) -> Finding {
        let percent = (f64::from(straggler.ratio) - 1.0) * 100.0;
        let mut arriving: Vec<f32> =
            self.steps.values().filter_map(|seen| seen.get(name)).map(|(arriving, _)| *arriving).collect();
        let shared = if communicator.hosts.len() == 1 { communicator.hosts.first().cloned() } else { None };
        let mut evidence = vec![
            format!(
                "after its last rank arrives it takes {:.2} times as long as {} communicator(s) of its kind, \
                 over {} steps",
                straggler.ratio, straggler.peers, straggler.steps
            ),
            format!(
                "its ranks arrive within {:.1} ms of each other: no rank is late",
                median(&mut arriving) * 1e3
            ),
        ];
        if !communicator.hosts.is_empty() {
            evidence.push(format!("its ranks are on {}", communicator.hosts.join(", ")));
        }
        Finding {
            finding: number,
            attempt: Attempt(0),
            what: FindingKind::SlowLink,
            over: false,
            headline: format!(
                "transfers of communicator {name} take {percent:.0} % longer than those of its kind"
            ),
            domain: FaultDomain::Infrastructure,
            confidence: 0.8,
            ranks: communicator.members.iter().map(|rank| Rank(*rank)).collect(),
            device: None,
            host: shared,
            stage: None,
            since_step: straggler.since,
            step: straggler.reported,
            cost_percent: straggler.cost.map(|cost| (f64::from(cost) * 1000.0).round() / 10.0),
            evidence,
            last_agreed_step: None,
            doubtful_steps: Vec::new(),
        }
    }
}
