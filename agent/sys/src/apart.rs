//! File work in a process of its own, for file systems that may stop answering.
//!
//! A thread that waits for such a file system keeps its whole process from ending, and a child process gets copies of
//! all descriptors of the process that starts it: it closes them before it executes its program, and that close waits
//! too. A process that shares only the memory has neither problem: it alone waits, and it alone has the files.

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;

use nix::errno::Errno;
use nix::libc;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::{Pid, getpid, getppid};

/// The first descriptor after the standard streams, which the work may write to.
const FIRST: RawFd = 3;

/// Bytes of the work's stack, with a guard page below them.
const STACK_BYTES: usize = 2 << 20;
const GUARD_BYTES: usize = 64 << 10;

/// The children that work now; 0 is a free place.
static WORKING: [AtomicI32; 16] = [const { AtomicI32::new(0) }; 16];

/// Signals that a fault of the work itself raises.
const FAULTS: [Signal; 4] = [Signal::SIGBUS, Signal::SIGSEGV, Signal::SIGFPE, Signal::SIGILL];

/// Runs `work` in a child process that shares this process' memory, and waits for it. The child has copies of the
/// standard streams and of `used`, and no other descriptor; it is killed when the calling thread ends. Its name is
/// `name`. Returns `work`'s result; none if the child was killed before it had one. Where no child can be started, the
/// work runs in the calling thread.
///
/// `work` must close what it opens: the result must own no file.
pub fn apart<T: Send>(name: &CStr, used: &[BorrowedFd<'_>], work: impl FnOnce() -> T + Send) -> Option<T> {
    let mut kept: Vec<RawFd> = used.iter().map(AsRawFd::as_raw_fd).collect();
    kept.sort_unstable();
    let mut task = Task { name, kept: &kept, parent: getpid(), work: Some(work), result: None };
    match run(&mut task) {
        Ok(()) => {}
        Err(error) => {
            tracing::debug!(%error, "no process of its own: this process waits for the file system");
            task.result = task.work.take().map(|work| Ok(work()));
        }
    }
    task.result.map(|result| result.unwrap_or_else(|panic| resume_unwind(panic)))
}

/// Whether this process of ours does such work. The search for processes that ranks have left passes it over.
pub(crate) fn is_working(process: Pid) -> bool {
    WORKING.iter().any(|place| place.load(Ordering::Acquire) == process.as_raw())
}

/// Without a free place, the work may be taken for what a rank has left, and be done again.
fn replace(before: i32, now: i32) {
    let take =
        |place: &AtomicI32| place.compare_exchange(before, now, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    WORKING.iter().any(take);
}

/// What both processes see.
struct Task<'a, W, T> {
    name: &'a CStr,
    kept: &'a [RawFd],
    parent: Pid,
    work: Option<W>,
    result: Option<thread::Result<T>>,
}

/// Starts the child and waits until it has ended.
fn run<W: FnOnce() -> T, T>(task: &mut Task<'_, W, T>) -> io::Result<()> {
    let stack = Stack::new()?;
    // A handler that runs in the child would count each signal of the process group twice.
    let mut blocked = SigSet::all();
    FAULTS.iter().for_each(|fault| blocked.remove(*fault));
    let before = blocked.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK)?;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK;
    let argument: *mut c_void = (&raw mut *task).cast();
    // SAFETY: the child runs on a stack of its own while this thread waits in the call (CLONE_VFORK), so that nothing
    // else uses this thread's local storage or the task, as with posix_spawn. Other threads go on, and share memory
    // with the child as with a thread of this process. The task outlives the child.
    let child = unsafe { libc::clone(child::<W, T>, stack.top(), flags, argument) };
    let started = Errno::result(child);
    before.thread_set_mask()?;
    let ended = |child| {
        replace(child, 0);
        loop {
            // Without an exit signal, only this call sees the child.
            match waitpid(Pid::from_raw(child), Some(WaitPidFlag::__WALL)) {
                Err(Errno::EINTR) => {}
                other => return other.map(drop),
            }
        }
    };
    Ok(started.and_then(ended)?)
}

