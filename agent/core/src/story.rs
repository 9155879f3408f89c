//! The story of one failure as the journal tells it: what was judged, what was decided and what came of it, in words for a person
//! on call. Told by `mainstay explain` and by the API.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::attribute::class::Class;
use crate::attribute::explain;
use crate::entry::Body;
use crate::finding::Finding;
use crate::id::Incident;
use crate::markdown;
use crate::policy::Rung;
use crate::verdict::{Action, Decision, FaultDomain, Outcome, Verdict};

/// What the journal tells of one failure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Story {
    /// What it meant.
    pub verdict: Verdict,
    /// What was decided.
    pub decision: Option<Decision>,
    /// What came of it.
    pub outcome: Option<Outcome>,
}

/// The failure that is wanted, or the last one, from the entries of one job in their order; none if there was none.
pub fn story<'e>(
    entries: impl DoubleEndedIterator<Item = &'e Body> + Clone,
    wanted: Option<Incident>,
) -> Option<Story> {
    let mut verdicts = entries.clone().filter_map(|body| match body {
        Body::Verdict(verdict) => Some(verdict),
        _ => None,
    });
    let verdict = verdicts.rfind(|verdict| wanted.is_none_or(|wanted| verdict.incident == wanted))?.clone();
    let of_it = || entries.clone().filter(|body| body.incident() == Some(verdict.incident));
    // The last: before it, it may have been decided to wait for the host.
    let mut decisions = of_it().filter_map(|body| match body {
        Body::Decision(decision) => Some(decision.clone()),
        _ => None,
    });
    let decision = decisions.next_back();
    let outcome = of_it().find_map(|body| match body {
        Body::Outcome(outcome) => Some(outcome.clone()),
        _ => None,
    });
    Some(Story { verdict, decision, outcome })
}

/// The failure in words, as text or as Markdown for a ticket; `logs` is where the output of all ranks lies, if that is known.
pub fn render(story: &Story, logs: Option<&str>, markdown: bool) -> String {
    let Story { verdict, decision, outcome } = story;
    let (title, bullet) = marks(markdown);
    let foreign = |text: &str| if markdown { markdown::escaped(text) } else { markdown::clean(text) };
    let list = |lines: &mut Vec<String>, title: &str, told: &[String]| {
        if !told.is_empty() {
            lines.push(title.to_owned());
            lines.extend(told.iter().map(|told| format!("{bullet}{}", foreign(told))));
            lines.push(String::new());
        }
    };
    let mut lines = vec![format!("{title}{}", foreign(&verdict.headline)), String::new()];
    let sure = verdict.confidence * 100.0;
    lines.push(match (&verdict.class, verdict.domain) {
        (Some(class), domain) => format!("Whose fault: {domain} ({class}), {sure:.0} % sure."),
        (None, FaultDomain::Unknown) => {
            format!("Whose fault: it cannot be told from what was seen; {sure:.0} % sure of where it began.")
        }
        (None, domain) => format!("Whose fault: {domain}, {sure:.0} % sure."),
    });
    let delay = verdict.detected_at.since(verdict.fault_at);
    lines.push(format!(
        "Failure {} of the run, in attempt {}; known {delay} after it happened.",
        verdict.incident.0, verdict.attempt.0
    ));
    lines.push(String::new());
    list(&mut lines, "What that rests on:", &verdict.evidence);
    let against = match verdict.domain {
        FaultDomain::Unknown => "What else was seen, and can mean several things:",
        _ => "What speaks against it:",
    };
    list(&mut lines, against, &verdict.doubts.against);
    lines.push("What was done:".to_owned());
    lines.push(match decision.as_ref().map(|decision| (decision.action, foreign(&decision.why))) {
        Some((Action::RestartInJob { attempt }, why)) => {
            format!("{bullet}all ranks were started again as attempt {}: {why}", attempt.0)
        }
        Some((Action::Stop { exit }, why)) => format!("{bullet}the job was ended with status {exit}: {why}"),
        Some((Action::HandBack { exit }, why)) => {
            format!("{bullet}the job was handed back to the scheduler with status {exit}: {why}")
        }
        Some((Action::Wait, why)) => format!("{bullet}nothing yet: {why}"),
        Some((action, why)) => {
            let attempt = action.attempt().map_or(String::new(), |attempt| format!(" as {attempt}"));
            let done = action.rung().map_or("waiting", Rung::words);
            format!("{bullet}{done}{attempt}: {why}")
        }
        None => format!("{bullet}nothing was decided yet"),
    });
    if let Some(outcome) = outcome {
        lines.push(format!("{bullet}{}", outcome.told()));
    }
    lines.push(String::new());
    lines.push("What to do:".to_owned());
    lines.push(format!("{bullet}{}", advice(verdict)));
    let class = verdict.class.as_deref().and_then(Class::named);
    lines.extend(class.map(|class| format!("{bullet}{}", explain::look(class))));
    lines.extend(logs.map(|logs| format!("{bullet}the output of all ranks is in {logs}")));
    lines.push(String::new());
    list(&mut lines, "What would change this:", &verdict.doubts.would_change);
    lines.join("\n")
}

