//! The host's clocks and its boot id: the only place where the agent asks for the time.

use mainstay_core::id::BootId;
use mainstay_core::time::{Mono, Stamp, Wall};
use nix::time::{ClockId, clock_gettime};

/// `CLOCK_MONOTONIC`, the clock of heartbeat pages too.
pub fn mono() -> Mono {
    // Linux has this clock and the pointer is ours, so the call cannot fail; zero would only make spans long.
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Mono(0), |time| {
        Mono((time.tv_sec() as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec() as u64))
    })
}

/// Both clocks.
pub fn now() -> Stamp {
    let wall = clock_gettime(ClockId::CLOCK_REALTIME).map_or(Wall(0), |time| {
        Wall(time.tv_sec().saturating_mul(1_000_000_000).saturating_add(time.tv_nsec()))
    });
    Stamp { mono: mono(), wall }
}

/// The kernel's boot id; "unknown" where `/proc` does not tell, so that journals of different boots are at worst
/// not told apart.
pub fn boot_id() -> BootId {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    BootId(id.map_or_else(|_| "unknown".to_owned(), |id| id.trim().to_owned()))
}
