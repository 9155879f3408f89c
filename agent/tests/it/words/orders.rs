//! Refusals of operators' orders, and their results.

/// An order without a reason.
pub const REASON_REQUIRED: &str = "a reason is required";

/// A silence that is too long.
pub const AT_MOST_30_DAYS: &str = "at most 30 days";

/// An order about nothing.
pub const NO_COMPONENT: &str = "no component \"gpu.9\" here";

/// What the journal has of an order.
pub const ACKNOWLEDGED: &str = "acknowledged by user";

/// What the screen has of an order.
pub const SILENCED: &str = "silenced by user";

/// A reset in the journal.
pub const RESET_ORDERED: &str = "reset by user 0: ticket 7";

/// A GPU that a process uses.
pub const HELD_OPEN: &str = "it is not idle: process 4711 (python) has /dev/nvidia0 open";

/// The same in the journal.
pub const RESET_REFUSED: &str = "a reset by user 0 was refused: it is not idle: process 4711";

/// A GPU that a process uses, by the driver.
pub const WORKED_ON: &str = "it is not idle: by the driver, process 12 works on it";

/// An agent that resets nothing.
pub const RESETS_ARE_OFF: &str = "gpu.reset.mode of the agent's configuration is \"off\"";

/// A GPU that is not there.
pub const UNKNOWN_GPU: &str = "no GPU \"gpu.0000:09:00\" here; known: gpu.0000:01:00";

/// A reset without effect.
pub const RESET_DID_NOT_HELP: &str = "the reset did not help: the driver says that it still needs a reset";

/// The same in the journal.
pub const ORDERED_RESET_FAILED: &str = "a reset by user 0 failed: the reset did not help";

/// The same without an order.
pub const OWN_RESET_FAILED: &str = "a reset by the agent failed: the reset did not help";

/// A reset that the agent leaves.
pub const OWN_RESET_REFUSED: &str = "a reset by the agent was refused: it is not idle: process 4711";

/// A host without the program.
pub const NO_PROGRAM: &str = "nvidia-smi cannot be started: No such file";

/// A program that fails.
pub const PROGRAM_FAILED: &str = "failed (exit status: 19): GPU 0 is in use by another client.";

/// A program that hangs.
pub const PROGRAM_KILLED: &str = "took longer than 0.3 s and was killed";

/// A host with a job.
pub const JOB_RUNS: &str = "job trains runs on this host: stop it first";

/// A job without --allow-inject.
pub const NO_FAULTS_TAKEN: &str = "this job takes no injected faults";

/// GPUs that are not simulated.
pub const REAL_GPUS: &str = "real GPUs are left alone";
