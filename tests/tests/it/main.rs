//! End-to-end scenarios: the built program with real ranks.
//!
//! One executable for all of them: each module is a subject.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a panic in a test is its report")]

mod acceptance;
mod agent;
mod asking;
mod checkpoint_torch;
mod command_line;
mod commands;
mod corruption;
mod ddp;
mod documents;
mod drill;
mod drills;
mod exception;
mod exhausted;
mod exit_status;
mod failures_on_other_hosts;
mod gpus;
mod graceful;
mod hang;
mod heartbeats;
mod hosts;
mod in_process;
mod kill;
mod lineage;
mod nvrx;
mod oom;
mod orbax;
mod orders;
mod orphans;
mod output;
mod paths;
mod peers;
mod pods;
mod policy;
mod ports;
mod sealing;
mod served_logs;
mod several_hosts;
mod silent_mounts;
mod slow;
mod soak;
mod stop;
mod torch;
mod torchrun;
mod torchrun_rendezvous;
mod trainers;
mod undying;
mod unit_boot;
mod unit_user;
mod verdicts;
mod warm;
mod words;
mod world;
mod zero_code;
