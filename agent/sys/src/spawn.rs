//! Starts a child that leads a new process group and dies with its parent.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use nix::sys::prctl;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::unistd::getppid;

use crate::affinity::CpuSet;
use crate::limits;

/// Makes orphans of our descendants our own children, so that none gets lost.
///
/// # Errors
/// The kernel refused.
pub fn adopt_orphans() -> io::Result<()> {
    Ok(prctl::set_child_subreaper(true)?)
}

/// Starts `command` as leader of a new process group, killed by the kernel when the calling *thread* ends, and
/// inside `cgroup` (an open `cgroup.procs`) if given. Must be called from a thread that lives as long as the
/// program (the main one), or from one with which the child should end.
///
/// # Errors
/// The program could not be found or executed; the message of the kernel.
pub fn spawn_bound(command: &mut Command, cgroup: Option<&File>) -> io::Result<Child> {
    let parent = nix::unistd::getpid();
    let cgroup = cgroup.map(AsRawFd::as_raw_fd);
    command.process_group(0);
    // SAFETY: the closure runs between fork and exec. It makes only system calls that are async-signal-safe and
    // allocates nothing; the file descriptor is open in the parent for the whole call, hence in the child.
    unsafe {
        command.pre_exec(move || {
            prctl::set_pdeathsig(Signal::SIGKILL)?;
            if getppid() != parent {
                // The launcher died before the line above: nothing would kill this process.
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
            limits::as_before();
            if let Some(procs) = cgroup {
                enter_cgroup(procs);
            }
            Ok(())
        });
    }
    command.spawn()
}

/// Makes `command` run only on these CPUs. A refusal is not fatal: the program then runs on all allowed CPUs.
pub fn confine(command: &mut Command, cpus: CpuSet) {
    // SAFETY: the closure makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            let _ = cpus.confine();
            Ok(())
        });
    }
}

/// Moves the calling process into the cgroup. A refusal is not fatal: the process then runs outside.
fn enter_cgroup(procs: i32) {
    // SAFETY: the descriptor is open (see above) and the buffer is a static string.
    let _ = unsafe { nix::libc::write(procs, b"0".as_ptr().cast(), 1) };
}
