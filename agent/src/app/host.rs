//! The host's sensing, for the agent and for a launcher that has none.

use std::time::Duration;

use mainstay_core::host::os::{HostJudge, HostLimits};
use mainstay_core::model::report::SensorReport;
use tokio::sync::mpsc;

use crate::app::watch::{Watching, watch};
use crate::source::host::HostSource;

/// Looks at the host now and every `interval`, and reports what the judge makes of it.
///
/// # Errors
/// The kernel gives no more threads.
pub fn sense(
    mut source: HostSource,
    limits: HostLimits,
    interval: Duration,
) -> std::io::Result<(Watching, mpsc::Receiver<SensorReport>)> {
    // Room for one: a report that nobody took yet is old news, and the next one says it again.
    let (reports, receiver) = mpsc::channel(1);
    let mut judge = HostJudge::new(limits);
    let look = move |at| judge.step(at, &source.sample(at));
    let watching = watch("host", interval, look, move |judged| reports.blocking_send(judged).is_ok())?;
    Ok((watching, receiver))
}
