//! Lines of the launcher's terminal.

/// The beginning of each line of a leader, with its epoch at the end.
pub const LEADS: &str = "this host leads";
/// A leader that the store has lost is elected again.
pub const LEADS_AGAIN: &str = "this host leads again (epoch";
/// A follower before it has a journal.
pub const JOINS: &str = "joining the job; its leader is";
/// The last host that was missing is there.
pub const ALL_THERE: &str = "all hosts are there";
/// A launcher without a seat.
pub const IS_SPARE: &str = "waiting as a spare";
/// A launcher that lost its seat.
pub const WAITS_FOR_SEAT: &str = "the job goes on without this host; waiting for a seat";
/// The leader has no lease.
pub const WITHOUT_LEADER: &str = "nothing is decided until a leader is elected";
/// etcd is started by the launcher.
pub const RUNS_ETCD: &str = "coordination: etcd runs on this host";
/// Ranks are stopped because their host no longer takes part.
pub const RANKS_STOPPED: &str = "the ranks of this host are stopped";
/// A launcher with another script, before the name of the host.
pub const OTHER_SCRIPT: &str = "its script differs from that of host ";
/// A launcher with another number of ranks, before the name of the host.
pub const OTHER_RANKS: &str = "it has 2 ranks (--nproc-per-node), host ";
/// A launcher that the leader refuses.
pub const CANNOT_TAKE_PART: &str = "cannot take part: ";
/// A spare ends with its job.
pub const JOB_HAS_ENDED: &str = "the job has ended";
/// The file system of the logs, which holds the journal too.
pub const LOGS_SILENT: &str = "does not answer: the ranks of attempt 1 write to";
/// The same, where logs are copied to it.
pub const LOGS_ARE_KEPT: &str = "and are copied when it answers";
/// Logs that are not in the log directory when the job ends.
pub const LOGS_NOT_COMPLETE: &str = "are not complete";
/// The closing line of a job that succeeded.
pub const ENDED_WELL: &str = "ended with status 0";
/// A log that cannot be written, on the file system of the journal.
pub const CANNOT_BE_WRITTEN: &str = "cannot be written";
/// A directory of checkpoints that is away.
pub const WAITS_FOR_IT: &str = "waiting for it";

/// A section of the report on a failure.
pub const WHAT_WAS_DONE: &str = "What was done:";
/// The title of the stacks on a screen.
pub const STACKS_OF: &str = "stacks of job";
/// The screen asks for the reason of a restart.
pub const RESTART_REASON: &str = "reason:";
/// The screen asks for a restart a second time.
pub const RESTART_SURE: &str = "y restarts";

/// The pace in the line with the progress of a job.
pub const PACE: &str = " steps/s";
/// A row of the table at the end of a job.
pub const GOODPUT_ROW: &str = "  goodput    ";
