//! How checks are printed: one line, a table on a terminal, or JSON.

use std::fmt::Write;
use std::io::{IsTerminal, stdout};

use mainstay_health::host::preflight::{Check, CheckVerdict, overall, summary};
use mainstay_model::time::Span;
use serde_json::{Value, json};

use crate::exit;
use crate::output::{Paint, clean};

/// What node-problem-detector keeps of a plugin's output by default.
const MAX_NPD_BYTES: usize = 80;

/// All checks, and their overall result.
pub(super) struct Report {
    pub(super) checks: Vec<Check>,
    pub(super) took: Span,
    pub(super) status: u8,
    /// Their source.
    pub(super) by: String,
}

impl Report {
    /// The summary, preceded by each check on a terminal or on request.
    pub(super) fn as_text(&self, verbose: bool) -> String {
        let mut text = String::new();
        if verbose || stdout().is_terminal() {
            self.write_checks(Paint::for_stdout(), &mut text);
        }
        let word = verdict_name(overall(&self.checks)).to_uppercase();
        let _ = writeln!(text, "{}", clean(&format!("{word}: {}", summary(&self.checks, self.took))));
        text
    }

    /// What is wrong first, or how many checks passed, in one line as node-problem-detector shows it.
    pub(super) fn for_npd(&self) -> String {
        let worst = overall(&self.checks);
        let wrong = self.checks.iter().find(|check| check.verdict == worst);
        let wrong = wrong.filter(|_| !matches!(worst, CheckVerdict::Pass | CheckVerdict::Skipped));
        let text = match wrong {
            Some(check) => format!("{}: {}", check.name, check.reason),
            None => summary(&self.checks, self.took),
        };
        let mut text = clean(&text);
        if text.len() > MAX_NPD_BYTES {
            text.truncate(text.floor_char_boundary(MAX_NPD_BYTES));
        }
        text + "\n"
    }

    /// As Nagios' plugins: the state and the summary, performance data, and what is wrong in further lines.
    pub(super) fn for_nagios(&self) -> String {
        let state = match self.status {
            exit::OK => "OK",
            exit::DEGRADED => "WARNING",
            exit::UNHEALTHY => "CRITICAL",
            _ => "UNKNOWN",
        };
        // A bar separates the performance data.
        let line = |text: &str| clean(text).replace('|', "/");
        let count = |of: CheckVerdict| self.checks.iter().filter(|check| check.verdict == of).count();
        let mut text = format!(
            "MAINSTAY {state}: {} | pass={} warn={} fail={} unknown={} time={:.3}s\n",
            line(&summary(&self.checks, self.took)),
            count(CheckVerdict::Pass),
            count(CheckVerdict::Warn),
            count(CheckVerdict::Fail),
            count(CheckVerdict::Unknown),
            self.took.as_seconds(),
        );
        for check in self.checks.iter().filter(|check| is_wrong(check)) {
            let _ = writeln!(text, "{}: {}", line(&check.name), line(&check.reason));
        }
        text
    }

