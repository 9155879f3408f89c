//! Files below a directory that a user can change. The directory is opened once, and everything below it is reached from that descriptor
//! only: no symbolic link on the way is followed, and a renamed directory does not lead out of it. Callers act as the user
//! (`peer::user::UserGuard`). The descriptor ensures that a user cannot redirect the agent, not even to another place of the same user.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use mainstay_checkpoint::inventory::Medium;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat};
use rustix::io::Errno;

/// Maximum depth of a directory tree that is removed.
const MAX_DEPTH: usize = 64;

/// Maximum number of names that are read in one directory: a checkpoint or a cache has fewer, and a list of them takes memory.
const MAX_NAMES: usize = 1 << 20;

/// A directory and access to what is below it. Paths below are relative and have plain names only.
#[derive(Clone, Debug)]
pub struct Beneath {
    root: Arc<OwnedFd>,
    path: Arc<Path>,
    /// Owner of the files, if this process reads them through a descriptor that this user handed over: other users' files are not
    /// read, and nothing is written.
    reads_for: Option<u32>,
}

impl Beneath {
    /// Opens the directory at `path`. The path to it may contain links, paths below it may not.
    pub fn open(path: &Path) -> io::Result<Beneath> {
        Beneath::open_with(path, OFlags::empty())
    }

    /// Same as [`Beneath::open`], but the directory must not be a link itself.
    ///
    /// # Errors
    /// As [`Beneath::open`], and the name is a link.
    pub fn open_no_link(path: &Path) -> io::Result<Beneath> {
        Beneath::open_with(path, OFlags::NOFOLLOW)
    }

    fn open_with(path: &Path, more: OFlags) -> io::Result<Beneath> {
        let root = rustix::fs::openat(CWD, path, directory_flags() | more, Mode::empty())?;
        Ok(Beneath { root: Arc::new(root), path: path.into(), reads_for: None })
    }

    /// The directory `way` below one that the user `uid` handed over; `path` is its name.
    pub(crate) fn handed_over(uid: u32, root: OwnedFd, way: &Path, path: &Path) -> io::Result<Beneath> {
        let at = Beneath { root: Arc::new(root), path: path.into(), reads_for: Some(uid) };
        let root = Arc::new(at.directory(way)?);
        Ok(Beneath { root, ..at })
    }

    fn check_owner(&self, found: &Stat, below: &Path) -> io::Result<()> {
        let Some(uid) = self.reads_for.filter(|uid| *uid != found.st_uid) else { return Ok(()) };
        let problem = format!("{} is not of user {uid}", self.path.join(below).display());
        Err(io::Error::new(io::ErrorKind::PermissionDenied, problem))
    }

    /// Refuses writes for a descriptor that was handed over: files are written with the user's own rights only.
    fn check_write(&self) -> io::Result<()> {
        let Some(uid) = self.reads_for else { return Ok(()) };
        let problem = format!(
            "this agent runs as user {} and may read what user {uid} handed over, and write nothing for that user",
            nix::unistd::geteuid()
        );
        Err(io::Error::new(io::ErrorKind::PermissionDenied, problem))
    }

    /// The directory's name when it was opened, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Status of the directory itself.
    pub fn own_stat(&self) -> io::Result<Stat> {
        Ok(rustix::fs::fstat(&*self.root)?)
    }

    /// The magic number of its file system, as in statfs(2).
    pub fn file_system(&self) -> io::Result<i64> {
        Ok(rustix::fs::fstatfs(&*self.root)?.f_type & 0xffff_ffff)
    }

    /// A directory below as a new root; the directory itself for an empty path.
    pub fn below(&self, below: &Path) -> io::Result<Beneath> {
        let root = Arc::new(self.directory(below)?);
        Ok(Beneath { root, path: self.path.join(below).into(), reads_for: self.reads_for })
    }

