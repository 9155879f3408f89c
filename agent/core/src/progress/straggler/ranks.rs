//! Single ranks and single hosts that are slow.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};

use super::change::onset;
use super::found::{Found, Slow};
use super::history::{CLIP_UNITS, HORIZONS, ROWS};
use super::measurements::Measurements;
use super::score::{median, spread_around_median};

/// Fewer steps say nothing.
const SHORTEST: usize = 8;

/// In the first so many steps nobody is slow for good; until so many have been, slowness must not be getting less.
const WARM: usize = 10;
const WARM_OF_VERY_FEW: usize = 16;
const VERY_FEW: usize = 4;
const SETTLED: usize = 24;

/// So many slow ranks at once are no fault of single ranks.
const MOST_AT_ONCE: usize = 64;

/// So many ranks are few.
const FEW: usize = 16;

/// Sums of clipped scores are looked at more closely from this share of what makes sure, and above so many deviations in any case.
const NEARLY: f32 = 0.7;
const LOOKED_AT: f32 = 2.5;
const LOOKED_AT_OF_FEW: f32 = 1.5;

/// Steps that a rank's usual level must rest on before a change of it is told.
const USUAL: usize = 24;

/// Steps without slowness before it is over.
const OVER_AFTER: usize = 16;

/// Of a host's ranks, the share that must be slow for it to be the host.
const MOST_OF_HOST: f32 = 0.75;

/// Of more ranks than this, every so many are taken for how far ranks are apart for good.
const SAMPLE: usize = 8192;

/// How a slow rank, host, stage or imbalance stands.
#[derive(Clone, Debug)]
pub(super) struct RankState {
    /// The level that counts as usual.
    usual: f32,
    /// From here on it was told.
    gate: f32,
    reported_at: usize,
    /// Looks at which it was not seen (imbalance).
    pub(super) missed: usize,
}

impl RankState {
    pub(super) fn of(found: &Found, measured: &Measurements) -> RankState {
        let effect = found.ratio.ln();
        RankState {
            usual: found.usual,
            gate: effect.min(measured.limits().rank.max(effect / 2.0)),
            reported_at: measured.history().seen(),
            missed: 0,
        }
    }

