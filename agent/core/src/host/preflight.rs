//! Whether a job may start on this host: verdicts, one for each check, made of components, of what is missing and of
//! what active probes measured.
//!
//! - What was not read, or did not answer in its time, is unknown; what is not there is skipped, unless it is required.
//! - What is known weighs more than what is not: fail, warn, unknown, pass.

pub mod deep;
mod free;
mod held;
mod node_health;

use serde::{Deserialize, Serialize};

pub use free::{GpuAvailability, free};
pub use held::{GpuUse, Owners};
pub use node_health::{NodeHealth, node_health};

use crate::base::time::Span;
use crate::model::component_id::ComponentId;
use crate::model::health::{Component, Evidence, HealthState, RecommendedAction};

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

/// What a check came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckVerdict {
    /// In order.
    Pass,
    /// It works, but something is wrong.
    Warn,
    /// Not fit for training.
    Fail,
    /// It cannot be told.
    Unknown,
    /// There is nothing to check, or nobody asked for it; the reason says which.
    Skipped,
}

/// One check with its verdict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Its name: a component's (`gpu.0000:3b:00`), or that of an active probe (`deep.storage:/scratch`).
    pub name: String,
    /// What it is about.
    pub group: Group,
    /// What it came to.
    pub verdict: CheckVerdict,
    /// Why, in one line for a person.
    pub reason: String,
    /// What is recommended.
    #[serde(default)]
    pub action: RecommendedAction,
    /// The readings that it rests on.
    #[serde(default)]
    pub evidence: Vec<Evidence>,
    /// How long it took, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub took: Option<Span>,
    /// How long it might have taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Span>,
}

/// What must be there: so many devices of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// Of what.
    pub group: Group,
    /// How many at least.
    pub count: u32,
}

impl Group {
    /// All groups, in the order in which they are shown.
    pub const ALL: [Group; 6] =
        [Group::Gpu, Group::Fabric, Group::Storage, Group::Host, Group::Tpu, Group::Network];

    /// Its word on the command line and in JSON.
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

    /// The group of that word.
    pub fn parse(word: &str) -> Option<Group> {
        Group::ALL.into_iter().find(|group| group.name() == word)
    }

    /// The group that a component or a room is of, by its name.
    pub fn of(name: &str) -> Group {
        let mut parts = name.split(['.', ' ', ':', '_']);
        let first = parts.next().unwrap_or_default();
        let second = parts.next().unwrap_or_default();
        match (first, second) {
            _ if name == "host.network_storage" => Group::Storage,
            // What the kernel log says of GPUs without naming one.
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

    /// What a host has of it, in words: for what is missing.
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
    /// The check that a component as it stands amounts to.
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
            ..Check::new(&component.name, Group::of(&component.name), verdict, component.reason.clone())
        }
    }

    /// A check that has nothing more to tell than its verdict.
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

    /// A check that did not answer in its time.
    pub fn unanswered(name: &str, group: Group, deadline: Span) -> Check {
        let reason = format!("did not answer in {deadline}");
        Check {
            took: Some(deadline),
            deadline: Some(deadline),
            ..Check::new(name, group, CheckVerdict::Unknown, reason)
        }
    }

    /// Whether it is about one device, port or chip of possibly several: their names have a number, those that sum
    /// up (`gpu.driver`) have none.
    fn is_of_a_device(&self) -> bool {
        let rest = self.name.split_once('.').map_or("", |(_, rest)| rest);
        // Of a GPU others speak too: DCGM, the probes.
        let own = self.group != Group::Gpu
            || matches!(ComponentId::parse(&self.name), ComponentId::Gpu(_) | ComponentId::Gpus(_));
        let probed = self.name.starts_with("deep.") || self.name.starts_with("free.");
        own && !probed && self.verdict != CheckVerdict::Skipped && rest.contains(|c: char| c.is_ascii_digit())
    }
}

/// Rounds the checks off: what nobody asked for goes, a group of which nothing was found is skipped with its reason, and
/// what is required and not there fails. `silent` are groups of which a room has not answered: of them it cannot be
/// told whether there is nothing.
pub fn conclude(
    mut checks: Vec<Check>,
    groups: &[Group],
    requirements: &[Requirement],
    silent: &[Group],
) -> Vec<Check> {
    checks.retain(|check| groups.contains(&check.group));
    for group in Group::ALL.into_iter().filter(|group| groups.contains(group)) {
        let required = requirements.iter().find(|required| required.group == group).map(|of| of.count);
        let found = checks.iter().filter(|check| check.group == group && check.is_of_a_device()).count();
        let nothing = checks.iter().all(|check| check.group != group);
        let seen = format!("{found} {} seen", group.things());
        let reported = match required {
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
        if let Some((verdict, reason)) = reported {
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

/// How heavily a verdict weighs.
fn weight(verdict: CheckVerdict) -> u8 {
    match verdict {
        CheckVerdict::Skipped => 0,
        CheckVerdict::Pass => 1,
        CheckVerdict::Unknown => 2,
        CheckVerdict::Warn => 3,
        CheckVerdict::Fail => 4,
    }
}

/// The verdict over all checks: the heaviest of them. Unknown if there is none at all.
pub fn overall(checks: &[Check]) -> CheckVerdict {
    let heaviest = checks.iter().map(|check| check.verdict).max_by_key(|verdict| weight(*verdict));
    heaviest.unwrap_or(CheckVerdict::Unknown)
}

/// All of it in one line: what is wrong first, heaviest first, then the numbers.
pub fn summary(checks: &[Check], took: Span) -> String {
    let mut wrong: Vec<&Check> =
        checks.iter().filter(|check| weight(check.verdict) > weight(CheckVerdict::Pass)).collect();
    wrong.sort_by_key(|check| std::cmp::Reverse(weight(check.verdict)));
    const NAMED: usize = 3;
    let mut parts: Vec<String> =
        wrong.iter().take(NAMED).map(|check| format!("{}: {}", check.name, check.reason)).collect();
    if wrong.len() > NAMED {
        parts.push(format!("{} more", wrong.len() - NAMED));
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
