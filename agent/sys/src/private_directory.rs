//! Directories that only this user can enter.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

/// Creates a directory and its parents that only this user can enter. In `/dev/shm` and `/tmp` another user may have
/// created it before us, and could then read and change its files.
///
/// # Errors
/// It cannot be created, or what exists is not a directory of ours that only we can write to.
pub fn private_directory(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    let found = fs::symlink_metadata(path)?;
    let ours = found.is_dir() && found.uid() == nix::unistd::geteuid().as_raw();
    if !ours || found.mode() & 0o022 != 0 {
        let message = "it exists already and is not a directory that belongs to us alone";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
    }
    let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) else { return Ok(()) };
    let above = fs::metadata(parent)?;
    let is_trusted = above.uid() == 0 || above.uid() == found.uid();
    // A user who may rename in the parent can replace this directory; in a sticky one only its owner can.
    let is_open = above.mode() & 0o002 != 0 && above.mode() & 0o1000 == 0;
    if !is_trusted || is_open {
        let message = format!(
            "{} belongs to user {}, who could exchange what is in it: have that directory removed, or name another one",
            parent.display(),
            above.uid()
        );
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_directory_below_one_of_another_user_is_refused() {
        if !nix::unistd::geteuid().is_root() {
            return eprintln!("skipped: only root can make directories of another user");
        }
        let root = testing::tempdir().expect("a directory");
        let made_beforehand = root.path().join("mainstay-1000");
        fs::create_dir(&made_beforehand).expect("made");
        std::os::unix::fs::chown(&made_beforehand, Some(61_001), None).expect("given away");
        let refused = private_directory(&made_beforehand.join("pools")).expect_err("another user's");
        assert!(refused.to_string().contains("61001"), "{refused}");
        std::os::unix::fs::chown(&made_beforehand, Some(0), None).expect("taken back");
        fs::set_permissions(&made_beforehand, fs::Permissions::from_mode(0o777)).expect("opened to all");
        private_directory(&made_beforehand.join("pools")).expect_err("anyone may rename in it");
        fs::set_permissions(&made_beforehand, fs::Permissions::from_mode(0o1777)).expect("made sticky");
        private_directory(&made_beforehand.join("pools")).expect("only its owner may rename it");
    }

    #[test]
    fn a_directory_that_others_may_write_to_and_a_link_are_refused() {
        let root = testing::tempdir().expect("a directory");
        let path = root.path().join("a/b");
        private_directory(&path).expect("made");
        private_directory(&path).expect("ours already");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).expect("opened to all");
        private_directory(&path).expect_err("open to all");
        let link = root.path().join("link");
        symlink("/tmp", &link).expect("a link");
        private_directory(&link).expect_err("a link");
    }
}
