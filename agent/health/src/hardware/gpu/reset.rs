//! A reset of a GPU: who may request one, when a GPU is idle, and whether the reset helped.
//!
//! - Nothing is reset unless the host's configuration allows it; automatic resets need their own mode.
//! - A GPU is idle if neither driver nor kernel sees a process on it. A source that cannot be read is no evidence of
//!   idleness.
//! - A reset helped if the driver answers for the same board again and needs no further action.

use serde::{Deserialize, Serialize};

use super::{DeviceReport, GpuReading, ProbeAnswer, faults, observed};
use mainstay_model::component_id::ComponentId;
use mainstay_model::entry::Fact;
use mainstay_model::id::{JobId, Pid};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::pci::PciAddress;

/// Journal event: a reset starts.
const STARTED: &str = "gpu_reset_begun";
/// A reset helped: the faults that it heals are over.
pub const DONE: &str = "gpu_reset";
/// A reset was tried and did not help.
const FAILED: &str = "gpu_reset_failed";
/// A reset was refused.
const REFUSED: &str = "gpu_reset_refused";

/// Who may reset GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ResetMode {
    /// No one.
    #[default]
    Off,
    /// Operators.
    Ordered,
    /// Operators, and the agent if a GPU needs it.
    Automatic,
}

/// Who requested a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetBy {
    /// A user, identified by the kernel.
    User(u32),
    /// The agent: the GPU's component recommends a reset.
    Agent,
}

impl std::fmt::Display for ResetBy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ResetBy::User(uid) => write!(f, "user {uid}"),
            ResetBy::Agent => write!(f, "the agent"),
        }
    }
}

/// A requested reset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResetOrder {
    /// Which GPU.
    pub address: PciAddress,
    /// The board, by its UUID.
    pub uuid: String,
    /// Who requested it.
    pub by: ResetBy,
    /// The reason.
    pub reason: String,
}

/// Why a GPU was not reset, or why a reset did not help.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResetError {
    /// No GPU has that name.
    #[error("no GPU {name:?} here; known: {known}")]
    Unknown {
        /// The requested name.
        name: String,
        /// The existing GPUs.
        known: String,
    },
    /// The configuration does not allow it.
    #[error(
        "GPUs of this host are not to be reset: gpu.reset.mode of the agent's configuration is {0}, see \
         docs/reference/configuration.md"
    )]
    NotAllowed(&'static str),
    /// GPUs are not watched.
    #[error("GPUs are not watched on this host (gpu.enabled): whether one is idle is unknown")]
    NotWatched,
    /// Only one reset runs at a time.
    #[error("GPU {0} is being reset at this moment")]
    UnderWay(PciAddress),
    /// A job may start ranks on it at any moment.
    #[error("job {0} runs on this host: stop it first (mainstay job stop)")]
    JobRuns(JobId),
    /// A process uses it.
    #[error("it is not idle: {0}")]
    Busy(String),
    /// It is unknown whether a process uses it.
    #[error("whether it is idle is unknown: {0}")]
    Unreadable(String),
    /// The reset program failed.
    #[error("{0}")]
    Program(String),
    /// The reset ran and did not help.
    #[error("the reset did not help: {0}")]
    NotHelped(String),
}

impl ResetError {
    /// Whether the reset was tried, instead of refused.
    pub fn was_tried(&self) -> bool {
        matches!(self, ResetError::Program(_) | ResetError::NotHelped(_))
    }
}

/// A process that has a GPU's device file open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The process.
    pub pid: Pid,
    /// Its name.
    pub name: String,
    /// The file.
    pub file: String,
}

/// Finds the GPU named by a component (`gpu.0000:3b:00`), an address or a UUID, in the last readings.
///
/// # Errors
/// No GPU has that name, or its identity was never read.
pub fn meant<'a>(gpus: &'a [GpuReading], name: &str) -> Result<(PciAddress, &'a str), ResetError> {
    let address = PciAddress::parse(name.strip_prefix("gpu.").unwrap_or(name));
    let known =
        gpus.iter().filter_map(|gpu| gpu.identity.as_ref()).filter(|identity| !identity.uuid.is_empty());
    let mut of_name =
        known.clone().filter(|identity| Some(identity.address) == address || identity.uuid == name);
    match of_name.next() {
        Some(identity) => Ok((identity.address, &identity.uuid)),
        None => {
            let known: Vec<String> =
                known.map(|identity| ComponentId::Gpu(identity.address).to_string()).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            Err(ResetError::Unknown { name: name.to_owned(), known })
        }
    }
}

/// Checks whether a reset is allowed, before the GPU itself is checked. `running` is a job of this host that is not
/// over.
///
/// # Errors
/// Why it is not allowed.
pub fn may(mode: ResetMode, by: ResetBy, running: Option<&JobId>) -> Result<(), ResetError> {
    match (mode, by) {
        (ResetMode::Off, _) => return Err(ResetError::NotAllowed("\"off\"")),
        (ResetMode::Ordered, ResetBy::Agent) => return Err(ResetError::NotAllowed("\"ordered\"")),
        (ResetMode::Ordered | ResetMode::Automatic, _) => {}
    }
    running.map_or(Ok(()), |job| Err(ResetError::JobRuns(job.clone())))
}

