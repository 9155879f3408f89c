//! Active probes. Each runs in a child process, which is abandoned if it does not answer in time.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use mainstay_health::hardware::gpu::GpuReading;
use mainstay_health::host::preflight::deep::{DeepLimits, Probe, Probed, judge};
use mainstay_health::host::preflight::{Check, CheckVerdict, GpuAvailability, Group, free};
use mainstay_model::time::Span;

use super::request_child::{RequestChild, Unanswered};

/// How probes are started.
#[derive(Clone, Debug)]
pub struct ActivePlan {
    /// The program that contains the probes: our own.
    pub program: PathBuf,
    /// How long each may take.
    pub deadline: Duration,
    /// The limits for results.
    pub limits: DeepLimits,
    /// CUDA's library; none for the usual one.
    pub cuda: Option<PathBuf>,
}

/// Active probes that a user requested.
#[derive(Clone, Debug)]
pub struct Deep {
    /// How each probe is started.
    pub plan: ActivePlan,
    /// Whether memory, CPUs, loopback, storage and GPUs are probed.
    pub probes: bool,
    /// Directories to write to and read back.
    pub paths: Vec<PathBuf>,
    /// Hosts with an echo service, to measure the path to them.
    pub peers: Vec<String>,
    /// Whether every GPU must be free.
    pub exclusive: bool,
    /// Whether GPUs that are in use are probed too.
    pub force: bool,
}

/// The GPUs of the host, as far as known.
#[derive(Clone, Debug)]
pub enum Gpus {
    /// There are none.
    None,
    /// They have not answered in time.
    Silent,
    /// They are unknown; with the reason.
    Unknown(String),
    /// They were read.
    Read(Vec<GpuReading>),
}

impl Deep {
    /// Runs all probes of these groups, one after the other: in parallel they would measure each other. `gpus` is called
    /// when they are needed. Ends early if `report` returns false because no one receives the results.
    pub fn run(&self, groups: &[Group], gpus: impl FnOnce() -> Gpus, mut report: impl FnMut(Check) -> bool) {
        let wanted = |group: &Group| groups.contains(group);
        if self.probes && self.paths.is_empty() && wanted(&Group::Storage) {
            let why = "no directory is named (--path, or preflight.paths)";
            if !report(Check::new("deep.storage", Group::Storage, CheckVerdict::Skipped, why)) {
                return;
            }
        }
        for planned in self.of_the_host().iter().filter(|planned| wanted(&planned.group())) {
            if !report(probe(&self.plan, planned)) {
                return;
            }
        }
        if wanted(&Group::Gpu) && (self.probes || self.exclusive) {
            self.of_gpus(gpus(), &mut report);
        }
    }

    fn of_the_host(&self) -> Vec<Probe> {
        let mut probes = Vec::new();
        if self.probes {
            probes.extend([Probe::Memory, Probe::Cpu, Probe::Loopback]);
            probes.extend(self.paths.iter().map(|path| Probe::Storage(path.display().to_string())));
        }
        probes.extend(self.peers.iter().map(|peer| Probe::Peer(peer.clone())));
        probes
    }

    fn of_gpus(&self, gpus: Gpus, report: &mut impl FnMut(Check) -> bool) {
        let name = if self.probes { "deep.gpu" } else { "free.gpu" };
        let check = |verdict, why: &str| Check::new(name, Group::Gpu, verdict, why);
        let readings = match gpus {
            Gpus::Read(readings) => readings,
            Gpus::None => {
                report(check(CheckVerdict::Skipped, "this host has no GPUs of NVIDIA"));
                return;
            }
            Gpus::Silent => {
                report(Check::unanswered(name, Group::Gpu, span(self.plan.deadline)));
                return;
            }
            Gpus::Unknown(why) => {
                report(check(CheckVerdict::Unknown, &format!("the driver cannot be asked: {why}")));
                return;
            }
        };
        for gpu in &readings {
            if !self.of_one_gpu(gpu, report) {
                return;
            }
        }
    }

    fn of_one_gpu(&self, gpu: &GpuReading, report: &mut impl FnMut(Check) -> bool) -> bool {
        let Some(identity) = &gpu.identity else { return true };
        let (freedom, evidence) = free(gpu, &BTreeSet::new(), self.plan.limits.gpu_memory_held);
        if self.exclusive {
            let (verdict, why) = match &freedom {
                GpuAvailability::Free => (CheckVerdict::Pass, "no process holds it".to_owned()),
                GpuAvailability::Held(why) => (CheckVerdict::Fail, why.clone()),
                GpuAvailability::Unknown(why) => (CheckVerdict::Unknown, why.clone()),
            };
            let check = Check::new(&format!("free.{}", identity.address), Group::Gpu, verdict, why);
            if !report(Check { evidence, ..check }) {
                return false;
            }
        }
        if !self.probes {
            return true;
        }
        let planned = Probe::Gpu(format!("{}.0", identity.address));
        report(match freedom {
            GpuAvailability::Held(why) if !self.force => {
                let why = format!("not touched, since it is {why} (--force probes it all the same)");
                Check::new(&planned.name(), Group::Gpu, CheckVerdict::Skipped, why)
            }
            GpuAvailability::Unknown(why) if !self.force => {
                Check::new(&planned.name(), Group::Gpu, CheckVerdict::Unknown, format!("not touched: {why}"))
            }
            GpuAvailability::Free | GpuAvailability::Held(_) | GpuAvailability::Unknown(_) => {
                probe(&self.plan, &planned)
            }
        })
    }
}

fn span(duration: Duration) -> Span {
    Span(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}

/// Runs a probe and judges the result. Returns within the deadline.
pub fn probe(plan: &ActivePlan, probe: &Probe) -> Check {
    let began = Instant::now();
    let deadline = span(plan.deadline);
    let probed = match ask(plan, probe) {
        Ok(probed) => probed,
        Err(Unanswered::Late) => return Check::unanswered(&probe.name(), probe.group(), deadline),
        Err(Unanswered::Broken(why)) => Probed::Untried(format!("the probe failed: {why}")),
    };
    judge(probe, probed, &plan.limits, span(began.elapsed()), deadline)
}

fn ask(plan: &ActivePlan, probe: &Probe) -> Result<Probed, Unanswered> {
    let broken = |error: serde_json::Error| Unanswered::Broken(error.to_string());
    let mut command = Command::new(&plan.program);
    command.args(["probe", "deep", "--probe", &serde_json::to_string(probe).map_err(broken)?]);
    if let Some(cuda) = &plan.cuda {
        command.arg("--cuda").arg(cuda);
    }
    // By their order on the bus, even if the job's environment hides some.
    command.env("CUDA_DEVICE_ORDER", "PCI_BUS_ID").env_remove("CUDA_VISIBLE_DEVICES");
    let answer = RequestChild::default().ask(command, plan.deadline)?;
    serde_json::from_slice(&answer).map_err(broken)
}
