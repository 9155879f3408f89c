//! Death is seen at once: a pidfd becomes readable when its process ends, and a signal sent through it can never
//! hit another process that got the same number.

use std::io;
use std::os::fd::OwnedFd;

use mainstay_core::base::id::Pid;
use mainstay_core::model::entry::ExitStatus;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::unix::AsyncFd;

use crate::os::readable::readable;

/// A handle on one process.
#[derive(Debug)]
pub struct PidFd {
    pid: Pid,
    fd: AsyncFd<OwnedFd>,
}

impl PidFd {
    /// Opens the process `pid`. For a child that was not reaped yet this cannot hit another process.
    ///
    /// # Errors
    /// The process does not exist, or the kernel is older than Linux 5.3. Must be called within a tokio runtime.
    pub fn open(pid: Pid) -> io::Result<PidFd> {
        let raw = rustix::process::Pid::from_raw(pid.0).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("{} is no process id", pid.0))
        })?;
        let fd = pidfd_open(raw, PidfdFlags::NONBLOCK)?;
        Ok(PidFd { pid, fd: readable(fd)? })
    }

    /// The process.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Completes when the process has ended. A child is left for [`reap`] so that its number stays taken.
    ///
    /// # Errors
    /// The runtime is shutting down.
    pub async fn ended(&self) -> io::Result<()> {
        let _ready = self.fd.readable().await?;
        Ok(())
    }

    /// Sends a signal. A process that has ended already is no error.
    ///
    /// # Errors
    /// We may not signal the process.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        let signal = Signal::from_named_raw(signal)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, format!("{signal} is no signal")))?;
        match pidfd_send_signal(&self.fd, signal) {
            Err(rustix::io::Errno::SRCH) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// How the child `pid` ended, without reaping it; none while it lives.
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

/// Takes the ended child `pid` off the process table. From here on its number may be given to another process.
pub fn reap(pid: Pid) {
    // Not our child or reaped before: there is nothing to take off.
    let _ = waitpid(nix::unistd::Pid::from_raw(pid.0), Some(WaitPidFlag::WNOHANG));
}
