//! How long the TPUs of a job's ranks have been idle, according to libtpu. Launchers of jobs without heartbeats use it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use mainstay_health::hardware::tpu::RuntimeReply;
use mainstay_model::id::Pid;
use mainstay_model::time::Span;

use super::service::{self, Question};
use super::{USUAL_PORT, chips, holders};
use mainstay_sys::processes;

/// Whether this host has TPUs, or the ports of their metrics are configured.
pub fn may_be_here(sys: &Path) -> bool {
    let configured = std::env::var_os(holders::PORTS.trim_end_matches('=')).is_some();
    configured || chips::on_the_bus(sys).is_ok_and(|chips| !chips.is_empty())
}

/// Asks the services of the ranks' processes, in a separate thread, how long all of their TPUs have been idle. None if any
/// of them does not report it.
pub fn ask_idle(ranks: Vec<Pid>, within: Duration) -> mpsc::Receiver<Option<Span>> {
    let (sender, answer) = mpsc::channel();
    let ask = move || {
        let family =
            ranks.into_iter().flat_map(|rank| processes::descendants(rank).into_iter().chain([rank]));
        let environment = |pid: Pid| PathBuf::from(format!("/proc/{}/environ", pid.0));
        let ports = family.flat_map(|pid| holders::ports_of_environment(&environment(pid))).collect();
        // The attempt may be over meanwhile, and the receiver gone.
        let _ = sender.send(idle_at(ports, within));
    };
    if let Err(error) = std::thread::Builder::new().name("tpu-idle".to_owned()).spawn(ask) {
        tracing::debug!(%error, "no thread to ask libtpu in");
    }
    answer
}

/// The same for the services on these ports, or on the usual one.
pub fn idle_at(mut ports: BTreeSet<u16>, within: Duration) -> Option<Span> {
    if ports.is_empty() {
        ports.insert(USUAL_PORT);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let asked: Vec<_> = ports
        .iter()
        .map(|port| Question {
            endpoint: format!("localhost:{port}"),
            // Each may report the sum of the whole host: the minimum is the same either way.
            own: false,
            deadline: within,
            before: Vec::new(),
        })
        .map(|question| runtime.spawn(service::ask(question)))
        .collect();
    let mut least: Option<f64> = None;
    for answer in asked {
        let Ok(RuntimeReply::Reported(runtime)) = runtime.block_on(answer) else { return None };
        let of_one = runtime.idle_seconds.values().copied().reduce(f64::min)?;
        least = Some(least.map_or(of_one, |least| least.min(of_one)));
    }
    runtime.shutdown_background();
    let seconds = least.filter(|seconds| seconds.is_finite() && *seconds >= 0.0)?;
    Some(Span((seconds * 1e9) as u64))
}
