//! A trace from a file: CSV, JSON lines, a JSON array of the same objects, or events as Chrome's trace viewer has them.

use std::io::{BufRead, BufReader, Read, stdin};
use std::path::Path;

use anyhow::{Context, bail};
use mainstay_progress::straggler::{Columns, Trace};
use serde_json::{Map, Value};

use crate::output::open_input;

/// A longer line is not part of a trace.
const MAX_LINE_BYTES: usize = 1 << 20;

/// A JSON document is held in memory as a whole.
const MAX_DOCUMENT_BYTES: u64 = 1 << 30;

/// Possible field separators; the header's most frequent one is used.
const SEPARATORS: [char; 4] = [',', '\t', ';', '|'];

/// Where the documents of Chrome's trace viewer have their rows.
const ROWS: &str = "traceEvents";

/// Reads the trace in `path`; `-` is standard input.
pub(super) fn read(path: &Path) -> anyhow::Result<Trace> {
    let name = path.display();
    let trace = if path.as_os_str() == "-" {
        all_of(BufReader::new(stdin()))
    } else {
        all_of(BufReader::new(open_input(path).with_context(|| format!("opening {name}"))?))
    };
    let trace = trace.with_context(|| format!("reading {name}"))?;
    if trace.is_empty() {
        bail!("{name}: no line of a trace in it");
    }
    Ok(trace)
}

/// Reads a trace to its end.
pub(super) fn all_of(mut input: impl BufRead) -> anyhow::Result<Trace> {
    let beginning = input.fill_buf()?;
    if beginning.starts_with(b"PAR1") {
        bail!("this is a Parquet file: write it as CSV first (pandas: read_parquet(...).to_csv(...))");
    }
    if beginning.starts_with(&[0x1f, 0x8b]) {
        bail!("this is compressed: zcat it into `mainstay stragglers -`");
    }
    let mut reader = Reader::default();
    if is_document(beginning) {
        let document: Value = serde_json::from_reader(input.take(MAX_DOCUMENT_BYTES))?;
        reader.document(&document)?;
        return Ok(reader.trace);
    }
    let mut line = Vec::new();
    for number in 1_u64.. {
        line.clear();
        // Only one byte more than the limit is kept, enough to detect it.
        let longest = MAX_LINE_BYTES as u64 + 1;
        if input.by_ref().take(longest).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        if line.len() > MAX_LINE_BYTES {
            bail!("line {number} is longer than {MAX_LINE_BYTES} bytes");
        }
        let at = || format!("line {number}");
        let text = std::str::from_utf8(&line).with_context(at)?;
        reader.line(text.trim_end_matches(['\n', '\r'])).with_context(at)?;
    }
    Ok(reader.trace)
}

/// Whether this is one JSON document, and not an object in each line.
fn is_document(beginning: &[u8]) -> bool {
    let text = String::from_utf8_lossy(beginning);
    let text = text.trim_start_matches('\u{feff}').trim_start();
    let first_line = text.lines().next().unwrap_or_default().trim_end();
    let head = first_line.trim_start_matches('{').trim_start();
    text.starts_with('[')
        || first_line == "{"
        || (first_line.starts_with('{')
            && (head.starts_with(&format!("\"{ROWS}\": [")) || head.starts_with(&format!("\"{ROWS}\":["))))
}

#[derive(Default)]
struct Reader {
    trace: Trace,
    separator: char,
    /// The columns of the header, or the names of the last object.
    columns: Option<(Vec<String>, Columns)>,
}

