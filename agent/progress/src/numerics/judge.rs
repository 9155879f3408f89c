//! Judges the numbers of one step after the other.

use std::collections::BTreeMap;

use super::replicas::{DigestDivergence, Replicas};
use super::shards::{Compared, ShardDivergence, Shards};
use super::spike::{Series, Spike};
use mainstay_model::finding::FindingKind;
use mainstay_model::verdict::FaultDomain;

/// Steps without a problem before a finding is over.
const OVER_AFTER: u32 = 8;

/// A gradient norm that overflows is normal with loss scaling, but not in this many steps in a row.
const OVERFLOWS: u32 = 3;

/// A rank's gradient norm is an outlier at this many deviations of its replicas', in this many steps in a row.
const OUTLIER_DEVIATIONS: f64 = 8.0;
const APART_STEPS: u32 = 3;

/// With fewer ranks there are no outliers.
const MIN_RANKS: usize = 4;

/// The most checkpoints that are remembered.
const CHECKPOINTS: usize = 64;

/// The numbers of a rank in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Numbers {
    /// Its loss.
    pub loss: Option<f64>,
    /// Its gradient norm.
    pub grad_norm: Option<f64>,
    /// The digest of its parameters.
    pub digest: Option<u64>,
    /// Whether it made a checkpoint in this step.
    pub checkpointed: bool,
}

/// A numerical problem, or its end if `over`.
#[derive(Clone, Debug, PartialEq)]
pub struct Anomaly {
    /// The kind.
    pub what: FindingKind,
    /// Distinguishes problems of one kind.
    pub place: u32,
    /// Whether it is over.
    pub over: bool,
    /// The affected ranks, by index; empty if none or all.
    pub ranks: Vec<u32>,
    /// One line, with the placeholder `{ranks}`.
    pub headline: String,
    /// The fault domain.
    pub domain: FaultDomain,
    /// The confidence, from 0 to 1.
    pub confidence: f64,
    /// The first step with the problem, or without it if `over`.
    pub since: u64,
    /// The evidence.
    pub evidence: Vec<String>,
    /// The last step at which replicas agreed.
    pub last_agreed: Option<u64>,
    /// Checkpointed steps after that step.
    pub doubtful: Vec<u64>,
}

/// The judge of one job's numbers.
#[derive(Clone, Debug, Default)]
pub struct Judge {
    loss: Series,
    grad_norm: Series,
    replicas: Replicas,
    shards: Shards,
    /// Open problems, with the number of steps since each was last seen.
    open: BTreeMap<(FindingKind, u32), (Anomaly, u32)>,
    overflows: u32,
    /// The rank whose gradient norm is an outlier, since when, and for how many steps.
    apart: Option<(u32, u64, u32)>,
    checkpoints: Vec<u64>,
}

/// The `place` of findings of one kind.
const LOSS: u32 = 0;
const GRAD_NORM: u32 = 1;

/// The `place` of shards among findings about replicas, whose places are group numbers.
const SHARDS: u32 = u32::MAX;

impl Judge {
    /// The last step up to which no replica is known to have differed, by digests or, if there are none, by what was
    /// saved. `None` if neither can be compared.
    pub fn vouched(&self) -> Option<u64> {
        let (by_digests, by_shards) = (self.replicas.vouched(), self.shards.vouched());
        if self.shards.differed() {
            return by_shards.map(|saved| by_digests.map_or(saved, |digests| digests.min(saved)));
        }
        by_digests.or(by_shards)
    }

    /// Records what the ranks saved of a step: by rank the checksums of its shard's chunks. Appends changes to `out`.
    pub fn saved(&mut self, step: u64, shards: &[Vec<u64>], out: &mut Vec<Anomaly>) {
        let compared = self.shards.compare(step, shards);
        let agreed = compared == Compared::Agreed;
        let seen = match compared {
            Compared::ShardDivergence(apart) => vec![self.unlike(step, apart)],
            Compared::Agreed | Compared::Nothing => Vec::new(),
        };
        self.settle(step, seen, |_, place| place == SHARDS && agreed, out);
    }

