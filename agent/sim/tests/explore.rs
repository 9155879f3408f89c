use mainstay_core::straggler::{Change, Judge, Limits, Peers, Row, Slow};
use mainstay_sim::random::Random;

#[derive(Clone, Copy)]
struct Case { ranks: usize, noise: f32, apart: f32, outliers: f32, lost: f32, drift: f32, every: u64, host_noise: f32, ar: f32 }

fn run(case: Case, slow: Option<(usize, f32, u64)>, steps: u64, seed: u64) -> (Option<u64>, Vec<(Slow, u64, f32)>) {
    let mut r = Random::new(seed);
    let offs: Vec<f32> = (0..case.ranks).map(|_| r.normals().0 * case.apart).collect();
    let mut judge = Judge::new(Peers::alike(case.ranks), Limits::default());
    let mut found = None; let mut wrong = Vec::new(); let mut out = Vec::new();
    let mut state = vec![0.0f32; case.ranks];
    for step in 1..=steps {
        let common = (step as f32 * case.drift).exp() * (1.0 + 0.1 * (step as f32 / 7.0).sin());
        let times: Vec<f32> = (0..case.ranks).map(|rank| {
            state[rank] = case.ar * state[rank] + (1.0 - case.ar * case.ar).sqrt() * r.normals().0 * case.noise;
            let mut x = offs[rank] + state[rank];
            if r.happens(case.outliers) { x += 0.2 + r.unit(); }
            if case.every > 0 && step % case.every == 0 && rank == 0 { x += 1.5; }
            if let Some((who, by, from)) = slow { if who == rank && step >= from { x += by.ln_1p(); } }
            if r.happens(case.lost) { f32::NAN } else { common * x.exp() }
        }).collect();
        out.clear();
        judge.step(Row { step, self_times: &times, waits: &[], took: f32::NAN }, &mut out);
        for c in &out { if let Change::Found(f) = c {
            match (slow, f.slow) { (Some((who, _, from)), Slow::Rank(told)) if told as usize == who && step >= from => { found.get_or_insert(step - from + 1); }
                _ => wrong.push((f.slow, step, f.ratio)) }
        } }
    }
    (found, wrong)
}

#[test]
fn explore() {
    let usual = Case { ranks: 8, noise: 0.01, apart: 0.002, outliers: 0.002, lost: 0.0, drift: 0.0, every: 0, host_noise: 0.0, ar: 0.0 };
    let _ = usual.host_noise;
    for (name, case) in [("usual", usual), ("lost", Case { lost: 0.2, ..usual }), ("outliers", Case { outliers: 0.02, ..usual }), 
        ("ckpt", Case { every: 10, ..usual }), ("noise 3%", Case { noise: 0.03, ..usual }), ("ar .7", Case { ar: 0.7, ..usual }), ] {
        for ranks in [2, 3, 4, 8, 32] {
            let case = Case { ranks, ..case };
            let n = 40;
            let mut steps = Vec::new(); let mut missed = 0; let mut wrong = 0; let mut jobs = 0; let mut example = None;
            for seed in 0..n {
                let (f, w) = run(case, Some((seed as usize % ranks, 0.05, 1 + (seed % 4) * 20)), 120, seed);
                match f { Some(s) => steps.push(s), None => missed += 1 }
                wrong += w.len(); if let Some(e) = w.first() { example = Some(*e); }
            }
            let mut healthy = 0;
            for seed in 0..n { let (_, w) = run(case, None, 400, 1000 + seed); if !w.is_empty() { healthy += w.len(); jobs += 1; example = Some(w[0]); } }
            steps.sort();
            let q = |p: f32| steps.get(((steps.len() as f32 - 1.0) * p) as usize).copied().unwrap_or(0);
            println!("{name:10} {ranks:3} ranks: missed {missed}, steps p50 {} p90 {} p99 {} max {}, within 10: {}, wrong {wrong}; healthy false {healthy} in {jobs} jobs {example:?}", q(0.5), q(0.9), q(0.99), q(1.0), steps.iter().filter(|s| **s <= 10).count());
        }
    }
}
