//! Files below a directory that a user can change. The directory is opened once, and what is below it is reached from that descriptor
//! only: no symbolic link is followed on the way, and no exchange of a name leads out of it. Whoever uses this acts as the user
//! (`peer::user::As`); the descriptor makes sure that a user leads the agent nowhere, not even to another place of their own.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::handed;

/// Directories in directories that are removed at most.
const DEEPEST: usize = 64;

/// Names in one directory that are read at most: a checkpoint or a cache has fewer, and a list of them takes memory.
const MOST_NAMES: usize = 1 << 20;

/// A directory, and the way to what is below it. Paths below are relative and have plain names only.
#[derive(Clone, Debug)]
pub struct Beneath {
    root: Arc<OwnedFd>,
    path: Arc<Path>,
    /// Whose files these are, where this process reads them through a descriptor that this user handed over: others' files are not
    /// read, and nothing is written.
    reads_for: Option<u32>,
}

impl Beneath {
    /// The directory at `path` as it is now; the path to it may have links, what is below may not.
    ///
    /// # Errors
    /// There is no directory, or this thread's user may not search it.
    pub fn open(path: &Path) -> io::Result<Beneath> {
        Beneath::open_with(path, OFlags::empty())
    }

    /// The same of a directory that must not be a link itself.
    ///
    /// # Errors
    /// As [`Beneath::open`], and the name is a link.
    pub fn open_no_link(path: &Path) -> io::Result<Beneath> {
        Beneath::open_with(path, OFlags::NOFOLLOW)
    }

    fn open_with(path: &Path, more: OFlags) -> io::Result<Beneath> {
        if let Some(handed) = handed::directory(path) {
            let (uid, root, way) = handed?;
            let at = Beneath { root: Arc::new(root), path: path.into(), reads_for: Some(uid) };
            let root = Arc::new(at.directory(&way)?);
            return Ok(Beneath { root, ..at });
        }
        let root = rustix::fs::openat(CWD, path, directory_flags() | more, Mode::empty())?;
        Ok(Beneath { root: Arc::new(root), path: path.into(), reads_for: None })
    }

    fn check_owner(&self, found: &Stat, below: &Path) -> io::Result<()> {
        let Some(uid) = self.reads_for.filter(|uid| *uid != found.st_uid) else { return Ok(()) };
        let problem = format!("{} is not of user {uid}", self.path.join(below).display());
        Err(io::Error::new(io::ErrorKind::PermissionDenied, problem))
    }

    /// What is written is written with the user's own rights, or not at all.
    fn check_write(&self) -> io::Result<()> {
        let Some(uid) = self.reads_for else { return Ok(()) };
        let problem = format!(
            "this agent runs as user {} and may read what user {uid} handed over, and write nothing for that user",
            nix::unistd::geteuid()
        );
        Err(io::Error::new(io::ErrorKind::PermissionDenied, problem))
    }