/// What stands before a title and before a point of a list.
fn marks(markdown: bool) -> (&'static str, &'static str) {
    if markdown { ("## ", "- ") } else { ("", "  ") }
}

/// The next step of the person who reads it.
fn advice(verdict: &Verdict) -> &'static str {
    match (verdict.domain, verdict.deterministic) {
        (FaultDomain::User, true) => {
            "mend the program or its configuration; it would fail again the same way"
        }
        (FaultDomain::User, false) => "look at the program; it may pass when it is run again",
        (FaultDomain::Hardware, _) => {
            "take this host out of the job and have it checked before it comes back"
        }
        (FaultDomain::Infrastructure, true) => "mend what the job runs on; it would fail again the same way",
        (FaultDomain::Infrastructure, false) => {
            "run it again; if it comes back, look at network, storage and host"
        }
        (FaultDomain::Platform, true) => "look at versions and settings of the software below the program",
        (FaultDomain::Platform, false) => {
            "run it again; if it comes back, look at the software below the program"
        }
        (FaultDomain::Unknown, _) => {
            "read the last lines of the rank that began it, and the kernel's log of that time"
        }
    }
}

/// What was wrong with the job although nothing failed, each as it was last told.
pub fn findings<'e>(entries: impl Iterator<Item = &'e Body>) -> BTreeMap<u64, Finding> {
    let told = entries.filter_map(|body| match body {
        Body::Finding(finding) => Some((finding.finding, finding.clone())),
        _ => None,
    });
    told.collect()
}

