//! Unpacks files into a directory: next to their places first, and into them when all are written. Everything is reached from the
//! directory's descriptor, because its user may exchange names meanwhile.

use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use mainstay_checkpoint::archive::{self, Entry};
use rustix::fs::FileType;

use super::FilesError;
use super::host::UserDirectory;
use super::tree::{FileVersion, Member};
use crate::beneath::Beneath;
use crate::seal::{ReadAt, pass_on};
use crate::seal::{SealedShard, open_plainly};

/// Prefix of names that an agent creates in trainers' directories; no name in an archive may have it.
const ASIDE_PREFIX: &str = ".mainstay-";

/// How the files of an archive are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnpackMode<'a> {
    /// They replace what has their top-level names.
    Replace,
    /// They become a directory of this name, which must not exist.
    Inside(&'a Path),
    /// Only missing files are added.
    Add,
}

/// Unpacks the archive in `from`, which was compared with `sealed` when it was received. `is_wanted` gets the top-level name of each file,
/// and whether that is a directory, and returns whether it may be in this archive.
///
/// # Errors
/// It is not an archive, has an unwanted file, or the files cannot be written; then the directory is unchanged.
pub(super) fn unpack(
    from: &Path,
    sealed: &SealedShard,
    folder: &UserDirectory,
    way: UnpackMode<'_>,
    is_wanted: &dyn Fn(&str, bool) -> bool,
) -> Result<Vec<Member>, FilesError> {
    let file = open_plainly(from).map_err(FilesError::reading(from))?;
    let mut read = |at: u64, buffer: &mut [u8]| {
        ReadAt::read_exact_at(&file, buffer, at).map_err(|error| error.to_string())
    };
    let entries = archive::read(sealed.shard.bytes, &mut read)?;
    for (entry, _) in &entries {
        let (first, is_directory) = match entry.path.split_once('/') {
            Some((first, _)) => (first, true),
            None => (entry.path.as_str(), false),
        };
        if first.starts_with(ASIDE_PREFIX) || !is_wanted(first, is_directory) {
            return Err(FilesError::Manifest(format!(
                "{:?} is not a file of what this directory holds",
                entry.path
            )));
        }
    }
    let (at, directory) = (&folder.at, folder.at.path());
    let _as_user = folder.act()?;
    let aside =
        PathBuf::from(format!("{ASIDE_PREFIX}{}", &sealed.shard.root[..16.min(sealed.shard.root.len())]));
    let put = || -> io::Result<()> {
        at.remove_tree(&aside)?;
        at.make_directory(&aside)?;
        // From here on, new files stay below this descriptor, whatever names are exchanged around it.
        let made = at.below(&aside)?;
        for (entry, offset) in &entries {
            if way != UnpackMode::Add || !at.is_there(Path::new(&entry.path)) {
                write(&file, entry, *offset, &made)?;
            }
        }
        sync_all(&made, Path::new(""))?;
        match way {
            UnpackMode::Replace => replace(&made, &aside, at),
            UnpackMode::Inside(name) => at.rename(&aside, name),
            UnpackMode::Add => add(&made, Path::new(""), &aside, at),
        }?;
        at.sync_directory(Path::new(""))
    };
    let put = put();
    let _ = at.remove_tree(&aside);
    put.map_err(FilesError::reading(directory))?;
    let home = match way {
        UnpackMode::Inside(name) => at.below(name).map_err(FilesError::reading(directory))?,
        UnpackMode::Replace | UnpackMode::Add => at.clone(),
    };
    let member = |(entry, _): &(Entry, u64)| -> io::Result<Member> {
        let found = home.stat(Path::new(&entry.path))?;
        Ok(Member {
            path: entry.path.clone(),
            mode: entry.mode,
            mark: FileVersion::from_stat(&found),
            content: None,
        })
    };
    entries.iter().map(member).collect::<io::Result<_>>().map_err(FilesError::reading(directory))
}

fn write(from: &File, entry: &Entry, at: u64, aside: &Beneath) -> io::Result<()> {
    let path = Path::new(&entry.path);
    aside.make_directories(path.parent().unwrap_or(Path::new("")))?;
    let mut to = aside.create(path, 0o600)?;
    pass_on(from, at..at + entry.size, |error| error, |_, piece| to.write_all(piece))?;
    to.set_permissions(Permissions::from_mode(entry.mode))?;
    to.sync_all()
}

