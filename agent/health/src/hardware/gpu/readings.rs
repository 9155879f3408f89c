//! The remembered readings and the findings of one GPU.

use std::collections::{BTreeMap, BTreeSet};

use super::dcgm_opinion::Own;
use super::details::GpuDetails;
use super::links::Links;
use super::peers;
use super::reading::{GpuProcess, GpuReading, Sampled, SlowdownTimes};
use super::watch::{Change, CheckResult, Growth, Problem, Watch};
use crate::state::Hysteresis;
use mainstay_model::health::Evidence;
use mainstay_model::pci::PciAddress;
use mainstay_model::time::{Mono, Span};

/// The driver's bits: slowed down by hardware; by heat; by the power supply's brake. The other bits (idle, power cap,
/// application clocks) are normal.
pub(super) const HARDWARE: u64 = 0x8;
pub(super) const HEAT: u64 = 0x40;
pub(super) const BRAKE: u64 = 0x80;

/// The minutes, of the last ten, in which something was seen.
#[derive(Clone, Debug, Default)]
pub(super) struct Minutes(BTreeSet<u64>);

impl Minutes {
    fn step(&mut self, at: Mono, seen: bool) {
        let minute = at.0 / Span::seconds(60).0;
        if seen {
            self.0.insert(minute);
        }
        self.0.retain(|slow| slow + 10 > minute);
    }

    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }
}

/// The remembered readings of one GPU.
#[derive(Clone, Debug, Default)]
pub(super) struct Readings {
    pub(super) last: Option<GpuReading>,
    pub(super) details: Option<GpuDetails>,
    /// The details before the current ones.
    pub(super) details_before: Option<GpuDetails>,
    /// Readings in a row in which the driver could not open it.
    pub(super) refused: u32,
    /// Other GPUs that it reaches over NVLink when it is healthy.
    pub(super) peers: BTreeSet<PciAddress>,
    /// When it was last read without trouble.
    pub(super) read_at: Option<Mono>,
    pub(super) links: Links,
    pub(super) slow: Minutes,
    pub(super) brake: Minutes,
    pub(super) corrected: Growth,
    pub(super) replays: Growth,
    times: Option<(Mono, SlowdownTimes)>,
    watches: BTreeMap<&'static str, Watch>,
    /// Findings from before a restart, by check; they last until that check is read.
    recalled: BTreeMap<String, Problem>,
}

impl Readings {
    /// Applies the result of a comparison with other GPUs.
    pub(super) fn compared(
        &mut self,
        name: &'static str,
        result: CheckResult,
        patience: Hysteresis,
    ) -> Option<(String, Change)> {
        let mut changes = Vec::new();
        self.step(name, result, patience, &mut changes);
        changes.pop()
    }

    /// GPUs that it reaches over NVLink, by its last reading.
    pub(super) fn reach(&self) -> BTreeMap<PciAddress, u32> {
        let peers = self.details.iter().flat_map(|details| &details.peers);
        peers.map(|access| (access.peer, access.status)).collect()
    }

    /// Learns the GPUs that it reaches now, while it is healthy, as those it should reach.
    pub(super) fn learn_peers(&mut self) {
        let reached = peers::reached(&self.reach());
        self.peers.extend(reached);
    }

    pub(super) fn step(
        &mut self,
        name: &'static str,
        result: CheckResult,
        patience: Hysteresis,
        changes: &mut Vec<(String, Change)>,
    ) {
        let watch = self.watches.entry(name).or_default();
        if let Some(before) = self.recalled.remove(name) {
            watch.hold(before, Mono::default());
        }
        match watch.step(result, patience) {
            Change::None => {}
            change => changes.push((name.to_owned(), change)),
        }
    }

    /// Restores a finding from before a restart; `None`: it was over.
    pub(super) fn recall(&mut self, check: &str, problem: Option<Problem>) {
        match problem {
            Some(problem) => drop(self.recalled.insert(check.to_owned(), problem)),
            None => drop(self.recalled.remove(check)),
        }
    }

    /// Records whether heat or the power supply slowed clocks down: by the time counters, which miss nothing between
    /// two readings, and by the current bits.
    pub(super) fn slowed(&mut self, at: Mono, reading: &GpuReading) {
        let reasons = reading.clock_reasons.value().copied().unwrap_or(0);
        let brake = reasons & BRAKE != 0;
        // The brake also sets the hardware bit.
        let heat = reasons & HEAT != 0 || (reasons & HARDWARE != 0 && !brake);
        let (mut heat_grew, mut brake_grew) = (false, false);
        if let Some(now) = reading.slowdown.value() {
            if let Some((since, before)) = self.times {
                // 1 % of the time, in nanoseconds: less is normal for a governor.
                let least = at.since(since).0 / 100;
                let grew = |now: u64, before: u64| now.saturating_sub(before) > least;
                heat_grew = grew(now.thermal, before.thermal);
                brake_grew = grew(now.brake, before.brake);
            }
            self.times = Some((at, *now));
        }
        self.slow.step(at, heat || heat_grew);
        self.brake.step(at, brake || brake_grew);
    }

    /// The findings of the GPU, without those of its links.
    pub(super) fn problems(&self) -> impl Iterator<Item = (&'static str, &Problem)> {
        self.watches.iter().filter_map(|(name, watch)| Some((*name, watch.problem()?)))
    }

    pub(super) fn holds(&self, check: &str) -> bool {
        self.watches.get(check).is_some_and(|watch| watch.problem().is_some())
    }