/// Findings in words.
pub fn render_findings(findings: &BTreeMap<u64, Finding>, markdown: bool) -> String {
    let (title, bullet) = marks(markdown);
    let foreign = |text: &str| if markdown { markdown::escaped(text) } else { markdown::clean(text) };
    let mut lines = Vec::new();
    for finding in findings.values() {
        lines.push(String::new());
        lines.push(format!("{title}Finding {}: {}", finding.finding, foreign(&finding.headline)));
        lines.push(format!("{bullet}{}, {:.0} % sure", finding.domain, finding.confidence * 100.0));
        lines.extend(finding.evidence.iter().map(|evidence| format!("{bullet}{}", foreign(evidence))));
    }
    lines.push(String::new());
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Attempt, Rank};
    use crate::time::{Mono, Span};
    use crate::verdict::{Cause, DecidedBy, Doubts};

    fn told(domain: FaultDomain, class: Option<&str>) -> Story {
        let verdict = Verdict {
            incident: Incident(2),
            attempt: Attempt(1),
            headline: "rank 3 raised ValueError: bad".into(),
            cause: Cause::ExitCode { code: 1 },
            domain,
            class: class.map(str::to_owned),
            deterministic: true,
            doubts: Doubts {
                against: vec!["an ECC error on rank 5".into()],
                would_change: vec!["Machine's fault (12 %): an XID".into()],
            },
            confidence: 0.8,
            culprit_confidence: None,
            cannot_run: false,
            culprit: Some(Rank(3)),
            victims: vec![Rank(0)],
            step: Some(4),
            data: None,
            heartbeats: true,
            fault_at: Mono(0),
            detected_at: Mono(2_000_000),
            evidence: vec!["exit note of rank 3".into()],
        };
        let decision = Decision {
            incident: Incident(2),
            action: Action::Stop { exit: 1 },
            after: Span::default(),
            why: "it came again".into(),
            by: DecidedBy::Launcher,
        };
        Story { verdict, decision: Some(decision), outcome: None }
    }

    #[test]
    fn a_failure_is_explained_with_its_evidence_and_what_to_do() {
        let text = render(&told(FaultDomain::User, Some("user_code")), Some("/runs/x/attempt_1"), false);
        for part in [
            "rank 3 raised ValueError: bad",
            "Whose fault: the training program's fault (user_code), 80 % sure.",
            "known 2 ms after it happened",
            "  exit note of rank 3",
            "the job was ended with status 1: it came again",
            "What speaks against it:\n  an ECC error on rank 5",
            "mend the program",
            "Read the traceback",
            "What would change this:\n  Machine's fault (12 %): an XID",
            "/runs/x/attempt_1",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }

    #[test]
    fn a_ticket_has_a_title_and_lists_and_the_terminal_has_neither() {
        let told = told(FaultDomain::User, Some("user_code"));
        let (ticket, terminal) =
            (render(&told, Some("/runs/x"), true), render(&told, Some("/runs/x"), false));
        assert!(ticket.starts_with("## rank 3 raised ValueError: bad\n"), "{ticket}");
        assert!(ticket.contains("\n- exit note of rank 3\n"), "{ticket}");
        assert!(ticket.contains("\n- the output of all ranks is in /runs/x\n"), "{ticket}");
        assert!(!terminal.contains("## ") && !terminal.contains("\n- "), "{terminal}");
    }

    #[test]
    fn what_others_wrote_neither_formats_a_ticket_nor_drives_a_terminal() {
        let mut told = told(FaultDomain::User, Some("user_code"));
        told.verdict.headline = "rank 3 raised E: <b>\x1b[31m\n# [x](y)".into();
        told.verdict.evidence = vec!["a\n| b |".into()];
        let ticket = render(&told, None, true);
        assert!(ticket.starts_with(r"## rank 3 raised E: \<b\> \[31m \# \[x\](y)"), "{ticket}");
        assert!(ticket.contains("\n- a \\| b \\|\n"), "{ticket}");
        let terminal = render(&told, None, false);
        assert!(terminal.starts_with("rank 3 raised E: <b> [31m # [x](y)\n"), "{terminal}");
    }

    #[test]
    fn of_several_decisions_on_one_failure_the_last_is_what_was_done() {
        let Story { verdict, decision, .. } = told(FaultDomain::User, None);
        let decision = decision.expect("one");
        let waited = Decision { action: Action::Wait, why: "memory is held".into(), ..decision.clone() };
        let bodies = [Body::Verdict(verdict), Body::Decision(waited), Body::Decision(decision.clone())];
        assert_eq!(story(bodies.iter(), None).expect("a story").decision, Some(decision));
    }

    #[test]
    fn what_is_not_known_is_not_said() {
        let text = render(&told(FaultDomain::Unknown, None), None, true);
        assert!(text.starts_with("## rank 3") && text.contains("cannot be told"), "{text}");
    }

    #[test]
    fn the_story_is_that_of_the_failure_that_is_wanted_or_the_last() {
        let Story { verdict, decision, .. } = told(FaultDomain::User, None);
        let first = Verdict { incident: Incident(1), headline: "the first".into(), ..verdict.clone() };
        let bodies =
            [Body::Verdict(first), Body::Verdict(verdict.clone()), Body::Decision(decision.expect("one"))];
        let last = story(bodies.iter(), None).expect("a story");
        assert_eq!((last.verdict.incident, last.decision.is_some()), (Incident(2), true));
        let first = story(bodies.iter(), Some(Incident(1))).expect("a story");
        assert_eq!((first.verdict.headline.as_str(), first.decision.is_some()), ("the first", false));
        assert_eq!(story(bodies.iter(), Some(Incident(9))), None);
    }
}
