//! Memory that is given back to the system.

/// Returns freed memory that the allocator keeps: after a failure this is megabytes that an idle program does not
/// need again.
pub fn give_back() {
    // SAFETY: the function takes the allocator's own locks, touches only unallocated memory, and keeps no pointer.
    #[cfg(target_env = "gnu")]
    unsafe {
        nix::libc::malloc_trim(0);
    }
}
