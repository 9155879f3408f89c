//! Lines of the launcher's terminal.

/// A host before a restart.
pub const NOT_READY: &str = "this host is not ready for a restart: gpu.0000:01:00";

/// The same for an order, before that line.
pub const ORDER_WAITS: &str = "the ordered restart waits: ";

/// The first restart.
pub const RESTART_1: &str = "restart 1 of 3";

/// A launcher that the leader refuses.
pub const CANNOT_TAKE_PART: &str = "cannot take part: ";

/// A process that holds a GPU.
pub fn in_use_by(pid: i32) -> String {
    format!("in use by process {pid}")
}

/// A process that outlived its rank.
pub fn left_behind(pid: i32) -> String {
    format!("process {pid} was left behind by the ranks and is killed")
}

/// The end of such a wait.
pub const HANDED_BACK: &str = "handing the job back to the scheduler with exit status 75";

/// A process of the job itself.
pub const LEFT_BY_JOB: &str = "left by this job";

/// A launcher with another token.
pub const OTHER_TOKEN: &str = "does not have the same token";

/// A launcher that does not encrypt.
pub const ENCRYPT_ON_ALL: &str = "--rdzv-conf encrypt=off on all hosts or on none";

/// A launcher of another version.
pub const SAME_VERSION: &str = "install the same version on all hosts";

/// A store that everyone can read.
pub const OPEN_STORE: &str = "knows the job's id can read what the hosts write there";

/// An end of the job without a proof.
pub const FOREIGN_END: &str = "that no launcher of the job wrote";