/// Syncs all directories below.
fn sync_all(at: &Beneath, below: &Path) -> io::Result<()> {
    for (name, kind) in at.list(below)? {
        if kind == FileType::Directory {
            sync_all(at, &below.join(name))?;
        }
    }
    at.sync_directory(below)
}

/// Moves each name into place atomically. Small files, which name the others, come last. Other files that a user has put into a
/// directory of the checkpoint stay in it.
fn replace(made: &Beneath, aside: &Path, at: &Beneath) -> io::Result<()> {
    let mut names: Vec<(bool, PathBuf)> = made
        .list(Path::new(""))?
        .into_iter()
        .map(|(name, kind)| (kind != FileType::Directory, name.into()))
        .collect();
    names.sort();
    for (is_file, name) in names {
        let from = aside.join(&name);
        if !at.is_there(&name) {
            at.rename(&from, &name)?;
            continue;
        }
        at.exchange(&from, &name)?;
        let was_directory =
            made.stat(&name).is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Directory);
        if !is_file && was_directory {
            add(made, &name, aside, at)?;
        }
    }
    Ok(())
}

/// Moves missing files into place. A file that another process has created meanwhile stays.
fn add(made: &Beneath, below: &Path, aside: &Path, at: &Beneath) -> io::Result<()> {
    for (name, kind) in made.list(below)? {
        let path = below.join(name);
        if kind == FileType::Directory {
            at.make_directories(&path)?;
            add(made, &path, aside, at)?;
            continue;
        }
        match at.rename_new(&aside.join(&path), &path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use mainstay_checkpoint_format::Identity;
    use testing::TempDir;

    use super::*;
    use crate::files::Content;
    use crate::files::tree;
    use crate::peer::Access;

    /// An archive with `sub/file` and `one`, and its seal.
    fn archive() -> (TempDir, SealedShard) {
        let at = TempDir::new().unwrap();
        let from = at.path().join("from");
        fs::create_dir_all(from.join("sub")).unwrap();
        fs::write(from.join("sub/file"), "new").unwrap();
        fs::write(from.join("one"), "new").unwrap();
        let members = tree::members(&Beneath::open(&from).unwrap(), "").unwrap();
        let content = Content::new(&from, Access::own(), members).unwrap();
        let identity = Identity { job: "files".to_owned(), attempt: 0, step: 1, rank: 0, world_size: 1 };
        let sealed = SealedShard::of(content.seal(&identity, "run", 0).unwrap().encode()).unwrap();
        let mut bytes = vec![0; usize::try_from(content.size()).unwrap()];
        content.read_exact_at(&mut bytes, 0).unwrap();
        fs::write(at.path().join("files.tar"), bytes).unwrap();
        fs::create_dir(at.path().join("home")).unwrap();
        fs::create_dir(at.path().join("secret")).unwrap();
        (at, sealed)
    }

    fn home(at: &TempDir) -> UserDirectory {
        UserDirectory { access: Access::own(), at: Beneath::open(&at.path().join("home")).unwrap() }
    }

    #[test]
    fn a_link_in_a_cache_redirects_no_file() {
        let (at, sealed) = archive();
        symlink(at.path().join("secret"), at.path().join("home/sub")).unwrap();
        let put = unpack(&at.path().join("files.tar"), &sealed, &home(&at), UnpackMode::Add, &|_, _| true);
        assert!(put.is_err());
        assert_eq!(fs::read_dir(at.path().join("secret")).unwrap().count(), 0);
        let left: Vec<_> = fs::read_dir(at.path().join("home")).unwrap().flatten().collect();
        assert!(left.iter().all(|entry| !entry.file_name().to_string_lossy().starts_with(ASIDE_PREFIX)));
    }

    #[test]
    fn a_link_in_the_place_of_a_directory_is_replaced_and_not_followed() {
        let (at, sealed) = archive();
        symlink(at.path().join("secret"), at.path().join("home/sub")).unwrap();
        unpack(&at.path().join("files.tar"), &sealed, &home(&at), UnpackMode::Replace, &|_, _| true).unwrap();
        assert_eq!(fs::read_dir(at.path().join("secret")).unwrap().count(), 0);
        assert_eq!(fs::read_to_string(at.path().join("home/sub/file")).unwrap(), "new");
        assert!(!at.path().join("home/sub").is_symlink());
    }

    #[test]
    fn files_that_a_user_has_put_into_a_checkpoint_stay_when_the_rest_is_replaced() {
        let (at, sealed) = archive();
        let here = |name: &str| at.path().join("home/sub").join(name);
        fs::create_dir_all(here("more")).unwrap();
        for (name, text) in [("file", "damaged"), ("notes.txt", "mine"), ("more/plot", "mine too")] {
            fs::write(here(name), text).unwrap();
        }
        unpack(&at.path().join("files.tar"), &sealed, &home(&at), UnpackMode::Replace, &|_, _| true).unwrap();
        let read = |name: &str| fs::read_to_string(here(name)).unwrap();
        assert_eq!([read("file"), read("notes.txt"), read("more/plot")], ["new", "mine", "mine too"]);
    }

    #[test]
    fn a_file_that_no_rule_of_the_watch_names_is_not_unpacked() {
        let (at, sealed) = archive();
        let rules = |name: &str, is_directory: bool| (name, is_directory) == ("sub", true);
        let put = unpack(&at.path().join("files.tar"), &sealed, &home(&at), UnpackMode::Replace, &rules);
        assert!(put.unwrap_err().to_string().contains("one"));
        assert_eq!(fs::read_dir(at.path().join("home")).unwrap().count(), 0);
    }

    #[test]
    fn a_pipe_does_not_block_and_a_hard_link_is_not_written_through() {
        for way in [UnpackMode::Replace, UnpackMode::Add] {
            let (at, sealed) = archive();
            let theirs = at.path().join("secret/theirs");
            fs::write(&theirs, "theirs").unwrap();
            fs::create_dir(at.path().join("home/sub")).unwrap();
            fs::hard_link(&theirs, at.path().join("home/one")).unwrap();
            let pipe = at.path().join("home/sub/file");
            nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
            unpack(&at.path().join("files.tar"), &sealed, &home(&at), way, &|_, _| true).unwrap();
            assert_eq!(fs::read_to_string(&theirs).unwrap(), "theirs", "{way:?}");
            let one = fs::read_to_string(at.path().join("home/one")).unwrap();
            assert_eq!(
                one,
                if way == UnpackMode::Replace { "new" } else { "theirs" },
                "what is there stays where files are added"
            );
            assert_eq!(pipe.is_file(), way == UnpackMode::Replace);
        }
    }

    #[test]
    fn constantly_exchanged_names_redirect_no_file_of_an_archive() {
        use std::sync::atomic::{AtomicBool, Ordering};
        for way in [UnpackMode::Replace, UnpackMode::Add] {
            let (at, sealed) = archive();
            let (sub, link) = (at.path().join("home/sub"), at.path().join("home/way"));
            let is_over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    use rustix::fs::{CWD, RenameFlags, renameat_with};
                    while !is_over.load(Ordering::Relaxed) {
                        let _ = symlink(at.path().join("secret"), &link);
                        let _ = renameat_with(CWD, &sub, CWD, &link, RenameFlags::EXCHANGE);
                        // Also the temporary directories.
                        for aside in fs::read_dir(at.path().join("home")).into_iter().flatten().flatten() {
                            if aside.file_name().to_string_lossy().starts_with(ASIDE_PREFIX) {
                                let _ = renameat_with(CWD, aside.path(), CWD, &link, RenameFlags::EXCHANGE);
                            }
                        }
                    }
                });
                for _ in 0..50 {
                    let _ = unpack(&at.path().join("files.tar"), &sealed, &home(&at), way, &|_, _| true);
                }
                is_over.store(true, Ordering::Relaxed);
            });
            assert_eq!(fs::read_dir(at.path().join("secret")).unwrap().count(), 0, "{way:?}");
        }
    }

    #[test]
    fn without_descriptors_no_file_is_unpacked_and_existing_files_stay() {
        let (at, sealed) = archive();
        fs::write(at.path().join("home/one"), "old").unwrap();
        let folder = home(&at);
        testing::without_descriptors(|| {
            let put =
                unpack(&at.path().join("files.tar"), &sealed, &folder, UnpackMode::Replace, &|_, _| true);
            assert!(put.is_err());
        });
        let left: Vec<_> =
            fs::read_dir(at.path().join("home")).unwrap().flatten().map(|entry| entry.file_name()).collect();
        assert_eq!(left, ["one"]);
        assert_eq!(fs::read_to_string(at.path().join("home/one")).unwrap(), "old");
    }
}
