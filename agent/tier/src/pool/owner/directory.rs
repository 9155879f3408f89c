//! The pool's directory: its lock, and the socket that ranks ring.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::Duration;

use mainstay_checkpoint_format::control::{BELL_NAME, POOL_NAME};
use nix::fcntl::Flock;

use crate::pool::memory::lock_file;
use crate::pool::{PoolError, io_error, recover};

/// Interval of the pool owner's checks without a ring.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Takes the pool's lock. Waits for the guardian of a killed launcher, which may still hold it, and a moment for a process
/// that an ended launcher had just started: it holds the launcher's open files until it executes its program.
pub(super) fn take(directory: &Path, checkpoints: &Path) -> Result<Flock<File>, PoolError> {
    const MAX_TRIES: u32 = 6000;
    const MAX_TRIES_IF_OWNED: u32 = 10;
    let path = directory.join("lock");
    let mut owned = 0;
    for _ in 0..MAX_TRIES {
        if let Some(lock) = lock_file(&path).map_err(io_error(&path))? {
            return Ok(lock);
        }
        if directory.join(POOL_NAME).exists() && !directory.join(recover::RECOVERY_NAME).exists() {
            owned += 1;
            if owned == MAX_TRIES_IF_OWNED {
                return Err(PoolError::Taken(checkpoints.to_owned()));
            }
        }
        std::thread::sleep(Duration::from_millis(100));
        // The guardian may have removed the directory.
        DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(io_error(directory))?;
    }
    Err(PoolError::Taken(checkpoints.to_owned()))
}

/// Removes the ranks' memory of a pool and its lock, which the next pool in the same place takes again.
pub(super) fn remove_ranks(pool: &Path) -> io::Result<()> {
    // Its description first: without it the rest is not recognized as a pool.
    fs::remove_file(pool.join(POOL_NAME))?;
    for entry in fs::read_dir(pool)?.flatten() {
        let path = entry.path();
        let is_a_ranks = entry.file_name().as_encoded_bytes().starts_with(b"rank-");
        match path.is_dir() {
            true if is_a_ranks => fs::remove_dir_all(path)?,
            true => {}
            false => fs::remove_file(path)?,
        }
    }
    Ok(())
}

pub(super) fn open_bell(directory: &Path) -> Option<UnixDatagram> {
    let path = directory.join(BELL_NAME);
    let _ = fs::remove_file(&path);
    let bell =
        UnixDatagram::bind(&path).and_then(|bell| bell.set_read_timeout(Some(POLL_INTERVAL)).map(|()| bell));
    bell.inspect_err(
        |error| tracing::debug!(%error, path = %path.display(), "no bell; looking often instead"),
    )
    .ok()
}

pub(super) fn ring(directory: &Path) {
    // A pool owner that does not receive it checks by itself a little later.
    if let Ok(socket) = UnixDatagram::unbound() {
        let _ = socket.set_nonblocking(true);
        let _ = socket.send_to(b"!", directory.join(BELL_NAME));
    }
}
