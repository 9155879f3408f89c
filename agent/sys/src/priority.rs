//! Scheduling of work that may use a CPU only while it is otherwise idle.

use std::io;

use mainstay_model::id::Pid;
use nix::libc;

/// Whether a process of ours can be set to idle priority and back: without the capability or a limit that allows
/// it, the kernel permits only the first. Tried on a thread that ends.
pub fn can_be_idle() -> bool {
    // SAFETY: takes a number and returns one; 0 is the calling thread.
    let own = unsafe { libc::sched_getscheduler(0) };
    let there_and_back = || set(0, libc::SCHED_IDLE).and_then(|()| set(0, libc::SCHED_OTHER)).is_ok();
    own == libc::SCHED_OTHER && std::thread::spawn(there_and_back).join().unwrap_or(false)
}

/// Lets the first thread of a process run only on an idle CPU. Processes that it starts later inherit that.
///
/// # Errors
/// It is gone, or the kernel refuses.
pub fn idle(pid: Pid) -> io::Result<()> {
    set(pid.0, libc::SCHED_IDLE)
}

/// Reverts [`idle`].
///
/// # Errors
/// It is gone, or the kernel refuses.
pub fn normal(pid: Pid) -> io::Result<()> {
    set(pid.0, libc::SCHED_OTHER)
}

fn set(pid: i32, policy: i32) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the parameters are ours and outlive the call.
    match unsafe { libc::sched_setscheduler(pid, policy, &raw const parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
