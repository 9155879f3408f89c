//! A page of an exporter: refused, or at most one sample per line. The judge of dcgm-exporter accepts any page.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_health::hardware::dcgm::{ExporterJudge, ExporterReport};
use mainstay_health::parse::prometheus::parse;
use mainstay_model::time::Mono;
use mainstay_fuzz::text;

fuzz_target!(|bytes: &[u8]| {
    let page = text(bytes);
    if let Ok(samples) = parse(&page) {
        assert!(samples.len() <= page.lines().count());
        assert!(samples.iter().all(|sample| page.contains(&sample.name)));
    }
    let mut judge = ExporterJudge::default();
    let (first, second) = page.split_at(page.floor_char_boundary(page.len() / 2));
    for (at, page) in [first, second, &page].into_iter().enumerate() {
        let _ = judge.step(Mono(at as u64), &ExporterReport::Page(page.to_owned()));
    }
});
