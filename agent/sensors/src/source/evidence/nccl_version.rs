//! Which NCCL a rank has loaded: in two releases, a request to the RAS service may end the job.

use std::fs;
use std::path::{Path, PathBuf};

use mainstay_model::id::Pid;

/// Releases whose RAS service is not asked, with NVIDIA's issue.
const UNSAFE: [(&str, &str); 2] = [("2.26.2", "NVIDIA/nccl#1669"), ("2.29.7", "NVIDIA/nccl#2346")];

/// Why the rank's RAS service must not be asked; none if it may.
pub(super) fn objection(pid: Pid) -> Option<String> {
    let maps = fs::read_to_string(format!("/proc/{}/maps", pid.0)).ok()?;
    let version = version_of(&library(&maps)?)?;
    let (version, issue) = UNSAFE.into_iter().find(|(other, _)| *other == version)?;
    Some(format!("NCCL's RAS service is not asked: NCCL {version} can end the job when asked ({issue})"))
}

/// The path of NCCL's library in `/proc/PID/maps`.
fn library(maps: &str) -> Option<PathBuf> {
    let paths = maps.lines().filter_map(|line| Some(&line[line.find('/')?..]));
    paths.map(Path::new).find(|path| name_of(path).starts_with("libnccl.so")).map(Path::to_owned)
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The version in the name of the file, or in that of its Python package.
fn version_of(library: &Path) -> Option<String> {
    let version = name_of(library).strip_prefix("libnccl.so.").map(str::to_owned);
    if let Some(version) = version.filter(|version| version.contains('.')) {
        return Some(version);
    }
    // site-packages/nvidia/nccl/lib/libnccl.so.2 and site-packages/nvidia_nccl_cu12-2.27.3.dist-info.
    let packages = library.ancestors().nth(4)?;
    let names = fs::read_dir(packages).ok()?.flatten().map(|entry| entry.file_name());
    names.filter_map(|name| package_version(&name.to_string_lossy())).next()
}

fn package_version(name: &str) -> Option<String> {
    let (package, version) = name.strip_suffix(".dist-info")?.split_once('-')?;
    package.starts_with("nvidia_nccl").then(|| version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_that_of_the_file_or_of_its_package() {
        let maps = "7f00-7f01 r-xp 00000000 fe:00 12 /usr/lib/libc.so.6\n7f02-7f03 r-xp 00000000 fe:00 13 /usr/lib/libnccl.so.2.26.2\n";
        let found = library(maps).unwrap();
        assert_eq!(found, Path::new("/usr/lib/libnccl.so.2.26.2"));
        assert_eq!(version_of(&found).as_deref(), Some("2.26.2"));
        assert_eq!(library("7f00-7f01 r-xp 00000000 00:00 0\n"), None);
        let place = testing::tempdir().unwrap();
        let library = place.path().join("nvidia/nccl/lib/libnccl.so.2");
        fs::create_dir_all(place.path().join("nvidia_nccl_cu12-2.29.7.dist-info")).unwrap();
        assert_eq!(version_of(&library).as_deref(), Some("2.29.7"));
    }

    #[test]
    fn a_process_without_nccl_may_be_asked() {
        assert_eq!(objection(Pid(std::process::id().cast_signed())), None);
    }
}
