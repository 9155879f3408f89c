//! Labelled cases as stored in a file, one JSON object per line. Every line becomes a case: what cannot be parsed is noted in the case,
//! which is scored as far as possible. Lines are never skipped and never cause an error.

use serde_json::Value;

use super::class::{Class, Restart};
use super::lines;
use mainstay_model::verdict::FaultDomain;

/// Characters of a value that a note quotes.
const MAX_QUOTE_CHARS: usize = 60;

/// A failure together with the cause that people determined.
#[derive(Clone, Debug, Default)]
pub struct Case {
    /// Its name; `line N` where it has none.
    pub id: String,
    /// The log as it was found. Empty if the case has only exits or kernel lines.
    pub log: String,
    /// The log with line wraps undone, if that was needed.
    pub log_joined: Option<String>,
    /// Further files of the case. Their line numbers continue those of `log`.
    pub files: Vec<LogFile>,
    /// What is known about exits.
    pub exit_info: Option<String>,
    /// Kernel log lines.
    pub kernel_log: Option<String>,
    /// The right answer, if known.
    pub label: Option<Label>,
    /// How sure the label is: high, medium, low.
    pub confidence: Option<String>,
    /// Tags to group results by.
    pub tags: Vec<String>,
    /// `verbatim` or `author_abridged`.
    pub log_fidelity: Option<String>,
    /// Cases of one group come from one source: lessons learned from one of them apply to all.
    pub group: Option<String>,
    /// What could not be parsed, one sentence each.
    pub notes: Vec<String>,
}

/// One of several files of a case.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogFile {
    /// The file's name, which may contain its rank.
    pub name: String,
    /// The rank that wrote the file, if known.
    pub rank: Option<u32>,
    /// The file's content.
    pub text: String,
}

/// The right answer. A part that is missing or does not match the schema is not scored.
#[derive(Clone, Debug)]
pub struct Label {
    /// What went wrong.
    pub class: Option<Class>,
    /// Whose fault it was.
    pub fault_domain: FaultDomain,
    /// The right advice.
    pub restart: Option<Restart>,
    /// Lines of the log, from 1. Any of them counts as the root.
    pub root_lines: Option<Vec<u64>>,
    /// The rank where the failure started, if one rank is to blame.
    pub culprit_rank: Option<u32>,
}

impl Case {
    /// Reads one line of a case file. `number` is the line number, from 1.
    pub fn read(number: usize, text: &str) -> Case {
        match serde_json::from_str(text.trim_start_matches('\u{feff}')) {
            Ok(value) => Case::of_value(number, &value),
            Err(error) => Case {
                id: format!("line {number}"),
                notes: vec![format!("the line is not JSON ({error}); nothing in it could be read")],
                ..Case::default()
            },
        }
    }

    fn of_value(number: usize, value: &Value) -> Case {
        let mut case = Case { id: format!("line {number}"), ..Case::default() };
        let Value::Object(fields) = value else {
            case.notes.push(format!("not an object but {}; nothing in it could be read", quoted(value)));
            return case;
        };
        for (key, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
            match key.as_str() {
                "id" => case.id = text(value),
                "log" | "logs" | "files" | "log_files" => case.take_log(key, value),
                "log_joined" => case.log_joined = Some(text(value)),
                "exit_info" => case.exit_info = Some(text(value)),
                "kernel_log" => case.kernel_log = Some(text(value)),
                "confidence" => case.confidence = Some(text(value)),
                "log_fidelity" => case.log_fidelity = Some(text(value)),
                "group" => case.group = Some(text(value)),
                "tags" => case.tags = list(value).into_iter().map(text).collect(),
                "label" => case.label = label(value, &mut case.notes),
                // The origin of the case and what people thought of it are no evidence.
                _ => {}
            }
        }
        // Files with lines that the joined text lacks would be lost with it.
        if !case.files.is_empty() {
            case.log_joined = None;
        }
        case
    }

    /// Accepts a log as one text, a list of lines, or several files: objects with a name and a text, or a map of them.
    fn take_log(&mut self, key: &str, value: &Value) {
        match value {
            Value::Array(items) if items.iter().any(Value::is_object) => {
                let files = items.iter().enumerate().map(|(at, item)| file(&format!("{key} {at}"), item));
                self.files.extend(files);
            }
            Value::Object(map) if is_file(value) => {
                let name = map.keys().next().map_or(key, String::as_str);
                self.files.push(file(name, value));
            }
            Value::Object(map) => self.files.extend(map.iter().map(|(name, value)| file(name, value))),
            _ if self.log.is_empty() => self.log = text(value),
            _ => self.files.push(file(key, value)),
        }
    }

    /// Drops the logs and keeps what scoring needs.
    pub fn forget_texts(&mut self) {
        (self.log, self.log_joined, self.kernel_log) = (String::new(), None, None);
        self.files.clear();
    }

    /// The number of lines of all logs before those of the file at `index`.
    pub(super) fn lines_before(&self, index: usize) -> u64 {
        let own = if self.log.is_empty() { 0 } else { self.log.split('\n').count() };
        let files = self.files.iter().take(index).map(|file| file.text.split('\n').count());
        (own + files.sum::<usize>()) as u64
    }
}

/// Keys that may hold a file's text.
const TEXTS: [&str; 5] = ["text", "log", "content", "body", "lines"];

fn is_file(value: &Value) -> bool {
    TEXTS.iter().any(|key| value.get(key).is_some())
}