    /// Records a step, by rank. Appends changes to `out`.
    pub fn step(&mut self, step: u64, ranks: &[Numbers], out: &mut Vec<Anomaly>) {
        if ranks.iter().any(|rank| rank.checkpointed) {
            self.checkpoints.push(step);
            let excess = self.checkpoints.len().saturating_sub(CHECKPOINTS);
            self.checkpoints.drain(..excess);
        }
        let losses = given(ranks, |rank| rank.loss);
        let grad_norms = given(ranks, |rank| rank.grad_norm);
        let mut seen: Vec<Anomaly> = Vec::new();
        seen.extend(not_a_number("loss", LOSS, step, &losses));
        let overflow = not_a_number("gradient norm", GRAD_NORM, step, &grad_norms);
        self.overflows = if overflow.is_some() { self.overflows + 1 } else { 0 };
        seen.extend(overflow.filter(|_| self.overflows >= OVERFLOWS));
        if let Some(spike) = typical(&losses).and_then(|loss| self.loss.push(loss)) {
            seen.push(spiked(FindingKind::LossSpike, "loss", step, spike));
        }
        if let Some(spike) = typical(&grad_norms).and_then(|norm| self.grad_norm.push(norm)) {
            seen.push(spiked(FindingKind::GradNormSpike, "gradient norm", step, spike));
        }
        seen.extend(self.stands_out(step, &grad_norms));
        let digests: Vec<Option<u64>> = ranks.iter().map(|rank| rank.digest).collect();
        let (whole, splits) = self.replicas.compare(step, &digests);
        seen.extend(splits.into_iter().map(|split| self.corrupt(step, split)));
        let judged = |kind: FindingKind, place: u32| match kind {
            // Only a comparison can show that replicas agree again.
            FindingKind::SilentCorruption | FindingKind::ReplicasDiffer => whole.contains(&place),
            _ => true,
        };
        self.settle(step, seen, judged, out);
    }

    /// Opens what was seen and is not open. Closes what was not seen for long enough.
    fn settle(
        &mut self,
        step: u64,
        seen: Vec<Anomaly>,
        judged: impl Fn(FindingKind, u32) -> bool,
        out: &mut Vec<Anomaly>,
    ) {
        for (key, (_, quiet)) in &mut self.open {
            if judged(key.0, key.1) {
                *quiet += 1;
            }
        }
        for anomaly in seen {
            match self.open.get_mut(&(anomaly.what, anomaly.place)) {
                Some((_, quiet)) => *quiet = 0,
                None => {
                    self.open.insert((anomaly.what, anomaly.place), (anomaly.clone(), 0));
                    out.push(anomaly);
                }
            }
        }
        let over_after = |kind: FindingKind| match kind {
            FindingKind::SilentCorruption | FindingKind::ReplicasDiffer => 1,
            _ => OVER_AFTER,
        };
        self.open.retain(|(kind, _), (anomaly, quiet)| {
            let over = *quiet >= over_after(*kind);
            if over {
                out.push(Anomaly { over: true, since: step + 1 - u64::from(*quiet), ..anomaly.clone() });
            }
            !over
        });
    }

    /// Finds a rank whose own gradient norm differs from its replicas': what it computes before the reduction goes
    /// into all replicas.
    fn stands_out(&mut self, step: u64, norms: &[(u32, f64)]) -> Option<Anomaly> {
        let mut logs: Vec<(u32, f64)> = norms
            .iter()
            .filter(|(_, norm)| *norm > 0.0 && norm.is_finite())
            .map(|(rank, norm)| (*rank, norm.ln()))
            .collect();
        if logs.len() < MIN_RANKS {
            return None;
        }
        logs.sort_unstable_by(|a, b| a.1.total_cmp(&b.1));
        let centre = logs[logs.len() / 2].1;
        let mut apart: Vec<f64> = logs.iter().map(|(_, log)| (log - centre).abs()).collect();
        apart.sort_unstable_by(f64::total_cmp);
        let deviation = apart[apart.len() / 2] * 1.4826;
        let (rank, highest) = *logs.last()?;
        // Equal norms were reduced already: no rank can be distinguished.
        let z = (highest - centre) / deviation;
        if deviation <= 1e-9 || z < OUTLIER_DEVIATIONS {
            self.apart = None;
            return None;
        }
        let (since, steps) = match self.apart {
            Some((same, since, steps)) if same == rank => (since, steps + 1),
            _ => (step, 1),
        };
        self.apart = Some((rank, since, steps));
        (steps >= APART_STEPS).then(|| Anomaly {
            what: FindingKind::GradNormSpike,
            place: rank + 1,
            over: false,
            ranks: vec![rank],
            headline:
                "the gradient norm of {ranks} is unlike that of all others: possible silent data corruption"
                    .to_owned(),
            domain: FaultDomain::Hardware,
            confidence: 0.5,
            since,
            evidence: vec![format!(
                "{:.2} times the median of {} ranks, {z:.0} deviations, in {steps} steps in a row",
                (highest - centre).exp(),
                logs.len()
            )],
            last_agreed: None,
            doubtful: Vec::new(),
        })
    }

    fn corrupt(&self, step: u64, split: DigestDivergence) -> Anomaly {
        let agreed = match split.last_agreed {
            Some(agreed) => format!("they last agreed at step {agreed}: checkpoints after it are doubtful"),
            None => "they never agreed in this attempt: all its checkpoints are doubtful".to_owned(),
        };
        let (what, headline, domain, confidence, seen) = match split.majority {
            Some(majority) => (
                FindingKind::SilentCorruption,
                "possible silent data corruption: the parameters of {ranks} differ from those of its replicas".to_owned(),
                FaultDomain::Hardware,
                if split.ranks.len() == 1 { 0.9 } else { 0.7 },
                format!("at step {step}, {majority} of {} replicas have the same digest", split.total),
            ),
            None => (
                FindingKind::ReplicasDiffer,
                "the parameters of {ranks}, which should be the same, differ; which copy is right is unknown".to_owned(),
                FaultDomain::Unknown,
                0.5,
                format!("at step {step}, no majority of {} replicas has the same digest", split.total),
            ),
        };
        Anomaly {
            what,
            place: split.group,
            over: false,
            ranks: split.ranks,
            headline,
            domain,
            confidence,
            since: step,
            evidence: vec![seen, agreed],
            last_agreed: split.last_agreed,
            doubtful: self.checkpoints_after(split.last_agreed).collect(),
        }
    }

