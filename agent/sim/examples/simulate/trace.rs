//! Faults of real servers in place of exponential ones: a job of 400 servers with 0, 1 and 2 % of them as spares, with
//! and without the memory of hosts that failures implicated.

use mainstay_sim::productive::Job as Rates;
use mainstay_sim::trace::{DAYS, Job, Kind, Replayed, SERVERS, faults, replay};

use crate::ettr::{RESTART_ON_ANOTHER_HOST, RESTART_ORDERED, job_of};
use crate::figure;

/// The default of `--rdzv-conf grow_after`, in seconds.
const GROW_AFTER: f64 = 300.0;

pub fn measure() {
    let faults = faults();
    let unplanned = faults.iter().filter(|fault| fault.kind != Kind::Planned).count();
    let rates: Rates<'_> = job_of(f64::from(SERVERS), unplanned as f64 / f64::from(SERVERS) / DAYS, 30.0);
    let job = |spares, remembers| Job {
        spares,
        remembers,
        restart: RESTART_ON_ANOTHER_HOST + rates.communicators,
        ordered_restart: RESTART_ORDERED + rates.communicators,
        grow_after: GROW_AFTER,
        saves_every: rates.saves_every(),
        stall: rates.stall,
        saved_after: rates.saved_after,
    };
    for percent in 0..3 {
        let run = |remembers| replay(job(SERVERS * percent / 100, remembers), &faults);
        let (remembers, forgets) = (run(true), run(false));
        let id = if percent == 2 { "ettr_trace".to_owned() } else { format!("ettr_trace_{percent}_percent") };
        figure(&id, "%", &[remembers.productive * 100.0], None);
        figure(&format!("{id}_without_memory"), "%", &[forgets.productive * 100.0], None);
        let Replayed { exclusions, confirmed, confirmed_soon, .. } = remembers;
        eprintln!(
            "{id}: {} failures, {} without memory; {exclusions} exclusions, {confirmed} of them confirmed, \
             {confirmed_soon} within 14 days",
            remembers.failures, forgets.failures
        );
        if percent == 2 && exclusions > 0 {
            let right = f64::from(confirmed) / f64::from(exclusions);
            figure("trace_exclusions_right", "%", &[right * 100.0], None);
        }
    }
}
