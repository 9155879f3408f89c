//! Finds single ranks and single hosts that are slow.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};

use super::change::onset;
use super::history::{CLIP_UNITS, HORIZONS, ROWS};
use super::measurements::Measurements;
use super::score::{median, spread_around_median};
use super::slowness::{Slow, Straggler};

/// Fewer steps are not sufficient.
const MIN_STEPS: usize = 8;

/// No rank is permanently slow in the first steps (`WARM`). Until `SETTLED` steps, slowness must not be decreasing.
const WARM: usize = 10;
const WARM_OF_VERY_FEW: usize = 16;
const MAX_VERY_FEW_RANKS: usize = 4;
const SETTLED: usize = 24;

/// More slow ranks at once are not a fault of single ranks.
const MOST_AT_ONCE: usize = 64;

/// At most this many ranks are few.
const MAX_FEW_RANKS: usize = 16;

/// Sums of clipped scores are examined from this share of the required deviations, and above these deviations in any
/// case.
const NEARLY: f32 = 0.7;
const MIN_EXAMINED_SCORE: f32 = 2.5;
const LOOKED_AT_OF_FEW: f32 = 1.5;

/// A change of a rank's level counts only if its usual level is based on this many steps.
const MIN_BASELINE_STEPS: usize = 24;

/// Steps without slowness before it is over.
const OVER_AFTER: usize = 16;

/// Of a host's ranks, the share that must be slow for it to be the host.
const MOST_OF_HOST: f32 = 0.75;

/// With more ranks than this, the permanent differences between ranks are sampled.
const SAMPLE: usize = 8192;

/// The state of a slow rank, host, stage or imbalance.
#[derive(Clone, Debug)]
pub(super) struct RankState {
    /// The level that counts as usual.
    usual: f32,
    /// The score from which it was reported.
    gate: f32,
    reported_at: usize,
    /// Looks at which it was not seen (imbalance).
    pub(super) missed: usize,
}

impl RankState {
    pub(super) fn from_finding(found: &Straggler, measured: &Measurements) -> RankState {
        let effect = found.ratio.ln();
        RankState {
            usual: found.usual,
            gate: effect.min(measured.limits().rank.max(effect / 2.0)),
            reported_at: measured.history().seen(),
            missed: 0,
        }
    }

    /// Since when a rank or host is no longer slow. `None` if it still is, or if it is neither.
    pub(super) fn over_since(&self, slow: Slow, measured: &Measurements) -> Option<u64> {
        let members = match slow {
            Slow::Rank(rank) => std::slice::from_ref(&rank).to_vec(),
            Slow::Host(host) => measured.peers().on_host(host).to_vec(),
            Slow::Stage(_) | Slow::Rotating => return None,
        };
        if measured.history().seen() < self.reported_at + OVER_AFTER / 2 {
            return None;
        }
        let level = |levels: &[f32]| median(&mut levels.to_vec()) - self.usual;
        let last: Vec<Vec<(u64, f32)>> =
            members.iter().map(|rank| measured.history().last(*rank, OVER_AFTER).collect()).collect();
        let quiet = |scores: &Vec<(u64, f32)>| {
            let values: Vec<f32> = scores.iter().map(|(_, score)| *score).collect();
            values.len() >= OVER_AFTER / 2 && level(&values) < self.gate / 2.0
        };
        let quiet_members = last.iter().filter(|scores| quiet(scores)).count();
        if quiet_members * 2 <= members.len() {
            return None;
        }
        let first = last.first()?;
        let values: Vec<f32> = first.iter().map(|(_, score)| *score).collect();
        let at = onset(&values, measured.recent().noise()).min(values.len().saturating_sub(1));
        first.get(at).map(|(step, _)| *step)
    }
}

/// A rank that is certainly slow.
#[derive(Clone, Copy, Debug)]
struct Suspect {
    rank: u32,
    effect: f32,
    z: f32,
    steps: usize,
    /// Its own earlier level that the effect is counted from. `None` if it is counted from its peers'.
    before: Option<f32>,
}

