//! The lock of a pool.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::fcntl::{Flock, FlockArg};

/// Takes the lock of a pool; none if another process holds it.
pub(super) fn lock(path: &Path) -> io::Result<Option<Flock<File>>> {
    let file = File::options().create(true).append(true).open(path)?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => {
            // If the file was removed or created again meanwhile, this is not the pool's lock.
            let (mine, there) = (lock.metadata()?, fs::metadata(path));
            Ok(there.is_ok_and(|there| there.ino() == mine.ino()).then_some(lock))
        }
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, error)) => Err(error.into()),
    }
}

pub(super) fn lives(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}
