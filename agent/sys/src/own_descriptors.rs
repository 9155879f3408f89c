//! File work in a descriptor table of its own.
//!
//! A child process gets copies of all descriptors of the thread that starts it, and closes them before it executes
//! its program. Closing a file on FUSE or a network file system waits for its server. A thread that writes to such a
//! file system therefore keeps its files out of the table that children copy: otherwise nothing starts while the
//! server is silent.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::panic::resume_unwind;

use nix::errno::Errno;
use nix::libc;

/// The first descriptor after the standard streams, which the work may write to.
const FIRST: RawFd = 3;

/// Runs `work` in a thread whose descriptor table has the standard streams, `used` and what `work` opens, and returns
/// its result. Where the kernel or a seccomp profile refuses (Linux before 5.9), or no thread can be started, it runs
/// with the common table.
///
/// `work` must close what it opens, and may use only those earlier files that `used` has.
pub fn with_own_descriptors<T: Send>(name: &str, used: &[BorrowedFd<'_>], work: impl Fn() -> T + Sync) -> T {
    let mut kept: Vec<RawFd> = used.iter().map(AsRawFd::as_raw_fd).collect();
    kept.sort_unstable();
    std::thread::scope(|scope| {
        let apart = || {
            if let Err(error) = leave_table(&kept) {
                tracing::debug!(%error, "no descriptor table of its own: files are open in the common one");
            }
            work()
        };
        match std::thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, apart) {
            Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Err(_) => work(),
        }
    })
}

/// Gives the calling thread a table with `kept` (sorted) and the standard streams.
fn leave_table(kept: &[RawFd]) -> Result<(), Errno> {
    // The last range first: the kernel copies only what is below it.
    let from = kept.last().map_or(FIRST, |last| last.saturating_add(1).max(FIRST));
    close_range(from, RawFd::MAX, libc::CLOSE_RANGE_UNSHARE)?;
    let mut next = FIRST;
    for descriptor in kept {
        if *descriptor > next {
            close_range(next, descriptor - 1, 0)?;
        }
        next = next.max(descriptor.saturating_add(1));
    }
    Ok(())
}

fn close_range(first: RawFd, last: RawFd, flags: libc::c_uint) -> Result<(), Errno> {
    // SAFETY: a system call without pointers. The first call gives the thread its own table, so that those after it
    // close no file of another thread.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) };
    Errno::result(done).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;

    /// The inode behind a descriptor of the calling thread.
    fn inode(descriptor: RawFd) -> Option<u64> {
        std::fs::metadata(format!("/proc/thread-self/fd/{descriptor}")).map(|file| file.ino()).ok()
    }

    #[test]
    fn other_threads_see_nothing_that_is_opened_and_the_work_sees_only_what_it_uses() {
        let (others, used) = (File::open("/proc/self/stat").unwrap(), File::open("/etc/passwd").unwrap());
        let there = std::env::current_exe().unwrap();
        let opened = with_own_descriptors("test", &[used.as_fd()], || {
            assert_eq!(inode(used.as_raw_fd()), Some(used.metadata().unwrap().ino()));
            let mine = File::open(&there).unwrap();
            let mut text = String::new();
            (&used).read_to_string(&mut text).unwrap();
            assert!(!text.is_empty());
            let seen = std::fs::metadata(&there).unwrap().ino();
            assert_eq!(inode(mine.as_raw_fd()), Some(seen));
            let listed = |of: &str| -> usize {
                let links = std::fs::read_dir(format!("/proc/{of}/fd")).unwrap().flatten();
                links
                    .filter(|link| std::fs::metadata(link.path()).is_ok_and(|file| file.ino() == seen))
                    .count()
            };
            (listed("thread-self"), listed("self"), mine.as_raw_fd())
        });
        let (own, common, descriptor) = opened;
        assert_eq!((own, common), (1, 0), "as descriptor {descriptor}");
        // Closed in the thread's table only.
        assert!(others.metadata().is_ok() && inode(others.as_raw_fd()).is_some());
    }
}