/// Checks that a GPU is idle: by the driver, if it still lists the GPU's processes, and by the open files of all
/// processes.
///
/// # Errors
/// The process that uses it, or why that is unknown.
pub fn idle(reading: Option<&GpuReading>, holders: Result<Vec<Holder>, String>) -> Result<(), ResetError> {
    // The driver lists no processes of a GPU that waits for its reset; only the kernel can show whether it is idle.
    let by_driver =
        reading.filter(|reading| reading.trouble.is_none()).and_then(|reading| reading.processes.value());
    if let Some(first) = by_driver.and_then(|processes| processes.first()) {
        return Err(ResetError::Busy(format!("by the driver, process {} works on it", first.pid.0)));
    }
    let holders = holders.map_err(ResetError::Unreadable)?;
    match holders.first() {
        None => Ok(()),
        Some(Holder { pid, name, file }) => {
            let others = match holders.len() {
                1 => String::new(),
                count => format!(", and {} more", count - 1),
            };
            Err(ResetError::Busy(format!("process {} ({name}) has {file} open{others}", pid.0)))
        }
    }
}

/// Checks that the board is healthy after its reset, by a later reading.
///
/// # Errors
/// What is still wrong with it.
pub fn helped(order: &ResetOrder, report: &DeviceReport) -> Result<(), ResetError> {
    let still = |why: String| Err(ResetError::NotHelped(why));
    let DeviceReport::Answered(ProbeAnswer::Gpus { gpus, .. }) = report else {
        return still("the driver does not answer".to_owned());
    };
    let it =
        gpus.iter().find(|gpu| gpu.identity.as_ref().is_some_and(|identity| identity.uuid == order.uuid));
    let Some(gpu) = it else { return still("the driver no longer counts it".to_owned()) };
    if let Some(trouble) = &gpu.trouble {
        return still(trouble.describe());
    }
    match gpu.recovery_action.value().and_then(|number| u32::try_from(*number).ok()) {
        // Older drivers do not report it.
        None | Some(0) => Ok(()),
        Some(number) => still(format!("the driver says that it still needs {}", faults::recovery(number).2)),
    }
}

impl ResetOrder {
    /// The journal entry before the attempt.
    pub fn starts(&self) -> Fact {
        self.noted(STARTED, Weight::Warning, format!("reset by {}: {}", self.by, self.reason))
    }

    /// The journal entry with the outcome.
    pub fn ended(&self, outcome: &Result<(), ResetError>) -> Fact {
        match outcome {
            Ok(()) => {
                let words = format!("reset by {}: it answers, and the driver asks for nothing more", self.by);
                self.noted(DONE, Weight::Info, words)
            }
            Err(error) if error.was_tried() => {
                self.noted(FAILED, Weight::Error, format!("a reset by {} failed: {error}", self.by))
            }
            Err(error) => {
                self.noted(REFUSED, Weight::Warning, format!("a reset by {} was refused: {error}", self.by))
            }
        }
    }

    fn noted(&self, event: &str, weight: Weight, words: String) -> Fact {
        let value = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let values =
            [value("by", &self.by.to_string()), value("reason", &self.reason), value("uuid", &self.uuid)];
        observed(self.address, event, weight, words, values)
    }
}