/// Finds slow ranks and hosts that are not reported yet.
pub(super) fn find(measured: &Measurements) -> Vec<Straggler> {
    if measured.history().seen() < MIN_STEPS || measured.peers().len() < 2 {
        return Vec::new();
    }
    let mut suspects: BTreeMap<u32, Suspect> = BTreeMap::new();
    let wilder = OnceCell::new();
    let mut covered = 0;
    for horizon in 0..HORIZONS.len() {
        let (sums, steps) = measured.history().sums(horizon);
        if steps == covered {
            break;
        }
        covered = steps;
        look(measured, &wilder, sums, steps, &mut suspects);
    }
    look_for_changes(measured, &wilder, &mut suspects);
    let (long, steps) = measured.history().long();
    if steps > ROWS {
        look(measured, &wilder, long, steps, &mut suspects);
    }
    stragglers(measured, suspects)
}

/// Scans all sums over `steps` steps and examines those that stand out.
fn look<T: Copy + Into<i32>>(
    measured: &Measurements,
    wilder: &OnceCell<f32>,
    sums: &[T],
    steps: usize,
    suspects: &mut BTreeMap<u32, Suspect>,
) {
    // A clipped mean above this is examined in any case.
    let least = (NEARLY * measured.sure() * measured.scatter(steps) / measured.recent().noise())
        .min(looked_at(measured));
    let bar = (least * CLIP_UNITS * steps as f32) as i32;
    let mut apart = None;
    for (rank, sum) in sums.iter().enumerate() {
        let sum: i32 = (*sum).into();
        let rank = rank as u32;
        if sum < bar || suspects.contains_key(&rank) || measured.is_known(rank) {
            continue;
        }
        if measured.was_settled_within(rank, steps) {
            continue;
        }
        if suspects.len() >= MOST_AT_ONCE {
            return;
        }
        let apart = *apart.get_or_insert_with(|| apart_for_good(measured, sums, steps));
        let wilder = *wilder.get_or_init(|| measured.wilder());
        let mean = sum as f32 / (CLIP_UNITS * steps as f32);
        if let Some(suspect) = confirm(measured, rank, mean, steps, (apart, wilder)) {
            suspects.insert(rank, suspect);
        }
    }
}

/// A rank above this clipped mean is examined in any case. With few ranks the noise itself is uncertain, and an
/// examination is cheap.
fn looked_at(measured: &Measurements) -> f32 {
    if measured.peers().len() <= MAX_FEW_RANKS { LOOKED_AT_OF_FEW } else { MIN_EXAMINED_SCORE }
}

/// Finds ranks whose last few steps differ from those before, by their changes and not by their distance from peers.
fn look_for_changes(measured: &Measurements, wilder: &OnceCell<f32>, suspects: &mut BTreeMap<u32, Suspect>) {
    let ((last, steps), (twice, both)) = (measured.history().sums(0), measured.history().sums(1));
    if both != 2 * steps {
        return;
    }
    let moved_by_chance = std::f32::consts::SQRT_2 * measured.scatter(steps) / measured.recent().noise();
    let bar =
        (NEARLY * measured.sure() * moved_by_chance).min(looked_at(measured)) * CLIP_UNITS * steps as f32;
    for (rank, (last, twice)) in last.iter().zip(twice).enumerate() {
        let rank = rank as u32;
        let moved = 2 * i32::from(*last) - i32::from(*twice);
        if moved as f32 >= bar
            && suspects.len() < MOST_AT_ONCE
            && !suspects.contains_key(&rank)
            && !measured.is_known(rank)
            && let Some(suspect) =
                confirm_change(measured, rank, steps, *wilder.get_or_init(|| measured.wilder()))
        {
            suspects.insert(rank, suspect);
        }
    }
}

