//! What can go wrong, whose fault that is, and whether a restart helps.

use serde::{Deserialize, Serialize};

use mainstay_model::verdict::FaultDomain;

/// What went wrong. `docs/reference/attribution.md` describes each class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// A bug in the training program.
    UserCode,
    /// The configuration cannot work: flags, sizes, versions, credentials.
    UserConfig,
    /// The data is broken, missing or not what the program expects.
    Data,
    /// A GPU or another accelerator, its memory or its links.
    HardwareGpu,
    /// Anything else of the host: power, cooling, CPU, memory, PCIe, the node as a whole.
    HardwareHost,
    /// The network between hosts.
    Fabric,
    /// Filesystems and object stores.
    Storage,
    /// The host ran out of memory, shared memory, file handles or the like.
    HostResource,
    /// The scheduler or the cloud took the machines away.
    Preemption,
    /// Driver, libraries, containers, framework: everything below the program.
    SoftwarePlatform,
    /// The evidence does not show the cause.
    Unknown,
}

impl Class {
    /// All classes, in the order of the confusion matrix.
    pub const ALL: [Class; 11] = [
        Class::UserCode,
        Class::UserConfig,
        Class::Data,
        Class::HardwareGpu,
        Class::HardwareHost,
        Class::Fabric,
        Class::Storage,
        Class::HostResource,
        Class::Preemption,
        Class::SoftwarePlatform,
        Class::Unknown,
    ];

    /// Its name in files and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Class::UserCode => "user_code",
            Class::UserConfig => "user_config",
            Class::Data => "data",
            Class::HardwareGpu => "hardware_gpu",
            Class::HardwareHost => "hardware_host",
            Class::Fabric => "fabric",
            Class::Storage => "storage",
            Class::HostResource => "host_resource",
            Class::Preemption => "preemption",
            Class::SoftwarePlatform => "software_platform",
            Class::Unknown => "unknown",
        }
    }

    /// The class with that name.
    pub fn named(name: &str) -> Option<Class> {
        Class::ALL.into_iter().find(|class| class.name() == name)
    }

    /// Its index in [`Class::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }

    /// The default fault domain; evidence can override it. Host memory counts as the user's, who asked for too little; a full or slow
    /// filesystem as the infrastructure's.
    pub fn domain(self) -> FaultDomain {
        match self {
            Class::UserCode | Class::UserConfig | Class::Data | Class::HostResource => FaultDomain::User,
            Class::HardwareGpu | Class::HardwareHost => FaultDomain::Hardware,
            Class::Fabric | Class::Storage | Class::Preemption => FaultDomain::Infrastructure,
            Class::SoftwarePlatform => FaultDomain::Platform,
            Class::Unknown => FaultDomain::Unknown,
        }
    }

    /// The class in words, as the start of a sentence.
    pub fn description(self) -> &'static str {
        match self {
            Class::UserCode => "a bug in the training program",
            Class::UserConfig => "the configuration of the run",
            Class::Data => "the training data",
            Class::HardwareGpu => "a faulty GPU",
            Class::HardwareHost => "a faulty host",
            Class::Fabric => "the network between hosts",
            Class::Storage => "the storage",
            Class::HostResource => "a resource of the host ran out",
            Class::Preemption => "the scheduler took the machines away",
            Class::SoftwarePlatform => "the software under the program",
            Class::Unknown => "the evidence does not show the cause",
        }
    }

    /// Failures of this class, in the plural. `None` if the cause is unknown.
    pub fn failures(self) -> Option<&'static str> {
        Some(match self {
            Class::UserCode => "bugs of training programs",
            Class::UserConfig => "configuration errors",
            Class::Data => "errors in training data",
            Class::HardwareGpu => "GPU faults",
            Class::HardwareHost => "host faults",
            Class::Fabric => "network faults",
            Class::Storage => "storage faults",
            Class::HostResource => "exhausted resources",
            Class::Preemption => "preemptions",
            Class::SoftwarePlatform => "faults of libraries and drivers",
            Class::Unknown => return None,
        })
    }
}

/// What a controller should do now, before a person changes anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Restart {
    /// Restart on the same hosts.
    RestartSameNodes,
    /// Restart without the suspected host.
    RestartExcludeNode,
    /// Restart when the lost resource is available again.
    RestartAfterWait,
    /// Do not restart: it would only fail again.
    DoNotRestart,
}

impl Restart {
    /// All values.
    pub const ALL: [Restart; 4] = [
        Restart::RestartSameNodes,
        Restart::RestartExcludeNode,
        Restart::RestartAfterWait,
        Restart::DoNotRestart,
    ];

    /// The advice with that name.
    pub fn named(name: &str) -> Option<Restart> {
        Restart::ALL.into_iter().find(|restart| restart.name() == name)
    }

    /// Its name in files and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Restart::RestartSameNodes => "restart_same_nodes",
            Restart::RestartExcludeNode => "restart_exclude_node",
            Restart::RestartAfterWait => "restart_after_wait",
            Restart::DoNotRestart => "do_not_restart",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_wire() {
        for class in Class::ALL {
            assert_eq!(serde_json::to_value(class).expect("plain"), class.name());
            assert_eq!(Class::named(class.name()), Some(class));
            assert_eq!(Class::ALL[class.index()], class);
        }
        for restart in Restart::ALL {
            assert_eq!(serde_json::to_value(restart).expect("plain"), restart.name());
        }
    }
}
