//! Lines of the launcher's terminal.

/// The first leader of a job, before it has a journal.
pub const LEADS: &str = "this host leads the job";
/// The beginning of each line of a leader, with its epoch at the end.
pub const LEADS_SINCE: &str = "this host leads";
/// A leader that the store has lost is elected again.
pub const LEADS_AGAIN: &str = "this host leads again (epoch";
/// A follower before it has a journal.
pub const JOINS: &str = "joining the job; its leader is";
/// The last host that was missing is there.
pub const ALL_THERE: &str = "all hosts are there";
/// A launcher without a seat.
pub const IS_SPARE: &str = "waiting as a spare";
/// A spare is asked to end.
pub const SPARE_LEAVES: &str = "it leaves the job";
/// A spare ends with its job.
pub const JOB_HAS_ENDED: &str = "the job has ended";
/// The leader has no lease.
pub const WITHOUT_LEADER: &str = "nothing is decided until a leader is elected";
/// etcd is started by the launcher.
pub const RUNS_ETCD: &str = "coordination: etcd runs on this host";
/// Ranks are stopped because their host no longer takes part.
pub const RANKS_STOPPED: &str = "the ranks of this host are stopped";
/// A host that was lost comes back.
pub const REFUSED_AS_LOST: &str =
    "the ranks of this host are stopped: the leader refuses this host: it was lost";
/// A host that was lost, in each line about it.
pub const IS_LOST: &str = "is lost";
/// The result of a restart.
pub const TRAINS_AGAIN: &str = "training again";
/// A launcher of another size of job.
pub const OTHER_NNODES: &str = "it was started with --nnodes 3, the leader with 2";
/// A launcher with another script, before the name of the host.
pub const OTHER_SCRIPT: &str = "its script differs from that of host ";
/// A launcher with another number of ranks, before the name of the host.
pub const OTHER_RANKS: &str = "it has 2 ranks (--nproc-per-node), host ";
/// What a job whose hosts do not come advises.
pub const CHECK_MISSING_HOSTS: &str = "Check on the missing hosts";
/// A launcher that the leader refuses.
pub const CANNOT_TAKE_PART: &str = "cannot take part: ";
/// The end of that line: how many shards were there, and how many came.
pub const OF_THIS_HOSTS_SHARDS: &str = "of this host's shards ";
/// After that: no shard came from another host.
pub const NONE_CAME: &str = " were here, 0 came";
/// A spare with a seat.
pub const HAS_SEAT_1: &str = "this host joined the job: it is node rank 1 of 2";
/// Shards that other ranks saved.
pub const FOR_REPLICATED: &str = "is on this host for load(replicated=True)";
/// Copies between launchers.
pub const COPIES_ENCRYPTED: &str = "a copy in the memory of another host of the job, encrypted on their way";
/// Processes of ranks that wait in them get other numbers.
pub const NEW_PROCESSES: &str = "ranks that wait in their processes get new ones";
/// The file system of the logs.
pub const LOGS_SILENT: &str = "does not answer: the ranks of attempt 1 write to";
/// The same, where logs are copied to it.
pub const LOGS_ARE_KEPT: &str = "and are copied when it answers";
/// Logs that are not in the log directory when the job ends.
pub const LOGS_NOT_COMPLETE: &str = "are not complete";
/// The file system of the working directory.
pub const WORK_SILENT: &str = "its file system or the working directory does not answer";
/// The closing line of a job that succeeded.
pub const ENDED_WELL: &str = "ended with status 0";
/// A log that cannot be written.
pub const CANNOT_BE_WRITTEN: &str = "cannot be written";
/// A rank that ignores signals.
pub const KILLED_LATE: &str = "did not end in time and is killed";
/// A rank that the kernel does not end.
pub const DOES_NOT_DIE: &str = "did not exit after SIGKILL";
/// A signal to save that no rank would notice.
pub const NOBODY_SAVES: &str = "no rank checks for save requests";
/// Output that nobody read.
pub const NOT_SHOWN: &str = "was not shown";
/// How much of the launcher's own lines was not read.
pub const BYTES_ON_STDERR: &str = "bytes on standard error";
/// What was learned of a job is damaged.
pub const LEARNED_DAMAGED: &str = "the learned values of this job cannot be used and are skipped";
/// Why the launcher has no agent, before the reason.
pub const NO_AGENT: &str = "agent: none: ";
/// There is no agent's socket.
pub const NO_SOCKET: &str = "no socket at";
/// Nothing listens at the agent's socket.
pub const NOT_LISTENING: &str = "no agent listens there";
/// The agent belongs to a user that is not trusted.
pub const FOREIGN_AGENT: &str = "is served by user 65534";
/// A checkpoint that is not whole.
pub const STEP_20_NOT_OFFERED: &str = "step 20 is not offered";
/// A checkpoint that is being written.
pub const NOT_FINISHED: &str = "its writer has not finished it";
/// No checkpoint is left to go on from.
pub const NONE_LEFT: &str = "no whole checkpoint is left";
/// No checkpoint was found in the beginning.
pub const NONE_KNOWN: &str = "no whole step is known";
/// A directory of checkpoints that is away.
pub const WAITS_FOR_IT: &str = "waiting for it";
/// A directory of checkpoints that is gone.
pub const MAKE_IT: &str = "make it, and start the job again";
/// A checkpoint of no known library.
pub const UNSEALED: &str = r#""model.pt" is not sealed, because its name is of no known kind"#;
/// Checkpoints are sealed where they are.
pub const IN_PLACE: &str = "out (sealed in place; no agent keeps a copy elsewhere)";
/// A run of another directory cannot be resumed without an agent.
pub const NO_AGENT_FOR_RUN: &str = "no agent that keeps checkpoints of other directories answers";
/// A launcher that srun did not start.
pub const NOT_OF_SRUN: &str = "but srun did not start this launcher";
/// What a launcher takes from the scheduler.
pub const FROM_ENVIRONMENT: &str = "from the environment";

/// A section of the report on a failure.
pub const WHAT_WAS_DONE: &str = "What was done:";
/// The title of the stacks on a screen.
pub const STACKS_OF: &str = "stacks of job";
/// The screen asks for the reason of a restart.
pub const RESTART_REASON: &str = "reason:";
/// The screen asks for a restart a second time.
pub const RESTART_SURE: &str = "y restarts";

/// A leader that was replaced meanwhile.
pub fn another_leads(epoch: u64) -> String {
    format!("leads the job now (epoch {epoch})")
}
/// The pace in the line with the progress of a job.
pub const PACE: &str = " steps/s";
/// A row of the table at the end of a job.
pub const GOODPUT_ROW: &str = "  goodput    ";