extern "C" fn child<W: FnOnce() -> T, T>(task: *mut c_void) -> c_int {
    replace(0, getpid().as_raw());
    // SAFETY: `run` passes its task, of the same type, and waits.
    let task = unsafe { &mut *task.cast::<Task<'_, W, T>>() };
    let _ = prctl::set_name(task.name);
    let _ = prctl::set_pdeathsig(Signal::SIGKILL);
    if getppid() == task.parent {
        close_others(task.kept);
        task.result = task.work.take().map(|work| catch_unwind(AssertUnwindSafe(work)));
    }
    0
}

/// Closes all descriptors but the standard streams and `kept` (sorted).
fn close_others(kept: &[RawFd]) {
    let mut next = FIRST;
    for descriptor in kept.iter().copied().filter(|descriptor| *descriptor >= FIRST) {
        if descriptor > next {
            close_range(next, descriptor - 1);
        }
        next = descriptor.saturating_add(1);
    }
    close_range(next, RawFd::MAX);
}

/// Before Linux 5.9, the child keeps copies of all descriptors for as long as it runs.
fn close_range(first: RawFd, last: RawFd) {
    // SAFETY: a system call without pointers, on the child's own table.
    let _ = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
}

struct Stack(NonNull<c_void>);

impl Stack {
    fn new() -> nix::Result<Stack> {
        let length = std::num::NonZeroUsize::MIN.saturating_add(STACK_BYTES + GUARD_BYTES - 1);
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_STACK | MapFlags::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start =
            unsafe { mmap_anonymous(None, length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, flags)? };
        let stack = Stack(start);
        // SAFETY: the lower end of this mapping, which nothing uses yet.
        unsafe { mprotect(stack.0, GUARD_BYTES, ProtFlags::PROT_NONE)? };
        Ok(stack)
    }

    /// It grows down from here.
    fn top(&self) -> *mut c_void {
        // SAFETY: one past the end of the mapping, a multiple of 16.
        unsafe { self.0.as_ptr().byte_add(STACK_BYTES + GUARD_BYTES) }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, which nothing uses any more: the child has ended.
        let _ = unsafe { munmap(self.0, STACK_BYTES + GUARD_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;
    use std::sync::Mutex;
    use std::sync::mpsc::channel;

    /// The inode behind a descriptor of this process.
    fn inode(process: Pid, descriptor: RawFd) -> Option<u64> {
        std::fs::metadata(format!("/proc/{process}/fd/{descriptor}")).map(|file| file.ino()).ok()
    }

    #[test]
    fn the_work_has_its_own_process_and_only_the_files_that_it_uses() {
        let (other, used) = (File::open("/proc/self/stat").unwrap(), File::open("/etc/passwd").unwrap());
        let seen = Mutex::new(0);
        let result = apart(c"test", &[used.as_fd()], || {
            assert!(other.metadata().is_err(), "not passed on");
            let us = mainstay_model::id::Pid(getppid().as_raw());
            assert!(!crate::processes::descendants(us).contains(&mainstay_model::id::Pid(getpid().as_raw())));
            let mine = File::open(std::env::current_exe().unwrap()).unwrap();
            let mut text = String::new();
            (&used).read_to_string(&mut text).unwrap();
            *seen.lock().unwrap() = text.len();
            let own = mine.metadata().unwrap().ino();
            assert_eq!(inode(getpid(), mine.as_raw_fd()), Some(own));
            assert_ne!(inode(getppid(), mine.as_raw_fd()), Some(own), "no file of the parent");
            assert_eq!(inode(getpid(), used.as_raw_fd()), Some(used.metadata().unwrap().ino()));
            getpid()
        });
        assert!(result.is_some_and(|child| child != getpid() && !is_working(child)));
        assert!(*seen.lock().unwrap() > 0 && other.metadata().is_ok() && used.metadata().is_ok());
    }

    #[test]
    fn a_child_that_is_killed_has_no_result_and_a_panic_goes_on_in_the_caller() {
        let killed = apart(c"test", &[], || {
            let _ = nix::sys::signal::kill(getpid(), Signal::SIGKILL);
            loop {
                std::thread::yield_now();
            }
        });
        assert_eq!(killed, None::<()>);
        assert!(catch_unwind(|| apart(c"test", &[], || panic!("a fault of the work"))).is_err());
    }

    #[test]
    fn other_threads_and_the_work_hear_of_each_other() {
        let (to_work, from_test) = channel();
        let (to_test, from_work) = channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                apart(c"test", &[], move || {
                    to_test.send(1).unwrap();
                    from_test.recv()
                })
            });
            assert_eq!(from_work.recv(), Ok(1));
            to_work.send(2).unwrap();
        });
    }

    #[test]
    fn files_between_those_that_are_used_are_closed() {
        let files: Vec<File> = (0..5).map(|_| File::open("/dev/null").unwrap()).collect();
        let used = [files[1].as_fd(), files[3].as_fd()];
        let open =
            apart(c"test", &used, || files.iter().map(|file| file.metadata().is_ok()).collect::<Vec<_>>());
        assert_eq!(open, Some(vec![false, true, false, true, false]));
    }
}
