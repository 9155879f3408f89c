//! The wiring: start, supervise, drain in order.

pub mod agent;
pub mod catalog;
mod checkpoint;
pub mod default_paths;
mod device;
mod earlier_entries;
mod host;
mod job;
mod kernel_log;
pub mod logging;
mod nvrx;
pub mod one_check;
mod reset;
mod resume;
mod roles;
mod sensors;
mod watch;

pub use agent::run_agent;
pub use job::{JobPlan, run_job};
pub use roles::{RestartRule, RolePlan, RolesPlan, When, run_roles};

use mainstay_model::id::Pid;

use mainstay_api::{Mode, ServerInfo};
use mainstay_sensors::source::host::identify;
use mainstay_sys::clock;

/// What the API reports about this process.
fn about(mode: Mode) -> ServerInfo {
    ServerInfo {
        hostname: identify().host_name.unwrap_or_else(|| "unknown".to_owned()),
        boot_id: clock::boot_id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        mode,
        started: clock::now(),
        pid: Pid(i32::try_from(std::process::id()).unwrap_or(0)),
    }
}
