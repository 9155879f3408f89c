//! The files of a training program, to distinguish a changed job from one that was only restarted: the script or module of
//! the command, the Python files in its folder and below, and the configuration files that the command names. The search is
//! limited; imported files elsewhere are not seen.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mainstay_diagnosis::fingerprint;

/// Files that are read.
const MAX_FILES: usize = 256;
/// Bytes that are read, of all files together.
const MAX_BYTES: u64 = 4 << 20;
/// A larger file with the extension of a configuration is data.
const CONFIGURATION: u64 = 256 << 10;
/// Folders that are searched.
const FOLDERS: usize = 64;
/// Extensions of configuration files.
const ENDS: [&str; 7] = ["yaml", "yml", "json", "toml", "ini", "cfg", "conf"];

/// A hash of what the command runs; none if it names no readable script or module below the working directory.
pub fn hash(command: &[String]) -> Option<String> {
    hash_in(Path::new("."), command)
}

/// What all hosts of a job have in common: the command without the directories in it, which may differ, and the content
/// of the script that it names. Both are hashes; the second is empty if no script can be read.
pub fn identity(command: &[String]) -> (String, String) {
    let name = |path: &str| path.rsplit('/').next().unwrap_or(path).to_owned();
    let word = |word: &String| match word.split_once('=') {
        Some((option, value)) => format!("{option}={}", name(value)),
        None => name(word),
    };
    let arguments: Vec<String> = command.iter().map(word).collect();
    let folder = Path::new(".");
    // A program without Python: the first file that the command names by its path.
    let by_path = || command.iter().find(|word| word.contains('/')).map(|word| folder.join(word));
    let script = script(folder, command).or_else(by_path).filter(|script| {
        let size = std::fs::metadata(script).map_or(u64::MAX, |metadata| metadata.len());
        script.is_file() && size <= MAX_BYTES
    });
    let content = script.and_then(|script| std::fs::read(script).ok());
    let content =
        content.map(|content| fingerprint::program(&[], &BTreeMap::from([(String::new(), content)])));
    (fingerprint::program(&arguments, &BTreeMap::new()), content.unwrap_or_default())
}

fn hash_in(folder: &Path, command: &[String]) -> Option<String> {
    let script = script(folder, command)?.canonicalize().ok()?;
    let beside = script.parent()?;
    let mut files = BTreeMap::new();
    let mut room = MAX_BYTES;
    let mut read = |name: String, path: &Path, most: u64| {
        let size = std::fs::metadata(path).map_or(u64::MAX, |metadata| metadata.len());
        if files.len() < MAX_FILES
            && size <= room.min(most)
            && let Ok(content) = std::fs::read(path)
        {
            room -= size;
            files.insert(name, content);
        }
    };
    // The script and its arguments first: there may be no room for more.
    read(name_in(beside, &script), &script, MAX_BYTES);
    for (name, path) in configurations(folder, command) {
        read(name, &path, CONFIGURATION);
    }
    for path in python_files(beside).into_iter().filter(|path| *path != script) {
        read(name_in(beside, &path), &path, MAX_BYTES);
    }
    (!files.is_empty()).then(|| fingerprint::program(command, &files))
}

fn name_in(folder: &Path, path: &Path) -> String {
    path.strip_prefix(folder).unwrap_or(path).display().to_string()
}

/// The script of the command: a word that ends in `.py`, or the module after `-m`.
fn script(folder: &Path, command: &[String]) -> Option<PathBuf> {
    let ends = |word: &&String| Path::new(word).extension().is_some_and(|ext| ext == "py");
    if let Some(script) = command.iter().find(ends) {
        return Some(folder.join(script));
    }
    let modules = command.windows(2).filter(|pair| matches!(pair[0].as_str(), "-m" | "--module"));
    // `python -m torch.distributed.run -m train`: the last module is the program, the others are installed elsewhere.
    let mut files = modules.rev().flat_map(|pair| {
        let module = folder.join(pair[1].replace('.', "/"));
        [module.join("__main__.py"), module.with_extension("py"), module.join("__init__.py")]
    });
    files.find(|path| path.is_file())
}

/// The configuration files that the command names, as words, after `=`, or in Hydra's form by folder and name.
fn configurations(folder: &Path, command: &[String]) -> Vec<(String, PathBuf)> {
    let value = |names: &[&str]| {
        command.iter().enumerate().find_map(|(at, word)| {
            let (name, value) =
                word.split_once('=').map_or((word.as_str(), None), |(name, value)| (name, Some(value)));
            let value = value.or_else(|| command.get(at + 1).map(String::as_str));
            value.filter(|_| names.contains(&name))
        })
    };
    let hydra = value(&["--config-name", "-cn"]).map(|name| {
        let within = value(&["--config-path", "-cp", "--config-dir", "-cd"]).unwrap_or_default();
        Path::new(within).join(format!("{}.yaml", name.trim_end_matches(".yaml"))).display().to_string()
    });
    let arguments =
        command.iter().map(|word| word.rsplit_once('=').map_or(word.as_str(), |(_, value)| value));
    let named = arguments.map(str::to_owned).chain(hydra);
    named
        .filter(|word| Path::new(word).extension().is_some_and(|ext| ENDS.iter().any(|end| ext == *end)))
        .map(|word| (format!("configuration {word}"), folder.join(&word)))
        .filter(|(_, path)| path.is_file())
        .collect()
}

