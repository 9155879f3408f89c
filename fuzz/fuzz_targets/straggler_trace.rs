//! A recorded trace, a line with the columns and then one row per line: refused, or judged.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_progress::straggler::{Columns, Limits, Trace};
use mainstay_fuzz::text;

/// The maximum number of rows of an input.
const MOST: usize = 500;

fuzz_target!(|bytes: &[u8]| {
    let text = text(bytes);
    let mut lines = text.lines();
    let Some(Ok(columns)) = lines.next().map(|header| Columns::from_header(header.split(','))) else { return };
    let mut trace = Trace::default();
    for line in lines.take(MOST) {
        if let Ok(spans) = columns.spans(&line.split(',').collect::<Vec<_>>()) {
            spans.into_iter().for_each(|span| trace.push(span));
        }
    }
    let report = trace.judge(Limits::default(), &[]);
    assert!(report.ranks <= MOST && report.steps <= MOST);
    assert_eq!(report.ranks == 0, trace.is_empty());
});