    /// Status of a file below, without following a link.
    pub fn stat(&self, below: &Path) -> io::Result<Stat> {
        if below.as_os_str().is_empty() {
            return self.own_stat();
        }
        let (parent, name) = self.parent(below)?;
        Ok(rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Whether a file, directory or link of this name exists.
    pub fn is_there(&self, below: &Path) -> bool {
        self.stat(below).is_ok()
    }

    /// Opens a regular file for reading; refuses links, pipes and devices.
    pub fn read(&self, below: &Path) -> io::Result<File> {
        self.plain(below, OFlags::RDONLY)
    }

    /// Opens a regular file for overwriting.
    pub fn write_over(&self, below: &Path) -> io::Result<File> {
        self.check_write()?;
        self.plain(below, OFlags::WRONLY)
    }

    fn plain(&self, below: &Path, access: OFlags) -> io::Result<File> {
        let (parent, name) = self.parent(below)?;
        // A pipe without a writer, or a device, must not block this thread before its type is known.
        let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(&parent, name, flags, Mode::empty())?);
        if !file.metadata()?.is_file() {
            let problem = format!("{} is not a plain file", self.path.join(below).display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        self.check_owner(&rustix::fs::fstat(&file)?, below)?;
        Ok(file)
    }

    /// Creates a file for writing. The name must be free.
    pub fn create(&self, below: &Path, mode: u32) -> io::Result<File> {
        self.check_write()?;
        let (parent, name) = self.parent(below)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(File::from(rustix::fs::openat(&parent, name, flags, Mode::from_raw_mode(mode))?))
    }

    /// Creates a directory. The name must be free.
    pub fn make_directory(&self, below: &Path) -> io::Result<()> {
        self.check_write()?;
        let (parent, name) = self.parent(below)?;
        Ok(rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o777))?)
    }

    /// Creates a directory and its missing parents.
    pub fn make_directories(&self, below: &Path) -> io::Result<()> {
        let mut made = PathBuf::new();
        for part in plain_parts(below)? {
            made.push(part);
            match self.make_directory(&made) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                // If the name is a link, opening the directory fails.
                _ => {}
            }
        }
        self.directory(below).map(drop)
    }

    /// The names in a directory, each with the file type that the directory entry reports.
    pub fn list(&self, below: &Path) -> io::Result<Vec<(OsString, FileType)>> {
        let opened = self.readable(below)?;
        names(&opened).map_err(|error| match error.kind() {
            io::ErrorKind::FileTooLarge => {
                let problem = format!("{}: more than {MAX_NAMES} names", self.path.join(below).display());
                io::Error::new(io::ErrorKind::FileTooLarge, problem)
            }
            _ => error,
        })
    }

