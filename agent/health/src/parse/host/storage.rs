//! Disks and file systems, local and remote.

use super::{OfDevice, about, between, contains_any, starts_with_any};
use mainstay_model::kernel::{KernelClass, KernelReport};

use KernelClass::{
    DiskError, FileSystemError, NetworkStorage, NetworkStorageBack, Nvme, NvmeLost, RemountedReadOnly,
};

pub(super) fn report(message: &str) -> Option<KernelReport> {
    const LINE_PARSERS: [fn(&str) -> Option<KernelReport>; 7] =
        [nvme, ext4, xfs, other_file_systems, disk, controller, server];
    LINE_PARSERS.iter().find_map(|reader| reader(message))
}

/// Messages of a disk's or controller's driver, identified by PCI address: `megaraid_sas 0000:65:00.0: 5013 (682172338s/0x0001/FATAL) -
/// VD 01/1 is now OFFLINE`.
pub(super) fn of_device(message: &str, (driver, device, text): OfDevice<'_>) -> Option<KernelReport> {
    if driver == "megaraid_sas" {
        let failed = text.contains("FW in FAULT state")
            || (text.contains(" - ") && contains_any(text, &["/CRIT)", "/FATAL)", "/DEAD)"]));
        return failed.then(|| about(DiskError, Some(device)));
    }
    if matches!(driver, "smartpqi" | "hpsa") {
        let failed = contains_any(text, &["controller is offline", "controller lockup detected"]);
        return failed.then(|| about(DiskError, Some(device)));
    }
    nvme(message)
}

/// `nvme nvme0: I/O 12 QID 3 timeout, aborting`, `nvme nvme0: controller is down; will reset: CSTS=0xffffffff`.
fn nvme(message: &str) -> Option<KernelReport> {
    let (disk, what) = message.strip_prefix("nvme ")?.split_once(": ")?;
    const LOST: [&str; 5] = [
        "Removing after probe failure",
        "Device not ready; aborting",
        "Disabling device after reset failure",
        "Identify Controller failed",
        "Could not set queue count",
    ];
    if starts_with_any(what, &LOST) {
        return Some(about(NvmeLost, Some(disk)));
    }
    // Over a network the connection failed, until it is restored.
    if starts_with_any(what, &["starting error recovery", "Failed reconnect attempt"]) {
        return Some(about(NetworkStorage, Some(disk)));
    }
    if what.starts_with("Successfully reconnected") {
        return Some(about(NetworkStorageBack, Some(disk)));
    }
    const TROUBLE: [&str; 4] = [
        "controller is down",
        "Abort status",
        "frozen state error detected",
        "resetting controller due to persistent internal error",
    ];
    let late = starts_with_any(what, &["I/O ", "queue "]) && what.contains("timeout");
    let trouble = late || starts_with_any(what, &TROUBLE);
    trouble.then(|| about(Nvme, Some(disk)))
}

fn ext4(message: &str) -> Option<KernelReport> {
    let device = || between(message, "(device ", ")");
    if message.starts_with("EXT4-fs error (device ") {
        return Some(about(FileSystemError, device()));
    }
    if message.starts_with("EXT4-fs warning (device ") && message.contains("I/O error") {
        return Some(about(DiskError, device()));
    }
    let journal = message.strip_prefix("Aborting journal on device ");
    if let Some(journal) = journal {
        return Some(about(FileSystemError, Some(journal.trim_end_matches('.').rsplit_once('-')?.0)));
    }
    if let Some(what) = message.strip_prefix("JBD2: ") {
        let device_of = |journal: &str| {
            journal.trim_end_matches('.').rsplit_once('-').map(|(device, _)| device.to_owned())
        };
        if let Some((_, journal)) = what.split_once("journal superblock for ") {
            let failed = starts_with_any(what, &["Error ", "I/O error "]);
            return failed.then(|| about(FileSystemError, device_of(journal).as_deref()));
        }
        let (_, journal) = what.split_once("Detected IO errors while flushing file data on ")?;
        return Some(about(DiskError, device_of(journal).as_deref()));
    }
    if let Some((device, what)) = message.strip_prefix("EXT4-fs (").and_then(|rest| rest.split_once("): ")) {
        if what.starts_with("This should not happen") || what.contains("potential data loss") {
            return Some(about(FileSystemError, Some(device)));
        }
        if what.starts_with("I/O error while writing superblock") {
            return Some(about(DiskError, Some(device)));
        }
    }
    let of_a_file_system = starts_with_any(message, &["EXT", "FAT-fs", "F2FS-fs", "JFS", "NILFS"]);
    const PROTECTED: [&str; 2] = ["remounting filesystem read-only", "filesystem has been set read-only"];
    let protected = || contains_any(&message.to_ascii_lowercase(), &PROTECTED);
    (of_a_file_system && protected()).then(|| about(RemountedReadOnly, between(message, "(", ")")))
}