    /// The directory's name when it was opened, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the directory itself is.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn own_stat(&self) -> io::Result<Stat> {
        Ok(rustix::fs::fstat(&*self.root)?)
    }

    /// The magic number of its file system, as in statfs(2).
    ///
    /// # Errors
    /// As fstatfs(2).
    pub fn file_system(&self) -> io::Result<i64> {
        Ok(rustix::fs::fstatfs(&*self.root)?.f_type & 0xffff_ffff)
    }

    /// A directory below, as another place to begin from; itself for an empty path.
    ///
    /// # Errors
    /// There is no directory, or a link is on the way.
    pub fn below(&self, below: &Path) -> io::Result<Beneath> {
        let root = Arc::new(self.directory(below)?);
        Ok(Beneath { root, path: self.path.join(below).into(), reads_for: self.reads_for })
    }

    /// What is below, without following a link.
    ///
    /// # Errors
    /// Nothing is there, or a link is on the way.
    pub fn stat(&self, below: &Path) -> io::Result<Stat> {
        if below.as_os_str().is_empty() {
            return self.own_stat();
        }
        let (parent, name) = self.parent(below)?;
        Ok(rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Whether anything is there, be it a link.
    #[must_use]
    pub fn is_there(&self, below: &Path) -> bool {
        self.stat(below).is_ok()
    }

    /// Opens a plain file to read, and no link, pipe or device in its place.
    ///
    /// # Errors
    /// It is none, or cannot be read.
    pub fn read(&self, below: &Path) -> io::Result<File> {
        self.plain(below, OFlags::RDONLY)
    }

    /// The same to write over what is in it.
    ///
    /// # Errors
    /// It is none, or cannot be written to.
    pub fn write_over(&self, below: &Path) -> io::Result<File> {
        self.check_write()?;
        self.plain(below, OFlags::WRONLY)
    }

    fn plain(&self, below: &Path, access: OFlags) -> io::Result<File> {
        let (parent, name) = self.parent(below)?;
        // A pipe without a writer, or a device, must not hold this thread up before it is seen what it is.
        let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(&parent, name, flags, Mode::empty())?);
        if !file.metadata()?.is_file() {
            let problem = format!("{} is no plain file", self.path.join(below).display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        self.check_owner(&rustix::fs::fstat(&file)?, below)?;
        Ok(file)
    }

    /// A new file to write; its name must be free.
    ///
    /// # Errors
    /// The name is taken, or the file cannot be made.
    pub fn create(&self, below: &Path, mode: u32) -> io::Result<File> {
        self.check_write()?;
        let (parent, name) = self.parent(below)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(File::from(rustix::fs::openat(&parent, name, flags, Mode::from_raw_mode(mode))?))
    }

    /// A new directory; its name must be free.
    ///
    /// # Errors
    /// The name is taken, or the directory cannot be made.
    pub fn make_directory(&self, below: &Path) -> io::Result<()> {
        self.check_write()?;
        let (parent, name) = self.parent(below)?;
        Ok(rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o777))?)
    }

    /// A directory with those above it that are missing.
    ///
    /// # Errors
    /// One cannot be made, or a link or a file is on the way.
    pub fn make_directories(&self, below: &Path) -> io::Result<()> {
        let mut made = PathBuf::new();
        for part in plain_parts(below)? {
            made.push(part);
            match self.make_directory(&made) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                // A link that has the name is found when the directory is opened.
                _ => {}
            }
        }
        self.directory(below).map(drop)
    }

    /// The names in a directory, each with what it is as far as the directory says.
    ///
    /// # Errors
    /// It cannot be read, or has too many names.
    pub fn list(&self, below: &Path) -> io::Result<Vec<(OsString, FileType)>> {
        let opened = self.readable(below)?;
        names(&opened).map_err(|error| match error.kind() {
            io::ErrorKind::FileTooLarge => {
                let problem = format!("{}: more than {MOST_NAMES} names", self.path.join(below).display());
                io::Error::new(io::ErrorKind::FileTooLarge, problem)
            }
            _ => error,
        })
    }

    /// Gives what is at `from` the name `to`, whatever had it.
    ///
    /// # Errors
    /// As renameat2(2).
    pub fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.rename_with(from, to, RenameFlags::empty())
    }

    /// The two change places.
    ///
    /// # Errors
    /// As renameat2(2).
    pub fn exchange(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.rename_with(from, to, RenameFlags::EXCHANGE)
    }

    /// Gives what is at `from` the name `to`, if nothing has it.
    ///
    /// # Errors
    /// As renameat2(2).
    pub fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.rename_with(from, to, RenameFlags::NOREPLACE)
    }

    fn rename_with(&self, from: &Path, to: &Path, flags: RenameFlags) -> io::Result<()> {
        self.check_write()?;
        let ((from_parent, from), (to_parent, to)) = (self.parent(from)?, self.parent(to)?);
        Ok(rustix::fs::renameat_with(&from_parent, from, &to_parent, to, flags)?)
    }

    /// Removes a file or a link.
    ///
    /// # Errors
    /// As unlinkat(2).
    pub fn remove_file(&self, below: &Path) -> io::Result<()> {
        self.check_write()?;
        let (parent, name) = self.parent(below)?;
        Ok(rustix::fs::unlinkat(&parent, name, AtFlags::empty())?)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// As unlinkat(2).
    pub fn remove_directory(&self, below: &Path) -> io::Result<()> {
        self.check_write()?;
        let (parent, name) = self.parent(below)?;
        Ok(rustix::fs::unlinkat(&parent, name, AtFlags::REMOVEDIR)?)
    }

    /// Removes a file, a link, or a directory with all in it; nothing is no error.
    ///
    /// # Errors
    /// Something of it cannot be removed.
    pub fn remove_tree(&self, below: &Path) -> io::Result<()> {
        self.check_write()?;
        let (parent, name) = match self.parent(below) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        remove_tree(&parent, name, 0)
    }

    /// A link with these words; its name must be free.
    ///
    /// # Errors
    /// As symlinkat(2).
    pub fn link_to(&self, words: &Path, below: &Path) -> io::Result<()> {
        self.check_write()?;
        let (parent, name) = self.parent(below)?;
        Ok(rustix::fs::symlinkat(words, &parent, name)?)
    }

    /// Brings the names in a directory to the disk.
    ///
    /// # Errors
    /// As fsync(2).
    pub fn sync_directory(&self, below: &Path) -> io::Result<()> {
        File::from(self.readable(below)?).sync_all()
    }

    /// Writes a file as a whole, in the place of what had its name: aside first, then in one move.
    ///
    /// # Errors
    /// It cannot be written; then what was there still is.
    pub fn write_whole(&self, below: &Path, bytes: &[u8]) -> io::Result<()> {
        let name = below.file_name().unwrap_or_default().to_string_lossy();
        let aside = below.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
        self.remove_tree(&aside)?;
        let put = || -> io::Result<()> {
            let mut file = self.create(&aside, 0o644)?;
            io::Write::write_all(&mut file, bytes)?;
            file.sync_all()?;
            self.rename(&aside, below)?;
            self.sync_directory(below.parent().unwrap_or(Path::new("")))
        };
        put().inspect_err(|_| _ = self.remove_tree(&aside))
    }

    /// A directory below as a descriptor that can be listed and brought to the disk.
    ///
    /// # Errors
    /// There is no directory, a link is on the way, or it cannot be read.
    pub fn readable(&self, below: &Path) -> io::Result<OwnedFd> {
        let found = self.directory(below)?;
        self.check_owner(&rustix::fs::fstat(&found)?, below)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&found, ".", flags, Mode::empty())?)
    }

    /// A directory below, by one call that follows no link and does not leave.
    fn directory(&self, below: &Path) -> io::Result<OwnedFd> {
        let mut parts = plain_parts(below)?.peekable();
        if parts.peek().is_none() {
            return Ok(rustix::fs::openat(&*self.root, ".", directory_flags(), Mode::empty())?);
        }
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        match rustix::fs::openat2(&*self.root, below, directory_flags(), Mode::empty(), resolve) {
            // Linux before 5.6, and containers that do not know the call: the same, one name at a time.
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
        // Checks the last name too.
        let Some(name) = plain_parts(below)?.last() else { return Err(not_below(below)) };
        Ok((self.directory(below.parent().unwrap_or(Path::new("")))?, name))
    }
}

