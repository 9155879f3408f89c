//! Who this process is, in terms that hold after it is gone.

use std::os::unix::fs::MetadataExt;

use mainstay_heartbeat::Claiming;
use nix::libc;

/// What the page is claimed with. What cannot be read is 0: it makes the claim less sharp, not wrong.
pub(crate) fn claiming(language: &str) -> Claiming<'_> {
    Claiming {
        pid: std::process::id(),
        start_ticks: start_ticks().unwrap_or(0),
        pid_namespace: std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino()),
        image: image(),
        version: VERSION,
        language,
    }
}

/// The version text that pages show.
pub(crate) const VERSION: &str = concat!("mainstay-client ", env!("CARGO_PKG_VERSION"));

/// Field 22 of `/proc/self/stat`. Field 2, the command's name, may hold anything; the last `)` ends it.
fn start_ticks() -> Option<u64> {
    let stat = std::fs::read("/proc/self/stat").ok()?;
    let name_end = stat.iter().rposition(|&byte| byte == b')')?;
    let fields = std::str::from_utf8(stat.get(name_end + 1..)?).ok()?;
    fields.split_ascii_whitespace().nth(22 - 3)?.parse().ok()
}

/// The first of the random bytes that the kernel gives each program image at `execve`.
fn image() -> u64 {
    // SAFETY: getauxval has no preconditions; it returns 0 for an entry that is not there.
    let random = unsafe { libc::getauxval(libc::AT_RANDOM) } as *const u64;
    if random.is_null() {
        return 0;
    }
    // SAFETY: AT_RANDOM points to 16 bytes above the stack that the kernel wrote before the program began and that
    // stay mapped for its whole life; they need not be aligned.
    unsafe { random.read_unaligned() }
}
