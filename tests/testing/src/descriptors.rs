//! A thread without free file descriptors.

use std::fs::File;
use std::io;

use nix::libc;

/// Does some work in a separate thread with its own descriptor table, which is full: every open there fails with
/// `EMFILE`. The other threads of the process are not affected. Threads that the work starts have the full table
/// too.
pub fn without_descriptors(work: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let working = scope.spawn(|| {
            // SAFETY: it changes only which descriptor table this thread uses from now on; open descriptors stay
            // open in both.
            let apart = unsafe { libc::unshare(libc::CLONE_FILES) };
            assert_eq!(apart, 0, "{}", io::Error::last_os_error());
            let one = File::open("/dev/null").expect("a descriptor is left");
            let mut held = Vec::new();
            let full = loop {
                match one.try_clone() {
                    Ok(another) => held.push(another),
                    Err(error) => break error,
                }
            };
            assert_eq!(full.raw_os_error(), Some(libc::EMFILE), "{full}");
            work();
        });
        if let Err(panic) = working.join() {
            std::panic::resume_unwind(panic);
        }
    });
}
