//! Compares the GPUs of one model on one host. A GPU that differs from all its siblings, which are alike, is the
//! outlier: each GPU alone looks healthy, and the vendor has no limit for it.
//!
//! - Clocks and temperatures are compared only among busy GPUs and must differ for minutes: power caps and the position
//!   in the air stream cause small differences, different programs short ones.
//! - Maximum PCIe width, generation and power limit are compared as well. Two GPUs that differ from the rest in the
//!   same way were built or configured so.

use super::details::GpuDetails;
use super::limits::{BUSY_PERCENT, DeviceLimits, taken_back};
use super::reading::GpuReading;
use super::watch::{CheckResult, Problem};
use mainstay_model::health::HealthState::Degraded;
use mainstay_model::health::RecommendedAction::{ContactSupport, None as Nothing};

/// With fewer than two others, the outlier cannot be identified.
const OTHERS: usize = 2;

/// Confidence that a GPU is faulty if it only differs from the others.
const INFERRED: f64 = 0.6;

/// A GPU among its siblings.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sibling<'a> {
    pub(super) reading: &'a GpuReading,
    pub(super) details: Option<&'a GpuDetails>,
}

/// The results of the comparison of one GPU, by check.
pub(super) type Compared = Vec<(&'static str, CheckResult)>;

/// Compares the GPU at `place` with its siblings.
pub(super) fn compare(all: &[Sibling<'_>], place: usize, limits: &DeviceLimits) -> Compared {
    let Some(own) = all.get(place) else { return Vec::new() };
    let others: Vec<Sibling<'_>> = all
        .iter()
        .enumerate()
        .filter(|(index, other)| *index != place && other.model() == own.model())
        .map(|(_, other)| *other)
        .collect();
    vec![
        ("slower_than_siblings", clock(own, &others, limits)),
        ("hotter_than_siblings", heat(own, &others, limits)),
        ("pcie_below_siblings", pcie(own, &others)),
        ("power_below_siblings", power(own, &others)),
    ]
}

impl Sibling<'_> {
    /// Its model; `None` if it is in trouble or split (MIG) and cannot be compared.
    fn model(&self) -> Option<&str> {
        let comparable = self.reading.trouble.is_none() && self.reading.mig.value() != Some(&true);
        self.reading.identity.as_ref().filter(|_| comparable).map(|identity| identity.name.as_str())
    }

    fn works(&self) -> bool {
        let busy = |percent: &u32| f64::from(*percent) >= BUSY_PERCENT;
        self.reading.utilization.value().is_some_and(busy)
    }
}

fn clock(own: &Sibling<'_>, others: &[Sibling<'_>], limits: &DeviceLimits) -> CheckResult {
    let clock = |sibling: &Sibling<'_>| {
        let clocks = sibling.reading.clocks.value().filter(|clocks| clocks.sm > 0)?;
        sibling.works().then_some(clocks.sm)
    };
    let (Some(sm), Some(usual)) = (clock(own), median(others.iter().filter_map(clock))) else {
        return CheckResult::Unread;
    };
    let least = f64::from(usual) * (1.0 - limits.sibling_clock.0 / 100.0);
    let reason = format!("it works at {sm} MHz, its siblings at {usual} MHz");
    let near = f64::from(sm) < f64::from(usual) * (1.0 - taken_back(limits.sibling_clock.0) / 100.0);
    CheckResult::from_problem((f64::from(sm) < least).then(|| {
        Problem::new(Degraded, reason, ContactSupport).sure(INFERRED).by(
            "NVML SM clock",
            format!("{sm} MHz"),
            format!("{least:.0} MHz; siblings {usual} MHz"),
        )
    }))
    .unless_near(near)
}

fn heat(own: &Sibling<'_>, others: &[Sibling<'_>], limits: &DeviceLimits) -> CheckResult {
    let temperature = |sibling: &Sibling<'_>| {
        let degrees = *sibling.reading.temperature.value()?;
        sibling.works().then_some(degrees)
    };
    let (Some(degrees), Some(usual)) = (temperature(own), median(others.iter().filter_map(temperature)))
    else {
        return CheckResult::Unread;
    };
    let most = usual.saturating_add(limits.sibling_heat);
    let reason = format!("at {degrees} °C it is hotter than its siblings, which are at {usual} °C");
    let near = f64::from(degrees) > f64::from(usual) + taken_back(f64::from(limits.sibling_heat));
    CheckResult::from_problem((degrees > most).then(|| {
        Problem::new(Degraded, reason, ContactSupport).sure(INFERRED).by(
            "NVML temperature among siblings",
            format!("{degrees} °C"),
            format!("{most} °C; siblings {usual} °C"),
        )
    }))
    .unless_near(near)
}

/// Compares the maximum link: a GPU whose link was trained narrower at boot reports that width as its maximum.
fn pcie(own: &Sibling<'_>, others: &[Sibling<'_>]) -> CheckResult {
    let best_link = |sibling: &Sibling<'_>| {
        let best = *sibling.reading.pcie_max.value()?;
        (best.generation > 0 && best.width > 0).then_some((best.generation, best.width))
    };
    let Some((generation, width)) = best_link(own) else { return CheckResult::Unread };
    let Some(usual) = all_alike(others.iter().map(best_link)) else { return CheckResult::Unread };
    let link = |(generation, width): (u32, u32)| format!("generation {generation} with {width} lanes");
    let below = generation < usual.0 || width < usual.1;
    let reason = format!(
        "its PCIe link can do {} and those of all its siblings {}",
        link((generation, width)),
        link(usual)
    );
    CheckResult::from_problem(below.then(|| {
        Problem::new(Degraded, reason, ContactSupport).sure(INFERRED).by(
            "NVML PCIe link at best",
            link((generation, width)),
            link(usual),
        )
    }))
}

fn power(own: &Sibling<'_>, others: &[Sibling<'_>]) -> CheckResult {
    let limit_of =
        |sibling: &Sibling<'_>| sibling.details?.power_limit.value().copied().filter(|limit| *limit > 0);
    let Some(limit) = limit_of(own) else { return CheckResult::Unread };
    let Some(usual) = all_alike(others.iter().map(limit_of)) else { return CheckResult::Unread };
    let watts = |milliwatts: u32| format!("{} W", milliwatts / 1000);
    let reason = format!("it may draw {}, all its siblings {}", watts(limit), watts(usual));
    // Differences within 5 % are board-specific calibration of the same model.
    let below = f64::from(limit) < f64::from(usual) * 0.95;
    CheckResult::from_problem(below.then(|| {
        Problem::new(Degraded, reason, Nothing).sure(INFERRED).by(
            "NVML power limit",
            watts(limit),
            watts(usual),
        )
    }))
}

/// The median; `None` if there are too few values.
fn median(values: impl Iterator<Item = u32>) -> Option<u32> {
    let mut values: Vec<u32> = values.collect();
    values.sort_unstable();
    (values.len() >= OTHERS).then(|| values[values.len() / 2])
}

/// The common value of all; `None` if they differ, one has none, or there are too few.
fn all_alike<T: PartialEq + Copy>(mut values: impl ExactSizeIterator<Item = Option<T>>) -> Option<T> {
    let enough = values.len() >= OTHERS;
    let first = values.next()??;
    (enough && values.all(|value| value == Some(first))).then_some(first)
}
