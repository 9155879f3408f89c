//! Whether a job may start on this host: one verdict per check, from components, missing devices and measurements of
//! active probes.
//!
//! - What was not read, or did not answer in time, is unknown. What does not exist is skipped, unless it is required.
//! - Known results weigh more than unknown ones: fail, warn, unknown, pass.

pub mod deep;
mod free;
mod gpu_use;
mod node_health;

use serde::{Deserialize, Serialize};

pub use free::{GpuAvailability, free};
pub use gpu_use::{GpuUse, Owners};
pub use node_health::{NodeHealth, node_health};

use mainstay_model::component_id::ComponentId;
use mainstay_model::health::{Component, Evidence, HealthState, RecommendedAction};
use mainstay_model::time::Span;

/// What a check is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// GPUs, their driver and the switches between them.
    Gpu,
    /// InfiniBand and RoCE.
    Fabric,
    /// Disks and file systems.
    Storage,
    /// CPU, memory, kernel, clock.
    Host,
    /// TPUs.
    Tpu,
    /// Network cards, TCP.
    Network,
}

/// The verdict of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckVerdict {
    /// Healthy.
    Pass,
    /// It works, but something is wrong.
    Warn,
    /// Not fit for training.
    Fail,
    /// The result is unknown.
    Unknown,
    /// There is nothing to check, or it was not requested; the reason says which.
    Skipped,
}

/// One check with its verdict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Its name: a component's (`gpu.0000:3b:00`), or that of an active probe (`deep.storage:/scratch`).
    pub name: String,
    /// What it is about.
    pub group: Group,
    /// The verdict.
    pub verdict: CheckVerdict,
    /// The reason, in one line.
    pub reason: String,
    /// The recommended action.
    #[serde(default)]
    pub action: RecommendedAction,
    /// The readings that the verdict is based on.
    #[serde(default)]
    pub evidence: Vec<Evidence>,
    /// How long it took, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub took: Option<Span>,
    /// Its time limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Span>,
}

/// A required number of devices of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// The group.
    pub group: Group,
    /// The minimum number.
    pub count: u32,
}

impl Group {
    /// All groups, in the order in which they are shown.
    pub const ALL: [Group; 6] =
        [Group::Gpu, Group::Fabric, Group::Storage, Group::Host, Group::Tpu, Group::Network];

    /// Its name on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Group::Gpu => "gpu",
            Group::Fabric => "fabric",
            Group::Storage => "storage",
            Group::Host => "host",
            Group::Tpu => "tpu",
            Group::Network => "network",
        }
    }

    /// Parses a group's name.
    pub fn parse(word: &str) -> Option<Group> {
        Group::ALL.into_iter().find(|group| group.name() == word)
    }

    /// The group of a component or sensor, by its name.
    pub fn from_name(name: &str) -> Group {
        let mut parts = name.split(['.', ' ', ':', '_']);
        let first = parts.next().unwrap_or_default();
        let second = parts.next().unwrap_or_default();
        match (first, second) {
            _ if name == "host.network_storage" => Group::Storage,
            // Kernel log reports about GPUs that name no GPU.
            ("host", "gpu") => Group::Gpu,
            ("gpu" | "devices" | "nvml" | "nvlink" | "nvswitch" | "dcgm" | "imex", _) => Group::Gpu,
            ("fabric" | "infiniband" | "ib" | "roce" | "rdma", _) => Group::Fabric,
            ("host", "disk" | "storage" | "mount" | "mounts") | ("storage" | "disk" | "mount" | "nfs", _) => {
                Group::Storage
            }
            ("tpu" | "libtpu", _) => Group::Tpu,
            ("host", "network") | ("network" | "net" | "ethernet" | "nccl", _) => Group::Network,
            _ => Group::Host,
        }
    }

    /// The devices of the group, in words: for reports of missing ones.
    fn things(self) -> &'static str {
        match self {
            Group::Gpu => "GPUs",
            Group::Fabric => "InfiniBand or RoCE ports",
            Group::Storage => "file systems",
            Group::Host => "components of the host",
            Group::Tpu => "TPU chips",
            Group::Network => "network components",
        }
    }
}

impl Check {
    /// The check for a component in its current state.
    pub fn of_component(component: &Component) -> Check {
        let verdict = match component.state {
            HealthState::Healthy => CheckVerdict::Pass,
            HealthState::Degraded => CheckVerdict::Warn,
            HealthState::Unhealthy => CheckVerdict::Fail,
            HealthState::Unknown => CheckVerdict::Unknown,
        };
        Check {
            action: component.action,
            evidence: component.evidence.clone(),
            ..Check::new(
                &component.name,
                Group::from_name(&component.name),
                verdict,
                component.reason.clone(),
            )
        }
    }

    /// A check with only a verdict and a reason.
    pub fn new(name: &str, group: Group, verdict: CheckVerdict, reason: impl Into<String>) -> Check {
        Check {
            name: name.to_owned(),
            group,
            verdict,
            reason: reason.into(),
            action: RecommendedAction::None,
            evidence: Vec::new(),
            took: None,
            deadline: None,
        }
    }

