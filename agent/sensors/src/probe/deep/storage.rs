//! A directory: a file is written with a pattern, flushed to the disk, read back and compared. The file has no name, or
//! loses it at once, so that it disappears when this process ends for any reason.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Instant;

use mainstay_health::host::preflight::deep::{Measured, Probed, What};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::libc;

use super::buffer::{difference, fill, page_aligned};

/// Bytes written or read at a time.
const BLOCK: usize = 4 << 20;

pub(super) fn probe(directory: &Path, size: u64) -> Probed {
    let blocks = size.div_ceil(BLOCK as u64).max(1);
    match run(directory, blocks) {
        Ok(probed) => probed,
        Err((doing, error)) => io_problem(directory, doing, &error),
    }
}

fn io_problem(directory: &Path, doing: &str, error: &io::Error) -> Probed {
    let what = format!("{doing} {}: {error}", directory.display());
    match error.kind() {
        // A directory that we may not write to is no failure of the disk.
        ErrorKind::PermissionDenied | ErrorKind::NotFound | ErrorKind::NotADirectory => Probed::Untried(what),
        _ => Probed::Refused(what),
    }
}

fn run(directory: &Path, blocks: u64) -> Result<Probed, (&'static str, io::Error)> {
    let (file, mut direct) = create(directory).map_err(|error| ("making a file in", error))?;
    let (mut memory, begin) = page_aligned(BLOCK);
    let block = &mut memory[begin..begin + BLOCK];
    let seed = u64::from(std::process::id());

    let mut writing = 0.0;
    for at in (0..blocks).map(|number| number * BLOCK as u64) {
        fill(block, seed, at);
        let began = Instant::now();
        let written = match file.write_all_at(block, at) {
            // Some file systems accept O_DIRECT at open and refuse it at the first write.
            Err(error) if direct && error.raw_os_error() == Some(libc::EINVAL) => {
                direct = false;
                leave_direct(&file).and_then(|()| file.write_all_at(block, at))
            }
            written => written,
        };
        written.map_err(|error| ("writing in", error))?;
        writing += began.elapsed().as_secs_f64();
    }
    let began = Instant::now();
    file.sync_all().map_err(|error| ("fsync in", error))?;
    let sync = began.elapsed().as_secs_f64();
    if !direct {
        // The next read must come from the disk. A file system that ignores this gives better numbers, no worse.
        let _ = posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    }

    let mut reading = 0.0;
    for at in (0..blocks).map(|number| number * BLOCK as u64) {
        let began = Instant::now();
        file.read_exact_at(block, at).map_err(|error| ("reading in", error))?;
        reading += began.elapsed().as_secs_f64();
        if let Some(place) = difference(block, seed, at) {
            let what =
                format!("{} returned other data than was written, at byte {place}", directory.display());
            return Ok(Probed::Wrong(what));
        }
    }
    let bytes = (blocks * BLOCK as u64) as f64;
    let measured = [
        (What::Write, bytes / (writing + sync)),
        (What::Read, bytes / reading),
        (What::Sync, sync),
        (What::Direct, f64::from(u8::from(direct))),
    ];
    Ok(Probed::Done(measured.into_iter().map(|(what, value)| Measured { what, value }).collect()))
}

/// Creates a file without a name, bypassing the page cache if the file system supports that.
fn create(directory: &Path) -> io::Result<(File, bool)> {
    match nameless(directory, libc::O_DIRECT) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok((nameless(directory, 0)?, false)),
        file => Ok((file?, true)),
    }
}

fn nameless(directory: &Path, flags: i32) -> io::Result<File> {
    let open = |path: &Path, create: bool, flags: i32| {
        OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(create)
            .mode(0o600)
            .custom_flags(flags)
            .open(path)
    };
    match open(directory, false, libc::O_TMPFILE | flags) {
        // Network file systems and old kernels: a name that exists for two calls.
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT))
                && directory.is_dir() =>
        {
            let path = directory.join(mainstay_tier::aside::name("mainstay-check"));
            let file = open(&path, true, flags);
            if file.is_ok() || flags != 0 {
                // With O_DIRECT some create the file and then refuse to open it.
                let _ = std::fs::remove_file(&path);
            }
            file
        }
        opened => opened,
    }
}

/// Continues through the page cache.
fn leave_direct(file: &File) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(rustix::fs::fcntl_setfl(file, flags - rustix::fs::OFlags::DIRECT)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_measured_and_left_as_it_was() {
        for directory in [testing::tempdir().unwrap(), testing::TempDir::new_in("/dev/shm").unwrap()] {
            let Probed::Done(measured) = probe(directory.path(), 5 << 20) else { panic!("not done") };
            assert_eq!(measured.len(), 4);
            assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn a_directory_that_cannot_be_tried_differs_from_one_that_fails() {
        assert!(matches!(probe(Path::new("/nowhere/at/all"), 1), Probed::Untried(_)));
        assert!(matches!(probe(Path::new("/proc/self/fd"), 1), Probed::Untried(_) | Probed::Refused(_)));
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        assert!(matches!(io_problem(Path::new("/x"), "writing in", &full), Probed::Refused(_)));
    }
}
