//! The share of time in which a job trains (effective training time ratio), compared with a scheduler that restarts
//! the whole job.
//!
//! Rates: 419 unexpected and 47 planned interruptions of 16,384 GPUs in 54 days (Llama 3, arXiv:2407.21783, table 5);
//! 6.5e-3 failures per host and day (Meta RSC, arXiv:2410.21680). Kinds: table 5. Hangs: 9.9 % (ByteRobust,
//! arXiv:2509.16293). Communicators: below 30 s on more than 10,000 GPUs (MegaScale, NSDI'24), 200 s on 98,000
//! (FT-HSDP, arXiv:2602.00277). The scheduler: 10 minutes to start again (RSC: 5 to 20), 129 s to load and 0.59 s and
//! 51 s to save (ByteCheckpoint, 405B on 8,960 GPUs), hangs detected after NCCL's 10 minutes. Our times are from
//! `docs/benchmarks.md`.

use mainstay_sim::productive::{Failure, Job};

use crate::figure;

/// Interruptions per host and day.
const LLAMA: f64 = 466.0 / 54.0 / 2048.0;
const RSC: f64 = 6.5e-3;

/// Of 466 interruptions: those for which a new process on the same host is enough (software, NCCL's watchdog,
/// dependencies, SDC), and maintenance.
const SOFTWARE: f64 = (54.0 + 7.0 + 2.0 + 6.0) / 466.0;
const HANGS: f64 = 0.099;

const STEP: f64 = 6.0;

/// The state of a rank in bytes: 405 billion parameters of 16 bytes over 16,384 GPUs.
const BYTES: f64 = 405e9 * 16.0 / 16_384.0;

/// The leader's part of a round of 12,500 hosts in seconds, the goal of `simulate.round_12500`; less for fewer hosts.
const ROUND: f64 = 2.0;

/// The goals of `hosts.lost_to_verdict` and `hosts.swap_added`; `restart.kill_to_step`; `detect.hang` plus 1.5 steps.
/// In seconds.
const LOST: f64 = 3.0;
const SWAP: f64 = 2.0;
const RESTART: f64 = 0.15;
const HANG: f64 = 1.5 * STEP + 1.9;

/// Copies to a peer and back with TLS (`checkpoint.replicate_tls`, `checkpoint.restore_peer_fresh`) and memcpy, in
/// bytes per second of a host. A save takes 0.55 of memcpy, a load from memory 1.05.
const REPLICATE: f64 = 2.8e9;
const RESTORE_PEER: f64 = 1.8e9;
const MEMCPY: f64 = 16e9;
const RANKS: f64 = 8.0;

const LOAD: f64 = BYTES / MEMCPY * 1.05;

/// From a failure on a host, or from the stop of ranks that have saved, until all ranks exist again; a spare gets its
/// state from a peer.
pub const RESTART_ON_ANOTHER_HOST: f64 = LOST + RESTART_ORDERED;
pub const RESTART_ORDERED: f64 = ROUND + SWAP + RESTART + RANKS * BYTES / RESTORE_PEER;

const OURS: [Failure; 3] = [
    Failure { share: SOFTWARE, detect: 0.001, restart: ROUND + RESTART + LOAD },
    Failure { share: HANGS, detect: HANG, restart: ROUND + RESTART + LOAD },
    Failure { share: 1.0 - SOFTWARE - HANGS, detect: LOST, restart: RESTART_ORDERED },
];

/// A job on this many hosts with this many failures per host and day.
pub fn job_of(hosts: f64, rate: f64, communicators: f64) -> Job<'static> {
    Job {
        hosts,
        rate,
        failures: &OURS,
        communicators,
        stall: 0.55 * BYTES / MEMCPY,
        saved_after: RANKS * BYTES / REPLICATE,
        step: STEP,
    }
}

pub fn measure(quick: bool) {
    let days = if quick { 200.0 } else { 2_000.0 };
    let theirs = [
        Failure { share: 1.0 - HANGS, detect: 10.0, restart: 600.0 + 129.0 },
        Failure { share: HANGS, detect: 600.0, restart: 600.0 + 129.0 },
    ];
    for (id, job) in [
        ("ettr_16k", job_of(2_048.0, LLAMA, 30.0)),
        ("ettr_16k_rsc", job_of(2_048.0, RSC, 30.0)),
        ("ettr_100k", job_of(12_500.0, LLAMA, 30.0)),
        ("ettr_100k_rsc", job_of(12_500.0, RSC, 30.0)),
        ("ettr_100k_communicators_200s", job_of(12_500.0, LLAMA, 200.0)),
    ] {
        let scheduler = Job { failures: &theirs, stall: 0.59, saved_after: 51.0, ..job };
        let runs =
            |job: &Job<'_>| -> Vec<f64> { (0..9).map(|seed| job.productive(days, seed) * 100.0).collect() };
        let mut peer = runs(&scheduler);
        peer.sort_unstable_by(f64::total_cmp);
        figure(id, "%", &runs(&job), peer.get(4).copied());
        eprintln!("{id}: a failure each {:.0} s, a save each {:.0} s", job.apart(), job.saves_every());
    }
}
