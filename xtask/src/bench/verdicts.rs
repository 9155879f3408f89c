//! The live fault matrix: real training programs (`tests/healthy/programs`) with faults of known cause
//! (`tests/healthy/faults`) under `mainstay run`. The first verdict and the first decision of each are compared
//! with the truth.
//!
//! Each cell is written to `target/bench/verdicts/cells.jsonl` as soon as it is measured.

mod cell;
mod score;
mod table;

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::Write;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::figure::{Figure, Report};
use crate::build;
use crate::healthy;
use crate::paths;
use crate::progress::Progress;
use cell::{Bench, Seen};
pub use table::Part;
use table::{Cell, Table};

/// Jobs at a time: each has one rank or two.
const AT_ONCE: usize = 2;
/// With `--quick` no cell starts after this time.
const QUICK: Duration = Duration::from_secs(150);

/// Runs the cells whose name contains one of the words of `only`, one part of them, or a sample.
pub fn measure(progress: &Progress, only: &str, part: Option<Part>, quick: bool, report: &mut Report) {
    report.part("verdicts", figures(progress, only, part, quick));
}

fn figures(progress: &Progress, only: &str, part: Option<Part>, quick: bool) -> Result<Vec<Figure>> {
    build::release(progress)?;
    let bench = Bench::new(healthy::python(progress)?)?;
    let table = Table::read()?;
    let mut cells = match part {
        _ if quick => table.sample(),
        Some(part) => table.part(part),
        None => table.cells(),
    };
    let wanted = |name: &str| only.split(',').any(|only| name.contains(only));
    cells.retain(|cell| wanted(&cell.name()) && bench.can_run(cell));
    anyhow::ensure!(!cells.is_empty(), "no cell has {only:?} in its name and can run here");
    let deadline = quick.then(|| Instant::now() + QUICK);
    let all = cells.len();
    let seen = progress.step(&format!("{all} faults in real programs"), || run(&bench, cells, deadline))?;
    let started = seen.len();
    if started < all {
        progress.note(&format!("{} of {all} were not started: three minutes were over", all - started));
    }
    let (survived, seen): (Vec<_>, Vec<_>) = seen.into_iter().partition(|(_, seen)| seen.survived);
    if !survived.is_empty() {
        let names: Vec<String> = survived.iter().map(|(cell, _)| cell.name()).collect();
        progress.note(&format!("Not counted, as the program caught the fault: {}", names.join(", ")));
    }
    score::print(&seen);
    Ok(score::figures(&seen))
}

/// Runs the cells, some at a time, until all are done or time is over.
fn run(bench: &Bench, cells: Vec<Cell>, deadline: Option<Instant>) -> Result<Vec<(Cell, Seen)>> {
    let folder = paths::target().join("bench/verdicts");
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let path = folder.join("cells.jsonl");
    let file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
    let (waiting, written) = (Mutex::new(VecDeque::from(cells)), Mutex::new((file, Vec::new())));
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(cell) = next(&waiting, deadline) {
                    let seen = bench.run(&cell);
                    let Ok(mut written) = written.lock() else { return };
                    // Without the file, the figures are still made.
                    let _ = writeln!(written.0, "{}", score::line(&cell, &seen));
                    if let Some(wrong) = score::wrong(&cell, &seen) {
                        eprintln!("    {wrong}");
                    }
                    written.1.push((cell, seen));
                }
            });
        }
    });
    let (_, seen) = written.into_inner().map_err(|_| anyhow::anyhow!("a cell could not be run at all"))?;
    Ok(seen)
}

fn next(waiting: &Mutex<VecDeque<Cell>>, deadline: Option<Instant>) -> Option<Cell> {
    if deadline.is_some_and(|deadline| Instant::now() > deadline) {
        return None;
    }
    waiting.lock().ok()?.pop_front()
}
