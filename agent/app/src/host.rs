//! Host sensing, for the agent and for a launcher without an agent.

use std::time::Duration;

use mainstay_health::host::os::{HostJudge, HostLimits};
use mainstay_model::report::SensorReport;
use tokio::sync::mpsc;

use crate::watch::{Watching, watch};
use mainstay_sensors::source::host::HostSource;

/// Reads the host now and every `interval`, and reports what the judge decides.
///
/// # Errors
/// The kernel cannot create a thread.
pub fn sense(
    mut source: HostSource,
    limits: HostLimits,
    interval: Duration,
) -> std::io::Result<(Watching, mpsc::Receiver<SensorReport>)> {
    // Room for one: a report that is not received yet is outdated, and the next one repeats its content.
    let (reports, receiver) = mpsc::channel(1);
    let mut judge = HostJudge::new(limits);
    let look = move |at| judge.step(at, &source.sample(at));
    let watching = watch("host", interval, look, move |report| reports.blocking_send(report).is_ok())?;
    Ok((watching, receiver))
}
