//! Lines that state that something is in order: "Remapping Failure Occurred : No", "uncorrectable ECC errors: 0", "no XID errors". They
//! contain the words of faults and report none: settings and reports about a healthy machine precede most failures of programs.

use super::level;
use super::lines;
use super::traceback;

/// Values which say that there is nothing.
const NOTHING: [&str; 22] = [
    "0",
    "0x0",
    "0.0",
    "n/a",
    "[n/a]",
    "no",
    "none",
    "null",
    "[]",
    "{}",
    "false",
    "off",
    "pass",
    "passed",
    "ok",
    "good",
    "healthy",
    "not active",
    "inactive",
    "disabled",
    "unused",
    "skip",
];

/// Words for events that a machine reports. Other negations are faults themselves: "no space left", "no route to host".
const EVENTS: [&str; 12] = [
    "error",
    "xid",
    "fault",
    "failure",
    "fallen off",
    "ecc",
    "event",
    "retired",
    "remapped",
    "violation",
    "incident",
    "throttl",
];

/// What a setting does if a fault happens: none has.
const SETTINGS: [&str; 7] = [
    "will restart on ",
    "restart on ",
    "will be restarted on ",
    "retry on ",
    "watching pattern",
    "watching for ",
    "monitoring for ",
];

/// Parts of the names of settings which say what happens on a fault.
const NAMES_OF_SETTINGS: [&str; 19] = [
    "on_",
    "_on",
    "-on",
    "retry",
    "retries",
    "restart",
    "ignore",
    "max_",
    "max-",
    "enable",
    "abort",
    "check",
    "timeout",
    "fatal_",
    "skip",
    "raise",
    "watch",
    "preempttype",
    "preemptmode",
];

/// What reports and a starting system say about what is in order.
const IN_ORDER: [&str; 26] = [
    "no issue found",
    "found no issue",
    "issues: none",
    "none found",
    "check passed",
    "checks passed",
    "successfully checked",
    "completed successfully",
    "no errors to report",
    "error found)",
    ": ok (",
    ": pass (",
    "is healthy",
    "no bad pages",
    "giving out device",
    "optional ras",
    "systemd[1]: start",
    "is not needed",
    "\"health\":\"healthy\"",
    "\"status\":\"healthy\"",
    "op=exists",
    "conditions:",
    "\"passed\": true",
    "\"passed\":true",
    ") unlimited",
    "error source: ",
];

/// Words of a record's values that report an event.
const ALARMS: [&str; 9] =
    ["fail", "error", "oom", "out_of_memory", "preempted", "timeout", "killed", "cancel", "lost"];

/// Spaces before the lines of a report in sections.
const INDENT: &str = "    ";
/// The most words of a heading.
const MAX_HEADING_WORDS: usize = 8;

/// Whether the line only states that there is no fault, or heads a table of such statements.
pub fn reports_no_fault(line: &str) -> bool {
    let text = line[lines::prefix(line).len..].trim();
    if text.is_empty() {
        return false;
    }
    // Gloo's exceptions end with "no error": an exception is a fault whatever its message says is none.
    if traceback::raised(text).is_some_and(|raised| !raised.embedded && raised.message.contains(' ')) {
        return false;
    }
    let lower = text.to_ascii_lowercase();
    let indented = line.starts_with(INDENT);
    is_json_of_nothing(&lower)
        || parts_state_nothing(&lower)
        || pairs_of_nothing(&lower)
        || is_record(&lower)
        || is_metric(&lower)
        || ends_with_nothing(&lower)
        || last_cell_is_nothing(&lower)
        || is_false_condition(&lower)
        || is_table_header(&lower)
        || is_setting(&lower)
        || IN_ORDER.iter().any(|phrase| lower.contains(phrase))
        || SETTINGS.iter().any(|setting| lower.contains(setting))
        || indented && (is_heading(text) || is_measurement(&lower))
}

