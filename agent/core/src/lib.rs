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

pub mod attention;
pub mod attribute;
pub mod blame;
pub mod catalog;
pub mod checkpoint;
pub mod cloud;
pub mod counter;
pub mod dcgm;
pub mod device;
pub mod entry;
pub mod fabric;
pub mod finding;
pub mod fingerprint;
pub mod forwarded;
pub mod freshness;
pub mod hang;
pub mod health;
pub mod host;
pub mod host_log;
pub mod hosts;
pub mod id;
pub mod incident_report;
pub mod job;
pub mod judge;
pub mod judged;
pub mod kernel;
pub mod last_words;
pub mod layout;
pub mod learned;
pub mod ledger;
pub mod lemon;
pub mod line_times;
pub mod markdown;
pub mod mask;
pub mod nccl_ras;
pub mod numbers;
pub mod nvrx;
pub mod observation;
pub mod parse;
pub mod pci;
pub mod pickle;
pub mod policy;
pub mod preflight;
pub mod repeats;
pub mod replay;
pub mod rounds;
pub mod running;
pub mod settings;
pub mod standing;
pub mod straggler;
pub mod surroundings;
pub mod testimony;
pub mod time;
pub mod timeline;
pub mod tpu;
pub mod unrunnable;
pub mod verdict;
pub mod view;
mod wait_channel;
pub mod witness;
