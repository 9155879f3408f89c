//! Terminal output: colors if enabled, and no control characters from foreign text.

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use mainstay_model::escape::printable;
use mainstay_proto::json::versioned;
use mainstay_proto::v1::{HealthState, Severity};
pub(super) use mainstay_view::progress::spoken;
use serde_json::Value;

pub(super) use mainstay_model::escape::clean;

/// Writes to standard output. Parts of the text may be foreign: nothing in it but colours drives the terminal. A reader
/// that went away (`| head`) is an error that ends the program quietly.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    print_after("", text)
}

/// The same after a sequence that moves the cursor.
pub(super) fn print_after(sequence: &str, text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(sequence.as_bytes())?;
    out.write_all(printable(text).as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Prints a help text, or an error that quotes an argument.
pub(super) fn print_answer(answer: &clap::Error) -> io::Result<()> {
    let text = answer.render();
    let shown = |is_terminal: bool| match has_colours(is_terminal) {
        true => printable(&text.ansi().to_string()).into_owned(),
        false => printable(&text.to_string()).into_owned(),
    };
    match answer.use_stderr() {
        true => io::stderr().write_all(shown(io::stderr().is_terminal()).as_bytes()),
        false => io::stdout().write_all(shown(io::stdout().is_terminal()).as_bytes()),
    }
}

/// Colours on a terminal, unless NO_COLOR is set to anything or the terminal is dumb.
fn has_colours(is_terminal: bool) -> bool {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let dumb = set("TERM").is_some_and(|term| term == "dumb");
    is_terminal && set("NO_COLOR").is_none() && !dumb
}

/// The form of the output.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(super) struct Form {
    /// Print JSON, as --output json
    #[arg(long)]
    json: bool,
    /// Form of the output
    #[arg(long, short, value_enum, value_name = "FORM", default_value = "table", conflicts_with = "json")]
    output: FormName,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum FormName {
    /// For people.
    #[default]
    Table,
    Json,
    Yaml,
}

/// A form for scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Structured {
    Json,
    Yaml,
}

impl Form {
    /// The form for scripts that is asked for; none for people.
    pub(super) fn structured(self) -> Option<Structured> {
        match self.output {
            _ if self.json => Some(Structured::Json),
            FormName::Table => None,
            FormName::Json => Some(Structured::Json),
            FormName::Yaml => Some(Structured::Yaml),
        }
    }
}

impl Structured {
    /// A document as text, with its `schema_version`. Several of them may follow each other.
    pub(super) fn document(self, value: Value) -> String {
        let value = versioned(value);
        match self {
            Structured::Json => format!("{value}\n"),
            Structured::Yaml => yaml(&value),
        }
    }
}

/// A document of YAML 1.2, of which JSON's scalars are a part.
fn yaml(value: &Value) -> String {
    let mut text = "---\n".to_owned();
    match value {
        Value::Object(_) | Value::Array(_) if !is_empty(value) => block(value, 0, &mut text),
        scalar => text.push_str(&format!("{scalar}\n")),
    }
    text
}

fn is_empty(value: &Value) -> bool {
    value.as_object().is_some_and(serde_json::Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
}

/// The lines of an object or a list that is not empty.
fn block(value: &Value, depth: usize, text: &mut String) {
    let indent = "  ".repeat(depth);
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                // JSON's quotes: no name can be read as a number or a truth value.
                let plain = name.chars().all(|letter| letter.is_ascii_lowercase() || letter == '_');
                let name = if plain && name.len() > 3 {
                    name.clone()
                } else {
                    Value::from(name.as_str()).to_string()
                };
                text.push_str(&format!("{indent}{name}:"));
                nested(value, depth, text);
            }
        }
        Value::Array(values) => {
            for value in values {
                text.push_str(&format!("{indent}-"));
                nested(value, depth, text);
            }
        }
        scalar => text.push_str(&format!("{indent}{scalar}\n")),
    }
}

/// What follows a name or a dash.
fn nested(value: &Value, depth: usize, text: &mut String) {
    if matches!(value, Value::Object(_) | Value::Array(_)) && !is_empty(value) {
        text.push('\n');
        block(value, depth + 1, text);
    } else {
        text.push_str(&format!(" {value}\n"));
    }
}

