//! Lines as the field's programs print them, with what they tell. They were written from knowledge of those
//! programs to widen the catalogue, and hold it in place: a change that loses many of them is no improvement.

#![allow(clippy::expect_used, reason = "in a test, a panic is the report")]

use mainstay_core::attribute::catalog::Catalog;
use mainstay_core::attribute::class::Class;
use mainstay_core::attribute::scan::{Kind, Scan};
use mainstay_core::attribute::{Evidence, attribute};

/// Right domains, in percent.
const FLOOR: usize = 92;

#[test]
fn lines_of_the_field_are_known() {
    let catalog = Catalog::built_in().expect("a sound catalogue");
    let (mut all, mut wrong) = (0, Vec::new());
    for line in include_str!("field_lines.tsv").lines().filter(|line| !line.is_empty()) {
        let (class, text) = line.split_once('\t').expect("a class, a tab and a text");
        let class = Class::named(class).expect("a class");
        let text = text.replace("\\n", "\n").replace("\\t", "\t");
        let findings = vec![Scan::of_text(catalog, "log", None, Kind::Log, text.as_bytes())];
        let judged = attribute(catalog, &Evidence { findings, ..Evidence::default() });
        all += 1;
        // A full disk is the storage's class and the user's fault.
        if judged.class.domain() != class.domain() {
            wrong.push(format!("{} instead of {}: {text}", judged.class.name(), class.name()));
        }
    }
    assert!(
        (all - wrong.len()) * 100 >= all * FLOOR,
        "{} of {all} wrong:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}
