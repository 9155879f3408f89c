//! Lists the files below a directory at one moment.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{FileType, Stat};

use serde::{Deserialize, Serialize};

use crate::beneath::Beneath;

/// Maximum depth of directories; deeper trees are not checkpoints.
const MAX_DEPTH: usize = 32;

/// Maximum number of files of one checkpoint or cache.
const MAX_FILES: usize = 1 << 20;

/// Identifies a version of a file: it changes if the file is written or replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileVersion {
    /// Inode number.
    pub ino: u64,
    /// Bytes.
    pub size: u64,
    /// Modification time: seconds since 1970, and nanoseconds.
    pub written: (i64, i64),
}

impl FileVersion {
    /// From the metadata of a file.
    pub(crate) fn of(found: &Metadata) -> FileVersion {
        FileVersion { ino: found.ino(), size: found.size(), written: (found.mtime(), found.mtime_nsec()) }
    }

    /// From the result of stat(2).
    #[allow(clippy::unnecessary_cast, reason = "the kernel's types differ between processors")]
    pub(crate) fn from_stat(found: &Stat) -> FileVersion {
        let written = (found.st_mtime as i64, found.st_mtime_nsec as i64);
        FileVersion { ino: found.st_ino, size: found.st_size.unsigned_abs(), written }
    }
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Path relative to the base.
    pub path: String,
    /// Permission bits.
    pub mode: u32,
    /// Version of the file.
    pub mark: FileVersion,
    /// Content, if it is not read from the file but must be written at a restore.
    #[serde(default, rename = "words")]
    pub content: Option<String>,
}

impl Member {
    pub(crate) fn size(&self) -> u64 {
        self.content.as_ref().map_or(self.mark.size, |text| text.len() as u64)
    }
}

/// All files of `name` below `base`, by name: for a directory all files in it, at any depth; for an empty name those of `base`.
///
/// # Errors
/// It cannot be read, or has something other than files and directories: a link could lead anywhere, and without it the checkpoint
/// would be incomplete.
pub fn members(base: &Beneath, name: &str) -> io::Result<Vec<Member>> {
    let mut found = Vec::new();
    collect(base, name, 0, true, &mut found)?;
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// One regular file of `base`; none if it does not exist or is something else.
pub(crate) fn regular_file(base: &Beneath, name: &str) -> Option<Member> {
    let found = base.stat(Path::new(name)).ok()?;
    let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
    let mode = found.st_mode & 0o777;
    is_file.then(|| Member {
        path: name.to_owned(),
        mode,
        mark: FileVersion::from_stat(&found),
        content: None,
    })
}

/// The regular files below `base`, by name. Other entries, and files that disappear meanwhile, are skipped.
pub(crate) fn plain(base: &Beneath) -> Vec<Member> {
    let mut found = Vec::new();
    let _ = collect(base, "", 0, false, &mut found);
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

fn collect(
    base: &Beneath,
    name: &str,
    depth: usize,
    strict: bool,
    found: &mut Vec<Member>,
) -> io::Result<()> {
    let path = || base.path().join(name);
    let stat = base.stat(Path::new(name))?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind == FileType::RegularFile {
        if found.len() >= MAX_FILES {
            let problem = format!("{}: more than {MAX_FILES} files", base.path().display());
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
        }
        let mode = stat.st_mode & 0o777;
        found.push(Member {
            path: name.to_owned(),
            mode,
            mark: FileVersion::from_stat(&stat),
            content: None,
        });
        return Ok(());
    }
    if kind != FileType::Directory || depth > MAX_DEPTH {
        if !strict {
            return Ok(());
        }
        let problem = format!("{} is neither a file nor a directory", path().display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
    }
    for (below, _) in base.list(Path::new(name))? {
        let below = below.to_str().ok_or_else(|| {
            let problem = format!("{}: a name that is not UTF-8", path().display());
            io::Error::new(io::ErrorKind::InvalidInput, problem)
        })?;
        let below = if name.is_empty() { below.to_owned() } else { format!("{name}/{below}") };
        match collect(base, &below, depth + 1, strict, found) {
            Err(error) if strict => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Whether a directory is on a file system that several hosts share: then not every host needs to keep a copy.
pub fn is_shared(directory: &Path) -> bool {
    // Magic numbers of statfs(2): NFS, SMB (three), Lustre, GPFS, Ceph, BeeGFS, AFS, PanFS, 9p, OCFS2, GFS2, and FUSE, which mounts
    // buckets.
    const SHARED_FILE_SYSTEMS: [i64; 14] = [
        0x6969,
        0x517b,
        0xff53_4d42,
        0xfe53_4d42,
        0x0bd0_0bd0,
        0x4750_4653,
        0x00c3_6400,
        0x1983_0326,
        0x5346_414f,
        0xaad7_aaea,
        0x0102_1997,
        0x7461_636f,
        0x0116_1970,
        0x6573_5546,
    ];
    rustix::fs::statfs(directory)
        .is_ok_and(|found| SHARED_FILE_SYSTEMS.contains(&(found.f_type & 0xffff_ffff)))
}
