//! Renders a report as text for a terminal, or as Markdown for a ticket.

use std::collections::BTreeMap;

use super::IncidentReport;
use super::sentences::{advice, capital, done, fault, length, origin};
use mainstay_hang::listed;
use mainstay_model::escape;
use mainstay_model::finding::Finding;
use mainstay_model::time::Span;
use mainstay_model::verdict::FaultDomain;

/// Lines of evidence shown by default.
const DEFAULT_EVIDENCE_LINES: usize = 5;

/// How a report is shown.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// The directory with the output of all ranks, if known.
    pub logs: Option<&'a str>,
    /// Markdown instead of text.
    pub markdown: bool,
    /// Show all evidence, the counter-evidence and what would change the result.
    pub all: bool,
}

/// Renders the report with the findings of the job.
pub fn render(report: &IncidentReport, options: Options<'_>) -> String {
    let IncidentReport { verdict, decision, outcome, .. } = report;
    let page = Page { markdown: options.markdown };
    let mut lines = vec![page.title(&verdict.headline), String::new()];
    page.section(&mut lines, "Time", &[since(report)]);
    let mut fault = vec![fault(verdict)];
    fault.extend(origin(verdict));
    if !verdict.victims.is_empty() && verdict.culprit.is_some() {
        fault.push(format!("Stopped because of it: {}.", listed(&verdict.victims)));
    }
    page.section(&mut lines, "Fault domain", &fault);
    let mut acted = vec![done(decision.as_ref(), report.since_then())];
    acted.extend(outcome.as_ref().map(|outcome| format!("{}.", capital(&outcome.describe()))));
    acted.extend(report.avoided.iter().map(|avoided| format!("{}.", capital(avoided))));
    page.section(&mut lines, "What was done", &acted);
    let mut todo = advice(verdict, decision.as_ref(), report.since_then());
    todo.extend(options.logs.map(|logs| format!("The output of all ranks is in {logs}")));
    page.section(&mut lines, "What to do", &todo);
    let shown = if options.all { verdict.evidence.len() } else { DEFAULT_EVIDENCE_LINES };
    let mut evidence: Vec<String> = verdict.evidence.iter().take(shown).cloned().collect();
    let doubts = &verdict.doubts;
    let left = verdict.evidence.len().saturating_sub(shown)
        + if options.all { 0 } else { doubts.against.len() + doubts.would_change.len() };
    if left > 0 {
        evidence.push(format!("({left} more with --all)"));
    }
    page.section(&mut lines, "Evidence", &evidence);
    if options.all {
        let against = match verdict.domain {
            FaultDomain::Unknown => "Also seen, ambiguous",
            _ => "Evidence against it",
        };
        page.section(&mut lines, against, &doubts.against);
        page.section(&mut lines, "What would change this", &doubts.would_change);
    }
    lines.join("\n") + &render_findings(&report.findings, options.markdown)
}

fn since(report: &IncidentReport) -> String {
    let verdict = &report.verdict;
    let into = report.into_the_job.map_or(String::new(), |span| format!(", {} into the job", length(span)));
    let run = match verdict.attempt.0 {
        0 => String::new(),
        restart => format!(", after restart {restart}"),
    };
    let delay = verdict.detected_at.since(verdict.fault_at);
    let noticed = if delay < Span::millis(1) { String::new() } else { format!("; detected {delay} later") };
    format!("{}{into}{run}{noticed}. Failure {} of this job.", report.happened, verdict.incident.0)
}

/// Renders findings.
pub fn render_findings(findings: &BTreeMap<u64, Finding>, markdown: bool) -> String {
    let page = Page { markdown };
    let mut lines = Vec::new();
    for finding in findings.values() {
        lines.push(String::new());
        lines.push(page.title(&format!("Finding {}: {}", finding.finding, finding.headline)));
        let sure = format!("{:.0} % sure", finding.confidence * 100.0);
        lines.push(page.item(&match finding.domain {
            FaultDomain::Unknown => format!("{sure}; the cause is unknown"),
            domain => format!("{domain}, {sure}"),
        }));
        lines.extend(finding.evidence.iter().map(|evidence| page.item(evidence)));
    }
    lines.push(String::new());
    lines.join("\n")
}

/// The format of titles and lists. Foreign text can neither format a ticket nor control a terminal.
struct Page {
    markdown: bool,
}

impl Page {
    fn title(&self, text: &str) -> String {
        if self.markdown { format!("## {}", self.foreign(text)) } else { self.foreign(text) }
    }

    fn item(&self, text: &str) -> String {
        format!("{}{}", if self.markdown { "- " } else { "  " }, self.foreign(text))
    }

    fn foreign(&self, text: &str) -> String {
        if self.markdown { escape::escaped(text) } else { escape::clean(text) }
    }

    /// Adds a section with its items. Adds nothing if there are none.
    fn section(&self, lines: &mut Vec<String>, title: &str, items: &[String]) {
        if items.is_empty() {
            return;
        }
        lines.push(if self.markdown { format!("**{title}**\n") } else { format!("{title}:") });
        lines.extend(items.iter().map(|item| self.item(item)));
        lines.push(String::new());
    }
}
