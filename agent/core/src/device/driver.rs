//! The driver as a whole: `gpu.driver`, and what it tells of each GPU.

use std::collections::BTreeSet;

use super::reading::{DeviceReport, DriverTrouble, GpuReading, GpuTrouble, ProbeAnswer, Read};
use super::{DeviceLimits, Shown};
use crate::health::{Component, Evidence, HealthState, RecommendedAction};
use crate::time::Mono;

use HealthState::{Degraded, Healthy, Unhealthy, Unknown};

/// The driver's bits that mean trouble: slowdown by hardware, by heat, by the power supply's brake.
const SLOWDOWN: u64 = 0x8 | 0x40 | 0x80;

/// What is known of the driver.
#[derive(Clone, Debug, Default)]
pub(super) struct Driver {
    pub(super) report: Option<(Mono, DeviceReport)>,
    pub(super) read_at: Option<Mono>,
    shown: Shown,
}

impl Driver {
    /// Whether GPUs are read at all on this host.
    pub(super) fn is_asked(&self) -> bool {
        matches!(&self.report, Some((_, report)) if *report != DeviceReport::NoGpus)
    }

    /// Why no GPU can be read, if so.
    pub(super) fn why_unreadable(&self) -> Option<String> {
        match &self.report.as_ref()?.1 {
            DeviceReport::Answered(ProbeAnswer::Gpus { .. }) | DeviceReport::NoGpus => None,
            DeviceReport::Answered(ProbeAnswer::Trouble { trouble, detail }) => {
                Some(format!("{}: {detail}", words(*trouble)))
            }
            DeviceReport::Silent { .. } => Some("the driver does not answer".to_owned()),
            DeviceReport::Broken(why) => Some(format!("the probe of the driver is broken: {why}")),
        }
    }

    pub(super) fn component(&mut self, now: Mono, limits: &DeviceLimits) -> Option<Component> {
        let report = &self.report.as_ref().filter(|_| self.is_asked())?.1;
        let (state, reason, action) = match report {
            DeviceReport::Answered(ProbeAnswer::Gpus { driver, gpus }) => {
                let version = driver.as_deref().unwrap_or("of unknown version");
                let nameless: Vec<String> = gpus
                    .iter()
                    .filter(|gpu| gpu.identity.is_none())
                    .map(|gpu| {
                        format!("GPU {} of its list: {}", gpu.index, trouble_words(gpu.trouble.as_ref()))
                    })
                    .collect();
                let told = format!("driver {version}, {} GPUs", gpus.len());
                if nameless.is_empty() {
                    (Healthy, told, RecommendedAction::None)
                } else {
                    (Unhealthy, format!("{told}; {}", nameless.join("; ")), RecommendedAction::RebootNode)
                }
            }
            DeviceReport::Silent { since } => {
                let silent = now.since(*since);
                let reason = format!("driver hung since {silent}: a call has not returned");
                if silent >= limits.hung_after.0 {
                    (Unhealthy, reason, RecommendedAction::RebootNode)
                } else {
                    (Unknown, reason, RecommendedAction::None)
                }
            }
            DeviceReport::Answered(ProbeAnswer::Trouble { .. })
            | DeviceReport::Broken(_)
            | DeviceReport::NoGpus => {
                (Unknown, self.why_unreadable().unwrap_or_default(), RecommendedAction::None)
            }
        };
        Some(Component {
            name: "gpu.driver".to_owned(),
            state,
            reason,
            action,
            evidence: Vec::new(),
            read_at: self.read_at,
            since: self.shown.since(state, now),
            ..Component::default()
        })
    }
}

fn words(trouble: DriverTrouble) -> &'static str {
    match trouble {
        DriverTrouble::LibraryMissing => {
            "NVIDIA's library cannot be loaded (install the driver, give the container its libraries, or set gpu.library)"
        }
        DriverTrouble::DriverNotLoaded => "the NVIDIA driver is not loaded (modprobe nvidia)",
        DriverTrouble::VersionMismatch => {
            "library and kernel module of the driver are of different versions (reload the module or reboot)"
        }
        DriverTrouble::NoPermission => "the agent may not ask the driver (give it /dev/nvidia*)",
        DriverTrouble::Other => "the driver refuses",
    }
}

fn trouble_words(trouble: Option<&GpuTrouble>) -> String {
    match trouble {
        None => "it does not say which it is".to_owned(),
        Some(GpuTrouble::Lost) => "the driver lost it".to_owned(),
        Some(GpuTrouble::ResetRequired) => "it has to be reset before it can be used".to_owned(),
        Some(GpuTrouble::NoPermission) => "the agent may not look at it".to_owned(),
        Some(GpuTrouble::Other(what)) => what.clone(),
    }
}

/// What is remembered of one GPU's readings.
#[derive(Clone, Debug, Default)]
pub(super) struct Readings {
    pub(super) last: Option<GpuReading>,
    pub(super) read_at: Option<Mono>,
    /// Links that were once up: what a board has none of was never up.
    links_seen: BTreeSet<u32>,
    /// Minutes in which it was slowed down.
    slow_minutes: BTreeSet<u64>,
}

/// One thing that is wrong.
pub(super) type Problem = (HealthState, String, RecommendedAction);