fn directory_flags() -> OFlags {
    OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC
}

/// The names of a path that has nothing else.
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
        if found.len() >= MOST_NAMES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let kind = match entry.file_type() {
            FileType::Unknown => rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
                .map_or(FileType::Unknown, |of| FileType::from_raw_mode(of.st_mode)),
            kind => kind,
        };
        found.push((name.to_owned(), kind));
    }
    Ok(found)
}

fn remove_tree(parent: &OwnedFd, name: &OsStr, depth: usize) -> io::Result<()> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        // What unlinkat says of a directory: Linux, and POSIX.
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    if depth >= DEEPEST {
        return Err(io::Error::other(format!("more than {DEEPEST} directories in one another")));
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
mod tests {
    use std::fs;
    use std::io::Read;
    use std::os::unix::fs::symlink;
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::{CWD, RenameFlags};
    use tempfile::TempDir;

    use super::Beneath;

    /// A directory `home` with `sub/file`, and a directory `secret` beside it with a file of the same name.
    fn place() -> (TempDir, Beneath) {
        let at = TempDir::new().unwrap();
        for (directory, words) in [("home/sub", "own"), ("secret", "secret")] {
            fs::create_dir_all(at.path().join(directory)).unwrap();
            fs::write(at.path().join(directory).join("file"), words).unwrap();
        }
        let home = Beneath::open(&at.path().join("home")).unwrap();
        (at, home)
    }

    #[test]
    fn no_link_is_followed_by_any_call() {
        let (at, home) = place();
        let secret = at.path().join("secret");
        symlink(&secret, at.path().join("home/way")).unwrap();
        symlink(secret.join("file"), at.path().join("home/sub/one")).unwrap();
        for below in ["way/file", "sub/one"].map(Path::new) {
            assert!(home.read(below).is_err(), "{below:?}");
            assert!(home.write_over(below).is_err(), "{below:?}");
            assert!(home.create(below, 0o600).is_err(), "{below:?}");
        }
        let (way, new) = (Path::new("way/new"), Path::new("sub/new"));
        assert!(home.create(way, 0o600).is_err());
        assert!(home.make_directories(way).is_err());
        assert!(home.make_directories(Path::new("way")).is_err());
        assert!(home.list(Path::new("way")).is_err());
        assert!(home.rename(Path::new("sub/file"), Path::new("way/file")).is_err());
        assert!(home.exchange(Path::new("sub/file"), Path::new("way/file")).is_err());
        assert!(home.rename(Path::new("way/file"), new).is_err());
        assert!(home.remove_file(Path::new("way/file")).is_err());
        assert!(home.remove_tree(Path::new("way/file")).is_err());
        assert!(home.write_whole(Path::new("way/file"), b"x").is_err());
        assert!(home.stat(Path::new("way/file")).is_err());
        // A link itself can be removed and written over; where it leads nothing changes.
        home.write_whole(Path::new("sub/one"), b"mine").unwrap();
        home.remove_tree(Path::new("way")).unwrap();
        assert_eq!(fs::read_to_string(secret.join("file")).unwrap(), "secret");
        assert_eq!(fs::read_dir(&secret).unwrap().count(), 1);
        assert_eq!(fs::read_to_string(at.path().join("home/sub/one")).unwrap(), "mine");
    }

    #[test]
    fn no_path_leaves_the_directory() {
        let (_at, home) = place();
        let giant = "n".repeat(300);
        let deep = "d/".repeat(3000);
        for below in [
            "../secret/file",
            "sub/../../secret/file",
            "/etc/passwd",
            "./sub/file",
            "..",
            giant.as_str(),
            &deep,
        ] {
            assert!(home.read(Path::new(below)).is_err(), "{below}");
            assert!(home.create(Path::new(below), 0o600).is_err(), "{below}");
            assert!(
                home.remove_tree(Path::new(below)).is_err() || !home.is_there(Path::new(below)),
                "{below}"
            );
        }
        assert!(home.remove_tree(Path::new("")).is_err());
    }

    #[test]
    fn pipes_and_devices_are_no_files_and_hold_nothing_up() {
        let (at, home) = place();
        let pipe = at.path().join("home/pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(home.read(Path::new("pipe")).is_err());
        assert!(home.write_over(Path::new("pipe")).is_err());
        let zero = Beneath::open(Path::new("/dev")).unwrap();
        assert!(zero.read(Path::new("zero")).is_err());
    }

    #[test]
    fn the_directory_stays_the_one_that_was_opened() {
        let (at, home) = place();
        fs::rename(at.path().join("home"), at.path().join("elsewhere")).unwrap();
        symlink(at.path().join("secret"), at.path().join("home")).unwrap();
        home.write_whole(Path::new("sub/new"), b"words").unwrap();
        assert_eq!(fs::read_to_string(at.path().join("elsewhere/sub/new")).unwrap(), "words");
        assert!(Beneath::open_no_link(&at.path().join("home")).is_err());
    }

    #[test]
    fn a_name_that_is_exchanged_all_the_time_never_leads_out() {
        let (at, home) = place();
        let (sub, way) = (at.path().join("home/sub"), at.path().join("home/way"));
        symlink(at.path().join("secret"), &way).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    rustix::fs::renameat_with(CWD, &sub, CWD, &way, RenameFlags::EXCHANGE).unwrap();
                }
            });
            let (mut read, mut refused) = (0, 0);
            while read < 500 || refused < 50 {
                match home.read(Path::new("sub/file")) {
                    Ok(mut file) => {
                        let mut words = String::new();
                        file.read_to_string(&mut words).unwrap();
                        assert_eq!(words, "own");
                        read += 1;
                    }
                    Err(_) => refused += 1,
                }
                let _ = home.create(Path::new("sub/new"), 0o600);
                let _ = home.make_directories(Path::new("sub/a/b"));
                let _ = home.remove_tree(Path::new("sub/new"));
            }
            is_over.store(true, Ordering::Relaxed);
        });
        assert_eq!(fs::read_dir(at.path().join("secret")).unwrap().count(), 1);
    }

    #[test]
    fn a_deep_tree_is_removed_and_a_deeper_one_refused() {
        let (at, home) = place();
        fs::create_dir_all(at.path().join("home").join("d/".repeat(60))).unwrap();
        home.remove_tree(Path::new("d")).unwrap();
        assert!(!home.is_there(Path::new("d")));
        fs::create_dir_all(at.path().join("home").join("d/".repeat(70))).unwrap();
        assert!(home.remove_tree(Path::new("d")).is_err());
    }

    #[test]
    fn without_descriptors_every_call_is_an_error_and_changes_nothing() {
        let (at, home) = place();
        testing::without_descriptors(|| {
            let (file, new) = (Path::new("sub/file"), Path::new("sub/new"));
            assert!(home.read(file).is_err());
            assert!(home.create(new, 0o600).is_err());
            assert!(home.write_whole(file, b"x").is_err());
            assert!(home.list(Path::new("sub")).is_err());
            assert!(home.remove_tree(Path::new("sub")).is_err());
            assert!(home.rename(file, new).is_err());
            assert!(Beneath::open(at.path()).is_err());
        });
        assert_eq!(fs::read_to_string(at.path().join("home/sub/file")).unwrap(), "own");
        assert_eq!(fs::read_dir(at.path().join("home/sub")).unwrap().count(), 1);
    }

    #[test]
    fn a_hard_link_to_anothers_file_is_replaced_and_not_written_through() {
        let (at, home) = place();
        let theirs = at.path().join("secret/file");
        fs::hard_link(&theirs, at.path().join("home/sub/linked")).unwrap();
        home.write_whole(Path::new("sub/linked"), b"own").unwrap();
        assert!(home.create(Path::new("sub/file"), 0o600).is_err(), "what is there is not opened");
        home.remove_file(Path::new("sub/linked")).unwrap();
        assert_eq!(fs::read_to_string(theirs).unwrap(), "secret");
    }
}
