//! File systems that do not answer, for tests of code that must not wait for them. Only root can mount them.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// A failing test may itself wait for the file system: after this time the mount is removed.
const AT_MOST: Duration = Duration::from_secs(150);

/// A FUSE mount whose server never answers, over an existing directory. When it is dropped, the directory is back,
/// and all waiting calls return an error.
#[derive(Debug)]
pub struct SilentMount {
    at: PathBuf,
    device: Option<Arc<File>>,
    _ends: Sender<()>,
}

impl SilentMount {
    /// Mounts over this directory; none if that is not possible here.
    #[must_use]
    pub fn over(at: &Path) -> Option<SilentMount> {
        let device = Arc::new(File::options().read(true).write(true).open("/dev/fuse").ok()?);
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(Some("silent"), at, Some("fuse"), flags, Some(options.as_str())).ok()?;
        let (ends, ended) = channel::<()>();
        let place = at.to_owned();
        std::thread::spawn(move || {
            if ended
                .recv_timeout(AT_MOST)
                .is_err_and(|error| error == std::sync::mpsc::RecvTimeoutError::Timeout)
            {
                abort(&place);
            }
        });
        Some(SilentMount { at: at.to_owned(), device: Some(device), _ends: ends })
    }
}

impl Drop for SilentMount {
    fn drop(&mut self) {
        abort(&self.at);
        self.device.take();
    }
}

fn abort(at: &Path) {
    let _ = umount2(at, MntFlags::MNT_DETACH | MntFlags::MNT_FORCE);
}

/// A small separate file system that can be frozen: a process that writes then waits, unkillable, until it is
/// thawed. It is thawed and unmounted when this is dropped.
#[derive(Debug)]
pub struct FreezableDisk {
    at: PathBuf,
}

impl FreezableDisk {
    /// Mounts one over this directory, with its image next to it; none if that is not possible here.
    #[must_use]
    pub fn over(at: &Path) -> Option<FreezableDisk> {
        let image = at.with_extension("image");
        File::create(&image).ok()?.set_len(32 << 20).ok()?;
        let made = run("mkfs.ext4", &["-q", "-O", "^has_journal", &image.display().to_string()]);
        let mounted =
            made && run("mount", &["-o", "loop", &image.display().to_string(), &at.display().to_string()]);
        mounted.then(|| FreezableDisk { at: at.to_owned() })
    }

    /// Blocks all writes from now on.
    pub fn freeze(&self) {
        assert!(run("fsfreeze", &["-f", &self.at.display().to_string()]), "fsfreeze");
    }

    /// Lets all writes continue.
    pub fn thaw(&self) {
        run("fsfreeze", &["-u", &self.at.display().to_string()]);
    }
}

impl Drop for FreezableDisk {
    fn drop(&mut self) {
        self.thaw();
        run("umount", &["-l", &self.at.display().to_string()]);
    }
}

pub(crate) fn run(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).stdin(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