    /// A check that did not answer in time.
    pub fn unanswered(name: &str, group: Group, deadline: Span) -> Check {
        let reason = format!("did not answer in {deadline}");
        Check {
            took: Some(deadline),
            deadline: Some(deadline),
            ..Check::new(name, group, CheckVerdict::Unknown, reason)
        }
    }

    /// Whether the check is about one device, port or chip. Such names contain a number; those of summaries
    /// (`gpu.driver`) do not.
    fn is_of_a_device(&self) -> bool {
        let rest = self.name.split_once('.').map_or("", |(_, rest)| rest);
        // DCGM and the probes also report on GPUs.
        let own = self.group != Group::Gpu
            || matches!(ComponentId::parse(&self.name), ComponentId::Gpu(_) | ComponentId::Gpus(_));
        let probed = self.name.starts_with("deep.") || self.name.starts_with("free.");
        own && !probed && self.verdict != CheckVerdict::Skipped && rest.contains(|c: char| c.is_ascii_digit())
    }
}

/// Completes the checks: drops those that were not requested, skips groups without any result, and fails requirements
/// that are not met. `silent` are groups with a sensor that has not answered: it is unknown whether they have devices.
pub fn conclude(
    mut checks: Vec<Check>,
    groups: &[Group],
    requirements: &[Requirement],
    silent: &[Group],
) -> Vec<Check> {
    checks.retain(|check| groups.contains(&check.group));
    for group in Group::ALL.into_iter().filter(|group| groups.contains(group)) {
        let required =
            requirements.iter().find(|required| required.group == group).map(|required| required.count);
        let found = checks.iter().filter(|check| check.group == group && check.is_of_a_device()).count();
        let nothing = checks.iter().all(|check| check.group != group);
        let seen = format!("{found} {} seen", group.things());
        let why = match required {
            Some(count) if found < count as usize && silent.contains(&group) => {
                Some((CheckVerdict::Unknown, format!("{count} are required, {seen} so far")))
            }
            Some(count) if found < count as usize => {
                Some((CheckVerdict::Fail, format!("{count} are required, {seen}")))
            }
            Some(count) => Some((CheckVerdict::Pass, format!("{seen}, {count} required"))),
            None if nothing && !silent.contains(&group) => {
                Some((CheckVerdict::Skipped, format!("this host has no {}", group.things())))
            }
            None => None,
        };
        if let Some((verdict, reason)) = why {
            let name =
                if required.is_some() { format!("required.{}", group.name()) } else { group.name().into() };
            let action = match verdict {
                CheckVerdict::Fail => RecommendedAction::RebootNode,
                _ => RecommendedAction::None,
            };
            checks.push(Check { action, ..Check::new(&name, group, verdict, reason) });
        }
    }
    checks.sort_by(|a, b| a.group.cmp(&b.group).then_with(|| a.name.cmp(&b.name)));
    checks
}

/// The severity of a verdict.
fn weight(verdict: CheckVerdict) -> u8 {
    match verdict {
        CheckVerdict::Skipped => 0,
        CheckVerdict::Pass => 1,
        CheckVerdict::Unknown => 2,
        CheckVerdict::Warn => 3,
        CheckVerdict::Fail => 4,
    }
}

/// The verdict over all checks: the most severe one. Unknown if there are no checks.
pub fn overall(checks: &[Check]) -> CheckVerdict {
    let heaviest = checks.iter().map(|check| check.verdict).max_by_key(|verdict| weight(*verdict));
    heaviest.unwrap_or(CheckVerdict::Unknown)
}

/// A summary in one line: the problems, most severe first, then the numbers.
pub fn summary(checks: &[Check], took: Span) -> String {
    let mut wrong: Vec<&Check> =
        checks.iter().filter(|check| weight(check.verdict) > weight(CheckVerdict::Pass)).collect();
    wrong.sort_by_key(|check| std::cmp::Reverse(weight(check.verdict)));
    const MAX_NAMED: usize = 3;
    let mut parts: Vec<String> =
        wrong.iter().take(MAX_NAMED).map(|check| format!("{}: {}", check.name, check.reason)).collect();
    if wrong.len() > MAX_NAMED {
        parts.push(format!("{} more", wrong.len() - MAX_NAMED));
    }
    let count = |verdict| checks.iter().filter(|check| check.verdict == verdict).count();
    let numbers: Vec<String> = [
        (CheckVerdict::Pass, "pass"),
        (CheckVerdict::Warn, "warn"),
        (CheckVerdict::Fail, "fail"),
        (CheckVerdict::Unknown, "unknown"),
        (CheckVerdict::Skipped, "skipped"),
    ]
    .into_iter()
    .filter(|(verdict, _)| count(*verdict) > 0)
    .map(|(verdict, word)| format!("{} {word}", count(verdict)))
    .collect();
    let numbers = if numbers.is_empty() { "nothing was checked".to_owned() } else { numbers.join(", ") };
    parts.push(format!("{numbers} in {took}"));
    parts.join("; ")
}
