//! Brings files back into a directory: beside their places first, and into them when all are there.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use mainstay_core::checkpoint::archive::{self, Entry};

use super::FilesError;
use super::tree::{Mark, Member};
use crate::peer::sealed::{Sealed, open_plainly};
use crate::peer::store::sync_directory;
use crate::peer::user::{As, User};
use crate::seal::ReadAt;

const PIECE: usize = 1 << 20;

/// What is done with the files of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// They take the place of what is there under their first names.
    Replace,
    /// All of them become this directory's; it must not be there.
    Inside,
    /// Only what is missing is added.
    Add,
}

/// The files of the archive in `from`, which was compared with `sealed` when it came.
///
/// # Errors
/// It is no archive, or the files cannot be written; then nothing has changed in the directory.
pub(super) fn unpack(
    from: &Path,
    sealed: &Sealed,
    directory: &Path,
    user: User,
    way: Way,
) -> Result<Vec<Member>, FilesError> {
    let file = open_plainly(from).map_err(FilesError::reading(from))?;
    let mut read = |at: u64, buffer: &mut [u8]| {
        ReadAt::read_exact_at(&file, buffer, at).map_err(|error| error.to_string())
    };
    let entries = archive::read(sealed.shard.bytes, &mut read)?;
    let _as_user = As::user(user).map_err(FilesError::reading(directory))?;
    let aside = aside_of(directory, sealed, way);
    let _ = fs::remove_dir_all(&aside);
    let put = || -> io::Result<()> {
        fs::create_dir_all(&aside)?;
        for (entry, at) in &entries {
            if way != Way::Add || fs::symlink_metadata(directory.join(&entry.path)).is_err() {
                write(&file, entry, *at, &aside)?;
            }
        }
        sync_all(&aside)?;
        match way {
            Way::Replace => replace(&aside, directory),
            Way::Inside => {
                fs::rename(&aside, directory).and_then(|()| directory.parent().map_or(Ok(()), sync_directory))
            }
            Way::Add => add(&aside, &aside, directory),
        }
    };
    let put = put();
    if way != Way::Inside || put.is_err() {
        let _ = fs::remove_dir_all(&aside);
    }
    put.map_err(FilesError::reading(directory))?;
    let member = |(entry, _): &(Entry, u64)| -> io::Result<Member> {
        let found = fs::symlink_metadata(directory.join(&entry.path))?;
        Ok(Member { path: entry.path.clone(), mode: entry.mode, mark: Mark::of(&found), words: None })
    };
    entries.iter().map(member).collect::<io::Result<_>>().map_err(FilesError::reading(directory))
}

/// In the same file system, under a name that says of itself that it is passing.
fn aside_of(directory: &Path, sealed: &Sealed, way: Way) -> PathBuf {
    let name = format!(".mainstay-{}", &sealed.shard.root[..16.min(sealed.shard.root.len())]);
    match way {
        Way::Inside => directory.with_file_name(name),
        Way::Replace | Way::Add => directory.join(name),
    }
}

fn write(from: &File, entry: &Entry, at: u64, aside: &Path) -> io::Result<()> {
    let path = aside.join(&entry.path);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut to = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
    let mut buffer = vec![0; PIECE];
    let mut done = 0;
    while done < entry.size {
        let piece = usize::try_from(entry.size - done).unwrap_or(PIECE).min(PIECE);
        ReadAt::read_exact_at(from, &mut buffer[..piece], at + done)?;
        to.write_all(&buffer[..piece])?;
        done += piece as u64;
    }
    to.set_permissions(Permissions::from_mode(entry.mode))?;
    to.sync_all()
}

/// All directories below.
fn sync_all(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)?.flatten() {
        if entry.file_type()?.is_dir() {
            sync_all(&entry.path())?;
        }
    }
    sync_directory(directory)
}

/// Each name takes its place at once. Small files, which name the others, come last.
fn replace(aside: &Path, directory: &Path) -> io::Result<()> {
    let mut names: Vec<(bool, PathBuf)> = Vec::new();
    for entry in fs::read_dir(aside)? {
        let entry = entry?;
        names.push((!entry.file_type()?.is_dir(), entry.path()));
    }
    names.sort();
    for (_, from) in names {
        let Some(name) = from.file_name() else { continue };
        let to = directory.join(name);
        if fs::symlink_metadata(&to).is_ok() {
            let flags = rustix::fs::RenameFlags::EXCHANGE;
            rustix::fs::renameat_with(rustix::fs::CWD, &from, rustix::fs::CWD, &to, flags)?;
        } else {
            fs::rename(&from, &to)?;
        }
    }
    sync_directory(directory)
}

/// Moves what is missing. A file that another one has made meanwhile stays.
fn add(from: &Path, aside: &Path, directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let path = entry.path();
        let Ok(below) = path.strip_prefix(aside) else { continue };
        let to = directory.join(below);
        if entry.file_type()?.is_dir() {
            fs::create_dir_all(&to)?;
            add(&path, aside, directory)?;
            continue;
        }
        let flags = rustix::fs::RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(rustix::fs::CWD, &path, rustix::fs::CWD, &to, flags) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
