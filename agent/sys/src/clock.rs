//! The host's clocks and its boot id: the only place where the agent reads the time.

use mainstay_model::id::{BootId, Pid};
use mainstay_model::time::{Mono, Span, Stamp, Wall};
use nix::time::{ClockId, clock_gettime};

/// `CLOCK_MONOTONIC`, which heartbeat pages use too.
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

/// Both clocks at a monotonic time that has just passed.
pub fn stamp_of(mono: Mono) -> Stamp {
    let now = now();
    let ago = i64::try_from(now.mono.since(mono).0).unwrap_or(0);
    Stamp { mono, wall: Wall(now.wall.0.saturating_sub(ago)) }
}

/// The boot id's sixteen bytes; zeros if it is unknown.
pub fn boot_id_bytes() -> [u8; 16] {
    let digits = boot_id().0.replace('-', "");
    u128::from_str_radix(&digits, 16).map_or([0; 16], u128::to_be_bytes)
}

/// The kernel's boot id; "unknown" if `/proc` does not have it. In that case journals of different boots cannot be
/// distinguished.
pub fn boot_id() -> BootId {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    BootId(id.map_or_else(|_| "unknown".to_owned(), |id| id.trim().to_owned()))
}

/// `CLOCK_BOOTTIME`: as the monotonic clock, but it also counts while the host sleeps.
pub fn since_boot() -> Mono {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Mono(0), |time| {
        Mono((time.tv_sec() as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec() as u64))
    })
}

/// The kernel's state of clock synchronization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockSync {
    /// The clock is being synchronized.
    pub synchronised: bool,
    /// Its maximum error, by the kernel's estimate.
    pub max_error: Span,
}

/// Reads adjtimex(2) without changing anything.
///
/// # Errors
/// The system call is not allowed here (some sandboxes).
pub fn kept() -> std::io::Result<ClockSync> {
    // SAFETY: timex consists only of integers, for which zero is a value; `modes` 0 reads and sets nothing.
    let mut timex: nix::libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes into the struct that we own, which outlives the call.
    let state = unsafe { nix::libc::adjtimex(&raw mut timex) };
    if state < 0 {
        return Err(std::io::Error::last_os_error());
    }
    let unsynchronised = timex.status & nix::libc::STA_UNSYNC != 0;
    let microseconds = u64::try_from(timex.maxerror).unwrap_or(0);
    Ok(ClockSync { synchronised: !unsynchronised, max_error: Span(microseconds.saturating_mul(1000)) })
}

/// CPU time of all threads of a process, including exited ones; none if it is gone.
pub fn cpu_of(process: Pid) -> Option<Span> {
    let clock = ClockId::pid_cpu_clock_id(nix::unistd::Pid::from_raw(process.0)).ok()?;
    let time = clock.now().ok()?;
    Some(Span((time.tv_sec() as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec() as u64)))
}
