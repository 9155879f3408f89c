//! How often live hosts are judged lost.
//!
//! Losses are too rare to count on healthy links: at one lost packet in a thousand, nothing happens in any time that
//! can be simulated. The example counts on links that lose 5 to 20 % and computes the rates for better ones: a
//! silence of 2 s needs four losses of one packet in a row (200, 400, 800 and 1600 ms), so the rate falls at least
//! with the fourth power of the loss.

use mainstay_sim::silence::{Kind, SilenceCounts, watch};

use crate::figure;

const HOSTS: f64 = 12_500.0;
const HOURS_PER_YEAR: f64 = 8_766.0;

/// The loss on a usual link between hosts: far above what data centers report, so that the result is a safe upper
/// estimate.
const USUAL_LOSS: f64 = 0.001;

/// The share of hosts whose link loses 5 % at any time.
const BAD_LINKS: f64 = 1e-4;

/// The delay of heartbeats on a machine on which ranks use all processors.
const LATE: (f32, f32) = (2.0, 1.2);

/// One stall per day, of 100 ms on average, as when memory is compacted or a virtual machine is moved.
const STALLS: (f32, f32) = (1.0, 100.0);

pub fn measure(quick: bool) {
    let hours = if quick { 4_000 } else { 60_000 };
    let rate = |loss: f32, hours: u64| {
        let seen = watch(Kind { loss, late: LATE, stalls: STALLS }, hours, u64::from(loss.to_bits()));
        eprintln!("loss {loss}: {seen:?} in {hours} host-hours");
        (seen, hours as f64)
    };
    let mut at_5 = 0.0;
    for (loss, hours) in [(0.2, hours / 20), (0.1, hours / 4), (0.05, hours)] {
        let (SilenceCounts { suspected, lost }, hours) = rate(loss, hours);
        let id = format!("false_lost_loss_{:.0}", loss * 100.0);
        let [least, most] = bounds(lost).map(|count| count / hours * HOURS_PER_YEAR);
        let value = lost as f64 / hours * HOURS_PER_YEAR;
        figure(&id, "per host and year", &[least, value, most], None);
        let asked = suspected as f64 / hours;
        figure(&format!("suspected_loss_{:.0}", loss * 100.0), "per host and hour", &[asked], None);
        at_5 = most;
    }
    // A busy machine whose link loses nothing.
    let (healthy, hours) = rate(0.0, hours);
    let [_, most] = bounds(healthy.lost).map(|count| count / hours * HOURS_PER_YEAR);
    eprintln!("without loss: at most {most:.4} per host and year (95 %), as far as that was simulated");
    let usual = at_5 * (USUAL_LOSS / 0.05).powi(4);
    figure("false_lost_per_year", "hosts of 12,500", &[usual * HOSTS], None);
    figure("false_lost_bad_links", "hosts of 12,500 and year", &[at_5 * HOSTS * BAD_LINKS], None);
}

/// The 95 % confidence interval of the mean of a count: the chi-squared distribution in the approximation of Wilson
/// and Hilferty.
fn bounds(count: u64) -> [f64; 2] {
    let count = count as f64;
    let at = |count: f64, z: f64| {
        if count <= 0.0 {
            0.0
        } else {
            count * (1.0 - 1.0 / (9.0 * count) + z / (3.0 * count.sqrt())).powi(3)
        }
    };
    let least = at(count, -1.96);
    let most = if count == 0.0 { 3.0 } else { at(count + 1.0, 1.96) };
    [least, most]
}
