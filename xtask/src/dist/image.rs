//! The image of the agent, by `deploy/image/Containerfile`. Where its usual base cannot be pulled, packages of Debian
//! make one: the C library and certificates, without a shell.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use fs_err as fs;

use super::VERSION;
use super::system::write;
use crate::command::{self, cmd};
use crate::paths;
use crate::release::git;

/// The packages of the base.
const BASE: [&str; 3] = ["libc6", "libgcc-s1", "ca-certificates"];

/// What of them is not needed at run time.
const LEFT_OUT: [&str; 5] = ["gconv", "doc", "lintian", "man", "locale"];

/// Its users; the second is that of the Containerfile.
const USERS: &str = "root:x:0:0:root:/root:/sbin/nologin\nmainstay:x:65532:65532:mainstay:/:/sbin/nologin\n";
const GROUPS: &str = "root:x:0:\nmainstay:x:65532:\n";

pub struct Image {
    pub archive: PathBuf,
    /// The size of its files, in bytes.
    pub bytes: u64,
}

/// Why no image can be built on this machine.
pub fn obstacle() -> Option<&'static str> {
    if !nix::unistd::geteuid().is_root() {
        return Some("an image is built by root only");
    }
    let tools = [
        ("buildah", "install buildah"),
        ("apt-get", "its base is made of packages by apt-get, which is missing"),
    ];
    tools.into_iter().find(|(tool, _)| !command::exists(tool, "--version")).map(|(_, missing)| missing)
}

/// Builds the image from a base and a staged tree into an archive that podman and others load.
pub fn build(base: &Path, tree: &Path, arch: &str, out: &Path) -> Result<Image> {
    let folder = paths::fresh(paths::target().join("dist-image"))?;
    let buildah = |arguments: &[&str]| {
        let mut buildah = Command::new("buildah");
        // Not the images of this machine's user; this storage needs nothing of the file system.
        buildah.args(["--storage-driver", "vfs", "--root"]).arg(folder.join("storage"));
        buildah.arg("--runroot").arg(folder.join("run")).args(arguments);
        buildah
    };
    let container = command::output(&mut buildah(&["from", "scratch"]))?;
    let container = container.trim();
    command::output(buildah(&["copy", "--quiet", container]).arg(base).arg("/"))?;
    let time = git(&["log", "-1", "--format=%ct"])?;
    command::output(&mut buildah(&[
        "commit",
        "--quiet",
        "--rm",
        "--timestamp",
        &time,
        container,
        "mainstay-base",
    ]))?;
    let name = format!("localhost/mainstay:{VERSION}");
    let mut build =
        buildah(&["build", "--isolation", "chroot", "--build-arg", "BASE=localhost/mainstay-base"]);
    build.args(["--timestamp", &time, "--tag", &name, "--file"]);
    build.arg(paths::root().join("deploy/image/Containerfile")).arg(tree);
    command::run_logged(&mut build, &paths::target().join("logs/buildah.log"))?;
    let layout = folder.join("layout");
    command::output(&mut buildah(&["push", "--quiet", &name, &format!("oci:{}:{name}", layout.display())]))?;
    let archive = out.join(format!("mainstay-{VERSION}-{arch}.oci.tar"));
    command::output(&mut cmd!(
        "tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@{time} -C {layout} -cf {archive} ."
    ))?;
    let root = command::output(&mut buildah(&["from", "--pull-never", &name]))?;
    let root = command::output(&mut buildah(&["mount", root.trim()]))?;
    let bytes = size(Path::new(root.trim()))?;
    // A mounted folder of this storage is a plain folder.
    fs::remove_dir_all(&folder)?;
    Ok(Image { archive, bytes })
}

/// The root of a base. Its packages are downloaded each time: they are small, and the newest are wanted.
pub fn base() -> Result<PathBuf> {
    let folder = paths::fresh(paths::target().join("dist-base"))?;
    let (root, packages) = (&folder.join("root"), paths::fresh(folder.join("packages"))?);
    let names = BASE;
    let mut download = cmd!("apt-get download {names...}");
    command::output(download.current_dir(&packages)).context("the packages of the image's base")?;
    fs::create_dir_all(root)?;
    for package in fs::read_dir(&packages)? {
        let package = package?.path();
        command::output(&mut cmd!("dpkg-deb --extract {package} {root}"))?;
    }
    let mut left_out = walkdir::WalkDir::new(root).into_iter();
    while let Some(entry) = left_out.next() {
        let entry = entry?;
        if entry.file_type().is_dir() && LEFT_OUT.iter().any(|name| entry.file_name() == *name) {
            left_out.skip_current_dir();
            fs::remove_dir_all(entry.path())?;
        }
    }
    // What the package's script would do.
    let mut certificates = Vec::new();
    for entry in walkdir::WalkDir::new(root.join("usr/share/ca-certificates")).sort_by_file_name() {
        let entry = entry?;
        if entry.file_type().is_file() {
            certificates.extend(fs::read(entry.path())?);
        }
    }
    ensure!(!certificates.is_empty(), "the package ca-certificates has no certificate");
    write(&root.join("etc/ssl/certs/ca-certificates.crt"), &certificates, 0o644)?;
    write(&root.join("etc/passwd"), USERS.as_bytes(), 0o644)?;
    write(&root.join("etc/group"), GROUPS.as_bytes(), 0o644)?;
    for folder in ["lib", "lib64"] {
        let (place, merged) = (root.join(folder), root.join("usr").join(folder));
        // As on a system with a merged /usr, which these packages are for.
        if !place.exists() && merged.exists() {
            symlink(Path::new("usr").join(folder), place)?;
        }
    }
    for folder in ["tmp", "run", "proc", "sys", "dev"] {
        fs::create_dir_all(root.join(folder))?;
    }
    Ok(root.clone())
}

fn size(root: &Path) -> Result<u64> {
    walkdir::WalkDir::new(root).into_iter().try_fold(0, |sum, entry| {
        let entry = entry?;
        Ok(sum + if entry.file_type().is_file() { entry.metadata()?.len() } else { 0 })
    })
}