    /// The finding for saved chunks that should be equal and differ.
    fn unlike(&self, step: u64, apart: ShardDivergence) -> Anomaly {
        let ShardDivergence { ranks, named, chunks: (differing, compared), first, total, last_agreed } =
            apart;
        let (what, headline, domain, confidence) = if named {
            (
                FindingKind::SilentCorruption,
                "possible silent data corruption: what {ranks} saved differs from what its replicas saved"
                    .to_owned(),
                FaultDomain::Hardware,
                if ranks.len() == 1 { 0.8 } else { 0.6 },
            )
        } else {
            (
                FindingKind::ReplicasDiffer,
                "possible silent data corruption: {ranks} always saved the same content before and now differ; which copy is right is unknown"
                    .to_owned(),
                FaultDomain::Unknown,
                0.5,
            )
        };
        let seen = format!(
            "in the checkpoint of step {step}, {differing} of {compared} chunks of 4 MiB that {total} ranks have always saved alike \
             differ, the first of them chunk {first}"
        );
        let agreed = match last_agreed {
            Some(agreed) => {
                format!("those of step {agreed} were the same: checkpoints after it are doubtful")
            }
            None => {
                "none was compared before it in this attempt: all its checkpoints are doubtful".to_owned()
            }
        };
        let mut doubtful: Vec<u64> = self.checkpoints_after(last_agreed).chain([step]).collect();
        doubtful.sort_unstable();
        doubtful.dedup();
        Anomaly {
            what,
            place: SHARDS,
            over: false,
            ranks,
            headline,
            domain,
            confidence,
            since: step,
            evidence: vec![seen, agreed],
            last_agreed,
            doubtful,
        }
    }

    fn checkpoints_after(&self, agreed: Option<u64>) -> impl Iterator<Item = u64> {
        self.checkpoints.iter().copied().filter(move |at| agreed.is_none_or(|agreed| *at > agreed))
    }
}

fn given(ranks: &[Numbers], number: impl Fn(&Numbers) -> Option<f64>) -> Vec<(u32, f64)> {
    ranks.iter().enumerate().filter_map(|(rank, value)| Some((rank as u32, number(value)?))).collect()
}

/// The median of the finite values.
fn typical(values: &[(u32, f64)]) -> Option<f64> {
    let mut finite: Vec<f64> =
        values.iter().map(|(_, value)| *value).filter(|value| value.is_finite()).collect();
    finite.sort_unstable_by(f64::total_cmp);
    finite.get(finite.len() / 2).copied()
}

fn not_a_number(what: &str, place: u32, step: u64, values: &[(u32, f64)]) -> Option<Anomaly> {
    let broken: Vec<u32> =
        values.iter().filter(|(_, value)| !value.is_finite()).map(|(rank, _)| *rank).collect();
    let first = values.iter().find(|(_, value)| !value.is_finite())?.1;
    let (all, one) = (broken.len() == values.len(), broken.len() == 1);
    let (headline, domain, confidence) = match (all, one) {
        (true, true) => (format!("the {what} is {first}"), FaultDomain::Unknown, 0.5),
        (true, false) => (format!("the {what} is {first} on all ranks"), FaultDomain::User, 0.7),
        (false, true) => {
            (format!("the {what} of {{ranks}} alone is {first}: suspicious"), FaultDomain::Hardware, 0.6)
        }
        (false, false) => (format!("the {what} of {{ranks}} is {first}"), FaultDomain::Unknown, 0.5),
    };
    let evidence = format!("at step {step}, {} of {} ranks that give it", broken.len(), values.len());
    Some(Anomaly {
        what: FindingKind::NotANumber,
        place,
        over: false,
        ranks: if all { Vec::new() } else { broken },
        headline,
        domain,
        confidence,
        since: step,
        evidence: vec![evidence],
        last_agreed: None,
        doubtful: Vec::new(),
    })
}

fn spiked(what: FindingKind, name: &str, step: u64, spike: Spike) -> Anomaly {
    Anomaly {
        what,
        place: 0,
        over: false,
        ranks: Vec::new(),
        headline: format!("the {name} rose to {:.4} at step {step}, from {:.4}", spike.value, spike.usual),
        domain: FaultDomain::Unknown,
        confidence: 0.6,
        since: step,
        evidence: vec![format!(
            "{:.0} deviations above the median of the last steps (deviation {:.4})",
            (spike.value - spike.usual) / spike.deviation,
            spike.deviation
        )],
        last_agreed: None,
        doubtful: Vec::new(),
    }
}
