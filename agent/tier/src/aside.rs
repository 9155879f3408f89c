//! Names of temporary files and directories, which get their real name when they are complete. Processes of several
//! hosts and containers may write into one directory, and each may have any process id. So a name has the place too
//! in which its process id is valid, and when it was made: `.rank-00001.4711-1c9a5e03f0000071-18a0c4d2e7f31b00.tmp`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// No process writes one temporary file for so long. Whether a process of another place lives cannot be seen.
const MAX_WRITE_TIME: Duration = Duration::from_secs(24 * 3600);

/// A name that no other process uses, for what becomes `what`.
pub fn name(what: &str) -> String {
    let since = UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
    format!(".{what}.{}-{}-{since:x}.tmp", std::process::id(), place())
}

/// Whether a name is that of a temporary file whose process is gone. `is_ours` gets what the file would have become,
/// `lives` a process id of this place.
pub fn is_left(name: &str, is_ours: impl Fn(&str) -> bool, lives: &dyn Fn(u32) -> bool) -> bool {
    let inner = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp"));
    let Some((what, owner)) = inner.and_then(|inner| inner.rsplit_once('.')) else { return false };
    is_ours(what) && is_gone(owner, lives, SystemTime::now()).unwrap_or(false)
}

fn is_gone(owner: &str, lives: &dyn Fn(u32) -> bool, now: SystemTime) -> Option<bool> {
    let mut parts = owner.split('-');
    let pid = parts.next()?.parse().ok()?;
    match (parts.next(), parts.next(), parts.next()) {
        // The name of an older version.
        (None, ..) => Some(!lives(pid)),
        (Some(place_of_name), Some(_), None) if place_of_name == place() => Some(!lives(pid)),
        (Some(_), Some(since), None) => {
            let since = Duration::from_nanos(u64::from_str_radix(since, 16).ok()?);
            Some((UNIX_EPOCH + since + MAX_WRITE_TIME) < now)
        }
        _ => None,
    }
}

/// Names the kernel and the PID namespace of this process. The client computes the same.
fn place() -> &'static str {
    static PLACE: OnceLock<String> = OnceLock::new();
    PLACE.get_or_init(|| {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let namespace = std::fs::metadata("/proc/self/ns/pid").map(|found| found.ino());
        match (boot, namespace) {
            (Ok(boot), Ok(namespace)) if boot.is_char_boundary(8) => format!("{}{namespace:x}", &boot[..8]),
            // Without them, one that no other process has.
            _ => {
                let random = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0);
                format!("{random:016x}")
            }
        }
    })
}

// Small files of the agent that are written atomically, also if the host crashes.

/// Writes a file that only its owner may read.
pub(crate) fn write_at_once(directory: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let aside = directory.join(format!(".{name}.tmp"));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&aside, directory.join(name))?;
    sync_directory(directory)
}

/// Syncs the names in a directory to disk.
pub(crate) fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_processes_of_this_place_are_judged_by_their_ids() {
        let own = name("rank-00001");
        let of_another = own.replace(place(), "0123456789abcdef");
        let any = |_: &str| true;
        assert!(is_left(&own, any, &|_| false), "{own}");
        assert!(!is_left(&own, any, &|_| true), "{own}");
        assert!(!is_left(&of_another, any, &|_| false), "{of_another}: it may live in another container");
        assert!(is_left(".rank-00001.17-0123456789abcdef-1.tmp", any, &|_| true), "made in 1970");
    }
}
