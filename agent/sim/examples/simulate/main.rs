//! Measures jobs of 100,000 ranks and prints one JSON object per line. `cargo xtask bench simulate` runs it and
//! collects the figures. Arguments: `quick` for fewer samples, and the parts to measure (`leader`, `lost`, `ettr`, `trace`);
//! all parts if none is named.

mod ettr;
mod leader;
mod lost;
mod trace;

use std::io::Write;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let quick = words.iter().any(|word| word == "quick");
    let parts = ["ettr", "leader", "lost", "trace"];
    let named = |part: &str| words.iter().any(|word| word == part);
    let all = !parts.iter().any(|part| named(part));
    if all || named("leader") {
        leader::measure(quick);
    }
    if all || named("lost") {
        lost::measure(quick);
    }
    if all || named("ettr") {
        ettr::measure(quick);
    }
    if all || named("trace") {
        trace::measure();
    }
}

/// Prints a figure: the median of samples, with the minimum and maximum.
fn figure(id: &str, unit: &str, samples: &[f64], peer: Option<f64>) {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let (Some(least), Some(most)) = (sorted.first(), sorted.last()) else { return };
    let n = sorted.len();
    let value = (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0;
    let peer = peer.map_or("null".to_owned(), |peer| format!("{peer:.4}"));
    println!(
        r#"{{"id": "simulate.{id}", "value": {value:.6}, "unit": "{unit}", "n": {n}, "min": {least:.6}, "max": {most:.6}, "peer_value": {peer}}}"#
    );
    // A closed pipe does not affect the measurement.
    let _ = std::io::stdout().flush();
}