impl Readings {
    pub(super) fn take_in(&mut self, at: Mono, reading: &GpuReading) {
        const MINUTE: u64 = 60_000_000_000;
        // Another board in the same place has another past.
        let serial = |reading: &GpuReading| reading.identity.as_ref().map(|identity| identity.uuid.clone());
        if let Some(last) = &self.last
            && serial(last).is_some()
            && serial(reading).is_some()
            && serial(last) != serial(reading)
        {
            *self = Readings::default();
        }
        if reading.mig.value() == Some(&true) {
            // A GPU that is split uses no links.
            self.links_seen.clear();
        } else {
            self.links_seen.extend(reading.nvlinks.iter().filter(|(_, up)| *up).map(|(link, _)| *link));
        }
        let minute = at.0 / MINUTE;
        if reading.clock_reasons.value().is_some_and(|reasons| reasons & SLOWDOWN != 0) {
            self.slow_minutes.insert(minute);
        }
        self.slow_minutes.retain(|slow| slow + 10 > minute);
        if reading.trouble.is_none() {
            self.read_at = Some(at);
        }
        self.last = Some(reading.clone());
    }

    pub(super) fn problems(&self, limits: &DeviceLimits) -> Vec<Problem> {
        let mut problems = Vec::new();
        let Some(last) = &self.last else { return problems };
        let mut problem = |state, reason: String, action| problems.push((state, reason, action));
        if let Some(trouble) = &last.trouble {
            let (state, action) = match trouble {
                GpuTrouble::Lost => (Unhealthy, RecommendedAction::RebootNode),
                GpuTrouble::ResetRequired => (Unhealthy, RecommendedAction::ResetDevice),
                GpuTrouble::NoPermission | GpuTrouble::Other(_) => (Unknown, RecommendedAction::None),
            };
            problem(state, trouble_words(Some(trouble)), action);
            // What else such a GPU says is not to be believed.
            return problems;
        }
        if let Some(errors @ 1..) = last.ecc_volatile.value() {
            let reason = format!("{errors} memory errors that could not be corrected since its last reset");
            problem(Unhealthy, reason, RecommendedAction::ResetDevice);
        }
        if let Some(rows) = last.remapped.value() {
            if rows.failed {
                let reason = "a bad row of memory could not be replaced: no spare one is left".to_owned();
                problem(Unhealthy, reason, RecommendedAction::ReplaceNode);
            } else if rows.pending {
                let reason = "a bad row of memory is replaced at the next reset".to_owned();
                problem(Degraded, reason, RecommendedAction::ResetDevice);
            }
        }
        if last.pages_pending.value() == Some(&true) {
            let reason = "bad pages of memory are taken out of use at the next reset".to_owned();
            problem(Degraded, reason, RecommendedAction::ResetDevice);
        }
        if let Some(number @ 1..) = last.recovery_action.value() {
            let (state, action, what) = super::faults::recovery(u32::try_from(*number).unwrap_or(u32::MAX));
            problem(state, format!("the driver says that it needs {what}"), action);
        }
        if self.slow_minutes.len() >= limits.slow_minutes as usize {
            let minutes = self.slow_minutes.len();
            let reason = format!("slowed down by heat or power in {minutes} of the last 10 minutes");
            problem(Degraded, reason, RecommendedAction::ContactSupport);
        }
        let up: BTreeSet<u32> = last.nvlinks.iter().filter(|(_, up)| *up).map(|(link, _)| *link).collect();
        let down: Vec<String> = self.links_seen.difference(&up).map(u32::to_string).collect();
        if !down.is_empty() {
            let reason = format!("NVLink {} down that was up before", down.join(", "));
            problem(Unhealthy, reason, RecommendedAction::ResetDevice);
        }
        for (what, failed) in failures(last) {
            problem(Unknown, format!("{what} cannot be read: {failed}"), RecommendedAction::None);
        }
        problems
    }

    pub(super) fn evidence(&self) -> Vec<Evidence> {
        let Some(last) = &self.last else { return Vec::new() };
        let mut told = Vec::new();
        let mut evidence = |source: &str, reading: String, limit: Option<&str>| {
            let limit = limit.map(str::to_owned);
            told.push(Evidence { source: format!("NVML {source}"), reading, limit, ..Evidence::default() });
        };
        if let Some(identity) = &last.identity {
            evidence("identity", format!("{} {}", identity.name, identity.uuid), None);
        }
        if let Some(errors) = last.ecc_volatile.value() {
            evidence("uncorrected ECC errors, volatile", errors.to_string(), Some("0"));
        }
        if let Some(rows) = last.remapped.value() {
            let counts =
                format!("{} after corrected, {} after uncorrected errors", rows.corrected, rows.uncorrected);
            evidence("remapped rows", counts, None);
        }
        if let Some(degrees) = last.temperature.value() {
            evidence("temperature", format!("{degrees} °C"), None);
        }
        told
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

/// What a GPU must tell to be called healthy, and did not.
fn failures(reading: &GpuReading) -> Vec<(&'static str, &str)> {
    fn failed<T>(read: &Read<T>) -> Option<&str> {
        match read {
            Read::Failed(why) => Some(why),
            Read::Value(_) | Read::NotOffered => None,
        }
    }
    let all = [
        ("the count of uncorrected ECC errors", failed(&reading.ecc_volatile)),
        ("the remapping of rows", failed(&reading.remapped)),
        ("the temperature", failed(&reading.temperature)),
    ];
    all.into_iter().filter_map(|(what, failed)| Some((what, failed?))).collect()
}