/// The GPU that the agent reset automatically, with any outcome, if the observation is about such a reset.
pub fn own_try(observation: &Observation) -> Option<PciAddress> {
    let of_ours = observation.values.get("by").is_some_and(|by| *by == ResetBy::Agent.to_string());
    let tried = observation.event == DONE || observation.event == FAILED;
    let ComponentId::Gpu(address) = ComponentId::parse(&observation.component) else { return None };
    (of_ours && tried).then_some(address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::gpu::{GpuIdentity, GpuProcess, GpuTrouble, Sampled};

    const ADDRESS: &str = "0000:01:00";

    fn gpu() -> GpuReading {
        let address = PciAddress::parse(ADDRESS).unwrap_or_else(|| panic!("{ADDRESS} is an address"));
        let identity = GpuIdentity { address, uuid: "GPU-1".into(), name: String::new(), serial: None };
        GpuReading {
            identity: Some(identity),
            processes: Sampled::Value(Vec::new()),
            recovery_action: Sampled::Value(0),
            ..GpuReading::default()
        }
    }

    fn with(processes: &[i32]) -> GpuReading {
        let processes = processes.iter().map(|pid| GpuProcess { pid: Pid(*pid), memory: None });
        GpuReading { processes: Sampled::Value(processes.collect()), ..gpu() }
    }

    fn order(by: ResetBy) -> ResetOrder {
        let gpus = [gpu()];
        let (address, uuid) = meant(&gpus, ADDRESS).unwrap_or_else(|error| panic!("{error}"));
        ResetOrder { address, uuid: uuid.to_owned(), by, reason: "XID 48".into() }
    }

    fn answered(gpus: Vec<GpuReading>) -> DeviceReport {
        DeviceReport::Answered(ProbeAnswer::Gpus { driver: None, gpus, bound: Vec::new() })
    }

    #[test]
    fn a_gpu_is_found_by_each_of_its_names() {
        let gpus = [gpu()];
        for name in ["gpu.0000:01:00", "0000:01:00", "GPU-1"] {
            assert_eq!(meant(&gpus, name).map(|(_, uuid)| uuid), Ok("GPU-1"), "{name}");
        }
        let error = meant(&gpus, "gpu.0000:02:00").map(|_| ()).unwrap_err().to_string();
        testing::snapshot!("reasons", "reset: a gpu is found by each of its names", error);
        assert!(meant(&[], "GPU-1").unwrap_err().to_string().ends_with("known: none"));
    }

    #[test]
    fn nothing_is_reset_without_permission_or_while_a_job_runs() {
        let (person, agent) = (ResetBy::User(0), ResetBy::Agent);
        for (mode, by, allowed) in [
            (ResetMode::Off, person, false),
            (ResetMode::Off, agent, false),
            (ResetMode::Ordered, person, true),
            (ResetMode::Ordered, agent, false),
            (ResetMode::Automatic, person, true),
            (ResetMode::Automatic, agent, true),
        ] {
            assert_eq!(may(mode, by, None).is_ok(), allowed, "{mode:?} {by:?}");
            assert!(may(mode, by, Some(&JobId("a".into()))).is_err());
        }
        assert_eq!(ResetMode::default(), ResetMode::Off);
    }

    #[test]
    fn a_gpu_is_idle_only_if_driver_and_kernel_see_no_process() {
        let holder = Holder { pid: Pid(7), name: "python".into(), file: "/dev/nvidia0".into() };
        let stated = |reading: Option<&GpuReading>, holders: Result<Vec<Holder>, String>| {
            idle(reading, holders).err().map(|error| error.to_string())
        };
        assert_eq!(stated(Some(&gpu()), Ok(vec![])), None);
        let by_driver = stated(Some(&with(&[7])), Ok(vec![])).unwrap();
        testing::snapshot!("reasons", "reset: a gpu with a process by the driver is not idle", by_driver);
        let two = vec![holder.clone(), Holder { pid: Pid(8), ..holder.clone() }];
        let by_kernel = stated(Some(&gpu()), Ok(two)).unwrap();
        testing::snapshot!("reasons", "reset: a gpu whose file processes have open is not idle", by_kernel);
        // The driver lists no processes of a GPU that waits for its reset; only the kernel can show whether it is idle.
        let lost = GpuReading { trouble: Some(GpuTrouble::ResetRequired), ..with(&[7]) };
        assert_eq!(stated(Some(&lost), Ok(vec![])), None);
        assert!(stated(Some(&lost), Ok(vec![holder])).is_some());
        assert_eq!(idle(None, Err("denied".into())), Err(ResetError::Unreadable("denied".into())));
    }

    #[test]
    fn a_reset_helped_if_the_same_board_answers_and_needs_nothing_more() {
        let order = order(ResetBy::User(0));
        assert_eq!(helped(&order, &answered(vec![gpu()])), Ok(()));
        let old = GpuReading { recovery_action: Sampled::NotOffered, ..gpu() };
        assert_eq!(helped(&order, &answered(vec![old])), Ok(()));
        let other = GpuReading { identity: None, ..gpu() };
        let still = GpuReading { recovery_action: Sampled::Value(2), ..gpu() };
        let silent = GpuReading { trouble: Some(GpuTrouble::Lost), ..gpu() };
        for (report, name) in [
            (DeviceReport::NoGpus, "no answer"),
            (answered(vec![]), "no gpu"),
            (answered(vec![other]), "another gpu"),
            (answered(vec![still]), "action needed"),
            (answered(vec![silent]), "lost"),
        ] {
            let error = helped(&order, &report).unwrap_err();
            assert!(error.was_tried(), "{error}");
            testing::snapshot!("reasons", format!("reset: not helped, {name}"), error);
        }
    }

    #[test]
    fn the_agent_recognizes_its_own_resets_in_the_journal() {
        let own = |by, outcome: Result<(), ResetError>| match order(by).ended(&outcome) {
            Fact::Observed(observation) => own_try(&observation),
            other => panic!("{other:?}"),
        };
        assert!(own(ResetBy::Agent, Ok(())).is_some());
        assert!(own(ResetBy::Agent, Err(ResetError::NotHelped("x".into()))).is_some());
        assert!(own(ResetBy::Agent, Err(ResetError::Busy("x".into()))).is_none());
        assert!(own(ResetBy::User(0), Ok(())).is_none());
    }
}
