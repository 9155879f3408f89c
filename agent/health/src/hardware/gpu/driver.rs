//! The driver as a whole: `gpu.driver`.

use super::limits::{DeviceLimits, ExpectedGpus, STALE_AFTER};
use super::probe_protocol::{DeviceReport, DriverTrouble, ProbeAnswer};
use super::reading::{GpuReading, GpuTrouble};
use crate::state::ReportedState;
use mainstay_model::health::{Component, Evidence, HealthState, RecommendedAction};
use mainstay_model::pci::PciAddress;
use mainstay_model::time::{Mono, Span};

use HealthState::{Degraded, Healthy, Unhealthy, Unknown};

/// The driver's state.
#[derive(Clone, Debug, Default)]
pub(super) struct Driver {
    pub(super) report: Option<(Mono, DeviceReport)>,
    pub(super) read_at: Option<Mono>,
    /// Time between the last two answers.
    gap: Span,
    /// The highest number of GPUs that it has listed.
    pub(super) most: usize,
    shown: ReportedState,
}

type StateReasonAction = (HealthState, String, RecommendedAction);

impl Driver {
    /// Notes an answer of the driver.
    pub(super) fn answered(&mut self, at: Mono) {
        self.gap = self.read_at.map_or(Span::default(), |before| at.since(before));
        self.read_at = Some(at);
    }

    /// Why no GPU can be read; `None` if they can.
    pub(super) fn why_unreadable(&self, now: Mono) -> Option<String> {
        match &self.report.as_ref()?.1 {
            DeviceReport::Answered(ProbeAnswer::Gpus { .. }) => {
                let age = now.since(self.read_at?);
                // If the driver is queried rarely, an answer stays valid for longer.
                let stale = STALE_AFTER.max(Span(self.gap.0.saturating_mul(3)));
                (age > stale).then(|| format!("it was last read {age} ago"))
            }
            DeviceReport::NoGpus => None,
            DeviceReport::Answered(ProbeAnswer::Trouble { trouble, detail }) => {
                Some(format!("{}: {detail}", describe_trouble(*trouble)))
            }
            DeviceReport::Silent { .. } => Some("the driver does not answer".to_owned()),
            DeviceReport::Broken(why) => Some(format!("the probe of the driver is broken: {why}")),
        }
    }

    pub(super) fn component(
        &mut self,
        now: Mono,
        limits: &DeviceLimits,
        expected: &ExpectedGpus,
        name_of: impl Fn(u32) -> String,
    ) -> Option<Component> {
        let report = &self.report.as_ref()?.1;
        let mut evidence = Vec::new();
        let (state, reason, action) = match report {
            DeviceReport::NoGpus if expected.gpus == 0 => return None,
            DeviceReport::NoGpus => {
                let words = format!("no GPU on the PCI bus; {} are expected", expected.gpus);
                (Unhealthy, words, RecommendedAction::RebootNode)
            }
            DeviceReport::Answered(ProbeAnswer::Gpus { driver, gpus, bound }) => {
                let limit = Some(expected.gpus).filter(|count| *count > 0).map(|count| count.to_string());
                let reading = gpus.len().to_string();
                let most = Some(self.most).filter(|most| *most > gpus.len());
                let limit = limit.unwrap_or_default();
                evidence.push(Evidence::new("NVML device count", reading).limit(limit).before(most));
                answered(driver.as_deref(), gpus, bound, expected)
            }
            DeviceReport::Silent { since, reading } => {
                let silent = now.since(*since);
                let at = reading.map(|index| format!(" while {} was read", name_of(index)));
                let at = at.unwrap_or_default();
                let reason = format!("driver hung since {silent}: a call has not returned{at}");
                if silent >= limits.hung_after.0 {
                    (Unhealthy, reason, RecommendedAction::RebootNode)
                } else {
                    (Unknown, reason, RecommendedAction::None)
                }
            }
            DeviceReport::Answered(ProbeAnswer::Trouble { trouble, .. }) => {
                let why = self.why_unreadable(now).unwrap_or_default();
                let (state, action) = weight(*trouble);
                (state, why, action)
            }
            DeviceReport::Broken(_) => {
                let why = self.why_unreadable(now).unwrap_or_default();
                (Unknown, why, RecommendedAction::None)
            }
        };
        Some(Component {
            name: "gpu.driver".to_owned(),
            state,
            reason,
            action,
            evidence,
            read_at: self.read_at,
            since: self.shown.since(state, now),
            ..Component::default()
        })
    }
}