fn file(name: &str, value: &Value) -> LogFile {
    let named = ["name", "path", "file", "source"].iter().find_map(|key| value.get(key)).map(text);
    let name = named.unwrap_or_else(|| name.to_owned());
    let rank = value.get("rank").and_then(number).and_then(|rank| u32::try_from(rank).ok());
    let content = TEXTS.iter().find_map(|key| value.get(key)).unwrap_or(value);
    LogFile { rank: rank.or_else(|| lines::rank_of_path(&name)), text: text(content), name }
}

fn label(value: &Value, notes: &mut Vec<String>) -> Option<Label> {
    let mut known = |key: &str, found: bool| {
        if let (Some(value), false) = (value.get(key).filter(|value| !value.is_null()), found) {
            notes.push(format!("label: {key} {} is not of the schema and is not scored", quoted(value)));
        }
    };
    let class = value.get("class").map(text).and_then(|name| Class::named(&name));
    let domain = value.get("fault_domain").map(text).and_then(|name| FaultDomain::named(&name));
    let restart = value.get("restart").map(text).and_then(|name| Restart::named(&name));
    known("class", class.is_some());
    known("fault_domain", domain.is_some());
    known("restart", restart.is_some());
    let root: Vec<u64> =
        value.get("root_lines").map(list).unwrap_or_default().into_iter().filter_map(number).collect();
    let culprit_rank = value.get("culprit_rank").and_then(number).and_then(|rank| u32::try_from(rank).ok());
    known("root_lines", !root.is_empty());
    known("culprit_rank", culprit_rank.is_some());
    let Some(fault_domain) = domain.or(class.map(Class::domain)) else {
        notes.push("the label names no fault domain: the case is judged and not scored".to_owned());
        return None;
    };
    let root_lines = Some(root).filter(|root| !root.is_empty());
    Some(Label { class, fault_domain, restart, root_lines, culprit_rank })
}

/// Converts a value to text: lists become lines, anything else is written as JSON.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join("\n"),
        Value::Object(fields) if !fields.is_empty() => {
            let lines = fields.iter().map(|(key, value)| format!("{key}: {}", text(value)));
            lines.collect::<Vec<_>>().join("\n")
        }
        other => other.to_string(),
    }
}

fn list(value: &Value) -> Vec<&Value> {
    match value {
        Value::Array(items) => items.iter().collect(),
        Value::Null => Vec::new(),
        one => vec![one],
    }
}

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Number(number) => {
            number.as_u64().or_else(|| number.as_f64().map(|number| number.max(0.0) as u64))
        }
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    }
}

fn quoted(value: &Value) -> String {
    value.to_string().chars().take(MAX_QUOTE_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_case_of_the_schema_is_read() {
        let case = Case::read(
            1,
            r#"{"id": "a", "log": "x\ny", "exit_info": "137", "tags": ["one_line"], "source_url": null,
                "label": {"class": "fabric", "fault_domain": "infrastructure", "restart": "restart_exclude_node",
                          "root_lines": [2], "culprit_rank": 3}}"#,
        );
        let label = case.label.expect("a label");
        assert_eq!(
            (case.id.as_str(), case.log.as_str(), case.exit_info.as_deref()),
            ("a", "x\ny", Some("137"))
        );
        assert_eq!((label.class, label.fault_domain), (Some(Class::Fabric), FaultDomain::Infrastructure));
        assert_eq!((label.root_lines, label.culprit_rank), (Some(vec![2]), Some(3)));
        assert!(case.notes.is_empty());
    }

    #[test]
    fn a_case_may_have_several_files() {
        let case = Case::read(
            1,
            r#"{"log": "launcher\nsays", "files": {"logs/rank3.log": "a\nb", "x": {"text": "c", "rank": "5"}}}"#,
        );
        let ranks: Vec<Option<u32>> = case.files.iter().map(|file| file.rank).collect();
        assert_eq!((case.log.as_str(), ranks), ("launcher\nsays", vec![Some(3), Some(5)]));
        assert_eq!((case.lines_before(0), case.lines_before(1)), (2, 4));
        let listed =
            Case::read(1, r#"{"logs": [{"name": "rank_7/err", "log": ["a", "b"]}], "log": ["one", "two"]}"#);
        assert_eq!((listed.log.as_str(), listed.files[0].rank), ("one\ntwo", Some(7)));
        assert_eq!(listed.files[0].text, "a\nb");
    }

    #[test]
    fn unparsable_fields_are_noted_and_the_rest_is_scored() {
        let case = Case::read(
            4,
            r#"{"id": 7, "exit_info": {"rank 3": -9}, "label": {"class": "gremlins", "fault_domain": "user", "restart": 5}}"#,
        );
        let label = case.label.expect("the domain can be scored");
        assert_eq!((label.class, label.fault_domain, label.restart), (None, FaultDomain::User, None));
        assert_eq!(
            (case.id.as_str(), case.exit_info.as_deref(), case.notes.len()),
            ("7", Some("rank 3: -9"), 2)
        );
        let bare = Case::read(9, r#"{"label": {"class": "gremlins"}}"#);
        assert_eq!((bare.id.as_str(), bare.label.is_none(), bare.notes.len()), ("line 9", true, 2));
        for line in ["", "nonsense", "[1, 2]", "{\"id\": ", "null"] {
            let case = Case::read(2, line);
            assert_eq!((case.id.as_str(), case.notes.len()), ("line 2", 1), "{line}");
        }
    }

    proptest! {
        #[test]
        fn any_line_becomes_a_case(line in "\\PC{0,200}", number in 1usize..1000) {
            prop_assert!(!Case::read(number, &line).id.is_empty() || line.contains("id"));
        }
    }
}