/// Whether the line of `ibstat` says that nothing is connected to the port above.
pub fn is_unused_port(line: &str) -> bool {
    line.trim().eq_ignore_ascii_case("physical state: disabled")
}

/// `41 % used, 0 read errors`: some part states that there is nothing, and no other part reports anything.
fn parts_state_nothing(text: &str) -> bool {
    let parts = || text.split([',', '|', ';']);
    let calm = |part: &str| !EVENTS.iter().chain(&level::COMPLAINTS).any(|word| part.contains(word));
    parts().any(states_nothing) && parts().all(|part| states_nothing(part) || calm(part))
}

/// `uncorrectable ECC errors: 0`, `SLURM_JOB_PREEMPT=0`, `no XID errors found`, `0 machine check events`, each perhaps after a tag or a
/// word about what follows.
fn states_nothing(part: &str) -> bool {
    let part = part
        .trim()
        .trim_end_matches('.')
        .trim_start_matches(|mark: char| !mark.is_ascii_alphanumeric() && mark != '[');
    if denies(part) {
        return true;
    }
    let Some((name, value)) = part.rsplit_once([':', '=']) else { return false };
    let value = value.trim().trim_start_matches('.');
    denies(value) || is_name(name) && is_nothing(value)
}

/// `pending=No failure=No`, `state ACTIVE, link_downed=0, symbol_error=0`: all of several values are nothing.
fn pairs_of_nothing(text: &str) -> bool {
    let pairs = text.split([' ', ',', ';']).filter_map(|word| word.split_once('='));
    let mut count = 0;
    let all = pairs.inspect(|_| count += 1).all(|(_, value)| is_nothing(value));
    all && count > 1
}

/// `JobState=RUNNING Reason=None TimeLimit=2-00:00:00`: a record of values of which none is an event.
fn is_record(text: &str) -> bool {
    let words = text.split_whitespace().count();
    let pairs = text.split_whitespace().filter_map(|word| word.split_once('='));
    let mut count = 0;
    let calm =
        pairs.inspect(|_| count += 1).all(|(_, value)| !ALARMS.iter().any(|alarm| value.contains(alarm)));
    calm && count == words && count > 2
}

/// `node_vmstat_oom_kill{node="a"} 0`, and the comments that explain a metric.
fn is_metric(text: &str) -> bool {
    if text.starts_with("# help ") || text.starts_with("# type ") {
        return true;
    }
    let Some((name, value)) = text.rsplit_once(' ') else { return false };
    let name = match name.split_once('{') {
        Some((name, labels)) if labels.ends_with('}') => name,
        Some(_) => return false,
        None => name,
    };
    is_nothing(value)
        && name.contains('_')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b':'))
}

/// `checking for XIDs since boot ... none`
fn ends_with_nothing(text: &str) -> bool {
    text.rsplit_once("...")
        .is_some_and(|(_, value)| matches!(value.trim(), "none" | "no" | "ok" | "pass" | "passed" | "done"))
}

/// `NetworkUnavailable   False   Tue, …`: a condition of a node that is not met. `Ready` has to be met.
fn is_false_condition(text: &str) -> bool {
    let mut words = text.split_whitespace();
    let (name, value) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    value == "false"
        && name != "ready"
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric())
        && words.count() > 2
}

/// `--restart-on-xid=79,94`, `retry_on: ["Stale file handle"]`: what a program does on a fault, and no fault.
fn is_setting(text: &str) -> bool {
    let text = text.strip_prefix("export ").unwrap_or(text).trim_start_matches('-');
    let Some((name, value)) = text.split_once([':', '=']) else { return false };
    let named = |letter: char| letter.is_ascii_alphanumeric() || "_.-".contains(letter);
    let (name, value) = (name.trim(), value.trim());
    let listed = value.starts_with('[') && value.ends_with(']');
    name.chars().all(named)
        && NAMES_OF_SETTINGS.iter().any(|part| name.contains(part))
        && (listed || !value.is_empty() && !value.contains(' '))
}

