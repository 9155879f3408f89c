//! TPUs: chips on the PCI bus, the processes that hold them, what libtpu reports inside those processes, and the stall
//! summaries that it writes.
//!
//! libtpu's service is asked while a process holds a chip, or may hold one, and while it is in the configuration. Port 8353
//! is never asked: polling the agent behind it races with resets of the device.

mod chips;
mod driver;
mod holders;
mod idle;
mod service;
mod stalls;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use mainstay_health::hardware::tpu::{CoreState, RuntimeReply, RuntimeService, TpuSample};

pub use idle::{ask_idle, idle_at, may_be_here};

use driver::DriverLogs;
use service::Question;
use stalls::Stalls;

/// The default port of libtpu's service.
const USUAL_PORT: u16 = 8431;

/// The port of the control agent that must not be polled.
pub const FORBIDDEN_PORT: u16 = 8353;

/// How TPUs are read.
#[derive(Clone, Debug)]
pub struct TpuPlan {
    /// Where sysfs is.
    pub sys: PathBuf,
    /// Where procfs is.
    pub proc: PathBuf,
    /// Services to ask, as `host:port`; if empty, those of the processes that hold chips.
    pub endpoints: Vec<String>,
    /// How long an answer may take.
    pub deadline: Duration,
    /// Where libtpu writes its stall summaries and its driver's logs.
    pub log_dir: PathBuf,
}

/// The TPUs of this host.
#[derive(Debug)]
pub struct TpuSource {
    plan: TpuPlan,
    /// The state of the cores at the last look: expensive texts are requested only if they did not move.
    stood: BTreeMap<String, Vec<CoreState>>,
    stalls: Stalls,
    driver: DriverLogs,
}

impl TpuSource {
    /// A source that has not looked yet; stall summaries with the names in `reported` are already reported.
    pub fn new(plan: TpuPlan, seen_before: BTreeSet<String>) -> TpuSource {
        let stalls = Stalls::new(plan.log_dir.clone(), seen_before);
        let driver = DriverLogs::new(plan.log_dir.clone());
        TpuSource { plan, stood: BTreeMap::new(), stalls, driver }
    }

    /// Takes one sample. Returns within the deadline, whatever the services do.
    pub fn sample(&mut self) -> TpuSample {
        let mut chips = chips::on_the_bus(&self.plan.sys);
        let mut ports = BTreeSet::new();
        if let Ok(chips) = &mut chips
            && !chips.is_empty()
        {
            ports = holders::find(&self.plan.proc, chips);
        }
        let held = chips.as_ref().is_ok_and(|chips| chips.iter().any(|chip| !chip.holders.is_free()));
        let endpoints = self.endpoints(held, &ports);
        let there = chips.as_ref().is_ok_and(|chips| !chips.is_empty());
        let stalls = if there { self.stalls.newer() } else { Vec::new() };
        let driver = if there { self.driver.newer() } else { Vec::new() };
        TpuSample { chips, services: self.ask(&endpoints), stalls, driver }
    }

    fn endpoints(&self, held: bool, ports: &BTreeSet<u16>) -> Vec<String> {
        if !self.plan.endpoints.is_empty() || !held {
            return self.plan.endpoints.clone();
        }
        let usual = BTreeSet::from([USUAL_PORT]);
        let ports = if ports.is_empty() { &usual } else { ports };
        ports.iter().map(|port| format!("localhost:{port}")).collect()
    }

    /// Asks all services at the same time.
    fn ask(&mut self, endpoints: &[String]) -> Vec<RuntimeService> {
        if endpoints.is_empty() {
            return Vec::new();
        }
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                let answer = RuntimeReply::Improper(format!("it cannot be asked: {error}"));
                let service =
                    |endpoint: &String| RuntimeService { endpoint: endpoint.clone(), answer: answer.clone() };
                return endpoints.iter().map(service).collect();
            }
        };
        // Each of several services of one host would report the sum of all.
        let own = endpoints.len() > 1;
        let ask_one = |endpoint: &String| {
            let before = self.stood.remove(endpoint).unwrap_or_default();
            let question = Question { endpoint: endpoint.clone(), own, deadline: self.plan.deadline, before };
            (endpoint.clone(), runtime.spawn(service::ask(question)))
        };
        let asked: Vec<_> = endpoints.iter().map(ask_one).collect();
        let mut services = Vec::new();
        for (endpoint, answer) in asked {
            let answer =
                runtime.block_on(answer).unwrap_or_else(|error| RuntimeReply::Improper(error.to_string()));
            if let RuntimeReply::Reported(runtime) = &answer {
                self.stood.insert(endpoint.clone(), runtime.cores.clone().unwrap_or_default());
            }
            services.push(RuntimeService { endpoint, answer });
        }
        // Closes the connections. Do not wait for a resolver that hangs.
        runtime.shutdown_background();
        services
    }
}
