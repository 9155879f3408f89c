//! Files below a directory, as they are at one moment.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Directories in directories; deeper ones are no checkpoint.
const DEEPEST: usize = 32;

/// What tells whether a file is still the one that was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Its number in the file system.
    pub ino: u64,
    /// Bytes.
    pub size: u64,
    /// When it was last written: seconds since 1970, and nanoseconds.
    pub written: (i64, i64),
}

impl Mark {
    /// Of a file.
    pub(crate) fn of(found: &Metadata) -> Mark {
        Mark { ino: found.ino(), size: found.size(), written: (found.mtime(), found.mtime_nsec()) }
    }
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its name below the base.
    pub path: String,
    /// Permission bits.
    pub mode: u32,
    /// Which file it is.
    pub mark: Mark,
    /// What stands in it, where that is not read from the file but is what must stand there after a restore.
    #[serde(default)]
    pub words: Option<String>,
}

impl Member {
    /// Bytes.
    pub(crate) fn size(&self) -> u64 {
        self.words.as_ref().map_or(self.mark.size, |words| words.len() as u64)
    }
}

/// All files of `name` below `base`, by their names: of a directory those in it, at any depth. `base` itself for an empty name.
///
/// # Errors
/// It cannot be read, or has something that is neither file nor directory: a link could lead anywhere, and without it the checkpoint
/// would not be whole.
pub fn members(base: &Path, name: &str) -> io::Result<Vec<Member>> {
    let mut found = Vec::new();
    collect(base, name, 0, true, &mut found)?;
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// The plain files below `base`, by their names; what else is there is passed over, and what goes away meanwhile too.
pub(crate) fn plain(base: &Path) -> Vec<Member> {
    let mut found = Vec::new();
    let _ = collect(base, "", 0, false, &mut found);
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

fn collect(base: &Path, name: &str, depth: usize, strict: bool, found: &mut Vec<Member>) -> io::Result<()> {
    let path = if name.is_empty() { base.to_owned() } else { base.join(name) };
    let of = fs::symlink_metadata(&path)?;
    if of.is_file() {
        let mode = of.mode() & 0o777;
        found.push(Member { path: name.to_owned(), mode, mark: Mark::of(&of), words: None });
        return Ok(());
    }
    if !of.is_dir() || depth > DEEPEST {
        if !strict {
            return Ok(());
        }
        let problem = format!("{} is neither a file nor a directory", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
    }
    for entry in fs::read_dir(&path)? {
        let below = entry?.file_name();
        let below = below.to_str().ok_or_else(|| {
            let problem = format!("{}: a name that is no UTF-8", path.display());
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

/// Whether a directory lies where several hosts see the same files: then each need not keep a copy of it.
pub fn is_shared(directory: &Path) -> bool {
    // By the magic numbers of statfs(2): NFS, SMB (three), Lustre, GPFS, Ceph, BeeGFS, AFS, PanFS, 9p, OCFS2, GFS2, and FUSE, by which
    // buckets are mounted.
    const SHARED: [i64; 14] = [
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
    rustix::fs::statfs(directory).is_ok_and(|of| SHARED.contains(&(of.f_type & 0xffff_ffff)))
}