/// `GPU Slowdown T.Limit Temp : -2 C`
fn is_measurement(text: &str) -> bool {
    const UNITS: [&str; 8] = ["c", "w", "%", "mhz", "mib", "gib", "gb/s", "bank(s)"];
    let Some((name, value)) = text.rsplit_once(':') else { return false };
    let (number, unit) = value.trim().rsplit_once(' ').unwrap_or(("", ""));
    name.len() <= 60 && number.parse::<f64>().is_ok() && UNITS.contains(&unit)
}

fn is_nothing(value: &str) -> bool {
    const BEGINNINGS: [&str; 6] = ["pass -", "none ", "inactive ", "not active", "not enabled", "no issue"];
    NOTHING.contains(&value)
        || value == "state active"
        || BEGINNINGS.iter().any(|begin| value.starts_with(begin))
}

/// `no xid 79`, `0 machine check events logged`: none of the events is reported.
fn denies(part: &str) -> bool {
    let part = part.rsplit(']').next().unwrap_or(part).trim();
    // "no space left" is a fault, "0 bad nodes" is none.
    if part.strip_prefix("no ").is_some_and(|rest| EVENTS.iter().any(|event| rest.contains(event))) {
        return true;
    }
    let none = part.strip_prefix("0 ").or_else(|| part.strip_prefix("none "));
    none.is_some_and(|rest| EVENTS.iter().chain(&level::COMPLAINTS).any(|event| rest.contains(event)))
}

/// Whether it may be the name of a value. Messages with an address or a bracket in the middle are none, nor is an exception whose text
/// is a value (`KeyError: 0`).
fn is_name(name: &str) -> bool {
    const OF_EXCEPTIONS: [&str; 6] = ["error", "exception", "exit", "interrupt", "iteration", "warning"];
    let raised = |part: &str| {
        let part = part.trim();
        !part.contains([' ', '_']) && OF_EXCEPTIONS.iter().any(|end| part.ends_with(end))
    };
    if name.split(':').any(|part| raised(part.rsplit(']').next().unwrap_or(part))) {
        return false;
    }
    // `Link 0: Malformed packet Errors`
    let name = name.rsplit(']').next().unwrap_or(name);
    let name = name.rsplit(':').next().unwrap_or(name).trim();
    let letter = |letter: char| letter.is_ascii_alphanumeric() || " _.-/()".contains(letter);
    !name.is_empty()
        && name.len() <= 60
        && name.chars().all(letter)
        && name.starts_with(|first: char| first.is_ascii_alphabetic())
}

/// `{"check":"gpu","ecc_uncorrectable":0,"xid":[],"status":"healthy"}`: all values that are no texts are nothing, and none of the texts is
/// about an event.
fn is_json_of_nothing(text: &str) -> bool {
    let Some(body) = text.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) else { return false };
    let mut numbers = 0;
    let all = body.split(',').all(|pair| {
        let pair = pair.trim_matches(|letter: char| letter.is_whitespace() || "{}[]".contains(letter));
        if let Some((_, text)) = pair.rsplit_once(":\"").or_else(|| pair.rsplit_once(": \"")) {
            return !EVENTS.iter().any(|event| text.contains(event)) && !text.contains("fail");
        }
        let Some((_, value)) = pair.rsplit_once(':') else { return pair.is_empty() };
        let value = value.trim();
        numbers += 1;
        value.is_empty() || is_nothing(value)
    });
    all && numbers > 0
}

/// `| GPU Memory | Pass - All |`
fn last_cell_is_nothing(text: &str) -> bool {
    let Some(cells) = text.strip_suffix('|') else { return false };
    cells.rsplit_once('|').is_some_and(|(_, last)| is_nothing(last.trim()) || last.trim() == "enabled")
}

