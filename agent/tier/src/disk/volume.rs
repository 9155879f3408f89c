//! The outermost edge: every operation on the disk goes through [`Volume`], one at a time, so that a test can record them and leave
//! the disk as a crash may leave it.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::libc::{O_CLOEXEC, O_NOFOLLOW, O_NONBLOCK};

use crate::seal::ReadAt;

/// A file that is being written.
pub trait Sink {
    /// Appends.
    ///
    /// # Errors
    /// What the disk says.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Brings what was written to the disk.
    ///
    /// # Errors
    /// What the disk says.
    fn sync(&mut self) -> io::Result<()>;
    /// The whole file is on the disk and need not stay in memory.
    fn forget(&mut self) {}
}

/// A file system.
pub trait Volume: Sync {
    /// Makes one directory.
    ///
    /// # Errors
    /// It is there already, or what the disk says.
    fn make_directory(&self, path: &Path) -> io::Result<()>;
    /// Makes a new file.
    ///
    /// # Errors
    /// It is there already, or what the disk says.
    fn create(&self, path: &Path) -> io::Result<Box<dyn Sink + '_>>;
    /// Moves a file or directory to a name that is free, or a file over another one.
    ///
    /// # Errors
    /// What the disk says.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Brings the names in a directory to the disk.
    ///
    /// # Errors
    /// What the disk says.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;
    /// Removes a file.
    ///
    /// # Errors
    /// What the disk says.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes an empty directory.
    ///
    /// # Errors
    /// What the disk says.
    fn remove_directory(&self, path: &Path) -> io::Result<()>;
    /// The names in a directory.
    ///
    /// # Errors
    /// It is none, or what the disk says.
    fn list(&self, path: &Path) -> io::Result<Vec<String>>;
    /// Whether there is a directory of that name.
    fn is_directory(&self, path: &Path) -> bool;
    /// A file of this user's own, with its length.
    ///
    /// # Errors
    /// There is none, it is another's, or what the disk says.
    fn open(&self, path: &Path) -> io::Result<(Box<dyn ReadAt + '_>, u64)>;
}

/// The real one.
#[derive(Clone, Copy, Debug, Default)]
pub struct StdVolume;

impl Volume for StdVolume {
    fn make_directory(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().mode(0o777).create(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn Sink + '_>> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o666).open(path)?;
        Ok(Box::new(FileSink(file)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let names = fs::read_dir(path)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect()
    }

    fn is_directory(&self, path: &Path) -> bool {
        path.is_dir()
    }

    fn open(&self, path: &Path) -> io::Result<(Box<dyn ReadAt + '_>, u64)> {
        let file = open_own(path)?;
        let length = file.metadata()?.len();
        Ok((Box::new(file), length))
    }
}

/// Opens a regular file that is this user's own, neither through a link nor waiting for the other end of a FIFO: what it holds is
/// unpickled.
///
/// # Errors
/// It is none of that, or what the disk says.
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
        // The pages are clean; training needs the memory more than we do. Refused, they go by themselves later.
        let _ = nix::fcntl::posix_fadvise(&self.0, 0, 0, nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    }
}
