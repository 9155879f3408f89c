//! Memory that is given back to the system.

/// Gives back what was freed and is kept for later: after a failure that is megabytes which a quiet program does not need again.
pub fn give_back() {
    // SAFETY: the function takes the allocator's own locks, touches only memory that nobody has, and keeps no pointer.
    #[cfg(target_env = "gnu")]
    unsafe {
        nix::libc::malloc_trim(0);
    }
}