    /// Renames `from` to `to` and replaces what has that name.
    pub fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.rename_with(from, to, RenameFlags::empty())
    }

    /// Exchanges the two names.
    pub fn exchange(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.rename_with(from, to, RenameFlags::EXCHANGE)
    }

    /// Renames `from` to `to` if that name is free.
    pub fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.rename_with(from, to, RenameFlags::NOREPLACE)
    }

    fn rename_with(&self, from: &Path, to: &Path, flags: RenameFlags) -> io::Result<()> {
        self.check_write()?;
        let ((from_parent, from), (to_parent, to)) = (self.parent(from)?, self.parent(to)?);
        Ok(rustix::fs::renameat_with(&from_parent, from, &to_parent, to, flags)?)
    }

    /// Removes a file or a link.
    pub fn remove_file(&self, below: &Path) -> io::Result<()> {
        self.check_write()?;
        let (parent, name) = self.parent(below)?;
        Ok(rustix::fs::unlinkat(&parent, name, AtFlags::empty())?)
    }

    /// Removes an empty directory.
    pub fn remove_directory(&self, below: &Path) -> io::Result<()> {
        self.check_write()?;
        let (parent, name) = self.parent(below)?;
        Ok(rustix::fs::unlinkat(&parent, name, AtFlags::REMOVEDIR)?)
    }

    /// Removes a file, a link or a directory with its content. A missing name is no error.
    pub fn remove_tree(&self, below: &Path) -> io::Result<()> {
        self.check_write()?;
        let (parent, name) = match self.parent(below) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        remove_tree(&parent, name, 0)
    }

    /// Creates a symbolic link with this target. The name must be free.
    pub fn link_to(&self, target: &Path, below: &Path) -> io::Result<()> {
        self.check_write()?;
        let (parent, name) = self.parent(below)?;
        Ok(rustix::fs::symlinkat(target, &parent, name)?)
    }

    /// Syncs the names in a directory to disk.
    pub fn sync_directory(&self, below: &Path) -> io::Result<()> {
        File::from(self.readable(below)?).sync_all()
    }

    /// Replaces a file atomically: writes a temporary file and renames it.
    ///
    /// # Errors
    /// It cannot be written; the previous file stays.
    pub fn write_whole(&self, below: &Path, bytes: &[u8]) -> io::Result<()> {
        let name = below.file_name().unwrap_or_default().to_string_lossy();
        let aside = below.with_file_name(crate::aside::name(&name));
        let put = || -> io::Result<()> {
            let mut file = self.create(&aside, 0o644)?;
            io::Write::write_all(&mut file, bytes)?;
            file.sync_all()?;
            self.rename(&aside, below)?;
            self.sync_directory(below.parent().unwrap_or(Path::new("")))
        };
        put().inspect_err(|_| _ = self.remove_tree(&aside))
    }

    /// A directory below as a descriptor that can be listed and synced.
    pub fn readable(&self, below: &Path) -> io::Result<OwnedFd> {
        let found = self.directory(below)?;
        self.check_owner(&rustix::fs::fstat(&found)?, below)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&found, ".", flags, Mode::empty())?)
    }

    /// Opens a directory below with one call that follows no link and does not leave the root.
    fn directory(&self, below: &Path) -> io::Result<OwnedFd> {
        let mut parts = plain_parts(below)?.peekable();
        if parts.peek().is_none() {
            return Ok(rustix::fs::openat(&*self.root, ".", directory_flags(), Mode::empty())?);
        }
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        match rustix::fs::openat2(&*self.root, below, directory_flags(), Mode::empty(), resolve) {
            // Linux before 5.6, and containers that block the call: the same, one name at a time.
            Err(Errno::NOSYS | Errno::PERM) => {}
            opened => return Ok(opened?),
        }
        let mut at: Option<OwnedFd> = None;
        for part in parts {
            let from = at.as_ref().map_or(self.root.as_fd(), OwnedFd::as_fd);
            at = Some(rustix::fs::openat(from, part, directory_flags() | OFlags::NOFOLLOW, Mode::empty())?);
        }
        at.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn parent<'a>(&self, below: &'a Path) -> io::Result<(OwnedFd, &'a OsStr)> {
        // Also checks the last name.
        let Some(name) = plain_parts(below)?.last() else { return Err(not_below(below)) };
        Ok((self.directory(below.parent().unwrap_or(Path::new("")))?, name))
    }
}

fn directory_flags() -> OFlags {
    OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC
}

/// The names of a path that consists of plain names only.
fn plain_parts(below: &Path) -> io::Result<impl Iterator<Item = &OsStr>> {
    if !below.components().all(|part| matches!(part, Component::Normal(_))) {
        return Err(not_below(below));
    }
    Ok(below.iter())
}

fn not_below(below: &Path) -> io::Error {
    let problem = format!("{} is not a path below a directory", below.display());
    io::Error::new(io::ErrorKind::InvalidInput, problem)
}

fn names(directory: &OwnedFd) -> io::Result<Vec<(OsString, FileType)>> {
    use std::os::unix::ffi::OsStrExt;
    let mut found = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        if found.len() >= MAX_NAMES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let kind = match entry.file_type() {
            FileType::Unknown => rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
                .map_or(FileType::Unknown, |found| FileType::from_raw_mode(found.st_mode)),
            kind => kind,
        };
        found.push((name.to_owned(), kind));
    }
    Ok(found)
}

fn remove_tree(parent: &OwnedFd, name: &OsStr, depth: usize) -> io::Result<()> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        // unlinkat(2) of a directory returns EISDIR on Linux, EPERM in POSIX.
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    if depth >= MAX_DEPTH {
        return Err(io::Error::other(format!("more than {MAX_DEPTH} directories in one another")));
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = match rustix::fs::openat(parent, name, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(()),
        opened => opened?,
    };
    for (below, _) in names(&opened)? {
        remove_tree(&opened, &below, depth + 1)?;
    }
    match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests;

// Whether a directory is in memory or on a disk.

/// The medium of a directory.
pub(crate) fn medium_at(at: &Beneath) -> Medium {
    const TMPFS: i64 = 0x0102_1994;
    match at.file_system() {
        Ok(TMPFS) => Medium::Memory,
        _ => Medium::Disk,
    }
}
