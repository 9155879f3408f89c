//! Disk access: every operation goes through [`Volume`], one at a time, so that a test can record them and leave the disk in any
//! state that a crash may leave.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::libc::{O_CLOEXEC, O_NOFOLLOW, O_NONBLOCK};

use crate::seal::ReadAt;

/// A file that is being written.
pub trait Sink {
    /// Appends bytes.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Syncs the written bytes to disk.
    fn sync(&mut self) -> io::Result<()>;
    /// Reports that the whole file is on disk and need not stay in the page cache.
    fn forget(&mut self) {}
}

/// A file system. The provided methods are those of the real one; a test overrides all of them.
pub trait Volume: Sync {
    /// Creates one directory, which must not exist.
    fn make_directory(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().mode(0o777).create(path)
    }

    /// Creates a file, which must not exist.
    fn create(&self, path: &Path) -> io::Result<Box<dyn Sink + '_>> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o666).open(path)?;
        Ok(Box::new(FileSink(file)))
    }

    /// Renames a file or directory to a free name, or a file over another file.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    /// Syncs the names in a directory to disk.
    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    /// Removes an empty directory.
    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    /// The names in a directory.
    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let names = fs::read_dir(path)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect()
    }

    /// Whether a directory of that name exists.
    fn is_directory(&self, path: &Path) -> bool {
        path.is_dir()
    }

    /// Opens a file that belongs to this user, with its length.
    fn open(&self, path: &Path) -> io::Result<(Box<dyn ReadAt + '_>, u64)> {
        let file = open_own(path)?;
        let length = file.metadata()?.len();
        Ok((Box::new(file), length))
    }
}

/// The real file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct StdVolume;

impl Volume for StdVolume {}

/// Opens a regular file that belongs to this user. Follows no link and does not wait for the other end of a FIFO. The owner matters because
/// the content is unpickled.
pub fn open_own(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC).open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a regular file"));
    }
    if found.uid() != nix::unistd::geteuid().as_raw() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it belongs to another user"));
    }
    Ok(file)
}

/// A file that is being written to the real disk.
pub(crate) struct FileSink(pub(crate) File);

impl Sink for FileSink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.0.sync_all()
    }

    fn forget(&mut self) {
        // The pages are clean, and training needs the memory. If the kernel refuses, it evicts them later.
        let _ = nix::fcntl::posix_fadvise(&self.0, 0, 0, nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    }
}
