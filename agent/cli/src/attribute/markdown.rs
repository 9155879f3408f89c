//! The verdict as Markdown, for a ticket.

use std::fmt::Write;

use mainstay_diagnosis::attribution::explain::{EvidenceSummary, Report};
use mainstay_model::escape::{clean, escaped};

use super::show::place;

pub(super) fn report(report: &Report) -> String {
    let mut out = format!("## {}\n\n", escaped(&report.headline));
    let _ = writeln!(out, "| fault domain | class | confidence | advice |\n|---|---|---|---|");
    let _ = writeln!(
        out,
        "| {} | {} | {:.0} % | {} |",
        report.fault_domain.name(),
        report.class.name(),
        report.confidence * 100.0,
        report.restart.name()
    );
    if let Some(rank) = report.culprit {
        let _ = writeln!(out, "\nIt began on rank {rank}.");
    }
    if !report.victims.is_empty() {
        let _ = writeln!(out, "\nVictims: {} ranks.", report.victims.len());
    }
    if let Some(line) = &report.unexplained {
        let _ = writeln!(
            out,
            "\n### Lines that match no signature\n\n- {} {}",
            escaped(&place(line)),
            escaped(&line.text)
        );
    }
    grounds(&mut out, "Evidence", &report.evidence);
    grounds(&mut out, "Evidence against it", &report.against);
    grounds(&mut out, "Consequences", &report.consequences);
    let aside: Vec<String> =
        report.set_aside.iter().map(|line| format!("{} {}", place(line), clean(&line.text))).collect();
    sentences(&mut out, "Set aside: caught, or healthy steps followed", &aside);
    sentences(&mut out, "What to do next", &report.next);
    sentences(&mut out, "What would change this", &report.would_change);
    out
}

fn grounds(out: &mut String, title: &str, grounds: &[EvidenceSummary]) {
    if grounds.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n### {title}\n");
    for ground in grounds {
        let _ = writeln!(out, "- {} (`{}`)", escaped(&ground.meaning), ground.signature);
        for quote in &ground.quotes {
            // A fence longer than any run of backticks in the text keeps foreign text inside.
            let text = clean(&quote.text);
            let fence = "`".repeat(longest_run(&text) + 1);
            let _ = writeln!(out, "  - {}: {fence} {text} {fence}", escaped(&place(quote)));
        }
    }
}

fn sentences(out: &mut String, title: &str, sentences: &[String]) {
    if !sentences.is_empty() {
        let _ = writeln!(out, "\n### {title}\n");
    }
    for sentence in sentences {
        let _ = writeln!(out, "- {}", escaped(sentence));
    }
}

fn longest_run(text: &str) -> usize {
    text.split(|letter| letter != '`').map(str::len).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_diagnosis::attribution::catalog::Catalog;
    use mainstay_diagnosis::attribution::scan::{Kind, Scan};
    use mainstay_diagnosis::attribution::{Evidence, attribute, explain};

    fn report_of(log: &str) -> String {
        let catalog = Catalog::built_in().expect("the catalog is compiled in");
        let findings = vec![Scan::of_text(catalog, "rank3.log", Some(3), Kind::Log, log.as_bytes())];
        let evidence = Evidence { findings, ..Evidence::default() };
        report(&explain::report(&evidence, &attribute(catalog, &evidence)))
    }

    #[test]
    fn a_ticket_has_the_fault_domain_the_evidence_and_the_advice() {
        let log = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n[rank5]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n";
        let ticket = report_of(log);
        testing::snapshot!("attribute", "a ticket", ticket);
    }

    #[test]
    fn a_ticket_without_a_known_cause_has_no_empty_parts() {
        let ticket = report_of("step 3 loss 2.1\n");
        assert!(ticket.contains("| unknown | unknown |"), "{ticket}");
        testing::snapshot!("attribute", "a ticket without a known cause", ticket);
    }

    #[test]
    fn a_quoted_line_stays_within_its_fence() {
        let ticket = report_of("ValueError: ```# not a title``` <script> | a | cell |\n");
        let quoted = ticket.lines().find(|line| line.contains("not a title")).expect("the line is quoted");
        assert!(quoted.starts_with("  - ") && quoted.matches("````").count() == 2, "{quoted}");
        let lines = ticket.lines().filter(|line| line.starts_with('#'));
        assert!(lines.clone().all(|line| line.starts_with("## ") || line.starts_with("### ")), "{ticket}");
    }

    #[test]
    fn a_fence_is_longer_than_what_it_holds() {
        assert_eq!(longest_run("a``b```c"), 3);
    }
}
