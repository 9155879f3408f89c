//! What a beat costs here: `cargo run --release -p mainstay-client --example beat_cost`.
//!
//! Prints one JSON object: the median over many batches of back-to-back calls, in ns per call. Beats go to the page that
//! `MAINSTAY_PAGE` names, or to one made for the purpose in `/dev/shm`.

use std::error::Error;
use std::time::Instant;

use mainstay_client::{Client, Measures};
use mainstay_heartbeat::{PageSpec, format};

const BATCHES: usize = 501;
const CALLS: u32 = 2000;

fn main() -> Result<(), Box<dyn Error>> {
    let made = std::path::PathBuf::from(format!("/dev/shm/mainstay-beat-cost-{}", std::process::id()));
    let client = match Client::from_env() {
        client if client.is_active() => client,
        _ => {
            let spec = PageSpec {
                job: "beat-cost",
                rank: 0,
                local_rank: 0,
                world_size: 1,
                attempt: 0,
                boot_id: [0; 16],
                creator_pid: std::process::id(),
                created_mono_ns: 0,
            };
            std::fs::write(&made, format(&spec))?;
            let client = Client::open(&made);
            std::fs::remove_file(&made)?;
            client?
        }
    };
    let section = client.intern("forward");
    let measures = Measures { loss: Some(1.5), grad_norm: Some(0.5), digest: Some(7) };
    let disabled = Client::disabled();

    println!(
        "{{\"heartbeat_ns\": {:.1}, \"step_ns\": {:.1}, \"step_with_ns\": {:.1}, \"section_pair_ns\": {:.1}, \
         \"disabled_ns\": {:.2}}}",
        median_ns(|_| client.beat()),
        median_ns(|step| client.step(step)),
        median_ns(|step| client.step_with(step, measures)),
        median_ns(|_| {
            client.enter(section);
            client.leave(section);
        }),
        median_ns(|step| std::hint::black_box(&disabled).step(step)),
    );
    Ok(())
}

fn median_ns(mut call: impl FnMut(u64)) -> f64 {
    let mut batches: Vec<f64> = (0..BATCHES)
        .map(|_| {
            let start = Instant::now();
            for step in 0..CALLS {
                call(step.into());
            }
            start.elapsed().as_nanos() as f64 / f64::from(CALLS)
        })
        .collect();
    batches.sort_by(f64::total_cmp);
    batches[BATCHES / 2]
}
