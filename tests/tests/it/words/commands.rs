//! Lines of the commands, and errors of the command line.

/// A host that does not answer.
pub const NO_ANSWER: &str = "no answer from";
/// A command that follows events asks again.
pub const TRYING_AGAIN: &str = "trying again";
/// A directory that is no journal.
pub const NO_ENTRIES: &str = "has no entries of a journal";
/// A replay that comes to the same.
pub const SAME_VERDICT: &str = "same verdict and decision";
/// A replay that comes to another domain.
pub const OTHER_DOMAIN: &str = "domain: the hardware's fault, now the training program's fault";
/// A replay that comes to another decision.
pub const OTHER_DECISION: &str = "decision: hand back, now restart";
/// Orders of another user.
pub const MAY_NOT_CONTROL: &str = "user 65534 may not control this job";
/// An injection into no rank.
pub const RANK_DOES_NOT_RUN: &str = "rank 7 does not run";
/// An order without a reason.
pub const REASON_REQUIRED: &str = "a reason is required";
/// A job that needs all its ranks.
pub const NOT_WITH_FEWER: &str = "cannot go on with fewer ranks";
/// A shard that is damaged.
pub const NOT_WHAT_WAS_SEALED: &str = "chunk 1 is not what was sealed";
/// A peer with TLS.
pub const PEER_USES_TLS: &str = "uses TLS and this agent does not";
/// A peer without TLS.
pub const PEER_WITHOUT_TLS: &str = "does not use TLS and this agent does";
/// An agent that keeps no copies.
pub const KEEPS_NO_COPIES: &str = "neither checkpoint.listen nor checkpoint.durable is set";
/// A restore without files of the user.
pub const NO_FILES_LENT: &str = "no files were lent for its 2 shard(s)";
/// A directory that the user may not write.
pub const CANNOT_LEND: &str = "no files can be lent to the agent: Permission denied";
/// The check of the doctor about an agent without rights.
pub const CHECKPOINTS_OF_USERS: &str = "checkpoints of users";
/// Its advice.
pub const LENT_BY_LAUNCHERS: &str = "that launchers lend";
/// The newest step has copies.
pub const ON_TWO_HOSTS: &str = "is on two hosts";
/// A number of hosts that is none.
pub const BAD_NNODES: &str = "--nnodes: 2:1: write a number of hosts";
/// An implementation of logs that is not there.
pub const ONLY_DEFAULT_LOGS: &str = "only default is supported";
/// Fewer GPUs than ranks.
pub const GPU_EACH: &str = "--virtual-local-rank: 2 ranks need a GPU each";
/// An abbreviation of several options.
pub const AMBIGUOUS: &str =
    "ambiguous option: --rdzv could match --rdzv-backend, --rdzv-conf, --rdzv-endpoint, --rdzv-id";
/// Values that torchrun refuses as well, by option.
pub const REFUSED_VALUES: [(&str, &str); 8] = [
    ("--nproc-per-node unknown", "write a number of ranks from 1 up"),
    ("--start-method thread", "spawn, fork, forkserver"),
    ("--monitor-interval 0", "not a number of seconds above 0"),
    ("--numa-binding die", "write node, socket, exclusive or core-complex"),
    ("--signals-to-handle SIGTERM,SIGKILL", "SIGKILL cannot be handled"),
    ("--local-ranks-filter a", "write local ranks such as 0,2"),
    ("--redirects 4", "write 0 (none), 1 (stdout), 2 (stderr) or 3 (both)"),
    ("--shutdown-timeout soon", "not a duration"),
];
