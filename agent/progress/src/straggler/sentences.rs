//! A finding as text: what is slow, since when, its cost, and the evidence.

use std::collections::BTreeMap;

use super::peers::Peers;
use super::slowness::{Change, Slow, Straggler};
use mainstay_model::finding::{Finding, FindingKind, Hint};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::verdict::FaultDomain;

/// The most hints that are quoted for one finding.
const MAX_QUOTED_HINTS: usize = 6;

/// The names of ranks and hosts.
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// The rank of each index.
    pub ranks: Vec<Rank>,
    /// The device of each index, if known.
    pub devices: Vec<Option<String>>,
    /// The hosts by number.
    pub hosts: Vec<String>,
}

impl Names {
    fn rank(&self, index: u32) -> Rank {
        self.ranks.get(index as usize).copied().unwrap_or(Rank(index))
    }

    fn host(&self, host: u32) -> String {
        self.hosts.get(host as usize).cloned().unwrap_or_else(|| format!("host {host}"))
    }
}

/// Open findings, by what is slow. Each is reported under its number, and again when it is over.
#[derive(Clone, Debug, Default)]
pub struct OpenFindings {
    by_place: BTreeMap<Slow, ReportedFinding>,
}

/// A finding as reported.
#[derive(Clone, Debug)]
struct ReportedFinding {
    /// Without possible explanations.
    bare: Finding,
    /// The hints that were quoted with it. They stay even if the reason ends.
    hints: Vec<Hint>,
}

impl ReportedFinding {
    fn finding(&self) -> Finding {
        let mut finding = self.bare.clone();
        for hint in &self.hints {
            finding.confidence = (finding.confidence + 0.05).min(0.99);
            finding.evidence.push(format!("possible cause: {}", hint.fact));
        }
        finding
    }

    /// Quotes new hints that explain it. Returns whether there are any.
    fn quote(&mut self, hints: &[Hint]) -> bool {
        let known = |hints: &[Hint], new: &Hint| {
            hints.iter().any(|old| (&old.device, &old.about) == (&new.device, &new.about))
        };
        let before = self.hints.len();
        for hint in explaining(&self.bare, hints) {
            if self.hints.len() < MAX_QUOTED_HINTS && !known(&self.hints, hint) {
                self.hints.push(hint.clone());
            }
        }
        self.hints.len() > before
    }
}

impl OpenFindings {
    /// The finding for a change of the judge. `number` is used for a new one.
    pub fn report(
        &mut self,
        change: &Change,
        number: u64,
        attempt: Attempt,
        (peers, names, hints): (&Peers, &Names, &[Hint]),
    ) -> Option<Finding> {
        match change {
            Change::Found(straggler) => {
                let mut reported_finding = ReportedFinding {
                    bare: finding_of(number, attempt, straggler, peers, names),
                    hints: Vec::new(),
                };
                reported_finding.quote(hints);
                let finding = reported_finding.finding();
                self.by_place.insert(straggler.slow, reported_finding);
                Some(finding)
            }
            Change::Over { slow, since, .. } => {
                let before = self.by_place.remove(slow)?.finding();
                let headline = format!("ended at step {since}: {}", before.headline);
                Some(Finding { over: true, step: *since, headline, ..before })
            }
        }
    }

    /// The findings to report again, because their device or a possible explanation is now known.
    pub fn explain(&mut self, names: &Names, hints: &[Hint]) -> Vec<Finding> {
        let mut again = Vec::new();
        for (slow, slow_finding) in &mut self.by_place {
            let mut news = false;
            if let Slow::Rank(rank) = slow
                && slow_finding.bare.device.is_none()
            {
                slow_finding.bare.device = names.devices.get(*rank as usize).cloned().flatten();
                news = slow_finding.bare.device.is_some();
                if news {
                    slow_finding.bare.domain = FaultDomain::Hardware;
                }
            }
            if slow_finding.quote(hints) || news {
                again.push(slow_finding.finding());
            }
        }
        again
    }
}

/// The finding with number `number`.
fn finding_of(number: u64, attempt: Attempt, straggler: &Straggler, peers: &Peers, names: &Names) -> Finding {
    let (ranks, host, device, stage) = place(straggler, peers, names);
    Finding {
        finding: number,
        attempt,
        what: kind(straggler.slow),
        over: false,
        headline: headline(straggler, peers, names),
        domain: domain(straggler.slow, peers, names),
        confidence: (f64::from(straggler.confidence) * 100.0).round() / 100.0,
        ranks,
        device,
        host,
        stage,
        since_step: straggler.since,
        step: straggler.reported,
        cost_percent: straggler.cost.map(|cost| (f64::from(cost) * 1000.0).round() / 10.0),
        evidence: evidence(straggler),
        last_agreed_step: None,
        doubtful_steps: Vec::new(),
    }
}

