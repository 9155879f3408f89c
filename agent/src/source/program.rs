//! The files of a training program, to tell a job that was changed from one that was only started again: the script of the
//! command and the Python files in its folder and below. Bounded; what lies elsewhere and is imported is not seen.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mainstay_core::fingerprint;

/// Files that are read.
const FILES: usize = 256;
/// Bytes that are read, of all files together.
const BYTES: u64 = 4 << 20;
/// Folders that are looked into.
const FOLDERS: usize = 64;

/// What the command runs, as one number; none if it names no script that can be read.
pub fn hash(command: &[String]) -> Option<String> {
    let script =
        command.iter().map(Path::new).find(|word| word.extension().is_some_and(|ext| ext == "py"))?;
    let script = script.canonicalize().ok()?;
    let folder = script.parent()?;
    let mut files = BTreeMap::new();
    let mut room = BYTES;
    // The script first: there may be room for nothing else.
    for path in std::iter::once(script.clone()).chain(python_files(folder)) {
        let size = std::fs::metadata(&path).map_or(u64::MAX, |of| of.len());
        if files.len() >= FILES || size > room {
            continue;
        }
        if let Ok(content) = std::fs::read(&path) {
            room -= size;
            files.insert(path.strip_prefix(folder).unwrap_or(&path).display().to_string(), content);
        }
    }
    (!files.is_empty()).then(|| fingerprint::program(command, &files))
}

/// The Python files of a folder and of those below, in order, without hidden folders.
fn python_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    let mut looked = 0;
    while let Some(folder) = folders.pop() {
        looked += 1;
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        let mut here: Vec<std::fs::DirEntry> = entries.take(FILES * 4).filter_map(Result::ok).collect();
        here.sort_by_key(std::fs::DirEntry::file_name);
        for entry in here {
            let path = entry.path();
            let hidden = entry.file_name().to_string_lossy().starts_with(['.', '_']);
            // A link may lead anywhere, and in circles.
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_file() && path.extension().is_some_and(|ext| ext == "py") {
                found.push(path);
            } else if kind.is_dir() && !hidden && looked + folders.len() < FOLDERS {
                folders.push(path);
            }
        }
    }
    found.truncate(FILES);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_script_import_or_option_is_seen_and_nothing_else() {
        let dir = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("written");
        std::fs::create_dir(dir.path().join("model")).expect("a folder");
        write("train.py", "import model.net");
        write("model/net.py", "width = 8");
        let script = dir.path().join("train.py").display().to_string();
        let of = |option: &str| hash(&["python".into(), script.clone(), option.into()]);
        let first = of("--lr=1");
        assert!(first.is_some());
        write("notes.txt", "anything");
        assert_eq!(of("--lr=1"), first);
        assert_ne!(of("--lr=2"), first);
        write("model/net.py", "width = 9");
        let second = of("--lr=1");
        assert_ne!(second, first);
        write("train.py", "import model.net  # more");
        assert_ne!(of("--lr=1"), second);
        assert_eq!(hash(&["python".into(), "-m".into(), "train".into()]), None);
        assert_eq!(hash(&["gone.py".into()]), None);
    }
}
