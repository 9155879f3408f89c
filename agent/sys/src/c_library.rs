//! The C library that the program runs with.

/// Its version, such as `2.36`; none where it is not glibc.
pub fn version() -> Option<String> {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: it has no arguments, and returns a constant string of the library.
        let version = unsafe { std::ffi::CStr::from_ptr(nix::libc::gnu_get_libc_version()) };
        Some(version.to_string_lossy().into_owned())
    }
    #[cfg(not(target_env = "gnu"))]
    None
}
