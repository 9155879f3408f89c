//! Whether a set of files has changed since something was made from them.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Folders that hold results rather than sources.
const RESULTS: &[&str] = &["target", "__pycache__", ".pytest_cache", ".git"];

/// A number that changes when a name or a byte below these paths does. Good for a stamp next to a cached result:
/// another Rust release may give another number, which costs one needless rebuild.
pub fn of(paths: &[PathBuf]) -> Result<String> {
    let mut files = Vec::new();
    for path in paths {
        collect(path, &mut files)?;
    }
    files.sort();
    let mut hasher = DefaultHasher::new();
    for file in files {
        let bytes = fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
        file.hash(&mut hasher);
        bytes.hash(&mut hasher);
    }
    Ok(format!("{:016x}", hasher.finish()))
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if path.is_file() {
        files.push(path.to_path_buf());
        return Ok(());
    }
    for entry in fs::read_dir(path).with_context(|| format!("listing {}", path.display()))? {
        let entry = entry.with_context(|| format!("listing {}", path.display()))?;
        let name = entry.file_name();
        let is_result = RESULTS.iter().any(|result| name == *result)
            || Path::new(&name).extension().is_some_and(|e| e == "so" || e == "pyc");
        if !is_result {
            collect(&entry.path(), files)?;
        }
    }
    Ok(())
}