/// The permanent differences between ranks, in units of the noise: the spread of their means without the part due to
/// chance.
fn apart_for_good<T: Copy + Into<i32>>(measured: &Measurements, sums: &[T], steps: usize) -> f32 {
    let scale = CLIP_UNITS * steps as f32;
    let stride = sums.len() / SAMPLE + 1;
    let mean = |sum: &T| {
        let sum: i32 = (*sum).into();
        sum as f32 / scale
    };
    let mut means: Vec<f32> = sums.iter().step_by(stride).map(mean).collect();
    let spread = if means.len() <= MAX_FEW_RANKS {
        // Among few ranks, a third that is permanently slow is normal for this job, which the median would not show.
        let (_, centre, _) = means.select_nth_unstable_by(sums.len() / 2, f32::total_cmp);
        let centre = *centre;
        means.iter_mut().for_each(|mean| *mean = (*mean - centre).abs());
        means.sort_unstable_by(f32::total_cmp);
        means.pop();
        means.get(means.len() * 4 / 5).map_or(0.0, |mean| mean / 1.2816)
    } else {
        spread_around_median(&mut means)
    };
    let by_chance = measured.scatter(steps) / measured.recent().noise();
    (spread * spread - 1.2 * by_chance * by_chance).max(0.0).sqrt()
}

/// `apart`: the permanent differences between ranks, in units of the noise; `wilder`: the factor by which the present
/// noise is greater.
fn confirm(
    measured: &Measurements,
    rank: u32,
    mean: f32,
    steps: usize,
    (apart, wilder): (f32, f32),
) -> Option<Suspect> {
    let (limits, noise) = (measured.limits(), measured.recent().noise());
    let scores: Vec<f32> = measured.history().last(rank, steps).map(|(_, score)| score).collect();
    if scores.len() < steps.min(ROWS) * 3 / 5 {
        return None;
    }
    // In the long memory only the clipped mean is known. It is used if noise hides the effect anyway.
    let level = if steps <= ROWS { level_of(measured, &scores) } else { mean * noise };
    let by_chance = measured.sure() * measured.scatter(steps) * wilder;
    let apart_for_good = reach(measured.peers().len()) * apart * noise;
    let gate = by_chance.hypot(apart_for_good).max(limits.rank.ln_1p() * 0.98);
    let enough = if steps <= 16 { 0.8 } else { 0.6 };
    let lasts = |bar: f32| share_above(&scores, bar) >= enough;
    // A level far beyond the noise that most steps do not reach comes from a few outliers.
    let persists = steps > ROWS
        || level < 2.5 * noise
        || lasts(gate / 2.0) && (level < 6.0 * noise || lasts(level / 2.0));
    if level >= gate && persists && stays(measured, &scores) {
        let z = level / (gate / measured.sure());
        return Some(Suspect { rank, effect: level, z, steps, before: None });
    }
    if steps <= 16 { confirm_change(measured, rank, steps, wilder) } else { None }
}

/// Whether slowness at the start will last: devices, caches and compilers warm up at different paces. Extrapolated,
/// it must still be there.
fn stays(measured: &Measurements, scores: &[f32]) -> bool {
    let seen = measured.history().seen();
    if seen >= SETTLED {
        return true;
    }
    let (older, newer) = scores.split_at(scores.len() / 2);
    let (older, newer) = (middle_mean(&mut older.to_vec()), middle_mean(&mut newer.to_vec()));
    let warm = if measured.peers().len() <= MAX_VERY_FEW_RANKS { WARM_OF_VERY_FEW } else { WARM };
    seen >= warm && newer.min(2.0 * newer - older) >= measured.limits().rank.ln_1p() * 0.98
}