/// Opens a file that the user names. A FIFO that nobody writes into would be waited for without a word, and a device
/// such as `/dev/zero` has no end; the pipe of a shell's `<(command)` has a writer.
pub(super) fn open_input(path: &Path) -> io::Result<File> {
    let kind = std::fs::metadata(path)?.file_type();
    let what = match kind {
        _ if ["/dev/fd", "/dev/stdin", "/dev/null", "/proc"]
            .iter()
            .any(|folder| path.starts_with(folder)) =>
        {
            ""
        }
        _ if kind.is_fifo() => "a FIFO",
        _ if kind.is_char_device() || kind.is_block_device() => "a device",
        _ => "",
    };
    if !what.is_empty() {
        let text = format!("{what} is read from standard input only");
        return Err(io::Error::new(ErrorKind::InvalidInput, text));
    }
    File::open(path)
}

/// Prints a note for the user next to the output. It may quote what somebody else wrote, also a file's name.
pub(super) fn note(text: &str) {
    let lines: Vec<String> = text.split('\n').map(clean).collect();
    let _ = writeln!(io::stderr(), "mainstay: {}", lines.join("\n"));
}

/// An error with its causes. A cause that an error already includes is not repeated.
pub(super) fn in_full(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Whether the error is that the reader of the output is gone.
pub(super) fn is_closed(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
    })
}

/// Colors, or none.
#[derive(Clone, Copy, Debug)]
pub(super) struct Paint {
    on: bool,
}

impl Paint {
    /// Colors on a terminal that has them.
    pub(super) fn for_stdout() -> Paint {
        Paint { on: has_colours(io::stdout().is_terminal()) }
    }

    /// Whether there are colors.
    pub(super) fn is_on(self) -> bool {
        self.on
    }

    /// No colors.
    pub(super) fn plain() -> Paint {
        Paint { on: false }
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    pub(super) fn bold(self, text: &str) -> String {
        self.with("1", text)
    }

    pub(super) fn dim(self, text: &str) -> String {
        self.with("2", text)
    }

    pub(super) fn good(self, text: &str) -> String {
        self.with("32", text)
    }

    pub(super) fn warning(self, text: &str) -> String {
        self.with("33", text)
    }

    pub(super) fn bad(self, text: &str) -> String {
        self.with("31", text)
    }

    pub(super) fn state(self, state: HealthState, text: &str) -> String {
        match state {
            HealthState::Healthy => self.good(text),
            HealthState::Degraded => self.warning(text),
            HealthState::Unhealthy => self.bad(text),
            HealthState::Unknown | HealthState::Unspecified => self.dim(text),
        }
    }

    pub(super) fn severity(self, severity: Severity, text: &str) -> String {
        match severity {
            Severity::Error => self.bad(text),
            Severity::Warning => self.warning(text),
            Severity::Info | Severity::Unspecified => text.to_owned(),
        }
    }
}

/// The rows of a table as lines. Columns of words are left-aligned, numbers right-aligned; one column may be hidden.
pub(super) fn aligned<const N: usize>(
    rows: &[[String; N]],
    is_words: impl Fn(usize) -> bool,
    hidden: Option<usize>,
) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let columns: Vec<(usize, usize)> =
        (0..N).filter(|column| Some(*column) != hidden).map(|column| (column, width(column))).collect();
    let cell = |row: &[String; N], (column, width): (usize, usize)| match is_words(column) {
        true => format!("{:<width$}", row[column]),
        false => format!("{:>width$}", row[column]),
    };
    let line =
        |row: &[String; N]| columns.iter().map(|column| cell(row, *column)).collect::<Vec<_>>().join("  ");
    rows.iter().map(|row| line(row).trim_end().to_owned()).collect()
}

/// At most this many characters; a cut is marked.
pub(super) fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use mainstay_proto::json::SCHEMA_VERSION;
    use serde_json::json;

    use super::*;

    #[test]
    fn foreign_text_cannot_drive_the_terminal() {
        assert_eq!(clean("a\x1b[2Jb\nc\u{9b}d"), "a [2Jb c d");
    }

    #[test]
    fn a_document_is_json_or_yaml_with_its_version() {
        let document = json!({
            "steps": [{ "step": 3, "whole": true }, 4, [], "yes"],
            "name": "a: b #c\n\"d\"", "on": null, "empty": {}, "64": 1.5,
        });
        let json: Value = serde_json::from_str(&Structured::Json.document(document.clone())).unwrap();
        assert_eq!(json["schema_version"], SCHEMA_VERSION);
        testing::snapshot!("output", "a document as YAML", Structured::Yaml.document(document));
    }

    #[test]
    fn what_is_cut_off_shows() {
        assert_eq!(shortened("abcdef", 6), "abcdef");
        assert_eq!(shortened("äbcdefg", 6), "äbcde…");
    }

    #[test]
    fn colours_can_be_off() {
        assert_eq!(Paint::plain().bad("x"), "x");
        assert_eq!(Paint { on: true }.bad("x"), "\x1b[31mx\x1b[0m");
    }
}