    /// Since when a rank or host is no longer slow; none if it is, or if this is no rank or host.
    pub(super) fn over_since(&self, slow: Slow, measured: &Measurements) -> Option<u64> {
        let members = match slow {
            Slow::Rank(rank) => std::slice::from_ref(&rank).to_vec(),
            Slow::Host(host) => measured.peers().on_host(host).to_vec(),
            Slow::Stage(_) | Slow::Rotating => return None,
        };
        if measured.history().seen() < self.reported_at + OVER_AFTER / 2 {
            return None;
        }
        let level = |of: &[f32]| median(&mut of.to_vec()) - self.usual;
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

/// A rank that is slow beyond doubt.
#[derive(Clone, Copy, Debug)]
struct Suspect {
    rank: u32,
    effect: f32,
    z: f32,
    steps: usize,
    /// Its own level of before that the effect counts from; none if it counts from its peers'.
    before: Option<f32>,
}

/// Ranks and hosts that are slow and not known yet.
pub(super) fn find(measured: &Measurements) -> Vec<Found> {
    if measured.history().seen() < SHORTEST || measured.peers().len() < 2 {
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
    found(measured, suspects)
}

/// Looks at all sums over `steps` steps; what stands out is looked at more closely.
fn look<T: Copy + Into<i32>>(
    measured: &Measurements,
    wilder: &OnceCell<f32>,
    sums: &[T],
    steps: usize,
    suspects: &mut BTreeMap<u32, Suspect>,
) {
    // A clipped mean of more than this is looked at in any case.
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

/// Above this clipped mean a rank is looked at in any case; of few, the noise itself is known badly, and looking costs nothing.
fn looked_at(measured: &Measurements) -> f32 {
    if measured.peers().len() <= FEW { LOOKED_AT_OF_FEW } else { LOOKED_AT }
}

/// Looks for ranks whose last few steps are unlike those before, by how ranks move and not by how far apart they are.
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

/// How far ranks are apart for good, in units of the noise: what is left of the spread of their means when that of
/// chance is taken off.
fn apart_for_good<T: Copy + Into<i32>>(measured: &Measurements, sums: &[T], steps: usize) -> f32 {
    let scale = CLIP_UNITS * steps as f32;
    let stride = sums.len() / SAMPLE + 1;
    let mean = |sum: &T| {
        let sum: i32 = (*sum).into();
        sum as f32 / scale
    };
    let mut means: Vec<f32> = sums.iter().step_by(stride).map(mean).collect();
    let spread = if means.len() <= FEW {
        // Among few ranks a third that is slow for good is how this job is, which their median would not show.
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

/// `apart`: how far ranks are apart for good, in units of the noise; `wilder`: how much more noise there is at present.
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
    // Over the long memory only the clipped mean is known; it is used where noise hides the effect anyway.
    let level = if steps <= ROWS { level_of(measured, &scores) } else { mean * noise };
    let by_chance = measured.sure() * measured.scatter(steps) * wilder;
    let apart_for_good = reach(measured.peers().len()) * apart * noise;
    let gate = by_chance.hypot(apart_for_good).max(limits.rank.ln_1p() * 0.98);
    let enough = if steps <= 16 { 0.8 } else { 0.6 };
    let lasts = |bar: f32| share_above(&scores, bar) >= enough;
    // Far beyond the noise, a level that was not reached in most steps is a few outliers.
    let persists = steps > ROWS
        || level < 2.5 * noise
        || lasts(gate / 2.0) && (level < 6.0 * noise || lasts(level / 2.0));
    if level >= gate && persists && stays(measured, &scores) {
        let z = level / (gate / measured.sure());
        return Some(Suspect { rank, effect: level, z, steps, before: None });
    }
    if steps <= 16 { confirm_change(measured, rank, steps, wilder) } else { None }
}

/// Whether slowness at the beginning will stay: devices, caches and compilers warm up at paces of their own. Taken on as it went, it
/// must still be there.
fn stays(measured: &Measurements, scores: &[f32]) -> bool {
    let seen = measured.history().seen();
    if seen >= SETTLED {
        return true;
    }
    let (older, newer) = scores.split_at(scores.len() / 2);
    let (older, newer) = (middle_mean(&mut older.to_vec()), middle_mean(&mut newer.to_vec()));
    let warm = if measured.peers().len() <= VERY_FEW { WARM_OF_VERY_FEW } else { WARM };
    seen >= warm && newer.min(2.0 * newer - older) >= measured.limits().rank.ln_1p() * 0.98
}

/// Peers may differ so much for good that a slow rank is within it; but a rank that became slow is another matter.
fn confirm_change(measured: &Measurements, rank: u32, steps: usize, wilder: f32) -> Option<Suspect> {
    let limits = measured.limits();
    let moving = (measured.scatter(steps) * wilder).hypot(measured.scatter(USUAL));
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

/// The least change that is told. Among few ranks nobody can say well how far ranks are apart for good, but each one's own past
/// can be read whole: a change must be twice what any of them has shown since it is remembered.
fn least_change(measured: &Measurements, steps: usize) -> f32 {
    let (limits, ranks) = (measured.limits(), measured.peers().len());
    let always = limits.change.ln_1p();
    if ranks > FEW {
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

/// What scores come to. Of very few ranks each step counts; else the median counts as well, as two hiccups among eight steps matter less.
fn level_of(measured: &Measurements, scores: &[f32]) -> f32 {
    let level = middle_mean(&mut scores.to_vec());
    if measured.peers().len() <= VERY_FEW { level } else { level.min(median(&mut scores.to_vec())) }
}

/// The mean of the middle half: nearly as good as the mean, and outliers on either side do not count.
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
    (all.len() >= USUAL).then(|| median(&mut all))
}

/// How many standard deviations the farthest of so many ranks may be apart from the others for good: beyond it is
/// one in a thousand jobs.
fn reach(ranks: usize) -> f32 {
    (2.0 * (ranks as f32 * 1000.0).ln()).sqrt()
}

/// What the suspects come to: where most of a host's ranks are among them, it is the host.
fn found(measured: &Measurements, mut suspects: BTreeMap<u32, Suspect>) -> Vec<Found> {
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
        // The others may need a step more to be sure of; they must at least look like it.
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

fn report(measured: &Measurements, slow: Slow, suspect: Suspect, is_slow: impl Fn(u32) -> bool) -> Found {
    let (history, recent) = (measured.history(), measured.recent());
    let rows: Vec<(u64, f32)> = history.last(suspect.rank, ROWS).collect();
    let scores: Vec<f32> = rows.iter().map(|(_, score)| *score).collect();
    let started = onset(&scores, recent.noise());
    // A level that holds for all that is remembered began with it, or before.
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
    Found {
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