fn xfs(message: &str) -> Option<KernelReport> {
    let (device, what) = message.strip_prefix("XFS (")?.split_once("): ")?;
    let what = what.to_ascii_lowercase();
    // A file system that XFS shut down is as unwritable as one that EXT4 made read-only.
    const SHUT_DOWN: [&str; 4] = ["shut down", "shutting down", "force_shutdown(", "xfs_log_force: error"];
    if contains_any(&what, &SHUT_DOWN) {
        return Some(about(RemountedReadOnly, Some(device)));
    }
    const DAMAGED: [&str; 8] = [
        "corrupt",
        "log i/o error",
        "metadata i/o error",
        "writeback error",
        "crc error detected",
        "internal error ",
        "log mount failed",
        "log mount/recovery failed",
    ];
    contains_any(&what, &DAMAGED).then(|| about(FileSystemError, Some(device)))
}

fn other_file_systems(message: &str) -> Option<KernelReport> {
    if message.starts_with("WARNING: Pool '") && message.contains("uncorrectable I/O failure") {
        return Some(about(RemountedReadOnly, between(message, "Pool '", "'")));
    }
    if let Some(what) = message.strip_prefix("device-mapper: ") {
        return mapper(what);
    }
    let rest = message.strip_prefix("BTRFS ").or_else(|| message.strip_prefix("BTRFS: "))?;
    let device =
        between(rest, "(device ", ")").map(|device| device.split([':', ' ']).next().unwrap_or(device));
    if rest.contains("forced readonly") {
        return Some(about(RemountedReadOnly, device));
    }
    starts_with_any(rest, &["error", "critical"]).then(|| about(FileSystemError, device))
}

/// `device-mapper: multipath: 253:3: Failing path 8:16.`, `device-mapper: thin: 253:4: switching pool to read-only mode`.
fn mapper(what: &str) -> Option<KernelReport> {
    let (target, rest) = what.split_once(": ")?;
    let (device, what) = rest.split_once(": ")?;
    match target {
        "multipath" if what.starts_with("Failing path ") => Some(about(DiskError, Some(device))),
        "thin" | "raid" if what.contains("read-only mode") => Some(about(RemountedReadOnly, Some(device))),
        _ => None,
    }
}

/// `Buffer I/O error on dev sdb1, …`, `blk_update_request: I/O error, dev sdb, sector …`,
/// `critical medium error, dev sdc, sector …`, `md/raid1:md0: Disk failure on sdb1, disabling device.`
fn disk(message: &str) -> Option<KernelReport> {
    if message.starts_with("md/raid") || message.starts_with("raid") {
        let failed = between(message, "Disk failure on ", ",").and_then(|what| what.split(' ').next());
        let unread = between(message, "read error NOT corrected!! (sector ", ")");
        let device = failed.or_else(|| unread?.rsplit(' ').next())?;
        return Some(about(DiskError, Some(device)));
    }
    // Status code type 2 is a media error. Newer kernels name it, "Unrecovered Read Error".
    if message.starts_with("nvme") && message.contains("rror (sct 0x2 ") {
        return Some(about(DiskError, message.split([':', ' ']).next()));
    }
    const BEGINNINGS: [&str; 4] = ["blk_update_request: ", "print_req_error: ", "end_request: ", "Buffer "];
    let text = BEGINNINGS.iter().find_map(|beginning| message.strip_prefix(beginning)).unwrap_or(message);
    if let Some(rest) = message.strip_prefix("sd ").filter(|rest| rest.contains("rejecting I/O to ")) {
        let offline = contains_any(rest, &["to offline device", "to dead device"]);
        let disk = between(rest, "[", "]").or_else(|| rest.split(": ").next());
        return offline.then(|| about(DiskError, disk));
    }
    const ERRORS: [&str; 7] = [
        "I/O error",
        "critical target error",
        "device offline error",
        "critical medium error",
        "protection error",
        "critical space allocation error",
        "timeout error",
    ];
    let rest = ERRORS.iter().find_map(|error| text.strip_prefix(error))?;
    let device = rest
        .strip_prefix(" on dev ")
        .or_else(|| rest.strip_prefix(", dev "))
        .or_else(|| rest.strip_prefix(" on device "))?;
    let device = device.split([',', ' ']).next()?;
    // Drives without a medium and loop devices over deleted files are no disks of the host.
    let none_of_ours = starts_with_any(device, &["sr", "fd"]) || is_virtual_disk(device);
    // Many old disks refuse discards, and no data is lost.
    let only_asked = contains_any(rest, &["(DISCARD)", "(WRITE_ZEROES)"]);
    // A target refuses much else; only reads and writes count.
    let refused = text.starts_with("critical target error") && !contains_any(rest, &["(READ)", "(WRITE)"]);
    (!none_of_ours && !only_asked && !refused).then(|| about(DiskError, Some(device)))
}

