//! Parses the mount table. Finding a path's mount in it needs no access to the file system.

use std::path::{Path, PathBuf};

/// The types of network file systems.
pub const NETWORK: [&str; 34] = [
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "beegfs_nodev",
    "panfs",
    "wekafs",
    "orangefs",
    "glusterfs",
    "afs",
    "ncpfs",
    "ocfs2",
    "gfs2",
    "fuse.sshfs",
    "fuse.glusterfs",
    "fuse.ceph",
    "fuse.ceph-fuse",
    "fuse.gcsfuse",
    "fuse.s3fs",
    "fuse.mountpoint-s3",
    "fuse.goofys",
    "fuse.juicefs",
    "fuse.blobfuse",
    "fuse.blobfuse2",
    "fuse.rclone",
    "fuse.alluxio",
    "fuse.cvmfs2",
    "fuse.mfs",
    "fuse.seaweedfs",
];

/// File systems in user space whose server is on this host and which containers have for their root.
const LOCAL_IN_USER_SPACE: [&str; 2] = ["fuse.fuse-overlayfs", "fuse.lxcfs"];

/// A mount of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Major and minor number: equal for all mounts of one file system.
    pub device: String,
    /// Its type: `ext4`, `nfs4`.
    pub kind: String,
    /// The source: a disk, or a server and its export.
    pub from: String,
    /// The mount point.
    pub point: PathBuf,
    /// Not writable.
    pub read_only: bool,
    /// Read-only by the mount's own options while the file system itself is writable: intended for this namespace, for example by
    /// systemd's ProtectSystem, and independent of `/etc/fstab`.
    pub by_choice: bool,
}

/// The mounts in order of creation: a later one covers an earlier one at the same mount point. Format: proc_pid_mountinfo(5). Skips
/// invalid lines.
pub fn parse_mounts(text: &str) -> Vec<Mount> {
    text.lines().filter_map(parse_mount).collect()
}

fn parse_mount(line: &str) -> Option<Mount> {
    let (mount, file_system) = line.split_once(" - ")?;
    let mut fields = mount.split(' ').skip(2);
    let (device, point, options) = (fields.next()?, fields.nth(1)?, fields.next()?);
    let mut about = file_system.split(' ');
    let (kind, from) = (about.next()?.to_owned(), unescape(about.next().unwrap_or("")));
    let super_options = about.next().unwrap_or("");
    // Since Linux 6.15, ext4 keeps `rw` and adds `emergency_ro` when errors stop writes.
    let stops = |option: &str| matches!(option, "ro" | "emergency_ro" | "shutdown");
    let (here, everywhere) = (options.split(',').any(stops), super_options.split(',').any(stops));
    let (read_only, by_choice) = (here || everywhere, here && !everywhere);
    let point = PathBuf::from(unescape(point));
    Some(Mount { device: device.to_owned(), kind, from, point, read_only, by_choice })
}

/// The mount that a path is on.
pub fn mount_of<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    let on = mounts.iter().filter(|mount| path.starts_with(&mount.point));
    // `max_by_key` returns the last of equal ones.
    on.max_by_key(|mount| mount.point.components().count())
}

/// Whether file systems of this type may stop answering while the host works: their server is another host or a process.
/// What is not mounted yet (`autofs`) is most often such a file system.
pub fn may_stop_answering(kind: &str) -> bool {
    let in_user_space = kind == "fuse" || kind.starts_with("fuse.");
    let in_user_space = in_user_space && !LOCAL_IN_USER_SPACE.contains(&kind);
    in_user_space || NETWORK.contains(&kind) || matches!(kind, "9p" | "autofs")
}

/// Whether `/etc/fstab` mounts the file system at `point` writable. `None` if it has no entry.
pub fn meant_writable(fstab: &str, point: &Path) -> Option<bool> {
    fstab.lines().filter(|line| !line.trim_start().starts_with('#')).find_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let (place, options) = (fields.next()?, fields.nth(1)?);
        (Path::new(&unescape(place)) == point).then(|| !options.split(',').any(|option| option == "ro"))
    })
}

/// Both tables escape blanks and backslashes as three octal digits.
fn unescape(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        plain.push_str(before);
        let code = after.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code.filter(u8::is_ascii) {
            Some(code) => {
                plain.push(char::from(code));
                rest = &after[3..];
            }
            None => {
                plain.push('\\');
                rest = after;
            }
        }
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_only_sandbox_is_no_failing_disk() {
        let sandboxed = "1 2 8:1 / / ro,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro";
        let failing = "1 2 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 ro,errors=remount-ro";
        let parsed = |line| parse_mount(line).map(|mount| (mount.read_only, mount.by_choice));
        assert_eq!(parsed(sandboxed), Some((true, true)));
        assert_eq!(parsed(failing), Some((true, false)));
    }

    const TABLE: &str = "\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
24 27 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw,mode=755
25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw
30 27 8:1 / /data rw,relatime shared:1 master:2 - ext4 /dev/sda rw,emergency_ro,errors=remount-ro
31 27 8:2 / /data/with\\040blank ro,relatime - ext4 /dev/sdb rw
32 27 0:9 / /twice rw - ext4 /dev/sdc rw
33 27 0:9 / /twice rw - ext4 /dev/sdc ro
no mount at all
";

    #[test]
    fn a_path_is_on_its_nearest_and_latest_mount() {
        let mounts = parse_mounts(TABLE);
        assert_eq!(mounts.len(), 7);
        let check = |path: &str, point: &str, read_only| {
            let mount = mount_of(&mounts, Path::new(path)).unwrap();
            assert_eq!((mount.point.to_str().unwrap(), mount.read_only), (point, read_only), "{path}");
        };
        check("/", "/", false);
        check("/database", "/", false);
        check("/dev/shm/x", "/dev/shm", false);
        check("/data/x/y", "/data", true);
        check("/data/with blank", "/data/with blank", true);
        check("/twice", "/twice", true);
        assert_eq!(mount_of(&mounts, Path::new("relative")), None);
    }

    #[test]
    fn servers_may_stop_answering_and_disks_may_not() {
        for kind in ["nfs4", "lustre", "fuse", "fuse.sshfs", "fuse.of_this_site", "9p", "autofs"] {
            assert!(may_stop_answering(kind), "{kind}");
        }
        for kind in ["ext4", "xfs", "tmpfs", "overlay", "fuseblk", "fusectl", "fuse.fuse-overlayfs"] {
            assert!(!may_stop_answering(kind), "{kind}");
        }
    }

    #[test]
    fn fstab_shows_the_intended_mode() {
        let fstab = "# /dev/sda /data ext4 rw 0 0\n/dev/sda /data ext4 defaults 0 2\n/dev/sdb /data/with\\040blank ext4 noatime,ro\nshort\n";
        assert_eq!(meant_writable(fstab, Path::new("/data")), Some(true));
        assert_eq!(meant_writable(fstab, Path::new("/data/with blank")), Some(false));
        assert_eq!(meant_writable(fstab, Path::new("/")), None);
    }

    #[test]
    fn invalid_escapes_are_kept() {
        assert_eq!(unescape(r"a\040b\\c\9é\"), r"a b\\c\9é\");
    }
}
