//! Which files are read, and which of them are text.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use mainstay_diagnosis::attribution::exit::Exit;

use super::run_dir;
use crate::output;

/// Maximum depth to which directories are read.
const MAX_DEPTH: u32 = 8;
/// Maximum number of files of a directory that are read, in the order of their names.
const MAX_FILES: usize = 10_000;

/// A file to read.
#[derive(Debug)]
pub(super) struct LogFile {
    pub(super) path: PathBuf,
    /// Whether it was found in a directory, and not named by the user.
    pub(super) found: bool,
    /// The rank that wrote it, if the journal of its run has that.
    pub(super) rank: Option<u32>,
}

/// The files to read, those of directories in the order of their names, each once, and how ranks ended by the journals
/// of run directories among them.
pub(super) fn below(paths: &[PathBuf]) -> anyhow::Result<(Vec<LogFile>, Vec<Exit>)> {
    let mut search = Search::default();
    for path in paths {
        if path.as_os_str() == "-" || !path.is_dir() {
            search.files.push(LogFile { path: path.clone(), found: false, rank: None });
            continue;
        }
        let before = search.files.len();
        search.directory(path, MAX_DEPTH)?;
        if search.files.len() == before {
            output::note(&format!("{}: no file in this directory", path.display()));
        }
    }
    if search.files.len() >= MAX_FILES {
        output::note(&format!("only the first {MAX_FILES} files are read"));
    }
    Ok((search.files, search.exits))
}

#[derive(Default)]
struct Search {
    files: Vec<LogFile>,
    /// Device and inode of the files found: several links may point to one.
    seen: BTreeSet<(u64, u64)>,
    exits: Vec<Exit>,
    /// The rank whose directory is read.
    rank: Option<u32>,
}

impl Search {
    fn directory(&mut self, dir: &Path, depth: u32) -> anyhow::Result<()> {
        if let Some(attempt) = run_dir::attempt_of(dir) {
            self.exits.extend(attempt.exits);
            for (dir, rank) in attempt.ranks {
                self.rank = Some(rank.0);
                self.directory(&dir, depth)?;
                self.rank = None;
            }
            return Ok(());
        }
        let entries =
            std::fs::read_dir(dir).with_context(|| format!("reading the directory {}", dir.display()))?;
        let mut entries: Vec<_> = entries.collect::<Result<_, _>>()?;
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let kind = entry.file_type()?;
            if kind.is_dir() && depth > 0 {
                self.directory(&entry.path(), depth - 1)?;
                continue;
            }
            // Links to files are followed, as Kubernetes uses them for logs; links to directories may form a cycle.
            let Ok(found) = std::fs::metadata(entry.path()) else { continue };
            if found.is_file() && self.files.len() < MAX_FILES && self.seen.insert((found.dev(), found.ino()))
            {
                self.files.push(LogFile { path: entry.path(), found: true, rank: self.rank });
            }
        }
        Ok(())
    }
}

/// Why a file that starts like this is not readable text, with what to do.
pub(super) fn unreadable(begin: &[u8], name: &str) -> Option<String> {
    begin.starts_with(b"BZh").then(|| {
        format!("{name} is compressed with bzip2 and is not read: bzcat {name} | mainstay attribute -")
    })
}
