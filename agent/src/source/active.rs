//! Active probes, each in a child process that is left behind when it does not answer in time.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use mainstay_core::preflight::Check;
use mainstay_core::preflight::deep::{DeepLimits, Probe, Probed, judge};
use mainstay_core::time::Span;

use super::asked::{Asked, Unanswered};

/// How probes are started.
#[derive(Clone, Debug)]
pub struct ActivePlan {
    /// The program that has the probes in it: our own.
    pub program: PathBuf,
    /// How long each may take.
    pub deadline: Duration,
    /// What they do, and what is slow.
    pub limits: DeepLimits,
    /// CUDA's library; the usual one if none is named.
    pub cuda: Option<PathBuf>,
}

/// Probes, and judges what came of it. Returns within the deadline.
pub fn probe(plan: &ActivePlan, probe: &Probe) -> Check {
    let began = Instant::now();
    let span = |duration: Duration| Span(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX));
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
    command.args(["--storage-size", &plan.limits.storage_size.0.to_string()]);
    if let Some(cuda) = &plan.cuda {
        command.arg("--cuda").arg(cuda);
    }
    // By their place on the bus, whatever the job's environment hides.
    command.env("CUDA_DEVICE_ORDER", "PCI_BUS_ID").env_remove("CUDA_VISIBLE_DEVICES");
    let answer = Asked::default().ask(command, plan.deadline)?;
    serde_json::from_slice(&answer).map_err(broken)
}
