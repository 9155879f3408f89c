//! Hangs: ranks that are alive and make no progress. Detected by counters and not by a clock, located by who waits
//! for whom.
//!
//! In reading order: `sketch` (how long something usually takes), `phase` (what a rank can be doing, and the limits),
//! `activity` (what its processes do), `rank`, `counters` (collective counters in flat vectors), `wait_for` (who
//! holds up whom), `finding` (the conclusions), `stacks` (groups ranks by stack), `locate` (from one snapshot),
//! `watch` (judges by heartbeats), `idle` (judges by activity), `judge` (the judge of a job, which combines both),
//! `elsewhere` (ranks of other hosts). Then the evidence that is collected once nothing moves: `flight` (PyTorch's
//! recorder), `witness`.
#![forbid(unsafe_code)]

mod activity;
mod collective_counters;
mod counters;
mod finding;
pub mod flight;
mod idle;
mod judge;
mod locate;
pub mod nccl_ras;
mod phase;
mod rank;
mod remote_ranks;
mod sketch;
mod stacks;
mod wait_for;
mod watch;

pub use activity::{Activity, Probe, ProcessState};
pub use collective_counters::{SourceCounters, waits, weigh};
pub use counters::Count;
pub use finding::{HangStatus, Suspicion};
pub use idle::{ActivitySample, Idle};
pub use judge::HangJudge;
pub use mainstay_model::hang::{ACTIVITY, Hang, HangKind, OUTPUT_LINES, PlaceGroup, Waits, listed};
pub use phase::{Class, Limit, LimitFrom, Limits, PhaseId, PhaseMemory, Phases};
pub use rank::RankSample;
pub use remote_ranks::RankSeen;
pub use sketch::Sketch;
pub use stacks::{fold, innermost_of_faulthandler, innermost_of_py_spy, innermost_of_worker_server, refine};
pub use watch::Watch;
