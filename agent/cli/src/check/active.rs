//! Checks that need an action on request: probes in child processes, and whether GPUs are really free.

use std::time::Duration;

use mainstay_health::hardware::gpu::{DeviceReport, ProbeAnswer};
use mainstay_health::host::preflight::{Check, Group};

use super::Args;
use mainstay_node::config::Config;
use mainstay_sensors::source::active::{ActivePlan, Deep, Gpus};
use mainstay_sensors::source::device::{DETAILS_INTERVAL, DeviceSource, ProbePlan};
use mainstay_sys::clock;

/// All requested checks of these groups.
pub(super) fn checks(args: &Args, config: &Config, groups: &[Group]) -> Vec<Check> {
    let plan = ActivePlan {
        program: "/proc/self/exe".into(),
        deadline: args.probe_deadline(),
        limits: config.limits.preflight.clone(),
        cuda: args.cuda.clone(),
    };
    let deep = Deep {
        plan,
        probes: args.deep,
        paths: if args.path.is_empty() { config.preflight.paths.clone() } else { args.path.clone() },
        peers: args.peer.clone(),
        exclusive: args.exclusive,
        force: args.force,
    };
    let mut checks = Vec::new();
    let report = |check| {
        checks.push(check);
        true
    };
    deep.run(groups, || gpus(args, config), report);
    checks
}

/// The GPUs, read from the driver.
fn gpus(args: &Args, config: &Config) -> Gpus {
    let library = &config.gpu.library;
    let mut driver = DeviceSource::new(ProbePlan {
        program: "/proc/self/exe".into(),
        library: (!library.as_os_str().is_empty()).then(|| library.clone()),
        sys: config.host.sys_root.clone(),
        proc: config.host.proc_root.clone(),
        deadline: args.longest(),
        details_every: DETAILS_INTERVAL,
        known: Vec::new(),
    });
    match driver.sample(clock::mono()) {
        DeviceReport::NoGpus => Gpus::None,
        DeviceReport::Silent { .. } => Gpus::Silent,
        DeviceReport::Broken(why) => Gpus::Unknown(why),
        DeviceReport::Answered(ProbeAnswer::Trouble { detail, .. }) => Gpus::Unknown(detail),
        DeviceReport::Answered(ProbeAnswer::Gpus { gpus, .. }) => Gpus::Read(gpus),
    }
}

impl Args {
    /// Time limit of a probe: longer than that of a look, unless the user sets one.
    fn probe_deadline(&self) -> Duration {
        self.deadline.map_or(Duration::from_secs(30), |deadline| Duration::from_nanos(deadline.0.0))
    }
}
