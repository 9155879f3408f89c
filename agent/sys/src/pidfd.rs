//! Reports the death of a process at once: a pidfd becomes readable when its process ends. A signal sent through it
//! never reaches another process with the same number.

use std::io;
use std::os::fd::OwnedFd;

use mainstay_model::entry::ExitStatus;
use mainstay_model::id::Pid;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::unix::AsyncFd;

use crate::readable::readable;

/// A handle to one process.
#[derive(Debug)]
pub struct PidFd {
    pid: Pid,
    fd: AsyncFd<OwnedFd>,
}

impl PidFd {
    /// Opens the process `pid`. For a child that was not reaped yet this cannot open another process.
    ///
    /// # Errors
    /// The process does not exist, or the kernel is older than Linux 5.3. Must be called within a tokio runtime.
    pub fn open(pid: Pid) -> io::Result<PidFd> {
        let raw = rustix::process::Pid::from_raw(pid.0).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("{} is not a process id", pid.0))
        })?;
        let fd = pidfd_open(raw, PidfdFlags::NONBLOCK)?;
        Ok(PidFd { pid, fd: readable(fd)? })
    }

    /// The process.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Completes when the process has ended. A child is left for [`reap`] so that its number stays in use.
    ///
    /// # Errors
    /// The runtime is shutting down.
    pub async fn ended(&self) -> io::Result<()> {
        let _ready = self.fd.readable().await?;
        Ok(())
    }

    /// Sends a signal. A process that has already ended is no error.
    ///
    /// # Errors
    /// No permission to signal the process.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        let signal = Signal::from_named_raw(signal).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("{signal} is not a signal"))
        })?;
        match pidfd_send_signal(&self.fd, signal) {
            Err(rustix::io::Errno::SRCH) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// How the child `pid` ended, without reaping it; none while it is alive.
///
/// # Errors
/// It is not our child, or was reaped before.
pub fn exit_status(pid: Pid) -> io::Result<Option<ExitStatus>> {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
    let status = waitid(Id::Pid(nix::unistd::Pid::from_raw(pid.0)), flags)?;
    Ok(match status {
        WaitStatus::Exited(_, code) => Some(ExitStatus::Code(code)),
        WaitStatus::Signaled(_, signal, _) => Some(ExitStatus::Signal(signal as i32)),
        _ => None,
    })
}

/// Reaps the ended child `pid`. After that its number may be given to another process.
pub fn reap(pid: Pid) {
    // Not our child, or reaped before: there is nothing to do.
    let _ = waitpid(nix::unistd::Pid::from_raw(pid.0), Some(WaitPidFlag::WNOHANG));
}
