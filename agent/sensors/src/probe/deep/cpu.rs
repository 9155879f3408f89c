//! Every CPU computes a product of matrices with an exactly known result. A core that sometimes computes wrong results is
//! rare, and silently spoils a whole training run.

use std::time::{Duration, Instant};

use mainstay_health::host::preflight::deep::{Measured, Probed, What};

use mainstay_sys::affinity;

/// Rows and columns.
const SIZE: usize = 96;
/// How long each CPU computes.
const WINDOW: Duration = Duration::from_millis(300);

pub(super) fn probe() -> Probed {
    let cpus = affinity::allowed();
    if cpus.is_empty() {
        return Probed::Untried("the kernel does not report its CPUs".to_owned());
    }
    let count = cpus.len();
    let workers: Vec<_> = cpus.into_iter().map(|cpu| (cpu, std::thread::spawn(move || work(cpu)))).collect();
    let (mut wrong, mut slowest) = (Vec::new(), 0.0_f64);
    for (cpu, worker) in workers {
        match worker.join() {
            Ok(Ok(seconds)) => slowest = slowest.max(seconds),
            Ok(Err(())) => wrong.push(cpu.to_string()),
            Err(_) => return Probed::Untried(format!("the worker on CPU {cpu} crashed")),
        }
    }
    if !wrong.is_empty() {
        return Probed::Wrong(format!("CPU {} computed a wrong product of matrices", wrong.join(", ")));
    }
    Probed::Done(vec![
        Measured { what: What::Product, value: slowest },
        Measured { what: What::Cpus, value: count as f64 },
    ])
}

/// Measures the fastest product on this CPU, in seconds.
fn work(cpu: usize) -> Result<f64, ()> {
    // If the CPU was removed meanwhile, the product is computed elsewhere.
    let _ = affinity::pin(cpu);
    let (left, right) = (values(31, 17, 7), values(13, 11, 5));
    let expected = exact(&left, &right);
    let (began, mut fastest) = (Instant::now(), f64::INFINITY);
    while began.elapsed() < WINDOW {
        let round = Instant::now();
        let found = product(std::hint::black_box(&left), std::hint::black_box(&right));
        fastest = fastest.min(round.elapsed().as_secs_f64());
        if found != expected {
            return Err(());
        }
    }
    Ok(fastest)
}

/// Small integers: their products and sums are exact in floating point.
fn values(row: usize, column: usize, modulus: usize) -> Vec<f64> {
    (0..SIZE * SIZE).map(|index| ((index / SIZE * row + index % SIZE * column) % modulus) as f64).collect()
}

fn product(left: &[f64], right: &[f64]) -> Vec<f64> {
    let mut result = vec![0.0; SIZE * SIZE];
    for row in 0..SIZE {
        for inner in 0..SIZE {
            let factor = left[row * SIZE + inner];
            let columns = &right[inner * SIZE..(inner + 1) * SIZE];
            for (sum, value) in result[row * SIZE..(row + 1) * SIZE].iter_mut().zip(columns) {
                *sum += factor * value;
            }
        }
    }
    result
}

/// The same in integers, with other units of the CPU.
fn exact(left: &[f64], right: &[f64]) -> Vec<f64> {
    let whole = |values: &[f64]| values.iter().map(|value| *value as i64).collect::<Vec<i64>>();
    let (left, right) = (whole(left), whole(right));
    let cell = |index: usize| {
        let (row, column) = (index / SIZE, index % SIZE);
        (0..SIZE).map(|inner| left[row * SIZE + inner] * right[inner * SIZE + column]).sum::<i64>() as f64
    };
    (0..SIZE * SIZE).map(cell).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_of_computing_agree_and_a_slip_shows() {
        let (left, right) = (values(31, 17, 7), values(13, 11, 5));
        let mut found = product(&left, &right);
        assert_eq!(found, exact(&left, &right));
        found[4711] += 1.0;
        assert_ne!(found, exact(&left, &right));
    }
}