    /// Readings that a healthy GPU must have and that failed.
    pub(super) fn unread(&self) -> Vec<String> {
        fn failed<T>(read: &Sampled<T>) -> Option<&str> {
            match read {
                Sampled::Failed(why) => Some(why),
                Sampled::Value(_) | Sampled::NotOffered => None,
            }
        }
        let Some(last) = self.last.as_ref().filter(|last| last.trouble.is_none()) else { return Vec::new() };
        let mut needed = vec![("the temperature", failed(&last.temperature))];
        // Many queries fail on a split GPU (MIG) by design.
        if last.mig.value() != Some(&true) {
            needed.extend([
                ("the count of uncorrected ECC errors", failed(&last.ecc_volatile)),
                ("the remapping of rows", failed(&last.remapped)),
                ("the state of its NVLinks", last.nvlinks.iter().find_map(|link| failed(&link.up))),
            ]);
        }
        let mut unread: Vec<String> = needed
            .into_iter()
            .filter_map(|(what, why)| Some(format!("{what} cannot be read: {}", why?)))
            .collect();
        let reports = last.temperature.value().is_some()
            || last.ecc_volatile.value().is_some()
            || last.memory.value().is_some()
            || last.clock_reasons.value().is_some();
        if !reports && unread.is_empty() {
            unread.push("the driver reports no readings for it".to_owned());
        }
        unread
    }

    /// The result of our own check of that name.
    pub(super) fn own(&self, check: &str) -> Own {
        if self.holds(check) || self.links.holds(check) {
            return Own::Held;
        }
        let Some(last) = self.last.as_ref().filter(|last| last.trouble.is_none()) else { return Own::Unread };
        let details = self.details.as_ref();
        let read = match check {
            "gpu_trouble" => true,
            "ecc_uncorrected" => last.ecc_volatile.value().is_some(),
            "ecc_corrected" => last.ecc_corrected.value().is_some(),
            "row_remap_failed" | "row_remap_pending" | "rows_remapped" => last.remapped.value().is_some(),
            "page_retirement_pending" => last.pages_pending.value().is_some(),
            "pages_retired" => details.is_some_and(|details| details.pages_retired.value().is_some()),
            "sram_threshold" | "sram_uncorrected" => {
                details.is_some_and(|details| details.sram.value().is_some())
            }
            "inforom" => details.is_some_and(|details| details.inforom_valid.value().is_some()),
            "recovery_action" => last.recovery_action.value().is_some(),
            "slowed_down" | "power_brake" => last.slowdown.value().is_some(),
            "pcie_replays" => last.pcie_replays.value().is_some(),
            "nvlink_down" => !last.nvlinks.is_empty(),
            "nvlink_errors" => {
                details.is_some_and(|details| details.links.iter().any(|link| link.replays.is_some()))
            }
            "fabric" => last.fabric.value().is_some(),
            _ => false,
        };
        if read { Own::Well } else { Own::Unread }
    }

    /// The most important readings, with their limits.
    pub(super) fn evidence(&self) -> Vec<Evidence> {
        let Some(last) = &self.last else { return Vec::new() };
        let details = self.details.as_ref();
        let mut all = Vec::new();
        let mut evidence = |source: &str, reading: String, limit: Option<String>| {
            all.push(Evidence { source: format!("NVML {source}"), reading, limit, ..Evidence::default() });
        };
        if let Some(identity) = &last.identity {
            evidence("identity", format!("{} {}", identity.name, identity.uuid), None);
        }
        if let Some(errors) = last.ecc_volatile.value() {
            evidence("uncorrected ECC errors, volatile", errors.to_string(), Some("0".to_owned()));
        }
        if let Some(rows) = last.remapped.value() {
            let counts =
                format!("{} after corrected, {} after uncorrected errors", rows.corrected, rows.uncorrected);
            evidence("remapped rows", counts, None);
        }
        if let Some(degrees) = last.temperature.value() {
            let limit =
                details.and_then(|details| details.hottest.value()).map(|limit| format!("{limit} °C"));
            evidence("temperature", format!("{degrees} °C"), limit);
        }
        if let Some(degrees) = last.memory_temperature.value() {
            let limit =
                details.and_then(|details| details.memory_hottest.value()).map(|limit| format!("{limit} °C"));
            evidence("memory temperature", format!("{degrees} °C"), limit);
        }
        if let Some(text) = self.links.summary() {
            evidence("NVLinks", text, None);
        }
        if let Some(processes) = last.processes.value().filter(|processes| !processes.is_empty()) {
            let shown = |process: &GpuProcess| match process.memory {
                Some(bytes) => format!("{} ({} MiB)", process.pid.0, bytes >> 20),
                None => process.pid.0.to_string(),
            };
            evidence("processes", processes.iter().map(shown).collect::<Vec<_>>().join(", "), None);
        }
        if let Some(gsp) = details.and_then(|details| details.gsp.value()) {
            evidence("GSP firmware", if *gsp { "on" } else { "off" }.to_owned(), None);
        }
        if details.and_then(|details| details.persistence.value()) == Some(&false) {
            let words = "off: the driver is unloaded while no process uses a GPU (nvidia-smi -pm 1)";
            evidence("persistence mode", words.to_owned(), None);
        }
        all
    }

    pub(super) fn summary(&self) -> Option<String> {
        let last = self.last.as_ref()?;
        let mut words: Vec<String> = last.identity.iter().map(|identity| identity.name.clone()).collect();
        words.extend(last.temperature.value().map(|degrees| format!("{degrees} °C")));
        words.extend(last.power.value().map(|milliwatts| format!("{} W", milliwatts / 1000)));
        words.extend(last.utilization.value().map(|percent| format!("{percent} % busy")));
        Some(words.join(", "))
    }
}
