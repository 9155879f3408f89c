//! A separate cgroup for a job's processes, if the launcher may create one: everything that a rank starts stays in
//! it, and the kernel kills it as a whole (`cgroup.kill`, Linux 5.14).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use mainstay_model::id::Pid;

/// A cgroup (version 2) that this process created; it is removed when this is dropped.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// Creates `name` below the cgroup of this process. `mounts` is the path of `/proc/self/mounts`, for tests.
    ///
    /// # Errors
    /// There is no cgroup v2, or no permission to create one here: the job then runs without.
    pub fn make(name: &str) -> io::Result<Cgroup> {
        let root = unified_mount(&fs::read_to_string("/proc/self/mounts")?)
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "cgroup v2 is not mounted"))?;
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or("");
        let path = root.join(own).join(name);
        fs::create_dir(&path)?;
        let cgroup = Cgroup { path };
        // Whether processes may be moved into it only shows when that is tried; that the file can be opened is a
        // good sign.
        fs::OpenOptions::new().write(true).open(cgroup.procs())?;
        if !cgroup.path.join("cgroup.kill").exists() {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel has no cgroup.kill"));
        }
        Ok(cgroup)
    }

    /// The file that accepts process ids.
    pub fn procs(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The processes in it.
    pub fn members(&self) -> Vec<Pid> {
        let members = fs::read_to_string(self.procs()).unwrap_or_default();
        members.lines().filter_map(|line| line.parse().ok().map(Pid)).collect()
    }

    /// Kills all processes in it, including those that are being forked.
    ///
    /// # Errors
    /// The file could not be written.
    pub fn kill(&self) -> io::Result<()> {
        fs::write(self.path.join("cgroup.kill"), "1")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Not empty, or already gone: the rest is left to the guardian and to the init system.
        let _ = fs::remove_dir(&self.path);
    }
}

/// Where cgroup v2 is mounted, from the text of `/proc/self/mounts`.
fn unified_mount(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let (_device, place, kind) = (fields.next()?, fields.next()?, fields.next()?);
        (kind == "cgroup2").then(|| PathBuf::from(place))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unified_hierarchy_is_found_in_both_layouts() {
        let hybrid =
            "cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(unified_mount(hybrid), Some(PathBuf::from("/sys/fs/cgroup/unified")));
        assert_eq!(unified_mount("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0"), Some("/sys/fs/cgroup".into()));
        assert_eq!(unified_mount("proc /proc proc rw 0 0"), None);
    }
}
