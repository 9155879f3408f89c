//! One entry of systemd's journal as a line of `journalctl -o json`, or of `dmesg --json`.

use serde::Deserialize;
use serde_json::Value;

use mainstay_model::id::BootId;
use mainstay_model::time::Mono;

/// The relevant fields of an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JournalEntry {
    /// The message.
    pub message: String,
    /// Whether the kernel wrote it.
    pub by_kernel: bool,
    /// Its position in the journal, as accepted by `--after-cursor`.
    pub cursor: Option<String>,
    /// When it was written, on the monotonic clock of its boot.
    pub at: Option<Mono>,
    /// Its boot id in the kernel's form, with dashes.
    pub boot: Option<BootId>,
}

/// Fields are text, a list of bytes if they are no valid text, a list if they occur more than once, or null if they are too long.
#[derive(Deserialize)]
struct Fields {
    #[serde(rename = "MESSAGE")]
    message: Option<Value>,
    #[serde(rename = "_TRANSPORT")]
    transport: Option<Value>,
    #[serde(rename = "SYSLOG_IDENTIFIER")]
    identifier: Option<Value>,
    #[serde(rename = "__CURSOR")]
    cursor: Option<Value>,
    #[serde(rename = "_SOURCE_MONOTONIC_TIMESTAMP")]
    written: Option<Value>,
    #[serde(rename = "__MONOTONIC_TIMESTAMP")]
    received: Option<Value>,
    #[serde(rename = "_BOOT_ID")]
    boot: Option<Value>,
}

impl JournalEntry {
    /// Parses a line. `None` if it is no entry.
    pub fn parse(line: &str) -> Option<JournalEntry> {
        let line = line.trim_start_matches(['\u{1e}', ' ']);
        let line = line.strip_prefix("data: ").unwrap_or(line);
        if !line.starts_with('{') {
            return None;
        }
        let fields: Fields = serde_json::from_str(line).ok()?;
        let message = text(fields.message)?;
        let by_kernel = match (text(fields.transport), text(fields.identifier)) {
            (Some(transport), _) => transport == "kernel",
            (None, Some(identifier)) => identifier == "kernel",
            (None, None) => false,
        };
        let at = text(fields.written).or(text(fields.received)).and_then(|micros| micros.parse::<u64>().ok());
        Some(JournalEntry {
            message,
            by_kernel,
            cursor: text(fields.cursor),
            at: at.map(|micros| Mono(micros.saturating_mul(1000))),
            boot: text(fields.boot).map(|id| BootId(with_dashes(&id))),
        })
    }
}

/// The message of a line of `dmesg --json`: `"msg": "NVRM: …"`.
pub fn of_dmesg(line: &str) -> Option<String> {
    let value = line.trim_start().strip_prefix("\"msg\":")?.trim().trim_end_matches(',');
    serde_json::from_str(value).ok()
}

/// The message in a JSON line that is no journal entry: a container's output as written by Docker, or a kernel line as sent by Talos.
pub fn of_container(line: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct JournalFields {
        log: Option<String>,
        stream: Option<String>,
        msg: Option<String>,
        facility: Option<String>,
    }
    let line: JournalFields =
        line.trim_start().starts_with('{').then(|| serde_json::from_str(line).ok())??;
    let of_docker = line.log.filter(|_| line.stream.is_some()).map(|log| log.trim_end().to_owned());
    of_docker.or(line.msg.filter(|_| line.facility.as_deref() == Some("kern")))
}

fn text(value: Option<Value>) -> Option<String> {
    match value? {
        Value::String(text) => Some(text),
        Value::Array(parts) if parts.iter().all(Value::is_u64) => {
            let bytes =
                parts.iter().filter_map(|part| u8::try_from(part.as_u64()?).ok()).collect::<Vec<u8>>();
            Some(String::from_utf8_lossy(&bytes).into_owned())
        }
        Value::Array(parts) => text(parts.into_iter().next()),
        _ => None,
    }
}

fn with_dashes(id: &str) -> String {
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|range| id.get(range));
    match parts {
        [Some(a), Some(b), Some(c), Some(d), Some(e)] if id.len() == 32 => format!("{a}-{b}-{c}-{d}-{e}"),
        _ => id.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_entry_of_the_kernel_is_read() {
        let line = r#"{"__CURSOR":"s=1;i=2","_TRANSPORT":"kernel","SYSLOG_IDENTIFIER":"kernel","PRIORITY":"3","_SOURCE_MONOTONIC_TIMESTAMP":"5140900","__MONOTONIC_TIMESTAMP":"9","_BOOT_ID":"0123456789abcdef0123456789abcdef","MESSAGE":"NVRM: Xid"}"#;
        let expected = JournalEntry {
            message: "NVRM: Xid".into(),
            by_kernel: true,
            cursor: Some("s=1;i=2".into()),
            at: Some(Mono(5_140_900_000)),
            boot: Some(BootId("01234567-89ab-cdef-0123-456789abcdef".into())),
        };
        assert_eq!(JournalEntry::parse(line), Some(expected));
    }

    #[test]
    fn binary_messages_and_entries_of_programs_are_distinguished() {
        let bytes = JournalEntry::parse(r#"{"_TRANSPORT":"kernel","MESSAGE":[78,86,255]}"#).unwrap();
        assert_eq!(bytes.message, "NV\u{fffd}");
        let program = JournalEntry::parse(
            r#"{"_TRANSPORT":"stdout","SYSLOG_IDENTIFIER":"kernel","MESSAGE":"NVRM: Xid"}"#,
        );
        assert!(!program.unwrap().by_kernel);
        assert_eq!(JournalEntry::parse(r#"{"_TRANSPORT":"kernel","MESSAGE":null}"#), None);
        assert_eq!(JournalEntry::parse("{"), None);
        assert_eq!(JournalEntry::parse("NVRM: Xid"), None);
    }

    #[test]
    fn dmesg_has_its_own_json() {
        assert_eq!(of_dmesg("         \"msg\": \"NVRM: \\\"x\\\"\""), Some("NVRM: \"x\"".into()));
        assert_eq!(of_dmesg("         \"pri\": 6,"), None);
    }

    #[test]
    fn messages_of_containers_and_talos_are_extracted() {
        let docker = r#"{"log":"[    5.1] NVRM: Xid\n","stream":"stderr","time":"2026-11-21T03:04:05Z"}"#;
        assert_eq!(of_container(docker), Some("[    5.1] NVRM: Xid".into()));
        let talos = r#"{"clock":5,"facility":"kern","msg":"NVRM: Xid","priority":"err","seq":7}"#;
        assert_eq!(of_container(talos), Some("NVRM: Xid".into()));
        assert_eq!(of_container(&talos.replace("kern", "user")), None);
        assert_eq!(of_container(r#"{"log":"NVRM: Xid"}"#), None);
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_without_a_panic(head in "(\\{\"MESSAGE\":|\"msg\":)?", tail in any::<String>()) {
            let line = format!("{head}{tail}");
            let _ = (JournalEntry::parse(&line), of_dmesg(&line), of_container(&line));
        }
    }
}