fn answered(
    driver: Option<&str>,
    gpus: &[GpuReading],
    bound: &[PciAddress],
    expected: &ExpectedGpus,
) -> StateReasonAction {
    let version = driver.unwrap_or("of unknown version");
    let mut stated = (Healthy, format!("driver {version}, {} GPUs", gpus.len()), RecommendedAction::None);
    let mut add = |state: HealthState, words: String, action: RecommendedAction| {
        stated = (stated.0.max(state), format!("{}; {words}", stated.1), stated.2.max(action));
    };
    for gpu in gpus.iter().filter(|gpu| gpu.identity.is_none()) {
        let why = gpu.trouble.as_ref().map_or("its identity is unknown".to_owned(), GpuTrouble::describe);
        let words = format!("GPU {} of its list: {why}", gpu.index);
        match &gpu.trouble {
            // This is normal in a container that has only some of the GPUs.
            Some(GpuTrouble::NoPermission | GpuTrouble::Other(_) | GpuTrouble::Hangs(_)) | None => {
                add(Unknown, words, RecommendedAction::None);
            }
            Some(GpuTrouble::ResetRequired) => add(Unhealthy, words, RecommendedAction::ResetDevice),
            Some(GpuTrouble::NoPower) => add(Unhealthy, words, RecommendedAction::ContactSupport),
            Some(GpuTrouble::Lost | GpuTrouble::NoInterrupts | GpuTrouble::Unopened(_)) => {
                add(Unhealthy, words, RecommendedAction::RebootNode);
            }
        }
    }
    let counted = |address: &&PciAddress| {
        gpus.iter().any(|gpu| gpu.identity.as_ref().is_some_and(|identity| identity.address == **address))
    };
    // Two lists with no common GPU are not from the same host.
    let same_host = bound.iter().any(|address| counted(&address));
    let uncounted: Vec<String> =
        bound.iter().filter(|address| same_host && !counted(address)).map(PciAddress::to_string).collect();
    let nameless = gpus.iter().any(|gpu| gpu.identity.is_none());
    if !uncounted.is_empty() && !nameless {
        let words = format!("the kernel's part of it holds GPU {} too", uncounted.join(", "));
        add(Unhealthy, words, RecommendedAction::RebootNode);
    }
    if gpus.is_empty() && expected.gpus == 0 {
        add(Unknown, "it counts none, and there should be some".to_owned(), RecommendedAction::None);
    }
    if gpus.len() < expected.gpus as usize {
        add(Unhealthy, format!("{} are expected", expected.gpus), RecommendedAction::RebootNode);
    }
    if !expected.driver.is_empty() && driver != Some(expected.driver.as_str()) {
        add(Degraded, format!("driver {} is expected", expected.driver), RecommendedAction::None);
    }
    stated
}

/// Severity if no GPU can be read. If the driver reports that no GPU can be used, the state is known.
fn weight(trouble: DriverTrouble) -> (HealthState, RecommendedAction) {
    match trouble {
        // No new program can use a GPU.
        DriverTrouble::VersionMismatch | DriverTrouble::GpuLost => (Unhealthy, RecommendedAction::RebootNode),
        DriverTrouble::ResetRequired => (Unhealthy, RecommendedAction::ResetDevice),
        DriverTrouble::LibraryMissing
        | DriverTrouble::DriverNotLoaded
        | DriverTrouble::NoPermission
        | DriverTrouble::Other => (Unknown, RecommendedAction::None),
    }
}

fn describe_trouble(trouble: DriverTrouble) -> &'static str {
    match trouble {
        DriverTrouble::LibraryMissing => {
            "NVIDIA's library cannot be loaded (install the driver, give the container its libraries, or set gpu.library)"
        }
        DriverTrouble::DriverNotLoaded => "the NVIDIA driver is not loaded (modprobe nvidia)",
        DriverTrouble::VersionMismatch => {
            "library and kernel module of the driver are of different versions (reload the module or reboot)"
        }
        DriverTrouble::NoPermission => "the agent may not ask the driver (give it /dev/nvidia*)",
        DriverTrouble::GpuLost => "the driver lost a GPU and answers no query for any GPU",
        DriverTrouble::ResetRequired => "a GPU needs a reset, and the driver answers no query for any GPU",
        DriverTrouble::Other => "the driver refuses",
    }
}
