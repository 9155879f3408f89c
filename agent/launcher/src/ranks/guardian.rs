//! The guardian: a small process that outlives its launcher and then ends what the launcher left.
//!
//! The ranks themselves die with the launcher by `PR_SET_PDEATHSIG`. The processes that they started (DataLoader workers,
//! helper processes) do not. The guardian finds these by cgroup, by process group, and by the launch's mark in the
//! environment (`MAINSTAY_LAUNCH`). A job id is no mark, because two launchers may use the same. The guardian waits on a
//! pipe that the kernel closes when the launcher ends for any reason.

use std::fs;
use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use mainstay_model::id::Pid;
use mainstay_sys::processes;
use nix::sys::signal::Signal;

/// The hidden subcommand that runs the guardian.
pub const SUBCOMMAND: &str = "guardian";

/// How often the removal of a control group is tried, and the pause between two tries: five seconds in all.
const MAX_REMOVAL_TRIES: u32 = 250;
const REMOVAL_INTERVAL: Duration = Duration::from_millis(20);

/// The launcher's handle of its guardian.
#[derive(Debug)]
pub struct Guardian {
    child: Child,
    orders: ChildStdin,
}

impl Guardian {
    /// Starts the guardian of the launch marked `mark` (`NAME=value` in the environment of all its processes).
    /// `program` is Mainstay's own. `pool` is the memory with the job's checkpoints.
    ///
    /// # Errors
    /// It could not be started.
    pub fn start(
        program: &Path,
        mark: &str,
        cgroup: Option<&Path>,
        pool: Option<&Path>,
    ) -> io::Result<Guardian> {
        let mut command = Command::new(program);
        command.arg(SUBCOMMAND).arg(mark).stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
        if let Some(cgroup) = cgroup {
            command.arg(cgroup);
        }
        if let Some(pool) = pool {
            command.arg("--pool").arg(pool);
        }
        let mut child = command.spawn()?;
        let orders = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(Guardian { child, orders })
    }

    /// The guardian's process.
    pub fn pid(&self) -> Pid {
        Pid(i32::try_from(self.child.id()).unwrap_or(0))
    }

    /// Adds a rank's process group.
    pub fn guard(&mut self, group: Pid) {
        self.report(&format!("+{}\n", group.0));
    }

    /// Removes a process group, before its number can be given to another process.
    pub fn release(&mut self, group: Pid) {
        self.report(&format!("-{}\n", group.0));
    }

    /// If the guardian is gone, the launcher's own cleanup is all that can be done.
    fn report(&mut self, order: &str) {
        let _ = self.orders.write_all(order.as_bytes());
    }

    /// Ends the guardian in order: nothing is left to guard.
    pub fn dismiss(mut self) {
        self.report("done\n");
        drop(self.orders);
        let _ = self.child.wait();
    }
}

/// Runs the guardian until its launcher is gone. Returns whether the launcher ended without dismissing it, so that it had to clean up.
pub fn stand_guard(orders: impl BufRead, mark: &str, cgroup: Option<&Path>) -> bool {
    let mut groups: Vec<Pid> = Vec::new();
    for order in orders.lines().map_while(Result::ok) {
        let number = |text: &str| text.parse().ok().map(Pid);
        match order.split_at_checked(1) {
            Some(("+", group)) => groups.extend(number(group)),
            Some(("-", group)) => groups.retain(|known| Some(*known) != number(group)),
            _ => return false,
        }
    }
    take_along(&groups, mark, cgroup);
    true
}

fn take_along(groups: &[Pid], mark: &str, cgroup: Option<&Path>) {
    if let Some(cgroup) = cgroup {
        let _ = fs::write(PathBuf::from(cgroup).join("cgroup.kill"), "1");
    }
    for group in groups {
        processes::signal_group(*group, Signal::SIGKILL);
    }
    // A process may start another one during a look: repeat until a look finds none.
    for _ in 0..100 {
        let left = processes::marked(mark);
        if left.is_empty() {
            break;
        }
        left.into_iter().for_each(|pid| processes::kill_marked(pid, mark));
    }
    if let Some(cgroup) = cgroup {
        remove(cgroup);
    }
}

/// Removes the control group. The kernel refuses while a process in it is still exiting, which ends after its environment
/// is gone, so the removal is retried for a while.
fn remove(cgroup: &Path) {
    for _ in 0..MAX_REMOVAL_TRIES {
        match fs::remove_dir(cgroup) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => std::thread::sleep(REMOVAL_INTERVAL),
            _ => return,
        }
    }
}
