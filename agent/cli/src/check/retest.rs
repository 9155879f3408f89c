//! GPUs that were repaired and not tested since: the agent learns that the active probes have passed on them.

use mainstay_health::host::preflight::deep::Probe;
use mainstay_health::host::preflight::{Check, CheckVerdict};
use mainstay_health::retest::NOT_RETESTED;

use super::Args;
use crate::{order, output};

/// Acknowledges the faults of the GPUs that passed.
pub(super) async fn report(args: &Args, watched: &mut [Check], probed: &[Check]) {
    let passed = |gpu: &Check| {
        let probe = gpu.name.strip_prefix("gpu.").map(|address| Probe::Gpu(format!("{address}.0")).name());
        probed.iter().any(|check| Some(&check.name) == probe.as_ref() && check.verdict == CheckVerdict::Pass)
    };
    for gpu in watched.iter_mut().filter(|check| check.reason.starts_with(NOT_RETESTED)) {
        if args.alone || !passed(gpu) {
            continue;
        }
        let told = async {
            order::agent(args.ask.socket.clone())
                .await?
                .acknowledge(&gpu.name, "mainstay check --deep passed")
                .await
        };
        match told.await {
            Ok(()) => {
                gpu.verdict = CheckVerdict::Pass;
                gpu.reason = "tested since its repair".to_owned();
            }
            Err(error) => {
                output::note(&format!("{}: it passed, but the agent does not count that: {error}", gpu.name))
            }
        }
    }
}