/// The fault domain of slowness. A rank without its own device shares CPUs with other work on the host, so being slow
/// alone does not indicate hardware. In a trace without known devices each rank counts as a device.
fn domain(slow: Slow, peers: &Peers, names: &Names) -> FaultDomain {
    let on_a_device =
        |rank: u32| names.devices.is_empty() || names.devices.get(rank as usize).is_some_and(Option::is_some);
    let hardware = match slow {
        Slow::Rank(rank) => on_a_device(rank),
        Slow::Host(host) => peers.on_host(host).iter().any(|rank| on_a_device(*rank)),
        Slow::Stage(_) | Slow::Rotating => return FaultDomain::User,
    };
    if hardware { FaultDomain::Hardware } else { FaultDomain::Unknown }
}

fn kind(slow: Slow) -> FindingKind {
    match slow {
        Slow::Rank(_) => FindingKind::SlowRank,
        Slow::Host(_) => FindingKind::SlowHost,
        Slow::Stage(_) => FindingKind::StageImbalance,
        Slow::Rotating => FindingKind::DataImbalance,
    }
}

type FindingKey = (Vec<Rank>, Option<String>, Option<String>, Option<u32>);

fn place(straggler: &Straggler, peers: &Peers, names: &Names) -> FindingKey {
    let host_of = |rank| peers.role(rank).host.map(|host| names.host(host));
    match straggler.slow {
        Slow::Rank(rank) => {
            let device = names.devices.get(rank as usize).cloned().flatten();
            (vec![names.rank(rank)], host_of(rank), device, peers.role(rank).stage)
        }
        Slow::Host(host) => {
            let ranks = peers.on_host(host).iter().map(|rank| names.rank(*rank)).collect();
            (ranks, Some(names.host(host)), None, None)
        }
        Slow::Stage(stage) => (Vec::new(), None, None, Some(stage)),
        Slow::Rotating => (Vec::new(), None, None, None),
    }
}

fn headline(straggler: &Straggler, peers: &Peers, names: &Names) -> String {
    let percent = (f64::from(straggler.ratio) - 1.0) * 100.0;
    let since = if straggler.onset_seen { format!(" since step {}", straggler.since) } else { String::new() };
    let cost = match straggler.cost {
        Some(cost) if cost >= 0.001 => {
            format!("; without it a step would be {:.1} % shorter", f64::from(cost) * 100.0)
        }
        _ => String::new(),
    };
    match straggler.slow {
        Slow::Rank(rank) => {
            let host = peers.role(rank).host.map(|host| format!(" on host {}", names.host(host)));
            let (rank, on) = (names.rank(rank), host.unwrap_or_default());
            format!("{rank}{on} is {percent:.0} % slower than its peers{since}{cost}")
        }
        Slow::Host(host) => {
            format!("all ranks of {} are slow, typically by {percent:.0} %{since}{cost}", names.host(host))
        }
        Slow::Stage(stage) => {
            format!("pipeline stage {stage} takes {percent:.0} % longer than the other stages{cost}")
        }
        Slow::Rotating => format!(
            "a different rank is the slowest in each step, typically by {percent:.0} %: the work is unevenly distributed{cost}"
        ),
    }
}

fn evidence(straggler: &Straggler) -> Vec<String> {
    let noise = f64::from(straggler.noise) * 100.0;
    let mut evidence = vec![match straggler.slow {
        Slow::Rank(_) | Slow::Host(_) => format!(
            "self time (a step without waiting for others) over {} steps is {:.3} of the median of {} peer(s): {:.0} times \
             its uncertainty; noise from step to step {noise:.1} %",
            straggler.steps, straggler.ratio, straggler.peers, straggler.z,
        ),
        Slow::Stage(_) => format!(
            "its median self time is {:.2} of the other stages' over {} steps, and its own ranks agree within {noise:.1} %: \
             more work, not a slow device",
            straggler.ratio, straggler.steps,
        ),
        Slow::Rotating => format!(
            "over {} steps the slowest rank takes {:.2} of its peers' median in a typical step, and no rank is the slowest in half \
             of them: no slow device",
            straggler.steps, straggler.ratio,
        ),
    }];
    if straggler.usual != 0.0 {
        evidence.push(format!(
            "it became slow: before, its self time was {:.2} of its peers'",
            straggler.usual.exp()
        ));
    }
    if let Some(share) = straggler.waited_least {
        evidence
            .push(format!("it waited least of all ranks in {:.0} % of the steps", f64::from(share) * 100.0));
    }
    if !straggler.stages.is_empty() {
        let times: Vec<String> =
            straggler.stages.iter().map(|(stage, time)| format!("stage {stage} {time:.3} s")).collect();
        evidence.push(format!("typical self times: {}", times.join(", ")));
    }
    evidence
}

/// The hints for the place of the finding. Findings without a place have none.
fn explaining<'a>(finding: &'a Finding, hints: &'a [Hint]) -> impl Iterator<Item = &'a Hint> {
    let is_of_place = matches!(finding.what, FindingKind::SlowRank | FindingKind::SlowHost);
    hints.iter().filter(move |hint| {
        let here = hint.host.is_none() || hint.host == finding.host;
        // A hint about one device explains neither another device nor a whole host.
        is_of_place && here && (hint.device.is_none() || hint.device == finding.device)
    })
}