/// Peers may differ permanently by so much that a slow rank is within the range. A rank that became slow is treated
/// separately.
fn confirm_change(measured: &Measurements, rank: u32, steps: usize, wilder: f32) -> Option<Suspect> {
    let limits = measured.limits();
    let moving = (measured.scatter(steps) * wilder).hypot(measured.scatter(MIN_BASELINE_STEPS));
    let gate = (measured.sure() * moving).max(least_change(measured, steps));
    let scores: Vec<f32> = measured.history().last(rank, steps).map(|(_, score)| score).collect();
    let usual = usual(measured, rank, steps)?;
    let level = middle_mean(&mut scores.clone()).min(median(&mut scores.clone()));
    let effect = level - usual;
    let above_peers = level >= gate.min(limits.change.ln_1p()).max(limits.rank.ln_1p() * 0.98);
    (above_peers && effect >= gate && share_above(&scores, usual + gate / 2.0) >= 0.8).then_some(Suspect {
        rank,
        effect,
        z: effect / moving,
        steps,
        before: Some(usual),
    })
}

/// The least change for a finding. Among few ranks the permanent differences are uncertain, but the history of each
/// is available: a change must be twice what any of them has shown within it.
fn least_change(measured: &Measurements, steps: usize) -> f32 {
    let (limits, ranks) = (measured.limits(), measured.peers().len());
    let always = limits.change.ln_1p();
    if ranks > MAX_FEW_RANKS {
        return always;
    }
    let wandered = (0..ranks as u32)
        .filter(|rank| !measured.is_known(*rank))
        .map(|rank| wandering(measured, rank, steps))
        .fold(0.0, f32::max);
    (2.0 * wandered).max(limits.rank.ln_1p() * 0.98).min(always)
}

/// How far a rank's level strayed from its usual one over spans as long as the last `steps` steps, before these.
fn wandering(measured: &Measurements, rank: u32, steps: usize) -> f32 {
    let mut all: Vec<f32> = measured.history().last(rank, ROWS).map(|(_, score)| score).collect();
    all.truncate(all.len().saturating_sub(steps));
    let usual = median(&mut all.clone());
    let strayed = |span: &[f32]| (middle_mean(&mut span.to_vec()) - usual).abs();
    all.chunks_exact(steps.max(1)).map(strayed).fold(0.0, f32::max)
}

/// The level of scores. With very few ranks each step counts; otherwise the median counts as well, which reduces the
/// weight of two hiccups in eight steps.
fn level_of(measured: &Measurements, scores: &[f32]) -> f32 {
    let level = middle_mean(&mut scores.to_vec());
    if measured.peers().len() <= MAX_VERY_FEW_RANKS { level } else { level.min(median(&mut scores.to_vec())) }
}

/// The mean of the middle half: nearly as good as the mean, and without outliers on either side.
fn middle_mean(values: &mut [f32]) -> f32 {
    values.sort_unstable_by(f32::total_cmp);
    let out = values.len() / 4;
    let middle = &values[out..values.len() - out];
    middle.iter().sum::<f32>() / middle.len() as f32
}

fn share_above(scores: &[f32], bar: f32) -> f32 {
    scores.iter().filter(|score| **score > bar).count() as f32 / scores.len().max(1) as f32
}

/// A rank's own level before the last `steps` steps.
fn usual(measured: &Measurements, rank: u32, steps: usize) -> Option<f32> {
    let mut all: Vec<f32> = measured.history().last(rank, ROWS).map(|(_, score)| score).collect();
    all.truncate(all.len().saturating_sub(steps));
    (all.len() >= MIN_BASELINE_STEPS).then(|| median(&mut all))
}

/// How many standard deviations the farthest of `ranks` ranks may permanently be apart from the others. Only one in a
/// thousand jobs exceeds it.
fn reach(ranks: usize) -> f32 {
    (2.0 * (ranks as f32 * 1000.0).ln()).sqrt()
}