/// The Python files of a folder and its subfolders, sorted, without hidden folders.
fn python_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    let mut looked = 0;
    while let Some(folder) = folders.pop() {
        looked += 1;
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        let mut here: Vec<std::fs::DirEntry> = entries.take(MAX_FILES * 4).filter_map(Result::ok).collect();
        here.sort_by_key(std::fs::DirEntry::file_name);
        for entry in here {
            let path = entry.path();
            let hidden = entry.file_name().to_string_lossy().starts_with(['.', '_']);
            // A link may lead anywhere, even in a cycle.
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_file() && path.extension().is_some_and(|ext| ext == "py") {
                found.push(path);
            } else if kind.is_dir() && !hidden && looked + folders.len() < FOLDERS {
                folders.push(path);
            }
        }
    }
    found.truncate(MAX_FILES);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_script_in_another_folder_is_the_same_program_and_another_content_is_not() {
        let folder = testing::tempdir().unwrap();
        let script = |name: &str, text: &str| {
            let path = folder.path().join(name).join("train.py");
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
            path.display().to_string()
        };
        let content = |script: &str, rate: &str| {
            let arguments = ["/usr/bin/python3", script, "--lr", rate, "--out=/tmp/x"];
            identity(&arguments.map(str::to_owned))
        };
        let (one, two, other) = (script("a", "pass"), script("b", "pass"), script("c", "exit()"));
        assert_eq!(content(&one, "0.1"), content(&two, "0.1"));
        assert_ne!(content(&one, "0.1").0, content(&one, "0.2").0);
        assert_eq!(content(&one, "0.1").0, content(&other, "0.1").0);
        assert_ne!(content(&one, "0.1").1, content(&other, "0.1").1);
    }

    #[test]
    fn a_change_of_script_import_or_option_is_seen_and_nothing_else() {
        let dir = testing::tempdir().expect("a folder");
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("written");
        std::fs::create_dir(dir.path().join("model")).expect("a folder");
        write("train.py", "import model.net");
        write("model/net.py", "width = 8");
        let script = dir.path().join("train.py").display().to_string();
        let hash_of = |option: &str| hash(&["python".into(), script.clone(), option.into()]);
        let first = hash_of("--lr=1");
        assert!(first.is_some());
        write("notes.txt", "anything");
        assert_eq!(hash_of("--lr=1"), first);
        assert_ne!(hash_of("--lr=2"), first);
        write("model/net.py", "width = 9");
        let second = hash_of("--lr=1");
        assert_ne!(second, first);
        write("train.py", "import model.net  # more");
        assert_ne!(hash_of("--lr=1"), second);
        assert_eq!(hash(&["python".into(), "-m".into(), "gone".into()]), None);
        assert_eq!(hash(&["gone.py".into()]), None);
    }

    /// A folder with a package `train` and a configuration.
    fn project() -> testing::TempDir {
        let dir = testing::tempdir().expect("a folder");
        for folder in ["train", "conf"] {
            std::fs::create_dir(dir.path().join(folder)).expect("a folder");
        }
        for (name, text) in
            [("train/__main__.py", "import a"), ("train/a.py", "x = 1"), ("conf/base.yaml", "lr: 1")]
        {
            std::fs::write(dir.path().join(name), text).expect("written");
        }
        dir
    }

    fn arguments(command: &str) -> Vec<String> {
        command.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn a_module_is_the_program_as_a_script_is() {
        let dir = project();
        let hash_of = |command: &str| hash_in(dir.path(), &arguments(command));
        let first = hash_of("python -m train --lr=1");
        assert!(first.is_some());
        assert_eq!(hash_of("python -m train --lr=1"), first);
        std::fs::write(dir.path().join("train/a.py"), "x = 2").expect("written");
        assert_ne!(hash_of("python -m train --lr=1"), first);
        assert!(hash_of("python -m torch.distributed.run --nproc-per-node 8 -m train.a").is_some());
        assert_eq!(
            hash_of("python -m torch.distributed.run"),
            None,
            "what is installed elsewhere is not the program"
        );
    }

    #[test]
    fn a_configuration_that_the_command_names_is_part_of_the_program() {
        let dir = project();
        let hash_of = |command: &str| hash_in(dir.path(), &arguments(command));
        let commands = [
            "python -m train conf/base.yaml",
            "python -m train --config=conf/base.yaml",
            "python -m train --config conf/base.yaml",
            "python -m train --config-path conf --config-name base",
            "python -m train --config-dir=conf --config-name=base.yaml",
        ];
        let before = commands.map(hash_of);
        let other = hash_of("python -m train --data /data/c4");
        std::fs::write(dir.path().join("conf/base.yaml"), "lr: 2").expect("written");
        for (command, before) in commands.iter().zip(before) {
            assert!(before.is_some() && hash_of(command) != before, "{command}");
        }
        assert_eq!(
            hash_of("python -m train --data /data/c4"),
            other,
            "a configuration that is not named is not read"
        );
    }

    #[test]
    fn what_ends_like_a_configuration_and_is_large_is_data() {
        let dir = project();
        let write = |text: &str| {
            let text = text.repeat(1 + usize::try_from(CONFIGURATION).expect("small"));
            std::fs::write(dir.path().join("set.json"), text).expect("written");
        };
        let hash_of = || hash_in(dir.path(), &arguments("python -m train --data=set.json"));
        write("a");
        let first = hash_of();
        write("b");
        assert_eq!(hash_of(), first);
    }
}
