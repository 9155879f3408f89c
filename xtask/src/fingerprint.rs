//! Whether a set of files has changed since something was made from them.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

use anyhow::Result;
use fs_err as fs;
use walkdir::{DirEntry, WalkDir};

/// Folders that hold results rather than sources.
const RESULTS: &[&str] = &["target", "__pycache__", ".pytest_cache", ".git"];

/// A number that changes when a name or a byte below these paths does. Good for a stamp next to a cached result:
/// another Rust release may give another number, which costs one needless rebuild.
pub fn of(paths: &[PathBuf]) -> Result<String> {
    let mut hasher = DefaultHasher::new();
    for path in paths {
        for entry in WalkDir::new(path).sort_by_file_name().into_iter().filter_entry(is_source) {
            let entry = entry?;
            if entry.file_type().is_file() {
                entry.path().hash(&mut hasher);
                fs::read(entry.path())?.hash(&mut hasher);
            }
        }
    }
    Ok(format!("{:016x}", hasher.finish()))
}

fn is_source(entry: &DirEntry) -> bool {
    let is_built = entry.path().extension().is_some_and(|e| e == "so" || e == "pyc");
    !is_built && !RESULTS.iter().any(|result| entry.file_name() == *result)
}