/// Turns suspects into findings: if most of a host's ranks are among them, it is the host.
fn stragglers(measured: &Measurements, mut suspects: BTreeMap<u32, Suspect>) -> Vec<Straggler> {
    let mut all = Vec::new();
    let slow: BTreeSet<u32> = suspects.keys().copied().collect();
    let is_slow = |rank: u32| slow.contains(&rank) || measured.is_known(rank);
    for host in hosts(measured, &suspects) {
        let members: Vec<Suspect> =
            measured.peers().on_host(host).iter().filter_map(|rank| suspects.remove(rank)).collect();
        if let Some(worst) = members.iter().max_by(|a, b| a.effect.total_cmp(&b.effect)) {
            let mut effects: Vec<f32> = members.iter().map(|suspect| suspect.effect).collect();
            let typical = Suspect { effect: median(&mut effects), ..*worst };
            all.push(report(measured, Slow::Host(host), typical, is_slow));
        }
    }
    all.extend(
        suspects.into_values().map(|suspect| report(measured, Slow::Rank(suspect.rank), suspect, is_slow)),
    );
    all
}

fn hosts(measured: &Measurements, suspects: &BTreeMap<u32, Suspect>) -> Vec<u32> {
    if measured.peers().hosts() < 2 {
        return Vec::new();
    }
    let mut slow: BTreeMap<u32, usize> = BTreeMap::new();
    for host in suspects.keys().filter_map(|rank| measured.peers().role(*rank).host) {
        *slow.entry(host).or_default() += 1;
    }
    let is_host = |host: &u32| {
        let members = measured.peers().on_host(*host);
        // The others may need one more step to be certain, but must at least look similar.
        let similar = members
            .iter()
            .filter(|rank| {
                let level = |rank| {
                    median(&mut measured.history().last(rank, 8).map(|(_, score)| score).collect::<Vec<_>>())
                };
                suspects.contains_key(rank) || level(**rank) > measured.limits().rank / 2.0
            })
            .count();
        members.len() > 1 && similar as f32 >= members.len() as f32 * MOST_OF_HOST
    };
    slow.keys().filter(|host| is_host(host)).copied().collect()
}

fn report(measured: &Measurements, slow: Slow, suspect: Suspect, is_slow: impl Fn(u32) -> bool) -> Straggler {
    let (history, recent) = (measured.history(), measured.recent());
    let rows: Vec<(u64, f32)> = history.last(suspect.rank, ROWS).collect();
    let scores: Vec<f32> = rows.iter().map(|(_, score)| *score).collect();
    let started = onset(&scores, recent.noise());
    // A level that holds for the whole memory started with it, or before.
    let onset_seen = started > 2 && suspect.steps <= ROWS;
    let at = if onset_seen { started.min(rows.len().saturating_sub(1)) } else { 0 };
    let peers = match slow {
        Slow::Rank(rank) => measured.peers().peers_of(rank),
        _ => measured.peers().len().saturating_sub(1),
    };
    let since = rows.get(at).map_or(0, |(step, _)| *step);
    let named = match slow {
        Slow::Host(host) => measured.peers().on_host(host),
        _ => std::slice::from_ref(&suspect.rank),
    };
    let waited_least = recent.waited_least(suspect.rank);
    let mut confidence: f32 = if suspect.before.is_some() { 0.85 } else { 0.9 };
    match peers {
        0 | 1 => confidence -= 0.25,
        2 => confidence -= 0.1,
        _ => {}
    }
    if waited_least.is_some_and(|share| share > 0.5) {
        confidence += 0.08;
    }
    Straggler {
        slow,
        ratio: suspect.effect.exp(),
        since,
        onset_seen,
        reported: rows.last().map_or(0, |(step, _)| *step),
        steps: suspect.steps as u32,
        cost: measured.paces().without(named, is_slow, since),
        z: suspect.z,
        noise: recent.noise(),
        waited_least,
        peers: peers as u32,
        stages: Vec::new(),
        confidence: confidence.clamp(0.0, 0.99),
        usual: suspect.before.unwrap_or(0.0),
    }
}
