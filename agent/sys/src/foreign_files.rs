//! Files whose path another user chose, in an environment or in a directory. The owner can replace such a path at any
//! time: by a link to a file that only root may write, by a device, or by a pipe that blocks. So the path is opened
//! once, without following a link and without an effect on what is there, and the type and owner of what is now open are
//! checked before it is used.

use std::fs::{File, FileType, OpenOptions};
use std::io::{Error, ErrorKind, Result};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::libc;
use nix::unistd::geteuid;

/// Opens a regular file for reading. It must belong to `owner`, if one is given who is not this process's own user.
///
/// # Errors
/// It is a link or not a regular file, it belongs to another user, or it cannot be opened.
pub fn open(path: &Path, owner: Option<u32>) -> Result<File> {
    opened(path, owner, "a regular file", FileType::is_file, OpenOptions::new().read(true))
}

/// Opens a pipe for writing, under the same conditions. Without a reader this fails instead of waiting for one.
///
/// # Errors
/// It is a link or not a pipe, it belongs to another user, no process reads it, or it cannot be opened.
pub fn open_pipe(path: &Path, owner: Option<u32>) -> Result<File> {
    opened(path, owner, "a pipe", FileType::is_fifo, OpenOptions::new().write(true))
}

fn opened(
    path: &Path,
    owner: Option<u32>,
    kind: &str,
    is_kind: impl Fn(&FileType) -> bool,
    options: &mut OpenOptions,
) -> Result<File> {
    // A device is not opened by this: opening some has an effect.
    let place = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(path)?;
    let found = place.metadata()?;
    if !is_kind(&found.file_type()) {
        return Err(Error::new(ErrorKind::InvalidInput, format!("it is not {kind}")));
    }
    let foreign = owner.filter(|owner| *owner != geteuid().as_raw() && *owner != found.uid());
    if let Some(owner) = foreign {
        let what = format!("it belongs to user {} and not to user {owner}", found.uid());
        return Err(Error::new(ErrorKind::PermissionDenied, what));
    }
    let same = format!("/proc/self/fd/{}", place.as_raw_fd());
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(same)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{Read, Write};
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use nix::sys::stat::Mode;

    use super::*;

    fn kind<T>(result: Result<T>) -> Option<ErrorKind> {
        result.err().map(|error| error.kind())
    }

    #[test]
    fn only_the_named_file_itself_is_opened_and_nothing_blocks() {
        let directory = testing::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("file"), "text").unwrap();
        symlink(at("file"), at("link")).unwrap();
        nix::unistd::mkfifo(&at("pipe"), Mode::S_IRWXU).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        let mut text = String::new();
        open(&at("file"), None).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");
        for other in ["link", "pipe", "socket", "."] {
            assert_eq!(kind(open(&at(other), None)), Some(ErrorKind::InvalidInput), "{other}");
        }
        assert_eq!(kind(open(Path::new("/dev/null"), None)), Some(ErrorKind::InvalidInput));
        assert_eq!(kind(open(&at("missing"), None)), Some(ErrorKind::NotFound));

        assert_eq!(open_pipe(&at("pipe"), None).unwrap_err().raw_os_error(), Some(libc::ENXIO));
        let mut reader = OpenOptions::new().read(true).write(true).open(at("pipe")).unwrap();
        open_pipe(&at("pipe"), None).unwrap().write_all(b"1").unwrap();
        reader.read_exact(&mut [0]).unwrap();
        symlink(at("pipe"), at("link-to-pipe")).unwrap();
        for other in ["file", "link", "link-to-pipe"] {
            assert_eq!(kind(open_pipe(&at(other), None)), Some(ErrorKind::InvalidInput), "{other}");
        }
        assert_eq!(fs::read_to_string(at("file")).unwrap(), "text");
    }

    #[test]
    fn what_belongs_to_another_user_is_refused_and_the_own_user_is_not_limited() {
        let directory = testing::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let own = fs::metadata(&file).unwrap().uid();
        assert!(open(&file, Some(own)).is_ok());
        assert_eq!(kind(open(&file, Some(own + 1))), Some(ErrorKind::PermissionDenied));
        // Network file systems show root's files as another user's.
        assert!(!geteuid().is_root() || open(Path::new("/etc/passwd"), Some(0)).is_ok());
    }
}
