//! Limits of this process and of others.

use std::io;
use std::sync::OnceLock;

use mainstay_model::id::Pid;
use rustix::process::{Resource, Rlimit, getrlimit, prlimit, setrlimit};

/// From now on, writes of process `pid` cannot extend any file: they fail with `EFBIG`, and the process receives
/// SIGXFSZ.
///
/// # Errors
/// The process is gone, or belongs to another user.
pub fn no_file_may_grow(pid: Pid) -> io::Result<()> {
    let pid = rustix::process::Pid::from_raw(pid.0).ok_or(io::ErrorKind::NotFound)?;
    let nothing = Rlimit { current: Some(0), maximum: Some(0) };
    prlimit(Some(pid), Resource::Fsize, nothing)?;
    Ok(())
}

/// Whether a call failed because the host, a control group or this process had no process, thread or file descriptor
/// left, which passes.
pub fn is_exhaustion(error: &io::Error) -> bool {
    use nix::libc::{EAGAIN, EMFILE, ENFILE};
    matches!(error.raw_os_error(), Some(EAGAIN | EMFILE | ENFILE))
}

/// The limit of open files before [`open_more_files`].
static INITIAL_LIMIT: OnceLock<Rlimit> = OnceLock::new();

/// Raises the limit of open files and connections of this process to what its administrator permits, and returns
/// it; none for no limit. The usual limit is 1024, so that programs with `select` keep working: ranks and their
/// children keep that (`as_before`).
pub fn open_more_files() -> Option<u64> {
    let before = getrlimit(Resource::Nofile);
    if before.current == before.maximum {
        return before.current;
    }
    let _ = INITIAL_LIMIT.set(before);
    let more = Rlimit { current: before.maximum, maximum: before.maximum };
    setrlimit(Resource::Nofile, more).map_or(before.current, |()| before.maximum)
}

/// Restores the original limit of open files in the calling process. For a child between fork and exec: makes one
/// system call and allocates nothing. A refusal is not fatal.
pub(crate) fn as_before() {
    if let Some(before) = INITIAL_LIMIT.get() {
        let _ = setrlimit(Resource::Nofile, *before);
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::spawn::spawn_bound;

    #[test]
    fn a_launcher_may_open_more_files_and_its_ranks_as_many_as_before() {
        // It changes the limits of its process: use another process, on which nothing else depends.
        let own = std::env::current_exe().expect("this test");
        let name = "limits::tests::in_a_process_of_its_own";
        let mut command = Command::new(own);
        let output = command.args(["--exact", name, "--ignored"]).output().expect("started");
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && printed.contains("1 passed"), "{printed}");
    }

    #[test]
    #[ignore = "changes the limits of its process; the test above starts it in one of its own"]
    fn in_a_process_of_its_own() {
        let maximum = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: Some(200), maximum })
            .expect("fewer are always permitted");
        assert_eq!(open_more_files(), maximum);
        assert_eq!(getrlimit(Resource::Nofile).current, maximum);
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -n"]).stdout(Stdio::piped());
        let output = spawn_bound(&mut command, None).expect("sh").wait_with_output().expect("its output");
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "200");
        assert_eq!(open_more_files(), maximum, "asked again, nothing changes");
    }
}
