//! The identity of this process, in terms that remain valid after it is gone.

use std::os::unix::fs::MetadataExt;

use mainstay_heartbeat::{Claimant, Claiming};
use nix::libc;

/// The values to claim the page with. A value that cannot be read is 0: the claim is then less specific, but not
/// wrong.
pub(crate) fn claiming(language: &str) -> Claiming<'_> {
    Claiming {
        pid: std::process::id(),
        start_ticks: start_ticks("self").unwrap_or(0),
        pid_namespace: std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino()),
        image: image(),
        version: VERSION,
        language,
    }
}

/// The version text that pages show.
pub(crate) const VERSION: &str = concat!("mainstay-client ", env!("CARGO_PKG_VERSION"));

/// Whether a claimant is another process that is certainly alive: visible from here, with the start time of its
/// claim.
pub(crate) fn lives_elsewhere(claimant: &Claimant, own: &Claiming<'_>) -> bool {
    claimant.pid != own.pid
        && claimant.pid_namespace == own.pid_namespace
        && claimant.start_ticks != 0
        && start_ticks(&claimant.pid.to_string()) == Some(claimant.start_ticks)
}

/// Field 22 of `/proc/<pid>/stat`, unless the process is dead and waits to be reaped.
fn start_ticks(pid: &str) -> Option<u64> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // Field 2, the command's name, may hold anything; the last `)` ends it.
    let name_end = stat.iter().rposition(|&byte| byte == b')')?;
    let mut fields = std::str::from_utf8(stat.get(name_end + 1..)?).ok()?.split_ascii_whitespace();
    let state = fields.next()?;
    let ticks = fields.nth(22 - 4)?.parse().ok()?;
    (state != "Z" && state != "X").then_some(ticks)
}

/// The first of the random bytes that the kernel gives each program image at `execve`.
fn image() -> u64 {
    // SAFETY: getauxval has no preconditions; it returns 0 for an entry that is not there.
    let random = unsafe { libc::getauxval(libc::AT_RANDOM) } as *const u64;
    if random.is_null() {
        return 0;
    }
    // SAFETY: AT_RANDOM points to 16 bytes above the stack that the kernel wrote before the program started and
    // that stay mapped for its whole life; they need not be aligned.
    unsafe { random.read_unaligned() }
}
