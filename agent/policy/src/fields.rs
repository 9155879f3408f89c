//! All fields of the case that a policy receives. Tests compare the value and the reference with the list.

/// A field of the case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its path: `past[].ago`.
    pub path: &'static str,
    /// Its type.
    pub kind: &'static str,
    /// Its unit; empty if it has none.
    pub unit: &'static str,
    /// Its meaning.
    pub means: &'static str,
}

const fn field(path: &'static str, kind: &'static str, unit: &'static str, means: &'static str) -> Field {
    Field { path, kind, unit, means }
}

/// Names of fields before 0.1.0, each with its present one: a policy that reads them still works, with a warning.
pub(crate) const FORMER_FIELDS: [(&str, &str); 2] = [("sick", "unhealthy"), ("heard_by", "answered_by")];

/// All fields, in the order of the documentation.
pub const FIELDS: &[Field] = &[
    field("verdict.incident", "int", "", "the number of the failure in its job, from 1"),
    field("verdict.attempt", "int", "", "the attempt that failed, from 0"),
    field("verdict.headline", "string", "", "one line for a person"),
    field(
        "verdict.cause.kind",
        "string",
        "",
        "`exception`, `exit_code`, `signal`, `out_of_memory`, `hang`, `host_lost` or `start`",
    ),
    field("verdict.cause.exception", "string or None", "", "type of the exception, of kind `exception`"),
    field("verdict.cause.fingerprint", "string or None", "", "equal for the same error, of kind `exception`"),
    field("verdict.cause.code", "int or None", "", "the exit code, of kind `exit_code`"),
    field("verdict.cause.signal", "int or None", "", "the signal, of kind `signal`"),
    field(
        "verdict.cause.hang",
        "string or None",
        "",
        "the kind of hang, of kind `hang`: `network`, `user_code`, … (`journal.md`)",
    ),
    field(
        "verdict.cause.place",
        "string or None",
        "",
        "equal for the same hang, of kind `hang`; the host, of kind `host_lost`",
    ),
    field(
        "verdict.domain",
        "string",
        "",
        "the fault domain: `user`, `hardware`, `infrastructure`, `platform` or `unknown`",
    ),
    field("verdict.failure_class", "string or None", "", "what went wrong (`attribution.md`)"),
    field("verdict.deterministic", "bool", "", "whether the failure would repeat at the same place"),
    field("verdict.confidence", "float", "0 to 1", "how likely the verdict is right"),
    field("verdict.culprit", "int or None", "", "the rank where the failure started"),
    field("verdict.victims", "list of int", "", "ranks that ended because of the culprit"),
    field("verdict.step", "int or None", "", "the step that the culprit was at"),
    field(
        "verdict.data",
        "int or None",
        "",
        "the culprit's position in its data, if it reported one (`mainstay.data_at`)",
    ),
    field(
        "verdict.heartbeats",
        "bool",
        "",
        "whether the culprit sent heartbeats: only then does a missing step mean that it completed none",
    ),
    field(
        "verdict.cannot_run",
        "bool",
        "",
        "whether the program cannot run at all: all ranks ended before a first step because of its source, its arguments, or a missing file or module",
    ),
    field("verdict.evidence", "list of string", "", "the evidence of the verdict"),
    field("past[].ago", "float", "s", "how long ago the decision was made"),
    field("past[].cause", "struct", "", "as `verdict.cause`; two causes may be compared with `==`"),
    field("past[].step", "int or None", "", "the step that the culprit was at"),
    field("past[].data", "int or None", "", "as `verdict.data`"),
    field("past[].lived", "float", "s", "how long the attempt had run"),
    field("past[].action", "string", "", "what was done"),
    field("past[].reached", "int or None", "", "newest step reached in any attempt by then"),
    field("past[].committed", "int or None", "", "as `committed`, by then"),
    field("past[].heartbeats", "bool", "", "whether the culprit sent heartbeats"),
    field(
        "past[].back_after",
        "float or None",
        "s",
        "from the fault to the first step that all ranks completed again; None if they never did",
    ),
    field(
        "earlier[].cause",
        "string",
        "",
        "a kind of cause (`verdict.cause.kind`) that occurred in earlier runs",
    ),
    field("earlier[].action", "string", "", "the action taken"),
    field(
        "earlier[].tried",
        "float",
        "",
        "how often it was tried; all earlier runs together count as at most 8 restarts",
    ),
    field("earlier[].helped", "float", "", "how often all ranks then completed a step"),
    field(
        "earlier[].seconds",
        "float",
        "s",
        "from the fault to that step, with the most weight on the newest; 0 if it never helped",
    ),
    field("exit", "int", "", "exit status of the culprit as a shell reports it"),
    field("lived", "float", "s", "how long the attempt had run"),
    field("reached", "int or None", "", "newest step reached in any attempt"),
    field(
        "committed",
        "int or None",
        "",
        "newest step saved through Mainstay; None if there is none, or if restarts resume from a later step saved elsewhere",
    ),
    field("host.unhealthy[].name", "string", "", "a component that is not healthy: `gpu.0000:3b:00`"),
    field("host.unhealthy[].state", "string", "", "`HEALTHY`, `UNKNOWN`, `DEGRADED` or `UNHEALTHY`"),
    field("host.unhealthy[].reason", "string", "", "why, in one line"),
    field(
        "host.unhealthy[].action",
        "string",
        "",
        "`NONE`, `RESTART_PROCESS`, `RESET_DEVICE`, `REBOOT_NODE`, `REPLACE_NODE` or `CONTACT_SUPPORT`",
    ),
    field(
        "host.unhealthy[].trained_with",
        "float or None",
        "s",
        "how long it had been in this state when the last step was completed; None without a step",
    ),
    field("host.unhealthy[].passes_with_ranks", "bool", "", "whether the ranks themselves cause it"),
    field(
        "host.held",
        "list of string",
        "",
        "resources that the ranks need and that are in use, one sentence each",
    ),
    field("host.waited", "float", "s", "how long this restart has waited for the host"),
    field(
        "host.last_step_ago",
        "float or None",
        "s",
        "how long ago a step was last completed in any attempt",
    ),
    field(
        "seen.elsewhere",
        "list of string",
        "",
        "other hosts on which the same program raised the same error before this run started",
    ),
    field(
        "seen.at_this_place",
        "list of string",
        "",
        "those of them on which it was at the same step or data",
    ),
    field(
        "seen.in_earlier_runs",
        "int",
        "",
        "how often earlier runs of this program did so on this host, at the same step or data",
    ),
    field("seen.answered_by", "int", "", "agents of other hosts that answer and receive this failure"),
    field("spares", "int", "", "hosts that could take this one's place"),
    field("job.actions", "list of string", "", "the possible restarts, mildest first"),
    field("job.max_restarts", "int", "", "restarts allowed (`--max-restarts`)"),
    field(
        "job.window",
        "float or None",
        "s",
        "the window in which restarts count (`--restart-window`); None for the whole job",
    ),
    field(
        "job.budgets",
        "dict of string to struct",
        "",
        "by kind of cause: `max_restarts` and `window` (`--restart-budget`)",
    ),
    field(
        "job.ready_within",
        "float or None",
        "s",
        "how long a restart may wait for a host that is not ready (`--ready-within`); None: not at all",
    ),
    field(
        "job.hand_back_exit",
        "int",
        "",
        "exit status that hands the job back to the scheduler (`--hand-back-exit`)",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case_value::value_of;
    use crate::language::{Heap, Limits, Run, Value};
    use crate::words::Words;

    /// The paths and types of everything in a value.
    fn paths(heap: &Heap<'_>, value: &Value, path: &str, found: &mut Vec<(String, &'static str)>) {
        match value {
            Value::Struct(id) if !path.ends_with("].cause") => {
                for (name, value) in heap.fields_of(*id) {
                    let dot = if path.is_empty() { "" } else { "." };
                    paths(heap, value, &format!("{path}{dot}{name}"), found);
                }
            }
            Value::List(id) => match heap.items_of(*id).first() {
                Some(item @ Value::Struct(_)) => paths(heap, item, &format!("{path}[]"), found),
                _ => found.push((path.to_owned(), "list")),
            },
            other => found.push((path.to_owned(), other.kind())),
        }
    }

    #[test]
    fn the_list_of_fields_matches_the_case() {
        let text = r#"
            [[incident]]
            name = "all of it"
            cause = { kind = "signal", signal = 9 }
            past = [{ cause = { kind = "hang", hang = "network", place = "p" } }]
            earlier = [{ cause = "signal", action = "respawn_ranks", tried = 4, helped = 3, seconds = 0.5 }]
            unhealthy = [{ name = "gpu.0" }]
            held = ["a port"]
            job = { budgets = { hang = { max_restarts = 1 } } }
        "#;
        let incidents = crate::incidents::read(text).expect("a table");
        let words = Words { seed: 0 };
        let mut run = Run::new(Limits { steps: 1 << 20, bytes: 1 << 20 }, &|| false, &words);
        let value =
            value_of(&mut run.heap, &incidents[0].settings, incidents[0].case()).expect("it has room");
        let mut found = Vec::new();
        paths(&run.heap, &value, "", &mut found);
        let former = ["host.sick[]", "seen.heard_by"];
        let count = found.len();
        found.retain(|(path, _)| !former.iter().any(|former| path.starts_with(former)));
        assert_eq!(count - found.len(), 7, "an older policy still finds the former names");
        let names: Vec<&str> = found.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(names, FIELDS.iter().map(|field| field.path).collect::<Vec<_>>());
        for ((path, kind), field) in found.iter().zip(FIELDS) {
            let kind = kind.rsplit(' ').next().expect("a word");
            let fits = field.kind.starts_with(kind) || (kind == "None" && field.kind.ends_with("or None"));
            assert!(fits, "{path} is {kind}, and should be {}", field.kind);
        }
    }

    #[test]
    fn the_reference_has_every_field_with_its_type_and_unit() {
        let reference = include_str!("../../../docs/reference/policy-file.md");
        for Field { path, kind, unit, means } in FIELDS {
            let row = format!("| `{path}` | {kind} | {unit} | {means} |");
            assert!(reference.contains(&row), "docs/reference/policy-file.md has no row {row}");
        }
        for action in crate::words::actions() {
            assert!(reference.contains(&format!("`{action}`")), "{action}");
        }
    }
}
