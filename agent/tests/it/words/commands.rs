//! Lines of the commands.

/// The advice of a report.
pub const TO_DO_NEXT: &str = "What to do next";

/// Nothing to judge.
pub const NO_FILE: &str = "no file in this directory";

/// A file that is not read.
pub const BZIP2: &str = "rank0.log.bz2 is compressed with bzip2";

/// A bundle without a failure.
pub const NO_FAILURE_THERE: &str = "no failure is recorded there";

/// The advice about a collective.
pub const FIND_OUT_WHY: &str = "Find out why rank 2 did not enter the operation";

/// What happened.
pub const KILLED: &str = "rank 1 was killed by SIGKILL";

/// A target that is nothing.
pub const NOR_A_JOB: &str = "nor a job";

/// A job without a failure.
pub const NO_FAILURE_IN_RUN: &str = "exp-2: no failure in this run";

/// A journal that is not there.
pub const NO_DIRECTORY: &str = "/nowhere is not a directory";

/// A command that follows events.
pub const GOING_ON_AFTER_4: &str = "trying again, going on after event 4";

/// What DCGM reported.
pub const DCGM_EVIDENCE: &str = "DCGM error 4: Detected 1 volatile";

/// The heading of the evidence.
pub const SEEN: &str = "What was seen";

/// Evidence.
pub const NOTE_OF_RANK_3: &str = "exit note of rank 3";

/// The heading of the counter-evidence.
pub const AGAINST: &str = "Evidence against it";

/// The heading of what is missing.
pub const WOULD_CHANGE: &str = "What would change this";

/// The advice before a decision.
pub const WAIT_FOR_DECISION: &str = "Wait for the decision";

/// A failure of another user.
pub const FOR_ITS_USER: &str = "for its user and for operators";
