//! The pure core of Mainstay: facts become verdicts, and verdicts become decisions.
//!
//! ```text
//!  what others write ──► formats ─┐
//!                                 ▼
//!  readings ──► hardware, host ──► health of components ─┐
//!  steps ─────► hang, progress ──► hangs, findings ──────┼─► failure ──► recovery ──► orders
//!  exits, logs ──────────────────────────────────────────┘   verdict     decision
//!  saved steps ─► checkpoint ──► placement, restore, retention
//!                                  all of it as entries of the journal ──► view
//! ```
//!
//! Each room uses only the rooms before it in this list. A test checks the order and that no two files depend on each other.
//!
//! | room | what it is |
//! |---|---|
//! | [`base`] | time, identifiers, units, counters, text escaping; no domain knowledge |
//! | [`model`] | the words of the journal: facts, findings, verdicts, health. Data only |
//! | [`formats`] | text and bytes that others write, read into typed values |
//! | [`hardware`] | GPUs, TPUs, DCGM, and what their error codes mean |
//! | [`host`] | operating system, network, cloud notices, kernel reports, preflight |
//! | [`hang`] | ranks that are alive and make no progress |
//! | [`progress`] | steps of a job: stragglers, numeric anomalies, goodput |
//! | [`failure`] | why an attempt failed: root rank, attribution, evidence of the host |
//! | [`checkpoint`] | where copies of steps are, what is restored from where, what may be deleted |
//! | [`recovery`] | the job's state machine, the policy, restarts in process |
//! | [`view`] | the read side: what is shown of a host and its jobs, incident reports, replays |
//!
//! Deliberately absent: I/O, clocks, threads and async. Time is an argument. The same code runs in the agent, in the replay
//! of a recorded incident and in a simulation of many thousand ranks.
#![forbid(unsafe_code)]

pub mod base;
pub mod checkpoint;
pub mod failure;
pub mod formats;
pub mod hang;
pub mod hardware;
pub mod host;
pub mod model;
pub mod progress;
pub mod recovery;
pub mod view;
