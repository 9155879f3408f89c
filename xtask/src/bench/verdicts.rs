//! The live fault matrix: real training programs (`tests/healthy/programs`) with faults of known cause
//! (`tests/healthy/faults`) under `mainstay run`. The first verdict and the first decision of each are compared
//! with the truth.
//!
//! Each cell is written to `target/bench/verdicts/cells.jsonl` as soon as it is measured.

mod cell;
mod score;
mod table;

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Mutex;
use std::thread;

use super::prelude::*;
use cell::{Place, Seen};
use table::Cell;
pub use table::Part;
use table::Table;

/// Jobs at a time: each has one rank or two.
const AT_ONCE: usize = 2;
/// With `--quick` no cell starts after this time.
const QUICK: Duration = Duration::from_secs(150);

/// Runs the cells whose name contains one of the words of `--cells`, one part of them, or a sample.
pub fn measure(bench: &mut Bench, _: &Bed) {
    let measured = figures(bench);
    bench.report.part("verdicts", measured);
}

fn figures(bench: &mut Bench) -> Result<Vec<Figure>> {
    let (args, progress) = (bench.args, &bench.progress);
    let place = Place::new(python::healthy(progress)?)?;
    let table = Table::read()?;
    let mut cells = match args.part {
        _ if args.quick => table.sample(),
        Some(part) => table.part(part),
        None => table.cells(),
    };
    let wanted = |name: &str| args.cells.split(',').any(|only| name.contains(only));
    cells.retain(|cell| wanted(&cell.name()) && place.can_run(cell));
    ensure!(!cells.is_empty(), "no cell has {:?} in its name and can run here", args.cells);
    let deadline = args.quick.then(|| Instant::now() + QUICK);
    let all = cells.len();
    let mut seen =
        progress.step(&format!("{all} faults in real programs"), || run(&place, cells, deadline))?;
    let started = seen.len();
    if started < all {
        progress.note(&format!("{} of {all} were not started: three minutes were over", all - started));
    }
    let survived: Vec<_> = seen.extract_if(.., |(_, seen)| seen.survived).collect();
    if !survived.is_empty() {
        let names: Vec<String> = survived.iter().map(|(cell, _)| cell.name()).collect();
        progress.note(&format!("Not counted, as the program caught the fault: {}", names.join(", ")));
    }
    score::print(&seen);
    Ok(score::figures(&seen))
}

/// Runs the cells, some at a time, until all are done or time is over.
fn run(place: &Place, cells: Vec<Cell>, deadline: Option<Instant>) -> Result<Vec<(Cell, Seen)>> {
    let file = fs::File::create(paths::fresh(paths::target().join("bench/verdicts"))?.join("cells.jsonl"))?;
    let (waiting, written) = (Mutex::new(VecDeque::from(cells)), Mutex::new((file, Vec::new())));
    let next = || {
        let is_late = deadline.is_some_and(|deadline| Instant::now() > deadline);
        waiting.lock().ok()?.pop_front().filter(|_| !is_late)
    };
    let work = || {
        while let Some(cell) = next() {
            let seen = place.run(&cell);
            let Ok(mut written) = written.lock() else { return };
            // Without the file, the figures are still made.
            let _ = writeln!(written.0, "{}", score::line(&cell, &seen));
            if let Some(wrong) = score::wrong(&cell, &seen) {
                eprintln!("    {wrong}");
            }
            written.1.push((cell, seen));
        }
    };
    thread::scope(|scope| (0..AT_ONCE).for_each(|_| _ = scope.spawn(work)));
    let (_, seen) = written.into_inner().map_err(|_| anyhow::anyhow!("a cell could not be run at all"))?;
    Ok(seen)
}
