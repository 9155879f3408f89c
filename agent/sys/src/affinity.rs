//! CPU affinity of threads.

use std::io;
use std::mem;

use nix::libc;

/// The CPUs that this thread may run on; none if the kernel does not report them.
pub fn allowed() -> Vec<usize> {
    // SAFETY: a CPU set is plain bits; all zero is the empty set.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    // SAFETY: the set is ours and has the given size.
    let code = unsafe { libc::sched_getaffinity(0, mem::size_of_val(&set), &raw mut set) };
    if code != 0 {
        return Vec::new();
    }
    let bits = 8 * mem::size_of_val(&set);
    // SAFETY: the number is below the set's number of bits.
    (0..bits).filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) }).collect()
}

/// A set of CPUs that a process is confined to, created in advance.
#[derive(Clone, Copy)]
pub struct CpuSet(libc::cpu_set_t);

impl CpuSet {
    /// These CPUs; numbers that are too large for the kernel are left out.
    pub fn from_cpus(cpus: &[usize]) -> CpuSet {
        // SAFETY: a CPU set is plain bits; all zero is the empty set.
        let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
        let bits = 8 * mem::size_of_val(&set);
        for cpu in cpus.iter().filter(|cpu| **cpu < bits) {
            // SAFETY: the number is below the set's number of bits.
            unsafe { libc::CPU_SET(*cpu, &mut set) };
        }
        CpuSet(set)
    }

    /// Confines this thread. Makes one system call and allocates nothing, so it may be called between fork and
    /// exec.
    ///
    /// # Errors
    /// The kernel refused: none of the CPUs may be used.
    pub fn confine(&self) -> io::Result<()> {
        // SAFETY: the set is ours and has the given size.
        match unsafe { libc::sched_setaffinity(0, mem::size_of_val(&self.0), &raw const self.0) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Lets this thread run on one CPU only.
///
/// # Errors
/// There is no such CPU, or it may not be used.
pub fn pin(cpu: usize) -> io::Result<()> {
    // SAFETY: as above.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    if cpu >= 8 * mem::size_of_val(&set) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the number is below the set's number of bits.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the set is ours and has the given size.
    match unsafe { libc::sched_setaffinity(0, mem::size_of_val(&set), &raw const set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_runs_on_the_given_cpus() {
        let all = allowed();
        let last = *all.last().unwrap();
        std::thread::spawn(move || {
            pin(last).unwrap();
            assert_eq!(allowed(), [last]);
        })
        .join()
        .unwrap();
        pin(100_000).unwrap_err();
    }
}
