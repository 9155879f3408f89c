//! Names of system calls that a process may wait in for long; their numbers differ between architectures.

use nix::libc;

const BLOCKING_CALLS: [(libc::c_long, &str); 31] = [
    (libc::SYS_accept4, "accept4"),
    (libc::SYS_clock_nanosleep, "clock_nanosleep"),
    (libc::SYS_close, "close"),
    (libc::SYS_connect, "connect"),
    (libc::SYS_epoll_pwait, "epoll_pwait"),
    (libc::SYS_fdatasync, "fdatasync"),
    (libc::SYS_flock, "flock"),
    (libc::SYS_fsync, "fsync"),
    (libc::SYS_futex, "futex"),
    (libc::SYS_getdents64, "getdents64"),
    (libc::SYS_io_getevents, "io_getevents"),
    (libc::SYS_ioctl, "ioctl"),
    (libc::SYS_madvise, "madvise"),
    (libc::SYS_mmap, "mmap"),
    (libc::SYS_munmap, "munmap"),
    (libc::SYS_nanosleep, "nanosleep"),
    (libc::SYS_openat, "openat"),
    (libc::SYS_ppoll, "ppoll"),
    (libc::SYS_pread64, "pread64"),
    (libc::SYS_pselect6, "pselect6"),
    (libc::SYS_pwrite64, "pwrite64"),
    (libc::SYS_read, "read"),
    (libc::SYS_recvfrom, "recvfrom"),
    (libc::SYS_recvmsg, "recvmsg"),
    (libc::SYS_restart_syscall, "restart_syscall"),
    (libc::SYS_rt_sigtimedwait, "rt_sigtimedwait"),
    (libc::SYS_sendmsg, "sendmsg"),
    (libc::SYS_sendto, "sendto"),
    (libc::SYS_wait4, "wait4"),
    (libc::SYS_waitid, "waitid"),
    (libc::SYS_write, "write"),
];

/// Calls that newer architectures no longer have.
#[cfg(target_arch = "x86_64")]
const OLD: [(libc::c_long, &str); 7] = [
    (libc::SYS_accept, "accept"),
    (libc::SYS_epoll_wait, "epoll_wait"),
    (libc::SYS_open, "open"),
    (libc::SYS_pause, "pause"),
    (libc::SYS_poll, "poll"),
    (libc::SYS_select, "select"),
    (libc::SYS_vfork, "vfork"),
];
#[cfg(not(target_arch = "x86_64"))]
const OLD: [(libc::c_long, &str); 1] = [(libc::SYS_accept, "accept")];

/// The name of the system call whose number is at the start of the text, as `/proc/<pid>/syscall` has it; none if
/// it is unknown or the process is in no call.
pub fn name(text: &str) -> Option<&'static str> {
    let number: libc::c_long = text.split(' ').next()?.parse().ok()?;
    BLOCKING_CALLS.iter().chain(&OLD).find(|(known, _)| *known == number).map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_named_by_its_number_on_this_machine() {
        let text = |number: libc::c_long| format!("{number} 0x7f03 0x189 0x0 0x7ffd 0x7f04");
        assert_eq!(name(&text(libc::SYS_futex)), Some("futex"));
        assert_eq!(name(&text(libc::SYS_accept)), Some("accept"));
        assert_eq!(name("running"), None);
        assert_eq!(name(""), None);
        assert_eq!(name("-1 0x7ffd 0x7f04"), None, "in the kernel, and in no call");
    }
}