/// Whether a block device is backed by a file or memory. It fails together with the disk below it, which the log names too. By itself
/// it does not indicate a fault of the host's disks.
pub fn is_virtual_disk(device: &str) -> bool {
    starts_with_any(device, &["loop", "zram", "ram"])
}

/// A controller of many disks: `mpt3sas_cm0: fault_state(0x2622)!`.
fn controller(message: &str) -> Option<KernelReport> {
    let (device, what) = message.split_once(": ").filter(|(device, _)| device.starts_with("mpt"))?;
    let failed = starts_with_any(what, &["fault_state(", "SAS host is non-operational"]);
    failed.then(|| about(DiskError, Some(device)))
}

/// `nfs: server filer1 not responding, still trying`, similar messages of Lustre, CIFS and Ceph, and the messages of recovery.
fn server(message: &str) -> Option<KernelReport> {
    for client in ["nfs: server ", "lockd: server ", "NFS: server "] {
        let Some(rest) = message.strip_prefix(client) else { continue };
        let (server, state) = rest.split_once(' ')?;
        let class = match state {
            state if state.starts_with("not responding") => NetworkStorage,
            state if state.starts_with("OK") => NetworkStorageBack,
            _ => return None,
        };
        return Some(about(class, Some(server)));
    }
    if let Some(rest) = message.strip_prefix("CIFS: VFS: ").or_else(|| message.strip_prefix("CIFS VFS: ")) {
        let gone = rest.contains("has not responded in") || rest.contains("not responding");
        let server = rest.split_whitespace().find(|word| word.starts_with("\\\\"));
        return gone.then(|| about(NetworkStorage, server));
    }
    if let Some(rest) = message.strip_prefix("Lustre: ") {
        // The target's name comes first, followed by the client's own number: `fs-OST0001-osc-ffff9a…`.
        let target = rest.split([':', ' ']).next().map(|name| name.split("-osc-").next().unwrap_or(name));
        let target = target.map(|name| name.split("-mdc-").next().unwrap_or(name));
        let class = if rest.contains(": Connection to ") && rest.contains(" was lost") {
            NetworkStorage
        } else if rest.contains(": Connection restored to ") {
            NetworkStorageBack
        } else {
            return None;
        };
        return Some(about(class, target));
    }
    // The network below Lustre: `LNetError: 2314:0:(o2iblnd_cb.c:3536:kiblnd_check_conns()) Timed out RDMA with 10.12.0.4@o2ib`.
    if let Some(rest) = message.strip_prefix("LNetError: ") {
        let late = rest.contains(") Timed out ");
        let peer =
            rest.split_once(" with ").map_or("LNet", |(_, peer)| peer.split(' ').next().unwrap_or(peer));
        return late.then(|| about(NetworkStorage, Some(peer)));
    }
    if let Some(rest) = message.strip_prefix("LustreError: ") {
        let target = between(rest, "evicted by ", ";").map(|by| by.split(' ').next().unwrap_or(by));
        return target.map(|target| about(NetworkStorage, Some(target)));
    }
    let rest = message.strip_prefix("ceph: ")?;
    // Newer kernels name the file system.
    let rest = rest.strip_prefix('[').and_then(|rest| rest.split_once("]: ")).map_or(rest, |(_, rest)| rest);
    let (server, what) = rest.split_once(' ')?;
    let class = match what {
        "hung" => NetworkStorage,
        "came back" => NetworkStorageBack,
        _ => return None,
    };
    Some(about(class, Some(server)))
}