    /// As JUnit's XML: what is degraded or unhealthy is a failure, what is unknown an error.
    pub(super) fn as_junit(&self) -> String {
        let count = |of: CheckVerdict| self.checks.iter().filter(|check| check.verdict == of).count();
        let mut text = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n<testsuite name=\"mainstay check\" tests=\"{}\" \
             failures=\"{}\" errors=\"{}\" skipped=\"{}\" time=\"{:.3}\">\n",
            self.checks.len(),
            count(CheckVerdict::Fail) + count(CheckVerdict::Warn),
            count(CheckVerdict::Unknown),
            count(CheckVerdict::Skipped),
            self.took.as_seconds(),
        );
        for check in &self.checks {
            let time = check.took.map_or(0.0, Span::as_seconds);
            let (name, group, why) = (xml(&check.name), check.group.name(), xml(&check.reason));
            let _ = write!(text, "<testcase classname=\"{group}\" name=\"{name}\" time=\"{time:.3}\">");
            let _ = match check.verdict {
                CheckVerdict::Pass => Ok(()),
                CheckVerdict::Warn | CheckVerdict::Fail => {
                    write!(text, "<failure type=\"{}\" message=\"{why}\"/>", verdict_name(check.verdict))
                }
                CheckVerdict::Unknown => write!(text, "<error message=\"{why}\"/>"),
                CheckVerdict::Skipped => write!(text, "<skipped message=\"{why}\"/>"),
            };
            text.push_str("</testcase>\n");
        }
        text + "</testsuite>\n</testsuites>\n"
    }

    fn write_checks(&self, paint: Paint, text: &mut String) {
        let widest = self.checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
        for check in &self.checks {
            let named = format!("{:<8}", verdict_name(check.verdict).to_uppercase());
            let took = check.took.map(|took| format!(" ({took})")).unwrap_or_default();
            let line = format!("{:<widest$}  {}{took}", check.name, clean(&check.reason));
            let _ = writeln!(text, "{}{line}", colour(paint, check.verdict, &named));
            if is_wrong(check) {
                for seen in &check.evidence {
                    let limit =
                        seen.limit.as_ref().map(|limit| format!(" (limit {limit})")).unwrap_or_default();
                    let before =
                        seen.before.as_ref().map(|before| format!(", before: {before}")).unwrap_or_default();
                    let seen = clean(&format!("{}: {}{before}{limit}", seen.source, seen.reading));
                    let _ = writeln!(text, "        {:<widest$}  {}", "", paint.dim(&seen));
                }
            }
        }
    }

    /// One object, as documented in docs/reference/cli.md.
    pub(super) fn as_json(&self) -> Value {
        let verdict = overall(&self.checks);
        json!({
            "verdict": verdict_name(verdict),
            "exit_status": self.status,
            "summary": summary(&self.checks, self.took),
            "seconds": self.took.as_seconds(),
            "by": self.by,
            "checks": self.checks.iter().map(check_as_json).collect::<Vec<Value>>(),
        })
    }
}

fn is_wrong(check: &Check) -> bool {
    !matches!(check.verdict, CheckVerdict::Pass | CheckVerdict::Skipped)
}

/// A text as the value of an attribute.
fn xml(text: &str) -> String {
    let escaped = [('&', "&amp;"), ('<', "&lt;"), ('>', "&gt;"), ('"', "&quot;")];
    escaped.into_iter().fold(clean(text), |text, (letter, escaped)| text.replace(letter, escaped))
}

fn check_as_json(check: &Check) -> Value {
    let evidence = |seen: &mainstay_model::health::Evidence| {
        let mut object = json!({ "source": seen.source, "reading": seen.reading });
        for (name, value) in [("limit", &seen.limit), ("before", &seen.before)] {
            if let Some(value) = value {
                object[name] = value.as_str().into();
            }
        }
        object
    };
    let mut object = json!({
        "name": check.name,
        "group": check.group,
        "verdict": verdict_name(check.verdict),
        "reason": check.reason,
        "recommended_action": check.action,
        "evidence": check.evidence.iter().map(evidence).collect::<Vec<Value>>(),
    });
    for (name, span) in [("seconds", check.took), ("deadline_seconds", check.deadline)] {
        if let Some(span) = span {
            object[name] = span.as_seconds().into();
        }
    }
    object
}

fn verdict_name(verdict: CheckVerdict) -> &'static str {
    match verdict {
        CheckVerdict::Pass => "pass",
        CheckVerdict::Warn => "warn",
        CheckVerdict::Fail => "fail",
        CheckVerdict::Unknown => "unknown",
        CheckVerdict::Skipped => "skipped",
    }
}

fn colour(paint: Paint, verdict: CheckVerdict, text: &str) -> String {
    match verdict {
        CheckVerdict::Pass => paint.good(text),
        CheckVerdict::Warn => paint.warning(text),
        CheckVerdict::Fail => paint.bad(text),
        CheckVerdict::Unknown | CheckVerdict::Skipped => paint.dim(text),
    }
}
