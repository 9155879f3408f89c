//! The thinking of Mainstay: facts become verdicts, verdicts become decisions.
//!
//! Pure by construction: no I/O, no clock, no threads, no async. Time comes in as an argument, so that the same
//! code runs in the agent, in a replay of last night's incident and in a simulation of many thousand ranks.
//!
//! In reading order, each module using only those before it: `time`, `id`, `pci`; `hang` (ranks that do not move);
//! `health`, `verdict`; `kernel` (what the kernel log tells), `observation`, `attention` (what operators
//! said), `freshness`, `testimony`; `entry`, `judged`; `view` (the read
//! side); `settings`; `counter`; `host`, `fabric` (the judges of the host and of its network), `cloud`,
//! `tpu`, `nccl_ras` (those of announcements, of TPUs and of NCCL's word on a job); `parse` (the kernel log), `catalog` (what its lines mean), `device`
//! and `host_log` (the judges of GPUs and of what the
//! kernel reports of the host); `attribute` (whose fault, from logs); `pickle` (what Python programs send); `last_words`, `fingerprint`, `judge`, `witness`,
//! `blame`, `policy`, `ledger`; `job`, which joins them; `replay` and `mask`, for journals of others.
//!
//! Beside failures: `finding` (what is wrong though nothing failed), `straggler` (who makes a job slow), `numbers` (losses,
//! gradient norms, digests), `layout` (how ranks share the model), `running`, which joins them. And `checkpoint`: where copies
//! of steps lie, and what is done with them.
#![forbid(unsafe_code)]

pub mod base;
pub mod checkpoint;
pub mod failure;
pub mod formats;
pub mod hang;
pub mod hardware;
pub mod host;
pub mod hosts;
pub mod model;
pub mod progress;
pub mod recovery;
pub mod view;