/// `index, ecc.errors.uncorrected.volatile.total, retired_pages.pending`: names of columns and no value.
fn is_table_header(text: &str) -> bool {
    let cells: Vec<&str> = text.split(',').map(str::trim).collect();
    let column = |cell: &&str| {
        let name = cell.split(" [").next().unwrap_or(cell);
        name.starts_with(|first: char| first.is_ascii_alphabetic())
            && name.chars().all(|letter| letter.is_ascii_alphanumeric() || "._#%".contains(letter))
    };
    let composed = cells.iter().filter(|cell| cell.contains(['.', '_'])).count();
    cells.len() > 2 && composed * 2 >= cells.len() && cells.iter().all(column)
}

/// `Remapped Rows` above the values of a section.
fn is_heading(text: &str) -> bool {
    let word = |word: &str| {
        word.starts_with(|first: char| first.is_ascii_uppercase())
            && word.bytes().all(|byte| byte.is_ascii_alphabetic())
    };
    let words = text.split_whitespace().count();
    (1..=MAX_HEADING_WORDS).contains(&words) && text.split_whitespace().all(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribution::class::Class;
    use crate::attribution::judged;

    #[test]
    fn reports_of_a_healthy_machine_are_no_faults() {
        for line in [
            "        Double Bit ECC                    : N/A",
            "        Row Remapping Failure             : No",
            "    Retired Pages",
            "        HW Thermal Slowdown               : Not Active",
            "[prolog] uncorrectable ECC errors: 0, NVLink errors: 0",
            "[prolog] no XID errors in the last hour",
            "dmesg: no Xid 48, no uncorrectable ECC error",
            "node check: 0 machine check events",
            "mcelog: [Hardware Error]: 0 machine check events logged",
            "timestamp, ecc.errors.corrected.volatile.total, remapped_rows.pending",
            "{\"gpu\": \"H100\", \"ecc_uncorrectable\": 0, \"row_remap_failure\": false, \"xid\": []}",
            "| Row Remap | Pass |",
            "SLURM_JOB_PREEMPT=0",
            "watchdog: will restart on ECC error, XID 79 or a node failure",
        ] {
            assert!(reports_no_fault(line), "{line}");
        }
    }

    #[test]
    fn faults_are_no_healthy_reports() {
        for line in [
            "        Double Bit ECC                    : 3",
            "        Row Remapping Failure             : Yes",
            "[prolog] uncorrectable ECC errors: 0, NVLink errors: 17",
            "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            "NVRM: Xid (PCI:0000:3b:00): 63, pid=0",
            "OSError: [Errno 28] No space left on device",
            "no route to host",
            "RuntimeError: No CUDA GPUs are available",
            "node check: 2 machine check events",
            "{\"gpu\": \"H100\", \"ecc_uncorrectable\": 1, \"xid\": []}",
            "{\"message\": \"xid 79\", \"code\": 0}",
            "| Row Remap | Fail |",
            "Segmentation fault",
            "Bus error, Killed, Aborted",
            "ValueError: the batch has 0 samples",
            "KeyError: 0",
            "RuntimeError: Gloo failed to connect [tcp/pair.cc:12] no error",
            "AssertionError: False",
            "CUDA error: an illegal memory access was encountered",
        ] {
            assert!(!reports_no_fault(line), "{line}");
        }
    }

    #[test]
    fn a_report_of_a_healthy_machine_before_an_error_of_the_program_changes_nothing() {
        let raised = "Traceback (most recent call last):\n  File \"/home/a/train.py\", line 3, in step\n    x = b\nNameError: name 'b' is not defined\n";
        let report = "    ECC Errors\n        Uncorrectable : 0\n    Retired Pages\n        Double Bit ECC : N/A\n[prolog] no XID errors\n";
        assert_eq!(judged(&format!("{report}{raised}")).class, Class::UserCode);
        assert_eq!(judged(report).class, Class::Unknown);
    }
}
