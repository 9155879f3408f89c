//! Determines which checkpoints belong to a job. The name (`--rdzv-id`) is not enough: two experiments may share it. A
//! run of checkpoints is therefore named `NAME~ID`. The id is derived from the directory that the job writes to, so two
//! directories are two runs. A directory is identified by device and inode, and by its creation time, because the
//! kernel reuses inodes.

use std::fmt;
use std::str::FromStr;

use super::owner;

/// Separates the name and the id. No `--rdzv-id` contains it.
const ID_SEPARATOR: char = '~';

/// The run `name` with this id.
#[must_use]
pub fn identified(name: &str, id: &str) -> String {
    format!("{name}{ID_SEPARATOR}{id}")
}

/// The name without owner, id and launch.
#[must_use]
pub fn plain(run: &str) -> &str {
    let run = run.split_once('@').map_or(run, |(run, _)| run);
    let name = owner::name(run);
    name.rsplit_once(ID_SEPARATOR).map_or(name, |(name, _)| name)
}

/// The id; `None` for a run that was named without one.
#[must_use]
pub fn id(run: &str) -> Option<&str> {
    let run = run.split_once('@').map_or(run, |(run, _)| run);
    owner::name(run).rsplit_once(ID_SEPARATOR).map(|(_, id)| id)
}

/// Whether `asked` matches this run: the name alone, or the name with the id.
#[must_use]
pub fn is_asked(run: &str, asked: &str) -> bool {
    owner::name(run) == asked || plain(run) == asked
}

/// Identifies a directory. A rename does not change its identity; another directory of that name has a different one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryId {
    /// The boot in which `device` is valid: the kernel may number devices differently in the next one.
    pub boot: String,
    /// The device of its file system.
    pub device: u64,
    /// Its inode.
    pub inode: u64,
    /// When it was created, nanoseconds since 1970; 0 if the file system does not store it.
    pub born: u64,
}

impl DirectoryId {
    /// Whether both are the same directory.
    #[must_use]
    pub fn is_same(&self, other: &DirectoryId) -> bool {
        let is_device = self.boot != other.boot || self.device == other.device;
        self.inode == other.inode && self.born == other.born && is_device
    }
}

impl fmt::Display for DirectoryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DirectoryId { boot, device, inode, born } = self;
        write!(f, "{boot}:{device:x}:{inode:x}:{born:x}")
    }
}

impl FromStr for DirectoryId {
    type Err = ();

    fn from_str(text: &str) -> Result<DirectoryId, ()> {
        let mut parts = text.rsplitn(4, ':');
        let mut number = || parts.next().and_then(|part| u64::from_str_radix(part, 16).ok()).ok_or(());
        let (born, inode, device) = (number()?, number()?, number()?);
        let boot = parts.next().ok_or(())?.to_owned();
        Ok(DirectoryId { boot, device, inode, born })
    }
}

#[cfg(test)]
mod tests {
    use super::{DirectoryId, id, identified, is_asked, plain};

    #[test]
    fn a_run_matches_its_name_with_or_without_its_id() {
        let run = format!("1000!{}@81.5f", identified("train:out", "ab12"));
        assert_eq!((plain(&run), id(&run)), ("train:out", Some("ab12")));
        let run = "1000!train~ab12";
        assert!(is_asked(run, "train") && is_asked(run, "train~ab12"));
        assert!(!is_asked(run, "train~ab13") && !is_asked(run, "trai") && !is_asked(run, "ab12"));
        assert_eq!((plain("train"), id("train")), ("train", None));
    }

    #[test]
    fn a_directory_is_identified_by_inode_birth_and_within_a_boot_by_device() {
        let one = DirectoryId { boot: "b-1".into(), device: 2, inode: 3, born: 4 };
        assert_eq!(one.to_string().parse(), Ok(one.clone()));
        assert!(one.is_same(&DirectoryId { boot: "b-2".into(), device: 9, ..one.clone() }));
        for other in [
            DirectoryId { device: 9, ..one.clone() },
            DirectoryId { inode: 9, ..one.clone() },
            DirectoryId { born: 9, boot: "b-2".into(), ..one.clone() },
        ] {
            assert!(!one.is_same(&other), "{other}");
        }
        assert!("".parse::<DirectoryId>().is_err() && "a:b".parse::<DirectoryId>().is_err());
    }
}