impl Reader {
    fn line(&mut self, line: &str) -> anyhow::Result<()> {
        let line = line.trim_start_matches('\u{feff}');
        if line.trim().is_empty() || line.starts_with('#') {
            return Ok(());
        }
        if line.trim_start().starts_with('{') {
            return self.object(&serde_json::from_str(line)?);
        }
        if self.columns.is_none() {
            let count = |separator: &char| line.matches(*separator).count();
            self.separator = SEPARATORS.into_iter().rev().max_by_key(count).unwrap_or(',');
            let names = fields(line, self.separator)?;
            let columns = Columns::from_header(names.iter().map(String::as_str))?;
            self.columns = Some((names, columns));
            return Ok(());
        }
        let fields = fields(line, self.separator)?;
        self.row(&fields.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn row(&mut self, fields: &[&str]) -> anyhow::Result<()> {
        if let Some((names, columns)) = &self.columns {
            if fields.len() > names.len() {
                bail!("{} fields under a header of {}", fields.len(), names.len());
            }
            columns.spans(fields)?.into_iter().for_each(|span| self.trace.push(span));
        }
        Ok(())
    }

    fn document(&mut self, document: &Value) -> anyhow::Result<()> {
        let rows = match document {
            Value::Array(rows) => Some(rows),
            Value::Object(object) => object.get(ROWS).and_then(Value::as_array),
            _ => None,
        };
        let Some(rows) = rows else { bail!("neither an array of rows nor an object with {ROWS}") };
        for (at, row) in rows.iter().enumerate() {
            let at = || format!("row {}", at + 1);
            self.object(row).with_context(at)?;
        }
        Ok(())
    }

    fn object(&mut self, object: &Value) -> anyhow::Result<()> {
        let Value::Object(object) = object else { bail!("not an object: {object}") };
        let flat;
        let object = if object.contains_key("ph") {
            // In a Chrome trace, marks and counters are not sections.
            let Some(event) = chrome_row(object) else { return Ok(()) };
            flat = event;
            &flat
        } else {
            object
        };
        // A null value counts as absent.
        let given = || object.iter().filter(|(_, value)| !value.is_null());
        let names: Vec<String> = given().map(|(name, _)| name.clone()).collect();
        let fields: Vec<String> = given()
            .map(|(_, value)| value.as_str().map_or_else(|| value.to_string(), str::to_owned))
            .collect();
        let columns = match self.columns.take() {
            Some((of, columns)) if of == names => columns,
            _ => Columns::from_header(names.iter().map(String::as_str))?,
        };
        self.columns = Some((names, columns));
        self.row(&fields.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

/// A complete section of a Chrome trace as a row: times are in microseconds, further data is in `args`, and the
/// process is the rank.
fn chrome_row(event: &Map<String, Value>) -> Option<Map<String, Value>> {
    if event.get("ph").and_then(Value::as_str) != Some("X") {
        return None;
    }
    let mut row = event.get("args").and_then(Value::as_object).cloned().unwrap_or_default();
    for (field, name) in [("name", "section"), ("pid", "rank"), ("ts", "start_us"), ("dur", "duration_us")] {
        if let Some(value) = event.get(field) {
            row.entry(name).or_insert_with(|| value.clone());
        }
    }
    // A section outside of any step belongs to none.
    Columns::from_header(row.keys().map(String::as_str)).is_ok().then_some(row)
}

/// The fields of a line of CSV; a quoted one may contain separators, and `""` is a quote in it.
fn fields(line: &str, separator: char) -> anyhow::Result<Vec<String>> {
    let (mut fields, mut field, mut quoted) = (Vec::new(), String::new(), false);
    let mut letters = line.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '"' if quoted && letters.peek() == Some(&'"') => {
                letters.next();
                field.push('"');
            }
            '"' if quoted || field.trim().is_empty() => quoted = !quoted,
            letter if letter == separator && !quoted => fields.push(std::mem::take(&mut field)),
            letter => field.push(letter),
        }
    }
    if quoted {
        bail!("a quote that does not end");
    }
    fields.push(field);
    Ok(fields.into_iter().map(|field| field.trim().to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        format!("{:#}", all_of(text.as_bytes()).unwrap_err())
    }

    #[test]
    fn an_unreadable_trace_is_an_error_with_its_reason() {
        assert!(error("rank,stepp,duration\n").contains("no column step"));
        assert!(error("rank,step,duration\n0,one,3\n").contains("line 2: step: \"one\""));
        assert!(error("rank,step,duration\n0,1,2,3\n").contains("4 fields under a header of 3"));
        assert!(error("rank,step,duration\n0,1,\"2\n").contains("quote"));
        assert!(error("{\"rank\": 1").contains("line 1"));
        assert!(error("[{\"rank\": 0, \"step\": 1, \"duration\": 1}, 7]").contains("row 2"));
        assert!(error("{\n\"what\": 3\n}").contains("traceEvents"));
        assert!(error("PAR1....").contains("Parquet"));
        assert!(format!("{:#}", all_of(&[0x1f_u8, 0x8b, 8][..]).unwrap_err()).contains("zcat"));
    }

    #[test]
    fn other_separators_and_quotes_are_understood() {
        for separator in [",", "\t", ";", "|"] {
            let line = |fields: [&str; 4]| fields.join(separator) + "\n";
            let text = line(["\"Rank\"", "Step", "Section", "Duration (ms)"])
                + &line(["0", "1", "\"a, \"\"b\"\"\"", "3"]);
            assert!(!all_of(text.as_bytes()).unwrap().is_empty(), "{separator:?}");
        }
        assert_eq!(fields("a,\"b,\"\"c\"\"\",", ',').unwrap(), ["a", "b,\"c\"", ""]);
    }

    #[test]
    fn comments_and_a_byte_order_mark_are_skipped() {
        let text = "\u{feff}rank,step,duration\n# made by hand\n\n0,1,2\n";
        assert!(!all_of(text.as_bytes()).unwrap().is_empty());
    }
}
