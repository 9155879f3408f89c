//! The verdict and the score on a terminal.

use std::fmt::Write;

use mainstay_diagnosis::attribution::class::{Class, Restart};
use mainstay_diagnosis::attribution::explain::{EvidenceSummary, Quote, Report};
use mainstay_diagnosis::attribution::score::{Answer, Case, Share, Summary};

use crate::output::{Paint, clean, shortened};

/// Characters of a quoted line that are shown.
const MAX_QUOTE_CHARS: usize = 200;

pub(super) fn report(report: &Report, paint: Paint) -> String {
    let mut out = format!("{}\n", paint.bold(&clean(&report.headline)));
    let _ = writeln!(
        out,
        "fault domain {}, class {}, advice {}",
        report.fault_domain.name(),
        report.class.name(),
        report.restart.name()
    );
    if !report.common_to.is_empty() {
        let _ = writeln!(out, "common to ranks {}: no single rank is the culprit", listed(&report.common_to));
    }
    if !report.victims.is_empty() {
        let _ = writeln!(out, "victims: ranks {}", listed(&report.victims));
    }
    if let Some(line) = &report.unexplained {
        let text = shortened(&clean(&line.text), MAX_QUOTE_CHARS);
        let _ = writeln!(out, "\nLines that match no signature\n  {} {text}", paint.dim(&place(line)));
    }
    grounds(&mut out, "Evidence", &report.evidence, paint);
    grounds(&mut out, "Evidence against it", &report.against, paint);
    grounds(&mut out, "Consequences", &report.consequences, paint);
    for (place_in_list, line) in report.set_aside.iter().enumerate() {
        if place_in_list == 0 {
            let _ = writeln!(out, "\nSet aside: caught, or healthy steps followed");
        }
        let text = shortened(&clean(&line.text), MAX_QUOTE_CHARS);
        let _ = writeln!(out, "  {} {text}", paint.dim(&place(line)));
    }
    sentences(&mut out, "What to do next", &report.next);
    sentences(&mut out, "What would change this", &report.would_change);
    out
}

fn grounds(out: &mut String, title: &str, grounds: &[EvidenceSummary], paint: Paint) {
    if grounds.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n{title}");
    for ground in grounds {
        let often = if ground.count > 1 { format!(", {} times", ground.count) } else { String::new() };
        let _ = writeln!(out, "  {} ({}{often})", clean(&ground.meaning), ground.signature);
        for quote in &ground.quotes {
            let _ = writeln!(
                out,
                "    {} {}",
                paint.dim(&place(quote)),
                shortened(&clean(&quote.text), MAX_QUOTE_CHARS)
            );
        }
    }
}

/// `file:12 [rank 3]`, or `file [rank 3]` for a whole file
pub(super) fn place(quote: &Quote) -> String {
    let rank = quote.rank.map(|rank| format!(" [rank {rank}]")).unwrap_or_default();
    match quote.line {
        0 => format!("{}{rank}", clean(&quote.source)),
        line => format!("{}:{line}{rank}", clean(&quote.source)),
    }
}

fn sentences(out: &mut String, title: &str, sentences: &[String]) {
    if !sentences.is_empty() {
        let _ = writeln!(out, "\n{title}");
    }
    for sentence in sentences {
        let _ = writeln!(out, "  {sentence}");
    }
}

fn listed(ranks: &[u32]) -> String {
    let shown: Vec<String> = ranks.iter().take(16).map(u32::to_string).collect();
    let more = if ranks.len() > shown.len() {
        format!(" and {} more", ranks.len() - shown.len())
    } else {
        String::new()
    };
    shown.join(", ") + &more
}

pub(super) fn score(cases: &[Case], answers: &[Answer], summary: &Summary) -> String {
    let mut out = String::new();
    for (case, answer) in cases.iter().zip(answers) {
        let Some(label) = case.label.as_ref() else { continue };
        let right = if answer.right == Some(true) { "right" } else { "WRONG" };
        let _ = writeln!(
            out,
            "{right}  {}: {} / {} (label {} / {}), {:.2}\n         {}",
            clean(&case.id),
            answer.class.name(),
            answer.restart.name(),
            label.class.map_or("?", Class::name),
            label.restart.map_or("?", Restart::name),
            answer.confidence,
            shortened(&clean(&answer.reasons.join("; ")), MAX_QUOTE_CHARS)
        );
    }
    let _ = writeln!(
        out,
        "\n{:<18}{:>6} {:>8} {:>8} {:>8} {:>8} {:>10} {:>13}",
        "", "cases", "domain", "class", "restart", "named", "root line", "line or rank"
    );
    share(&mut out, "all", &summary.all);
    share(&mut out, "headline", &summary.headline);
    share(&mut out, "one-liners", &summary.one_liners);
    for (class, of) in &summary.per_class {
        share(&mut out, class, of);
    }
    let _ = writeln!(out, "\nlabel \\ answer");
    for (class, row) in &summary.confusion {
        let cells: Vec<String> = Class::ALL
            .into_iter()
            .filter_map(|answer| row.get(answer.name()).map(|count| format!("{} {count}", answer.name())))
            .collect();
        let _ = writeln!(out, "  {class:<18}{}", cells.join(", "));
    }
    let _ = writeln!(
        out,
        "\ncalibration: Brier {:.3}, expected error {:.3}",
        summary.calibration.brier, summary.calibration.expected_error
    );
    for bin in summary.calibration.bins.iter().filter(|bin| bin.cases > 0) {
        let _ = writeln!(
            out,
            "  from {:.1}: {:>3} answers, {:>3.0} % sure, {:>3.0} % right",
            bin.from,
            bin.cases,
            bin.confidence * 100.0,
            bin.right * 100.0
        );
    }
    let _ = writeln!(out, "named only at or above a confidence:");
    for threshold in summary.calibration.thresholds.iter().filter(|threshold| threshold.named > 0) {
        let share = 100.0 * f64::from(threshold.right) / f64::from(threshold.named);
        let _ = writeln!(
            out,
            "  {:.2}: {:>3} named, {share:>3.0} % of them right",
            threshold.at, threshold.named
        );
    }
    let _ = writeln!(
        out,
        "user failures attributed to hardware: {}; advised not to restart although a restart was right: {}",
        summary.false_hardware, summary.false_do_not_restart
    );
    for answer in answers.iter().filter(|answer| !answer.notes.is_empty()) {
        let _ = writeln!(out, "{}: {}", clean(&answer.id), clean(&answer.notes.join("; ")));
    }
    if summary.unscored > 0 {
        let _ =
            writeln!(out, "{} cases were judged and have no label that could be scored", summary.unscored);
    }
    out
}

fn share(out: &mut String, name: &str, share: &Share) {
    let _ = writeln!(
        out,
        "{name:<18}{:>6} {:>8} {:>8} {:>8} {:>8} {:>10} {:>13}",
        share.cases,
        share.domain,
        share.class,
        share.restart,
        share.committed,
        format!("{}/{}", share.root_first, share.with_root),
        format!("{}/{}", share.place, share.with_place)
    );
}
