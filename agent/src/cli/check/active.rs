//! What is not watched but tried, because someone asked: probes in processes of their own, and GPUs that are really free.

use std::collections::BTreeSet;
use std::time::Duration;

use mainstay_core::device::{DeviceReport, GpuReading, ProbeAnswer};
use mainstay_core::preflight::deep::Probe;
use mainstay_core::preflight::{Check, CheckVerdict, Freedom, Group, free};
use mainstay_core::settings::Bytes;
use mainstay_core::time::Span;

use super::Args;
use crate::config::Config;
use crate::os::clock;
use crate::source::active::{ActivePlan, probe};
use crate::source::device::{DeviceSource, ProbePlan};

/// All that was asked for of these groups, one after the other: at once they would measure each other.
pub(super) fn checks(args: &Args, config: &Config, groups: &[Group]) -> Vec<Check> {
    let plan = ActivePlan {
        program: "/proc/self/exe".into(),
        deadline: args.probe_deadline(),
        limits: config.preflight.deep.clone(),
        cuda: args.cuda.clone(),
    };
    let (mut probes, mut checks) = (Vec::new(), Vec::new());
    if args.deep {
        probes.extend([Probe::Memory, Probe::Cpu, Probe::Loopback]);
        let paths = if args.path.is_empty() { &config.preflight.paths } else { &args.path };
        probes.extend(paths.iter().map(|path| Probe::Storage(path.display().to_string())));
        if paths.is_empty() {
            let why = "no directory is named (--path, or preflight.paths)";
            checks.push(Check::new("deep.storage", Group::Storage, CheckVerdict::Skipped, why));
        }
    }
    probes.extend(args.peer.iter().map(|peer| Probe::Peer(peer.clone())));
    let wanted = |probe: &Probe| groups.contains(&probe.group());
    checks.extend(probes.iter().filter(|of| wanted(of)).map(|of| probe(&plan, of)));
    if groups.contains(&Group::Gpu) && (args.deep || args.exclusive) {
        checks.extend(gpus(args, config, &plan));
    }
    checks
}

/// GPUs that nobody uses: whether that is so, and their probes.
fn gpus(args: &Args, config: &Config, plan: &ActivePlan) -> Vec<Check> {
    let name = if args.deep { "deep.gpu" } else { "free.gpu" };
    let told = |verdict, why: String| vec![Check::new(name, Group::Gpu, verdict, why)];
    let library = &config.gpu.library;
    let mut driver = DeviceSource::new(ProbePlan {
        program: "/proc/self/exe".into(),
        library: (!library.as_os_str().is_empty()).then(|| library.clone()),
        sys: config.host.sys_root.clone(),
        deadline: args.longest(),
        details_every: config.gpu.details_interval.0,
        known: Vec::new(),
    });
    match driver.sample(clock::mono()) {
        DeviceReport::NoGpus => told(CheckVerdict::Skipped, "this host has no GPUs of NVIDIA".to_owned()),
        DeviceReport::Silent { .. } => {
            vec![Check::unanswered(name, Group::Gpu, Span(args.deadline().0.0))]
        }
        DeviceReport::Broken(why) => {
            told(CheckVerdict::Unknown, format!("the driver cannot be asked: {why}"))
        }
        DeviceReport::Answered(ProbeAnswer::Trouble { detail, .. }) => {
            told(CheckVerdict::Unknown, format!("the driver cannot be asked: {detail}"))
        }
        DeviceReport::Answered(ProbeAnswer::Gpus { gpus, .. }) => {
            gpus.iter().flat_map(|gpu| of_one(args, config.preflight.gpu_memory_held, plan, gpu)).collect()
        }
    }
}

fn of_one(args: &Args, allowed: Bytes, plan: &ActivePlan, gpu: &GpuReading) -> Vec<Check> {
    let Some(identity) = &gpu.identity else { return Vec::new() };
    let (freedom, evidence) = free(gpu, &BTreeSet::new(), allowed);
    let mut checks = Vec::new();
    if args.exclusive {
        let (verdict, why) = match &freedom {
            Freedom::Free => (CheckVerdict::Pass, "nobody holds it".to_owned()),
            Freedom::Held(why) => (CheckVerdict::Fail, why.clone()),
            Freedom::Unknown(why) => (CheckVerdict::Unknown, why.clone()),
        };
        let check = Check::new(&format!("free.{}", identity.address), Group::Gpu, verdict, why);
        checks.push(Check { evidence, ..check });
    }
    if args.deep {
        let of = Probe::Gpu(format!("{}.0", identity.address));
        checks.push(match freedom {
            Freedom::Held(why) if !args.force => {
                let why = format!("not touched, since it is {why} (--force probes it all the same)");
                Check::new(&of.name(), Group::Gpu, CheckVerdict::Skipped, why)
            }
            Freedom::Unknown(why) if !args.force => {
                Check::new(&of.name(), Group::Gpu, CheckVerdict::Unknown, format!("not touched: {why}"))
            }
            Freedom::Free | Freedom::Held(_) | Freedom::Unknown(_) => probe(plan, &of),
        });
    }
    checks
}

impl Args {
    /// How long a probe may take: longer than a look, if nobody says otherwise.
    fn probe_deadline(&self) -> Duration {
        self.deadline.map_or(Duration::from_secs(30), |deadline| Duration::from_nanos(deadline.0.0))
    }
}
